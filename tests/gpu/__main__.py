"""Tries a machine with GPUs, and leaves one report.

    make gpu
    .venv/bin/python -m tests.gpu [--backend nccl] [--pretend 4] [--only PATTERN] [--limit 600]

Ends with 0 if every step passed or was skipped, with 1 if one failed, with 2 if nothing could be run.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.gpu import report
from tests.gpu.commands import ROOT
from tests.gpu.ladder import steps
from tests.gpu.machine import circumstances, ground
from tests.gpu.steps import Finding, Verdict, attempt


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the steps that are asked for, one after the other; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description="Tries a machine with GPUs.")
    parser.add_argument("--pretend", type=int, metavar="COUNT", help="let the CPU stand in for so many devices")
    parser.add_argument("--backend", choices=["nccl", "gloo", "strict"], help="[default: nccl, gloo for one device]")
    parser.add_argument("--only", default="", metavar="PATTERN", help="the steps whose names hold this expression")
    parser.add_argument("--limit", type=float, default=600, metavar="SECONDS", help="of each step [default: 600]")
    parser.add_argument("--report", type=Path, default=Path("gpu-report.md"), metavar="FILE")
    parser.add_argument("--folder", type=Path, default=Path("gpu.out"), help="of the programs [default: gpu.out]")
    options = parser.parse_args(arguments)
    if options.pretend is not None and (options.pretend < 1 or options.backend == "nccl"):
        parser.error("--pretend: one device or more, with --backend gloo or strict")
    devices = torch.cuda.device_count() if options.pretend is None else options.pretend
    if not devices:
        print("no GPU that torch can use: --pretend 4 tries the steps on the CPU", file=sys.stderr)
        return 2
    place, facts = ground(devices, options.backend, options.pretend is not None), circumstances()
    findings: list[Finding] = []
    report_file = ROOT / options.report
    for name, made in steps(place, options.folder):
        if re.search(options.only, name):
            print(f"{name} ..", end=" ", flush=True)
            findings.append(attempt(made(name), options.limit))
            print(f"{findings[-1].verdict.value} {findings[-1].why}".rstrip(), flush=True)
            report.write(report_file, place, facts, findings)
    if not findings:
        print(f"--only {options.only}: no step has such a name", file=sys.stderr)
        return 2
    print(f"{report.counted(findings)}; the report is {report_file}")
    return int(any(finding.verdict is Verdict.FAILED for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
