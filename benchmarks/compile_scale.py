"""How long the whole command takes, from the shell prompt to all files, beside torch's lowering of 1F1B.

    .venv/bin/python benchmarks/compile_scale.py [--runs 3] [--only dapple,small] [--markdown PAGE]

Ours is a process that runs ``chimera compile SCHEME --out DIR``: its start, the proofs, the report and every file.
Theirs is the insertion of sends, receives and gradient sums into a given order of operations alone
(``_add_unshard_reshard``, ``_add_reduce_grad``, ``_add_send_recv``, as ``_prepare_schedule_with_comms`` calls them),
without the start of its process; it verifies and writes nothing.

CPU seconds, and the peak of memory, are those of a whole process of ours as the system counts them. Bytecode, templates
and parsers are kept, as they are for a user from the second command on, whatever the environment of this script says.
All cases take turns, and the first round is thrown away unless it is the only one. A case has as many operations as it
says; the last one is a small command beside a process that only imports its libraries.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from commands import COMPILE
from paired import ratio
from tables import circumstances, publish, table

LARGE = (64, 1024)
"""Workers and micro-batches at which all schemes are compared, with each other and with torch."""

TORCH, IMPORTS = "torch", "imports"
LIBRARIES = "import networkx, lark, jinja2, click, rich.console"


class Case(NamedTuple):
    """A command: a scheme with its parameters, and its operations; ``beside`` is what its time is divided by."""

    scheme: str
    parameters: str
    operations: int
    beside: str = TORCH


def _case(scheme: str, workers: int, micro_batches: int, each: int = 2, beside: str = TORCH, more: str = "") -> Case:
    """A case with ``each`` operations for each worker and micro-batch."""
    name = "P" if scheme in ("interleaved", "zb_v") else "D"
    parameters = f"{name}={workers} N={micro_batches}{more}"
    return Case(scheme, parameters, each * workers * micro_batches, beside)


CASES = {
    "schemes": (
        *(_case(scheme, *LARGE) for scheme in ("chimera", "gpipe")),
        *(_case("interleaved", *LARGE, each=4), _case("zb_v", *LARGE, each=6)),
        _case("seq1f1b", 64, 256, each=8, more=" k=4"),
    ),
    "micro-batches": tuple(_case("dapple", 64, micro_batches) for micro_batches in (64, 256, 1024)),
    "large": (_case("dapple", 64, 4096),),
    "workers": tuple(_case("dapple", workers, 1024) for workers in (8, 16, 32)),
    "small": (_case("dapple", 8, 32, beside=IMPORTS),),
}
"""All cases in groups, by the names that ``--only`` takes."""


class Run(NamedTuple):
    """CPU seconds, and peak memory in bytes."""

    seconds: float
    peak: int


def ended(command: Sequence[str]) -> Run:
    """Runs a command, which keeps its bytecode, to its end; the CPU time and the memory of its process."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return Run(used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)


def ours(case: Case) -> Run:
    """Compiles a case into a new directory."""
    with tempfile.TemporaryDirectory() as folder:
        return ended((*COMPILE, case.scheme, *case.parameters.split(), "--out", f"{folder}/out"))


def theirs(beside: str) -> Run:
    """The divisor of a case: torch's lowering of 1F1B at the large size, or the imports of our libraries."""
    if beside == IMPORTS:
        return ended((sys.executable, "-c", LIBRARIES))
    done = subprocess.run([sys.executable, __file__, "--lower"], check=True, stdout=subprocess.PIPE, text=True)
    return Run(*json.loads(done.stdout))


def lower(depth: int, micro_batches: int) -> float:
    """Lowers 1F1B as torch does, in this process; the CPU seconds of the lowering alone."""
    from torch.distributed.pipelining import schedules as peer

    forward, backward = peer._ComputationType.FORWARD, peer._ComputationType.FULL_BACKWARD

    def order(rank: int) -> list[Any]:
        ahead = min(depth - 1 - rank, micro_batches)
        actions = [peer._Action(rank, forward, m) for m in range(ahead)]
        for m in range(micro_batches):
            if m + ahead < micro_batches:
                actions.append(peer._Action(rank, forward, m + ahead))
            actions.append(peer._Action(rank, backward, m))
        return actions

    orders = {rank: order(rank) for rank in range(depth)}
    begin = time.process_time()
    lowered = {
        rank: peer._add_reduce_grad(peer._add_unshard_reshard(actions), micro_batches)
        for rank, actions in orders.items()
    }
    peer._add_send_recv(lowered, stage_to_rank=lambda stage: stage, num_stages=depth)
    return time.process_time() - begin


def row(case: Case, mine: Sequence[Run], beside: Sequence[Run]) -> list[str]:
    """The medians of a case."""
    seconds = statistics.median(run.seconds for run in mine)
    return [
        case.scheme,
        case.parameters,
        f"{case.operations:,}",
        f"{seconds:.2f}",
        f"{seconds / case.operations * 1e6:.0f}",
        case.beside,
        str(ratio([run.seconds for run in mine], [run.seconds for run in beside])),
        f"{max(run.peak for run in mine) / 2**20:.0f}",
    ]


def main() -> None:
    """Measures, prints the table, and publishes it with a page."""
    parser = argparse.ArgumentParser(description="How long the whole command takes.")
    parser.add_argument("--runs", type=int, default=3, help="rounds whose median counts [default: 3]")
    parser.add_argument("--only", default=",".join(CASES), help="groups of cases [default: %(default)s]")
    parser.add_argument("--markdown", type=Path, metavar="PAGE", help="write the data file and the page's summary")
    parser.add_argument("--lower", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.lower:
        print(json.dumps([lower(*LARGE), 0]))
        return
    cases = [case for group in options.only.split(",") for case in CASES[group]]
    # The first command makes what the others find kept.
    for small in CASES["small"]:
        ours(small), theirs(small.beside)
    rounds = []
    for _ in range(options.runs + (options.runs > 1)):
        divisors = {beside: theirs(beside) for beside in dict.fromkeys(case.beside for case in cases)}
        rounds.append([(ours(case), divisors[case.beside]) for case in cases])
    rounds = rounds[1:] or rounds
    rows = [row(case, *zip(*runs, strict=True)) for case, runs in zip(cases, zip(*rounds, strict=True), strict=True)]
    heads = ("", "parameters", "operations", "CPU, s", "us each", "beside", "ratio", "peak, MB")
    print("\n\n".join([circumstances(), table(heads, rows)]))
    if options.markdown is not None:
        publish(options.markdown, "compile", heads, rows)


if __name__ == "__main__":
    main()
