"""The paper's Tables 2 and 3 (Chimera, SC'21), and what sections 2 and 3.5 add, hold for what the schemes compile to.

What is claimed is package data; here is asserted where the claims are met, and that each reason for a difference holds.
"""

from collections.abc import Iterator
from fractions import Fraction
from functools import cache

import pytest

from chimera_ir import library
from paper_tables.formula import value
from paper_tables.paper import Figure, PaperRow, paper
from paper_tables.survey import (
    Absent,
    Compared,
    Differs,
    Equal,
    Explained,
    FigureComparison,
    Section,
    Survey,
    Surveyed,
    schemes,
    survey,
)
from tests.literature.test_facts import cost
from tests.repeatable import also, part

UNITS = also(((D, K) for D in (2, 4, 6, 8) for K in (1, 2, 3, 4)), [(16, 1), (16, 2)])
RESTS = part([(D, N) for D in (2, 4, 6, 8) for N in range(1, 3 * D) if N % D], 5)


@cache
def tables(D: int, N: int) -> Survey:
    return survey({"D": D, "N": N}, schemes())


def compared(found: Survey, title: str) -> Iterator[tuple[Surveyed, FigureComparison]]:
    """Every comparison in the sections whose title begins like this."""
    for section in found.sections:
        if section.title.startswith(title):
            for row in section.rows:
                if isinstance(row.outcome, Compared):
                    yield from ((row, each) for each in row.outcome.comparisons)


def row_of(section: Section, name: str) -> dict[Figure, FigureComparison]:
    (row,) = (row for row in section.rows if row.name == name)
    assert isinstance(row.outcome, Compared)
    return {each.figure: each for each in row.outcome.comparisons}


def claims() -> Iterator[PaperRow]:
    for table in paper().tables:
        yield from table.rows


@pytest.mark.parametrize(("D", "K"), UNITS)
def test_table_2_is_what_compiles_but_for_the_ratio_that_is_a_limit(D: int, K: int) -> None:
    unequal = [
        (row.name, each.figure)
        for row, each in compared(tables(D, K * D), "Table 2")
        if not isinstance(each.verdict, Equal)
    ]
    assert unequal == [("GEMS", Figure.BUBBLE_RATIO)]


@pytest.mark.parametrize(("D", "K"), UNITS)
def test_table_3_is_what_compiles_for_every_number_of_pipelines(D: int, K: int) -> None:
    verdicts = [(row.parameters["f"], each.verdict) for row, each in compared(tables(D, K * D), "Table 3")]
    assert {verdict for _, verdict in verdicts} == {Equal()}
    assert sorted({f for f, _ in verdicts}) == [f for f in range(1, D // 2 + 1) if D // 2 % f == 0]


@pytest.mark.parametrize(("D", "K"), UNITS)
def test_what_sections_2_and_3_5_say_is_what_compiles_but_for_what_they_leave_out(D: int, K: int) -> None:
    """Section 3.5: direct concatenation has intermediate bubbles; a residual unit of D is not doubled."""
    unequal = {
        (row.name, each.figure)
        for row, each in compared(tables(D, K * D), "Sections")
        if not isinstance(each.verdict, Equal)
    }
    concatenated = {("Direct concatenation", Figure.BUBBLE_RATIO)} if K > 1 and D > 2 else set()
    residual = {("Forward doubling", Figure.STASHED_INPUTS)} if K == 1 else set()
    assert unequal == concatenated | residual


@pytest.mark.parametrize(("D", "N"), [*RESTS, *((D, K * D) for D, K in UNITS)])
def test_no_figure_differs_without_a_reason(D: int, N: int) -> None:
    assert [
        (row.name, each.figure, each.claimed, each.compiled)
        for row, each in compared(tables(D, N), "")
        if isinstance(each.verdict, Differs)
    ] == []


@pytest.mark.parametrize(("D", "N"), RESTS)
def test_a_reason_comes_with_the_formula_of_what_compiles(D: int, N: int) -> None:
    for row, each in compared(tables(D, N), ""):
        if isinstance(each.verdict, Explained):
            assert each.claimed != each.compiled
            at = {"D": D, "N": N, "f": 1, **row.parameters}
            instead = each.verdict.instead.claim.at(at)
            if each.figure is Figure.BUBBLE_RATIO:
                work = N * sum(cost for kind, cost in row.costs.items() if kind in "FB")
                assert each.compiled == 1 - work / instead
            else:
                assert each.compiled == instead


def test_a_reason_is_given_only_where_its_condition_holds() -> None:
    for D, N in RESTS:
        for row, each in compared(tables(D, N), ""):
            if isinstance(each.verdict, Explained):
                assert value(each.verdict.instead.when, {"D": D, "N": N, "f": 1, **row.parameters})


@pytest.mark.parametrize("D", [2, 4, 6, 8])
def test_the_ratio_that_is_a_limit_is_approached_from_above(D: int) -> None:
    """Table 2, GEMS: about (D-1)/(D+1/2); what compiles is that and O(1/N)."""
    limit = (D - 1) / (D + Fraction(1, 2))
    above = []
    for N in (2, 8, 32, 128):
        figure = row_of(tables(D, N).sections[0], "GEMS")[Figure.BUBBLE_RATIO] if N <= 32 else None
        compiled = figure.compiled if figure else cost("gems", D=D, N=N).bubble_ratio
        assert isinstance(compiled, Fraction)
        above.append(compiled - limit)
        assert 0 < above[-1] < Fraction(1, 2 * N)
    assert above == sorted(above, reverse=True)


@pytest.mark.parametrize("D", [4, 6, 8])
def test_the_more_units_are_concatenated_the_farther_from_the_ratio_of_one(D: int) -> None:
    """Section 3.5: intermediate bubbles; of K units (K+1)(D-2) in place of 2(D-2)."""
    for K in (2, 3, 4):
        figure = row_of(tables(D, K * D).sections[1], "Direct concatenation")[Figure.BUBBLE_RATIO]
        assert figure.claimed == Fraction(2 * (D - 2), 3 * K * D + 2 * (D - 2))
        assert figure.compiled == Fraction((K + 1) * (D - 2), 3 * K * D + (K + 1) * (D - 2))


@pytest.mark.parametrize(("D", "K"), [(4, 2), (8, 2), (8, 3)])
def test_every_row_is_compiled_whose_scheme_is_in_the_library(D: int, K: int) -> None:
    absent = {
        row.scheme for section in tables(D, K * D).sections for row in section.rows if isinstance(row.outcome, Absent)
    }
    assert absent == {row.scheme for row in claims()} - set(library.names())


def test_a_scheme_that_takes_no_such_size_says_so() -> None:
    told = {row.name: row.outcome for row in tables(4, 6).sections[1].rows}
    assert told["Backward halving"] == Absent(
        "no such schedule: N must be a multiple of D: whole units of D micro-batches"
    )


def test_every_claim_and_every_reason_is_a_formula_of_the_size() -> None:
    """Rows of schemes that the library lacks included."""
    at = {"D": 8, "N": 16, "f": 2}
    for row in claims():
        for formula in row.parameters.values():
            value(formula, at)
        for _, claim in row.claims:
            claim.at(at)
        for instead in row.instead:
            value(instead.when, at)
            instead.claim.at(at)
