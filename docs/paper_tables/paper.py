"""The paper's claims about each scheme, read from ``paper.toml``."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from functools import cache
from pathlib import Path

from chimera_ir.cost.durations import Costs
from paper_tables.formula import Size, value


class Figure(Enum):
    """The figures of a scheme, in the order of the tables; the values are the names in ``report.json``."""

    PIPELINES = "pipelines"
    BUBBLE_RATIO = "bubble_ratio"
    WEIGHTS = "weights"
    ACTIVATIONS = "activations"
    STASHED_INPUTS = "stashed_inputs"
    SYNCHRONOUS = "synchronous"


@dataclass(frozen=True, slots=True)
class Interval:
    """The least and the most over the workers: weights in M_theta, activations and inputs in M_a."""

    least: Fraction
    most: Fraction


Amount = Fraction | Interval | bool
"""A ratio or a count, an interval over the workers, or whether something holds."""


@dataclass(frozen=True, slots=True)
class RatioClaim:
    """A share of the time; ``about`` if the paper gives it as an approximation."""

    of: str
    over: str
    about: bool

    def at(self, size: Size) -> Fraction:
        """The ratio at a size."""
        return Fraction(value(self.of, size), value(self.over, size))


@dataclass(frozen=True, slots=True)
class IntervalClaim:
    """The least and the most over the workers."""

    least: str
    most: str

    def at(self, size: Size) -> Interval:
        """The interval at a size."""
        return Interval(Fraction(value(self.least, size)), Fraction(value(self.most, size)))


@dataclass(frozen=True, slots=True)
class CountClaim:
    """A count over the whole scheme."""

    count: str

    def at(self, size: Size) -> Fraction:
        """The number at a size."""
        return Fraction(value(self.count, size))


@dataclass(frozen=True, slots=True)
class FactClaim:
    """Whether the figure's name is true of the scheme, at every size."""

    holds: bool

    def at(self, _: Size) -> bool:
        """The claim, at any size."""
        return self.holds


Claim = RatioClaim | IntervalClaim | CountClaim | FactClaim


@dataclass(frozen=True, slots=True)
class Instead:
    """A compiled figure that differs from the claim: its own formula, under a condition, and the reason.

    For a bubble ratio the formula gives the makespan, from which the ratio follows.
    """

    figure: Figure
    when: str
    claim: CountClaim | IntervalClaim
    reason: str


@dataclass(frozen=True, slots=True)
class Every:
    """One row for each value of a parameter from 1 to ``most`` for which the condition holds."""

    parameter: str
    most: str
    when: str

    def sizes(self, size: Size) -> tuple[Size, ...]:
        """The sizes of the rows."""
        candidates = ({**size, self.parameter: number} for number in range(1, value(self.most, size) + 1))
        return tuple(candidate for candidate in candidates if value(self.when, candidate))


@dataclass(frozen=True, slots=True)
class PaperRow:
    """A scheme with the parameters and costs that the claims are for, and the claims."""

    name: str
    scheme: str
    every: Every | None
    parameters: Mapping[str, str]
    costs: Costs
    claims: tuple[tuple[Figure, Claim], ...]
    instead: tuple[Instead, ...]


@dataclass(frozen=True, slots=True)
class PaperTable:
    """Rows under a title."""

    title: str
    rows: tuple[PaperRow, ...]


@dataclass(frozen=True, slots=True)
class Paper:
    """The header that gives a size, and the tables."""

    size: str
    tables: tuple[PaperTable, ...]


_Data = Mapping[str, str]


@cache
def paper() -> Paper:
    """The paper's tables of what schemes cost."""
    data = tomllib.loads(Path(__file__).with_name("paper.toml").read_text(encoding="utf-8"))
    reasons = _strings(data["reasons"])
    tables = (PaperTable(table["title"], tuple(_row(row, reasons) for row in table["row"])) for table in data["table"])
    return Paper(data["size"], tuple(tables))


def _row(data: Mapping[str, object], reasons: _Data) -> PaperRow:
    claims = tuple((figure, _claim(figure, data[figure.value])) for figure in Figure if figure.value in data)
    every = data.get("every")
    return PaperRow(
        name=str(data["name"]),
        scheme=str(data["scheme"]),
        every=None if every is None else Every(**_strings(every)),
        parameters=_strings(data["set"]),
        costs=_costs(_strings(data["cost"])),
        claims=claims,
        instead=tuple(_instead(_strings(entry), reasons) for entry in _list(data.get("because", []))),
    )


def _costs(data: _Data) -> Costs:
    costs = Costs()
    for kind, text in data.items():
        costs = costs.using(kind, text)
    return costs


def _claim(figure: Figure, data: object) -> Claim:
    match data:
        case bool():
            return FactClaim(data)
        case str() if figure is Figure.PIPELINES:
            return CountClaim(data)
        case str():
            return IntervalClaim(data, data)
        case {"least": str(least), "most": str(most)}:
            return IntervalClaim(least, most)
        case {"of": str(of), "over": str(over)}:
            return RatioClaim(of, over, about=False)
        case {"about": str(of), "over": str(over)}:
            return RatioClaim(of, over, about=True)
        case _:
            raise ValueError(f"paper.toml: {figure.value} cannot be {data}")


def _instead(data: _Data, reasons: _Data) -> Instead:
    claim = CountClaim(data["makespan"]) if "makespan" in data else IntervalClaim(data["least"], data["most"])
    return Instead(Figure(data["figure"]), data["when"], claim, reasons[data["reason"]])


def _strings(data: object) -> dict[str, str]:
    assert isinstance(data, dict), data
    return {str(name): str(text) for name, text in data.items()}


def _list(data: object) -> list[object]:
    assert isinstance(data, list), data
    return data
