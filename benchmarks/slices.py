"""Savings and costs of slices of the sequence: bytes of each rank and step times, for several numbers of slices.

    .venv/bin/python benchmarks/slices.py [--rounds 3] [--steps 6] [--slices 1 2 4 8]

examples/long_context.py trains under seq1f1b; with one slice that is 1F1B. Each number of slices runs in turn, as often
as there are rounds. A rank needs what ``--memory-limit`` says before the first step, and has used what
``--peak-memory`` says after the last one. A step time is the median of a run without its first step; the ratio is the
median over the rounds of the time beside that of one slice in the same round.
"""

import argparse
import os
import re
import statistics
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from commands import COMPILE, TORCHRUN
from paired import ratio
from tables import circumstances, table

MODEL = Path(__file__).resolve().parent.parent / "examples" / "long_context.py"
STAGES, MICRO_BATCHES = 4, 4
_STEP = re.compile(r"^step \d+/\d+ .* ([\d.]+) s  ", re.M)
_RANK = re.compile(r"^ +\d+ +\d+ +[\d.]+ +([\d.]+ [KM]iB) +([\d.]+ [KM]iB)$", re.M)


@dataclass(frozen=True)
class SlicedRun:
    """A run: the median of its step times, and what each rank needed and used."""

    seconds: float
    ranks: tuple[tuple[str, str], ...]


def run(directory: Path, steps: int) -> SlicedRun:
    """Trains for some steps."""
    options = "--micro-batch-size", "1", "--steps", str(steps), "--memory-limit", "64GiB", "--peak-memory"
    command = [*TORCHRUN, f"--nproc-per-node={STAGES}", str(directory / "train.py"), "--model", str(MODEL), *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    said = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    _, *seconds = map(float, _STEP.findall(said))
    return SlicedRun(statistics.median(seconds), tuple(_RANK.findall(said)))


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description="What slices of the sequence save, and what they cost.")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each number of slices [default: 3]")
    parser.add_argument("--steps", type=int, default=6, help="steps of a run [default: 6]")
    parser.add_argument("--slices", type=int, nargs="+", default=[1, 2, 4, 8], help="the first is the others' unit")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directories = {count: Path(folder) / f"{count}.out" for count in options.slices}
        for count, directory in directories.items():
            settings = f"--set D={STAGES} --set N={MICRO_BATCHES} --set k={count} --quiet --out".split()
            subprocess.run([*COMPILE, "seq1f1b", *settings, str(directory)], check=True)
        rounds = [
            {count: run(directory, options.steps) for count, directory in directories.items()}
            for _ in range(options.rounds)
        ]
    rows = []
    for count in options.slices:
        against = ratio([each[count].seconds for each in rounds], [each[options.slices[0]].seconds for each in rounds])
        seconds = statistics.median(each[count].seconds for each in rounds)
        needs, used = zip(*rounds[-1][count].ranks, strict=True)
        rows.append([str(count), ", ".join(needs), ", ".join(used), f"{seconds:.3f}", str(against)])
    heads = ("slices", "needs, by rank", "used, by rank", "step, s", f"beside {options.slices[0]}")
    print("\n\n".join([circumstances(), table(heads, rows)]))


if __name__ == "__main__":
    main()
