"""What is published of each schedule, read from ``published.toml``, and the same figures compiled."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import assert_never

from chimera_ir import library
from chimera_ir.compilation import Compilation
from chimera_ir.cost.durations import Costs
from chimera_ir.cost.report import Figures
from chimera_ir.request import Request
from paper_tables.formula import Size, value


class Measure(Enum):
    """A figure of a schedule; the values are the names in ``published.toml``."""

    MAKESPAN = "makespan"
    BUBBLE_RATIO = "bubble ratio"
    SPAN_BUBBLE_RATIO = "bubble ratio of own spans"
    STEADY_PERIOD = "steady period"
    WEIGHTS = "most weights"
    ACTIVATIONS = "most activations"
    LEAST_ACTIVATIONS = "fewest activations"

    def of(self, figures: Figures) -> Fraction:
        """The figure of a compiled schedule."""
        match self:
            case Measure.MAKESPAN:
                return figures.makespan
            case Measure.BUBBLE_RATIO:
                return figures.bubble_ratio
            case Measure.SPAN_BUBBLE_RATIO:
                return figures.span_bubble_ratio
            case Measure.STEADY_PERIOD:
                return figures.steady_period
            case Measure.WEIGHTS:
                return max(figures.weights)
            case Measure.ACTIVATIONS:
                return max(figures.activations)
            case Measure.LEAST_ACTIVATIONS:
                return min(figures.activations)
            case _:
                assert_never(self)


@dataclass(frozen=True, slots=True)
class Number:
    """A published figure: a formula of the size, or of two whose ratio it is, and where it stands.

    ``derived`` is how it follows from the published order, for a figure that is not itself taken from a publication and
    has no place in one. ``differs`` is why what compiles has another figure, at some size.
    """

    measure: Measure
    formula: str
    over: str
    place: str
    derived: str
    differs: str

    def at(self, where: Size) -> Fraction:
        """The figure at a size."""
        return Fraction(value(self.formula, where), value(self.over, where))


@dataclass(frozen=True, slots=True)
class Published:
    """A published schedule: the library's scheme for it, its code, its placement and its numbers.

    ``sizes`` are values of the scheme's parameters; formulas may use all of these, defaults included. ``code`` is empty
    where none was compared.
    """

    name: str
    scheme: str
    code: str
    placement: str
    costs: Costs
    sizes: tuple[Size, ...]
    numbers: tuple[Number, ...]


@dataclass(frozen=True, slots=True)
class Compared:
    """A published figure at the sizes of its schedule: what is published, and what compiles."""

    number: Number
    published: tuple[Fraction, ...]
    compiled: tuple[Fraction, ...]

    @property
    def agrees(self) -> bool:
        """Whether both are the same at every size."""
        return self.published == self.compiled


@cache
def schedules() -> tuple[Published, ...]:
    """All published schedules that the library has, in the order of the page."""
    data = tomllib.loads(Path(__file__).with_name("published.toml").read_text(encoding="utf-8"))
    return tuple(map(_schedule, data["schedule"]))


def _schedule(data: Mapping[str, object]) -> Published:
    sizes, costs, numbers = data["sizes"], data.get("costs", {}), data["number"]
    assert isinstance(sizes, list)
    assert isinstance(costs, dict)
    assert isinstance(numbers, list)
    total = Costs()
    for kind, cost in costs.items():
        total = total.using(kind, cost)
    return Published(
        name=str(data["name"]),
        scheme=str(data["scheme"]),
        code=str(data.get("code", "")),
        placement=str(data["placement"]),
        costs=total,
        sizes=tuple(sizes),
        numbers=tuple(map(_number, numbers)),
    )


def _number(data: Mapping[str, str]) -> Number:
    over, differs = data.get("over", "1"), data.get("differs", "")
    return Number(
        Measure(data["figure"]), data["formula"], over, data.get("place", ""), data.get("derived", ""), differs
    )


def compared(schedule: Published) -> tuple[Compared, ...]:
    """Each published figure of a schedule beside the compiled one."""
    source = library.source(schedule.scheme)
    reports = [Compilation(Request(source, at, schedule.costs)).report for at in schedule.sizes]
    sizes = [report.parameters for report in reports]
    return tuple(
        Compared(
            number,
            tuple(number.at(at) for at in sizes),
            tuple(number.measure.of(report) for report in reports),
        )
        for number in schedule.numbers
    )
