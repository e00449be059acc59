"""Training in a loop of one's own beside the same in one process, for all schemes: clipped, with AdamW, in float64.

    python -m tests.agreement [--workers 2 4 8] [--copies 1 2] [--schemes NAME ..] [--markdown PAGE]

Each row is a run of tests/e2e/loops/agree.py: losses, norms and gradients of every update, weights after the last. It
ends with status 1 if a row is beyond the limits.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.tables import publish, table
from chimera_ir import library
from tests.e2e.ranks import Job, compiled, run_all
from tests.sizes import chains, with_a_flush

LOOP = Path(__file__).resolve().parent / "e2e" / "loops" / "agree.py"
LIMITS = {"losses": 1e-12, "norms": 1e-12, "gradients": 1e-12, "weights": 1e-9}
FOR_MORE = ("chimera_doubling", "chimera_halving", "dualpipe", "dualpipe_v")
"""Schemes for more micro-batches than workers: two that equal `chimera` otherwise, and two that require more."""


@dataclass(frozen=True)
class Case:
    """A library scheme on so many workers, with W copies; ``tied`` if the first and the last stage share the table."""

    scheme: str
    workers: int
    copies: int
    tied: bool = False

    @property
    def ranks(self) -> int:
        return self.workers * self.copies

    def job(self, folder: Path) -> Job:
        """The run that writes this case's result."""
        ties = ("first,last",) if self.tied else ()
        directory = compiled(folder, self.scheme, ties, **sizes(self.scheme, self.workers))
        arguments = (str(directory), str(self.result(folder)), *(["--tied"] if self.tied else []))
        return Job(self.name, LOOP, arguments, model=None)

    def result(self, folder: Path) -> Path:
        return folder / f"{self.name}.json"

    @property
    def name(self) -> str:
        return f"{self.scheme}-{self.workers}-{self.copies}{'-tied' if self.tied else ''}"


def sizes(scheme: str, workers: int) -> dict[str, int]:
    """As many micro-batches as workers, whatever the scheme calls these; twice as many for those in `FOR_MORE`."""
    names = library.parameters(scheme)
    micro_batches = workers * (2 if scheme in FOR_MORE else 1)
    return {name: micro_batches if name == "N" else workers for name in names if name in ("D", "P", "N")}


def measured(cases: list[Case], folder: Path) -> Iterator[tuple[Case, dict[str, float]]]:
    """What each case's ranks wrote; all cases with as many ranks run under one torchrun."""
    for ranks in sorted({case.ranks for case in cases}):
        together = [case for case in cases if case.ranks == ranks]
        outcomes = run_all(folder, ranks, [case.job(folder) for case in together])
        for case in together:
            outcomes[case.name].assert_passed()
            yield case, json.loads(case.result(folder).read_text())


def beyond(seen: dict[str, float]) -> list[str]:
    """What differs by more than its limit."""
    return [name for name, limit in LIMITS.items() if not seen[name] <= limit]


def main() -> None:
    """Runs all cases and prints the table."""
    schemes = [name for name in with_a_flush() if name in chains()]
    parser = argparse.ArgumentParser(description="Training through Pipeline beside the same in one process.")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--copies", type=int, nargs="+", default=[1, 2], metavar="W")
    parser.add_argument("--schemes", nargs="+", choices=schemes, default=schemes, metavar="NAME")
    parser.add_argument(
        "--markdown", type=Path, metavar="PAGE", help="write the data file, and its summary between the page's marks"
    )
    options = parser.parse_args()
    cases = [Case(s, w, c, tied=True) for s in options.schemes for w in options.workers for c in options.copies]
    heads, rows, wrong = ("scheme", "workers", "W", *LIMITS), [], []
    with tempfile.TemporaryDirectory() as folder:
        results = sorted(measured(cases, Path(folder)), key=lambda result: cases.index(result[0]))
    for case, seen in results:
        differences = (f"{seen[name]:.0e}" for name in LIMITS)
        rows.append([case.scheme, str(case.workers), str(case.copies), *differences])
        wrong += [f"{case.name}: {name} differ by {seen[name]:.1e}" for name in beyond(seen)]
    print(table(heads, rows))
    if options.markdown is not None:
        publish(options.markdown, "agreement", heads, rows)
    for line in wrong:
        print(line, file=sys.stderr)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
