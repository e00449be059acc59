"""Formulas on a whole grid: the values that Python gives for the same formula, or none at all."""

import pytest

from chimera_ir.elaborate.elaborate import elaborate
from chimera_ir.elaborate.grid import Grid, UndefinedOnGrid
from chimera_ir.elaborate.settings import evaluate_globals
from chimera_ir.source import Source
from chimera_ir.syntax import ast
from chimera_ir.syntax.parser import parse

MICROS, STAGES = range(3, 11), range(5)

TEXT = """
scheme grid(D = 5)
fn turn(m) = 2*(m % 3) + 7*(m / 3)
fn later(m, s) = turn(m) + max(s, 2)
pipe p {{
  stages s in 0..D on s
  micros m in 3..11 as m - 3
  F(m, s) @ {formula}
}}
"""


def turn(m: int) -> int:
    return 2 * (m % 3) + 7 * (m // 3)


def grid(formula: str) -> list[int]:
    scheme = parse(Source("", TEXT.format(formula=formula)))
    known = evaluate_globals(scheme, {})
    pipe = next(item for item in scheme.items if isinstance(item, ast.PipeBlock))
    line = next(clause for clause in pipe.clauses if isinstance(clause, ast.Operation))
    return Grid(MICROS, STAGES, ("m", "s"), known.scope).values(line.clock)


@pytest.mark.parametrize(
    ("formula", "python"),
    [
        ("7", lambda m, s: 7),
        ("m", lambda m, s: m),
        ("D-1 - s", lambda m, s: 4 - s),
        ("2*m + s", lambda m, s: 2 * m + s),
        ("-(m - 20) / 3 * s", lambda m, s: -(m - 20) // 3 * s),
        ("(s - m) % 4", lambda m, s: (s - m) % 4),
        ("later(m + 1, D-1 - s)", lambda m, s: turn(m + 1) + max(4 - s, 2)),
        (
            "if 4 <= m < 9 and not s == 2 then m*s else abs(s - m)",
            lambda m, s: m * s if 4 <= m < 9 and s != 2 else abs(s - m),
        ),
        ("share(m, D, s)", lambda m, s: m // 5 + (s < m % 5)),
        ("if m > 5 or s >= 3 then 1 else 0", lambda m, s: int(m > 5 or s >= 3)),
    ],
)
def test_a_grid_has_the_values_of_the_formula(formula, python):
    assert grid(formula) == [python(m, s) for m in MICROS for s in STAGES]


@pytest.mark.parametrize(
    "formula", ["m / s", "if s > 0 then m / s else 0", "share(s - 2, 2, 0)", "9223372036854775807 + m - m"]
)
def test_a_formula_that_lacks_a_value_somewhere_is_unfit(formula):
    with pytest.raises(UndefinedOnGrid):
        grid(formula)


def test_a_line_that_is_unfit_as_a_whole_still_has_its_operations():
    """The division has no value on stage 0, where it is not asked for."""
    text = TEXT.format(formula="if s > 0 then 8*m + 8 / s else 8*m")
    plan, _ = elaborate(parse(Source("", text)), {}, 1000)
    clocks = [8 * m + (8 // s if s else 0) for m in MICROS for s in STAGES]
    assert [planned.clock for planned in plan.operations] == clocks
