"""The overview of the library, schemes/README.md: its figures are those of the compiler wherever it says so."""

import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

import pytest

import chimera_ir
from chimera_ir import library
from chimera_ir.cost.report import Figures
from chimera_ir.options import Options
from tests.pages import DOCS
from tests.repeatable import also

OVERVIEW = DOCS / "reference" / "schemes" / "README.md"
VALUES = {"D": (1, 2, 3, 4, 6), "P": (1, 2, 3, 4), "N": also((1, 2, 3, 4, 6, 8, 12), (5, 9))}

Sizes = Mapping[str, int]


class Row(NamedTuple):
    """A row of the overview: its cells behind the brief, and what they mean as formulas of the sizes.

    ``ratio`` is the bubble ratio that the scheme's own page gives. ``fewest`` and ``most`` are the activations of the
    emptiest and of the fullest worker. An empty formula stands for a figure that no page gives.
    """

    cells: tuple[str, str]
    holds: str
    ratio: str
    weights: str
    fewest: str
    most: str
    sizes: str = "D N"
    costs: tuple[str, ...] = ()
    fixed: tuple[dict[str, int], ...] = ({},)


SPLIT = ("I=1", "W=1")
PAIRED = (*SPLIT, "pair=3")
SLICED = ({"k": 2}, {"k": 3})
LOOPED = ({"v": 2}, {"v": 3})
UNITS = "(N/D + 1)*(D-2)"
LATE = "2*(P-1) + (v-1)*P/2"
OF_1F1B = "(D-1)/(N + D-1)"
INTERLEAVED = "(P-1)/(v*N + P-1)"
LONGER = "(a if a > b else b)"


ROWS = {
    "gpipe": Row(("1", "N"), "True", OF_1F1B, "1", "N", "N"),
    "dapple": Row(("1", "1 to D"), "N >= D", OF_1F1B, "1", "1", "D"),
    "eager_1f1b": Row(("1", "1 to 2D-1"), "N >= 2*D-1", OF_1F1B, "1", "1", "2*D-1"),
    "gems": Row(("2", "1"), "N >= 2 and D % 2 == 0", "", "2", "1", "1"),
    "chimera": Row(("2f", "D-D/2f+1 to D"), "N % D == 0", f"{UNITS}/(3*N + {UNITS})", "2", "D - D//2 + 1", "D"),
    "chimera_doubling": Row(("2", "inputs only: D+2 to 2D"), "N % (2*D) == 0", "", "2", "D+2", "2*D"),
    "chimera_halving": Row(("2", "D/2+1 to D"), "N % D == 0", "(D-2)/(3*N + D-2)", "2", "D//2 + 1", "D"),
    "chimera_zb": Row(
        ("2", "up to D"), "D % 2 == 0 and D <= 8 and N % D == 0", "(D-2)/(6*N + D-2)", "2", "", "D", costs=SPLIT
    ),
    "interleaved": Row(
        ("v of D = vP", "(v-1)P+1 to vP"), "N % P == 0", INTERLEAVED, "v", "(v-1)*P + 1", "v*P", "P N", fixed=LOOPED
    ),
    "breadth_first": Row(("v of D = vP", "vN"), "N >= P", INTERLEAVED, "v", "v*N", "v*N", "P N", fixed=LOOPED),
    "waves": Row(
        *(("2w of D = 2wP", "up to 2wP"), "N % P == 0", "2*(P-1)/(3*w*N + 2*(P-1))", "2*w", "", "2*w*P", "P N"),
        fixed=({"w": 1}, {"w": 2}),
    ),
    "waves_tight": Row(
        *(("2w of D = 2wP", "(2w+1)P-1"), "N % P == 0 and N >= 2*P and P <= 6", "(P-1)/(2*w*N + P-1)"),
        *("2*w", "", "(2*w+1)*P - 1", "P N"),
        fixed=({"w": 2}, {"w": 3}),
    ),
    "bitpipe": Row(("4 of D = 2P", "up to 2P"), "N % P == 0", "(P-2)/(3*N + P-2)", "4", "", "2*P", "P N"),
    "zb_h1": Row(("1", "D"), "N >= D", "(D-1)/(3*N + D-1)", "1", "D", "D", costs=SPLIT),
    "zb_h2": Row(("1", "2D-1"), "N >= 2*D-1", "(D-1)/(3*N + D-1)", "1", "2*D-1", "2*D-1", costs=SPLIT),
    "zb_v": Row(("2 of D = 2P", "2P"), "N >= 2*P-1", "(P-1)/(6*N + P-1)", "2", "2*P", "2*P", "P N", SPLIT),
    "v_half": Row(("2 of D = 2P", "up to 2 floor((P+2)/2)"), "N >= P", "", "2", "", "2*((P+2)//2)", "P N", SPLIT),
    "v_min": Row(("2 of D = 2P", "up to 2 floor((P+4)/3)"), "N >= P", "", "2", "", "2*((P+4)//3)", "P N", SPLIT),
    "dapple_offload": Row(("1", "1 to 3"), "D >= 4 and N >= 3", OF_1F1B, "1", "1", "3"),
    "dapple_recompute": Row(("1", "inputs only: 1 to D"), "N >= D", "", "1", "1", "D"),
    "interleaved_offload": Row(
        *(("v of D = vP", "2 to 3"), "P == 4 and N % 2 == 0 and N >= P", f"({LATE})/(3*v*N + {LATE})"),
        *("v", "2", "3", "P N", SPLIT, LOOPED),
    ),
    "seq1f1b": Row(
        ("1", "1 to (D-1+k)/k"), "k*N >= D-1 + k", "(D-1)/(k*N + D-1)", "1", "1", "(D-1 + k)/k", fixed=SLICED
    ),
    "seq1f1b_interleaved": Row(
        *(("v of D = vP", "((v-1)P+k)/k to ((v+1)P-2+k)/k"), "P % k == k*N % P == 0 and k*N >= 2*P"),
        *("(P-1)/(v*k*N + P-1)", "v", "((v-1)*P + k)/k", "((v+1)*P - 2 + k)/k", "P N"),
        fixed=({"v": 2, "k": 2}, {"v": 3, "k": 4}),
    ),
    "seq1f1b_zb": Row(
        *(("1", "(D-1+k)/k"), "k*N >= D-1 + k", "(D-1)/(3*k*N + D-1)", "1", "(D-1 + k)/k", "(D-1 + k)/k"),
        costs=SPLIT,
        fixed=SLICED,
    ),
    "terapipe": Row(("1", "N"), "True", "(D-1)/(k*N + D-1)", "1", "N", "N", fixed=SLICED),
    "dualpipe": Row(("2", "D+1"), "N >= 2*D and N % 2 == 0", "(D-2)/(3*N + D-2)", "2", "D+1", "D+1", costs=PAIRED),
    "dualpipe_v": Row(("2 of D = 2P", "2P+1"), "N >= 2*P", "(P-1)/(3*N + P-1)", "2", "2*P+1", "2*P+1", "P N", PAIRED),
    "interleaved_overlap": Row(
        *(("v of D = vP", "(v-1)P+2 to (v+1)P"), "N % P == 0 and N >= 2*P", INTERLEAVED),
        *("v", "(v-1)*P + 2", "(v+1)*P", "P N", ("pair=3",), LOOPED),
    ),
    "two_encoders": Row(
        *(("1", "1 to max(a, b)+D"), f"N >= D + {LONGER}", f"(D + {LONGER} - 1)/(N + D + {LONGER} - 1)"),
        *("1", "1", f"D + {LONGER}"),
        fixed=({"a": 2, "b": 1}, {"a": 1, "b": 3}),
    ),
    "encoder_decoder": Row(
        *(("1", "1 to E+D"), "N >= D + E", "(D + E - 1)/(N + D + E - 1)", "1", "1", "D + E"),
        fixed=({"E": 1}, {"E": 2}),
    ),
    "colocated": Row(("2 of P+1", "1+N/P to P+N/P"), "N % P == 0", "", "2", "1 + N/P", "P + N/P", "P N"),
    "colocated_nested": Row(("2 of P+1", "3 to P+2"), "N % P == 0 and N >= 2*P", "", "2", "3", "P + 2", "P N"),
    "amdp": Row(("D", "D-1 to D"), "N % D == 0 and D >= 4", "1/(3*D + 1)", "D", "D-1", "D"),
    "pipedream": Row(("1 to D", "1 to D"), "True", "0", "D", "1", "D", "D"),
    "pipedream_2bw": Row(("2", "1 to D"), "N >= D", "0", "2", "1", "D"),
}


