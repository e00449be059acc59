"""What items that take 5 ms to load cost a step, with data workers and without, relative to instant ones.

.venv/bin/python benchmarks/loading.py [--workers 4]

Once with stages that compute on the CPU, and once with stages that leave it free: see ranks/loading.py. On two ranks
and two cores, 16 items in a mini-batch, a step relative to one with instant items and no data workers, medians of 12
alternating rounds with the 95 % interval of the sign test:

    items     data workers   stages compute on the CPU   stages leave it free
    instant   4              1.08 (1.02 to 1.12)         1.00 (0.99 to 1.02)
    5 ms      4              1.10 (0.99 to 1.19)         1.01 (1.00 to 1.03)
    5 ms      0              2.37 (2.24 to 2.52)         2.38 (2.35 to 2.42)
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from paired import middle, ratio

import chimera_ir

RANKS = Path(__file__).resolve().parent / "ranks" / "loading.py"


def main() -> None:
    """Compiles a schedule for two workers and runs the steps there."""
    parser = argparse.ArgumentParser(description="Steps on items that take 5 ms beside steps on instant ones.")
    parser.add_argument("--workers", type=int, default=4, help="data workers of each rank [default: 4]")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        chimera_ir.compile("dapple", D=2, N=4).write(f"{folder}/dapple.out")
        for stages in ("computing", "waiting"):
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(RANKS)]
            command += [f"{folder}/dapple.out", str(options.workers), stages]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            said = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True).stdout
            items, samples = json.loads(said)
            report(f"{stages} stages, {items} items in a mini-batch", samples)


def report(title: str, samples: dict[str, list[list[float]]]) -> None:
    """Prints a line for each kind, relative to the first."""
    print(title)
    first = [seconds for seconds, _ in next(iter(samples.values()))]
    for kind, rounds in samples.items():
        seconds, cpu = zip(*rounds, strict=True)
        print(f"  {kind}: {middle(seconds)} s, / first {ratio(seconds, first)}; CPU of data workers {middle(cpu)} s")


if __name__ == "__main__":
    main()
