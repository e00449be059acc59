"""The whole matrix under the backend that keeps NCCL's rules; `test_strict` has a sample of it.

    .venv/bin/python -m tests.e2e.strict_matrix [--random 300] [--seed 0] [--schemes NAME ..]
    .venv/bin/python -m tests.e2e.strict_matrix --late
    .venv/bin/python -m tests.e2e.strict_matrix --communicators pair

Each program runs with ``--check-only``: it trains some updates as one process does. Every rank delays each of its
operations at random; a device has 8 hardware queues, and room for one collective. With ``--late`` ranks compute as late
as they may. Changed programs: `strict_mutants`.

With ``--communicators pair`` programs are compiled for one for both directions between two workers, and train with it.
"""

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from chimera_ir import library
from chimera_ir.errors import TextError
from chimera_ir.ir.text.printer import show
from chimera_ir.lower.lower import order
from tests.e2e.ranks import Job, Outcome, compiled, run_all
from tests.e2e.test_strict import STRICT
from tests.property.programs import random_plan
from tests.sizes import chains

RULES = {"STRICT_DELAY": "0.003", "STRICT_QUEUES": "8", "STRICT_ALONE": "1"}
SIZES = ((2, 4), (4, 4), (4, 6), (4, 8), (4, 12))
"""Workers and micro-batches."""
TOGETHER = 40
"""Jobs under one torchrun."""


def library_jobs(folder: Path, schemes: Sequence[str], seed: int, asked: tuple[str, ...]) -> Iterator[tuple[int, Job]]:
    """Schemes of the library, at each size that they take, with their numbers of ranks."""
    for scheme in schemes:
        names = library.parameters(scheme)
        for workers, micro_batches in SIZES if "N" in names else SIZES[:2]:
            settings = {"P" if "P" in names else "D": workers} | ({"N": micro_batches} if "N" in names else {})
            try:
                directory = compiled(folder / f"{workers}-{micro_batches}", scheme, asked=asked, **settings)
            except (AssertionError, TextError):
                continue  # a size that the scheme refuses
            yield workers, job(f"{scheme} {workers} {micro_batches}", directory, seed)


def random_jobs(folder: Path, count: int, seed: int, asked: tuple[str, ...]) -> Iterator[tuple[int, Job]]:
    """Random schedules without trouble, on two to four workers, and without ties: the model has none."""
    made = 0
    for number in range(seed, seed + 10 * count):
        plan = random_plan(number, 0.0)
        plan = replace(plan, header=replace(plan.header, ties=()))
        if plan.header.workers > 1 and made < count:
            made += 1
            file = folder / f"random{number}.sir"
            file.write_text(show(order(plan)))
            directory = compiled(folder, str(file), asked=asked)
            yield plan.header.workers, job(f"random {number}", directory, seed)


def job(name: str, directory: Path, seed: int) -> Job:
    """A program under the strict rules."""
    environment = RULES | {"STRICT_SEED": str(seed), "STRICT_PATIENCE": "20"}
    return Job(name, directory, STRICT, environment=environment)


def outcomes(folder: Path, jobs: Sequence[tuple[int, Job]]) -> dict[str, Outcome]:
    """What became of all jobs, which run in portions."""
    by_ranks: dict[int, list[Job]] = defaultdict(list)
    for ranks, one in jobs:
        by_ranks[ranks].append(one)
    found: dict[str, Outcome] = {}
    for ranks, all_ in by_ranks.items():
        for first in range(0, len(all_), TOGETHER):
            found |= run_all(folder, ranks, all_[first : first + TOGETHER])
            print(f"{len(found)}/{len(jobs)}", flush=True)
    return found


def passed(outcome: Outcome) -> bool:
    """Whether all ranks ended well."""
    return set(outcome.statuses) == {"0"}


def main() -> None:
    """Runs all, and prints what failed."""
    parser = argparse.ArgumentParser(description="Programs under a backend that keeps NCCL's rules.")
    parser.add_argument("--random", type=int, default=300, metavar="COUNT", help="random schedules [default: 300]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--schemes", nargs="*", choices=chains(), default=chains(), metavar="NAME")
    parser.add_argument("--communicators", choices=["directed", "pair"], default="directed")
    parser.add_argument("--late", action="store_true", help="what ranks compute is as late as it may be")
    options = parser.parse_args()
    asked = ("--communicators", options.communicators)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        jobs = [
            *library_jobs(folder, options.schemes, options.seed, asked),
            *random_jobs(folder, options.random, options.seed, asked),
        ]
        if options.late:
            jobs = [(ranks, replace(run, environment={**run.environment, "STRICT_LATE": "1"})) for ranks, run in jobs]
        results = outcomes(folder, jobs)
        for name, outcome in results.items():
            if not passed(outcome):
                print(f"{name}: failed\n{''.join(outcome.said)[-2000:]}")
        print(f"{sum(map(passed, results.values()))} of {len(results)} programs trained as one process does")


if __name__ == "__main__":
    main()
