"""Kills ranks at random moments and inside of saves: every run must end with the losses of an undisturbed one.

    python -m tests.kills [--runs 50] [--seed 0]

Of the runs one in three dies inside of a save. torchrun starts the ranks again: they resume from the newest checkpoint.
All of 50 runs ended so.
"""

import json
import random
import sys
from argparse import ArgumentParser
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.e2e.ranks import MODELS, compiled, launched

STEPS, EVERY, RANKS = 12, 2, 2
INSIDE = (
    *("before writing", "after writing", "before metadata", "after metadata", "before fsync", "after fsync"),
    *("before rename", "after rename", "before removing", "after removing"),
)
"""Points of a save, see models/killed.py."""


@dataclass(frozen=True)
class Kill:
    """A rank that dies the count-th time that it comes to a point."""

    rank: int
    point: str
    count: int

    def __str__(self) -> str:
        return f"{self.rank}:{self.point}:{self.count}"


def drawn(number: int, seed: int) -> Kill:
    """The kill of a run."""
    draw = random.Random(f"{seed}/{number}")
    if number % 3:
        return Kill(draw.randrange(RANKS), "forward", draw.randrange(1, 8 * STEPS))
    point = INSIDE[number // 3 % len(INSIDE)]
    is_of_one = point.split()[1] in ("metadata", "rename", "removing")
    return Kill(0 if is_of_one else draw.randrange(RANKS), point, draw.randrange(1, 4))


def losses(
    folder: Path, directory: Path, kill: Kill | None, after: int | None = None, sliced: bool = False
) -> tuple[dict[int, set[float]], bool]:
    """The losses of each update, of all times that it was made, and whether a rank died.

    With ``after`` it dies when the checkpoint of that update is there, for which it waits. The model is ``sliced`` if
    the program has slices.
    """
    folder.mkdir()
    log, marker, saved = folder / "log.jsonl", folder / "marker", folder / "saved"
    options = f"--model {MODELS / 'killed.py'} --steps {STEPS} --micro-batch-size 2 --timeout 30 --log-file {log}"
    saving = f"--save {saved} --resume {saved} --save-every {EVERY} --keep 2"
    variables = {"MARKER": str(marker)} | ({} if kill is None else {"KILL": str(kill)})
    variables |= {"SLICED": "1"} if sliced else {}
    variables |= {} if after is None else {"SAVED": str(saved / f"update-{after:08d}")}
    done = launched(directory, RANKS, ("--max-restarts=3",), f"{options} {saving}".split(), variables)
    assert done.returncode == 0, f"{kill}: {done.stderr}"
    seen: dict[int, set[float]] = {}
    for line in log.read_text().splitlines():
        told = json.loads(line)
        seen.setdefault(told["update"], set()).add(told["loss"])
    return seen, marker.exists()


def main() -> None:
    """Runs all and prints a line for each."""
    parser = ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with TemporaryDirectory() as scratch:
        directory = compiled(Path(scratch), "chimera", D=2, N=4)
        expected, _ = losses(Path(scratch) / "undisturbed", directory, None)
        wrong = died = 0
        for number in range(options.runs):
            kill = drawn(number, options.seed)
            seen, has_died = losses(Path(scratch) / f"run-{number}", directory, kill)
            died += has_died
            wrong += seen != expected
            verdict = "as undisturbed" if seen == expected else "OTHER LOSSES"
            print(f"{number:3}  {kill!s:22}  {'died' if has_died else 'not reached':12}  {verdict}", flush=True)
    print(f"{options.runs} runs, {died} with a kill, {wrong} with other losses")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