def value(formula: str, sizes: Sizes) -> Any:
    """A formula at some sizes, exactly."""
    return eval(formula, {"__builtins__": {}}, {name: Fraction(size) for name, size in sizes.items()})


def overview() -> dict[str, tuple[str, ...]]:
    """The cells of each row of the page, without its name and brief."""
    rows = re.findall(
        r"^\| \[(\w+)\]\(\w+\.md\) \|([^|]*)\|(.*)\|$", OVERVIEW.read_text(encoding="utf-8"), re.MULTILINE
    )
    return {name: tuple(cell.strip() for cell in cells.split("|")) for name, _, cells in rows}


def sizes(row: Row) -> Iterator[dict[str, int]]:
    for fixed in row.fixed:
        known: list[dict[str, int]] = [fixed]
        for parameter in row.sizes.split():
            known = [{**sizes, parameter: value} for sizes in known for value in VALUES[parameter]]
        yield from (sizes for sizes in known if value(row.holds, sizes))


def wrong(row: Row, sizes: Sizes, figures: Figures) -> bool:
    kept = [inputs or each for each, inputs in zip(figures.activations, figures.stashed_inputs, strict=True)]
    expected = [
        (row.ratio, figures.bubble_ratio),
        (row.weights, max(figures.weights)),
        (row.fewest, min(kept)),
        (row.most, max(kept)),
    ]
    return any(formula and value(formula, sizes) != compiled for formula, compiled in expected)


def test_the_page_says_what_is_tested() -> None:
    assert overview() == {name: row.cells for name, row in ROWS.items()}


@pytest.mark.parametrize("name", ROWS)
def test_the_figures_hold_at_every_size_that_the_page_states(name: str) -> None:
    row = ROWS[name]
    options = Options(costs=dict(cost.split("=") for cost in row.costs))
    tried, differing = 0, []
    for known in sizes(row):
        try:
            figures = chimera_ir.compile(library.source(name), options=options, **known).report
        except chimera_ir.CompileError:
            continue  # a size that the scheme does not have
        tried += 1
        differing += [known] if wrong(row, known, figures) else []
    assert tried >= 3
    assert not differing, f"{len(differing)} of {tried} sizes"
