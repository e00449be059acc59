"""Each row of the paper's tables, compiled at a size: claimed and compiled figures, and why they differ."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import assert_never

from chimera_ir import library
from chimera_ir.compilation import Compilation
from chimera_ir.cost.durations import Costs
from chimera_ir.cost.report import Report
from chimera_ir.diagnostics.model import titles
from chimera_ir.errors import AboveMaxOperations, TextError
from chimera_ir.request import Request
from paper_tables.formula import Size, size, value
from paper_tables.paper import Amount, Claim, Figure, Instead, Interval, PaperRow, paper


@dataclass(frozen=True, slots=True)
class Equal:
    """The compiled figure is the one claimed."""


@dataclass(frozen=True, slots=True)
class Explained:
    """The compiled figure differs from the claim: it is that of ``instead``, whose reason says why."""

    instead: Instead


@dataclass(frozen=True, slots=True)
class Differs:
    """The compiled figure differs from the claim, without a known reason."""


Verdict = Equal | Explained | Differs


@dataclass(frozen=True, slots=True)
class FigureComparison:
    """One figure of one scheme: the claim, its amount at the size, the compiled amount, and the verdict."""

    figure: Figure
    claim: Claim
    claimed: Amount
    compiled: Amount
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Compared:
    """The figures of a row's scheme, compared with the claims."""

    comparisons: tuple[FigureComparison, ...]


@dataclass(frozen=True, slots=True)
class Absent:
    """A row without comparisons: the library lacks the scheme, or the scheme refuses the size."""

    why: str


@dataclass(frozen=True, slots=True)
class Surveyed:
    """A row of a table: the scheme with its parameters and costs, and the outcome of the comparison."""

    name: str
    scheme: str
    parameters: Size
    costs: Costs
    outcome: Compared | Absent


@dataclass(frozen=True, slots=True)
class Section:
    """The rows of a table under its title."""

    title: str
    rows: tuple[Surveyed, ...]


@dataclass(frozen=True, slots=True)
class Survey:
    """The paper's tables at one size."""

    size: Size
    sections: tuple[Section, ...]


def schemes() -> tuple[str, ...]:
    """The names of the schemes in the paper's tables, whether or not the library has them."""
    return tuple(dict.fromkeys(row.scheme for table in paper().tables for row in table.rows))


def survey(settings: Size, about: Collection[str]) -> Survey:
    """The rows of the paper's tables for some schemes, compiled at the size that the settings give.

    A row with an open parameter appears once for each of its values. Tables without rows are left out.

    Raises
    ------
    NoSuchSize
        If the paper's formulas say nothing for that size.
    """
    claims = paper()
    at = size(claims.size, settings)
    chosen = ((table.title, [row for row in table.rows if row.scheme in about]) for table in claims.tables)
    sections = (
        Section(title, tuple(_surveyed(row, row_size) for row in rows for row_size in _sizes(row, at, settings)))
        for title, rows in chosen
        if rows
    )
    return Survey(at, tuple(sections))


def _sizes(row: PaperRow, at: Size, settings: Size) -> tuple[Size, ...]:
    return (at,) if row.every is None or row.every.parameter in settings else row.every.sizes(at)


def _surveyed(row: PaperRow, at: Size) -> Surveyed:
    parameters = {name: value(formula, at) for name, formula in row.parameters.items()}
    return Surveyed(row.name, row.scheme, parameters, row.costs, _outcome(row, at, parameters))


def _outcome(row: PaperRow, at: Size, parameters: Size) -> Compared | Absent:
    if row.scheme not in library.names():
        return Absent("not in the library")
    try:
        report = Compilation(Request(library.source(row.scheme), parameters, row.costs)).report
    except TextError as error:
        return Absent(f"no such schedule: {titles(error.diagnostics)}")
    except AboveMaxOperations as error:
        return Absent(error.excess)
    return Compared(tuple(_comparisons(row, at, report)))


def _comparisons(row: PaperRow, at: Size, report: Report) -> Iterator[FigureComparison]:
    for figure, claim in row.claims:
        claimed, compiled = claim.at(at), _amount(figure, report)
        verdict = Equal() if compiled == claimed else _why(figure, row.instead, at, report)
        yield FigureComparison(figure, claim, claimed, compiled, verdict)


def _why(figure: Figure, known: Sequence[Instead], at: Size, report: Report) -> Explained | Differs:
    """The first reason for this figure and size whose formula gives the compiled figure."""
    substitutes = {Figure.BUBBLE_RATIO: report.makespan}
    compiled = substitutes[figure] if figure in substitutes else _amount(figure, report)
    for instead in known:
        if instead.figure is figure and value(instead.when, at) and instead.claim.at(at) == compiled:
            return Explained(instead)
    return Differs()


def _amount(figure: Figure, report: Report) -> Amount:
    """A figure from the report."""
    match figure:
        case Figure.PIPELINES:
            return Fraction(report.pipelines)
        case Figure.BUBBLE_RATIO:
            return report.bubble_ratio
        case Figure.WEIGHTS:
            return _interval(report.weights)
        case Figure.ACTIVATIONS:
            return _interval(report.activations)
        case Figure.STASHED_INPUTS:
            return _interval(report.stashed_inputs)
        case Figure.SYNCHRONOUS:
            return not report.header.asynchronous
        case _:
            assert_never(figure)


def _interval(values: Sequence[Fraction]) -> Interval:
    return Interval(min(values), max(values))
