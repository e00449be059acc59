"""Draws every picture of the pages again, from schemes that are compiled for it, and compares with what is there.

    python docs/figures.py             # says which pictures are out of date
    python docs/figures.py --update    # writes what is drawn now

A picture of one schedule is the ``timeline.svg`` of a compilation. A figure of the paper is a sheet of several
schedules on one scale; a scheme that the library does not have yet is left out.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path

from chimera_ir import library
from chimera_ir.compilation import Compilation
from chimera_ir.cost.durations import Costs
from chimera_ir.cost.simulate import beginning, steady_window
from chimera_ir.picture import sheet, svg
from chimera_ir.request import Request
from chimera_ir.source import Source

DOCS = Path(__file__).resolve().parent
IMAGES = DOCS / "images"
EQUAL = Costs(B=Fraction(1))
DOUBLED = Costs().using("B", "2")
"""Section 3.5: a forward over two micro-batches is as long as a backward over one, recomputation included."""


@dataclass(frozen=True)
class Shown:
    """A scheme, by its name in the library or its file, with parameters and costs, and what to say of its schedule."""

    caption: str
    scheme: str
    settings: Mapping[str, int] = field(default_factory=dict)
    costs: Costs = field(default_factory=Costs)

    @property
    def exists(self) -> bool:
        """Whether there is such a scheme."""
        return self.scheme.endswith(".chim") or self.scheme in library.names()


SINGLE = {
    "1f1b.svg": Shown("", "examples/1f1b.chim"),
    "chimera.svg": Shown("", "chimera"),
    "slow.svg": Shown("", "examples/vee.chim"),
    "chimera_f2.svg": Shown("", "chimera", {"D": 8, "N": 8, "f": 2}),
    **{f"schemes/{name}.svg": Shown("", name) for name in library.names()},
}
"""Pictures of one schedule."""

FOUR = {"D": 4, "N": 4}
SHEETS: Mapping[str, tuple[str, Sequence[Sequence[Shown]]]] = {
    "figure2.svg": (
        "Pipeline schemes, with four stages and four micro-batches",
        [
            [Shown("PipeDream: how it begins", "pipedream", {"D": 4})],
            [Shown("PipeDream-2BW: how it begins", "pipedream_2bw", FOUR)],
            [Shown("GPipe", "gpipe", FOUR), Shown("DAPPLE", "dapple", FOUR)],
            [Shown("GEMS", "gems", FOUR)],
            [Shown("Chimera", "chimera", FOUR)],
        ],
    ),
    "figure3.svg": (
        "Two pipelines in opposite directions, merged",
        [
            [
                Shown("The down pipeline alone", "figures/directions.chim", {"D": 4, "upward": 0}, EQUAL),
                Shown("Both, merged", "chimera", FOUR, EQUAL),
            ],
            [
                Shown("The up pipeline alone", "figures/directions.chim", {"D": 4, "downward": 0}, EQUAL),
                Shown("Both, a backward twice as long", "chimera", FOUR),
            ],
        ],
    ),
    "figure7.svg": (
        "More than D micro-batches",
        [
            [
                Shown("(a) a basic unit of D micro-batches", "chimera", FOUR),
                Shown("(a) and another one", "chimera", FOUR),
            ],
            [Shown("(b) direct concatenation of the two", "chimera", {"D": 4, "N": 8})],
            [Shown("(c) forwards over two, two chunks of backwards", "figures/chunks.chim", {"D": 4}, DOUBLED)],
            [Shown("(d) forward doubling, fine-tuned", "chimera_doubling", {"D": 4, "N": 8}, DOUBLED)],
        ],
    ),
    "figure8.svg": (
        "Four pipelines of eight stages",
        [
            [Shown("A backward as long as a forward", "chimera", {"D": 8, "N": 8, "f": 2}, EQUAL)],
            [Shown("A backward twice as long", "chimera", {"D": 8, "N": 8, "f": 2})],
        ],
    ),
}
"""The paper's figures: a title, and rows of schedules."""


def compilation(shown: Shown) -> Compilation:
    """The compilation of a scheme that passes every rule."""
    file = DOCS / shown.scheme
    source = Source(file.name, file.read_text(encoding="utf-8")) if file.suffix else library.source(shown.scheme)
    return Compilation(Request(source, shown.settings, shown.costs))


def panel(shown: Shown) -> sheet.Panel:
    """The schedule alone, without marks of what happens beside it; of an endless one what shows its steady state."""
    timeline = replace(compilation(shown).timeline, events=())
    window = steady_window(timeline)
    return sheet.Panel(shown.caption, timeline if window is None else beginning(timeline, window))


def drawings() -> Iterator[tuple[str, str]]:
    """The name of each picture, and the picture."""
    for name, shown in SINGLE.items():
        yield name, svg.draw(compilation(shown).timeline)
    for name, (title, rows) in SHEETS.items():
        there = [[panel(shown) for shown in row if shown.exists] for row in rows]
        yield name, sheet.draw(title, [row for row in there if row])


def main() -> None:
    """Checks or updates every picture."""
    update, stale = "--update" in sys.argv[1:], 0
    for name, drawing in drawings():
        path = IMAGES / name
        if path.is_file() and path.read_text(encoding="utf-8") == drawing:
            continue
        stale += 1
        sys.stdout.write(f"{path.relative_to(DOCS.parent)}\n")
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(drawing, encoding="utf-8")
    sys.exit(1 if stale and not update else 0)


if __name__ == "__main__":
    main()
