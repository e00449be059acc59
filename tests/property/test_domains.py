"""A formula means the same in every domain: integers one by one, columns on a grid, laws for all micro-batches.

w is a name for a formula of s, as a pipe has it for the worker.
"""

from dataclasses import dataclass
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chimera_ir.diagnostics.catalogue.values import Instance, Overflow
from chimera_ir.elaborate.affine import Law, eventual_law, law
from chimera_ir.elaborate.evaluate import Fault, Scope, compiled
from chimera_ir.elaborate.evaluate import Formula as Closure
from chimera_ir.elaborate.grid import Grid, UndefinedOnGrid
from chimera_ir.elaborate.settings import evaluate_globals
from chimera_ir.source import Source
from chimera_ir.syntax import ast
from chimera_ir.syntax.parser import parse
from tests.property.formulas import Formula, Undefined, around, call_of_function, variable
from tests.repeatable import examples

D, MOST = 2, 200
MICROS, STAGES = range(-3, 5), range(2)
NAMES = ("m", "s")
PLACE = "(s + 3) % D"
PAIRS = list(product(MICROS, STAGES))


@dataclass(frozen=True)
class Case:
    """A formula of m and s in the scope of a scheme that may have a function for it."""

    formula: Formula
    body: Formula

    def parsed(self) -> tuple[ast.Expression, Scope]:
        pipe = f"pipe p {{ stages s in 0..1 on w = {PLACE} micros m in 0..1 F(m, s) @ {self.formula} }}"
        scheme = parse(Source("", f"scheme a(D = {D}) fn f(x, y) = {self.body} {pipe}"))
        clauses = next(item.clauses for item in scheme.items if isinstance(item, ast.PipeBlock))
        clock = next(clause.clock for clause in clauses if isinstance(clause, ast.Operation))
        place = next(clause.place for clause in clauses if isinstance(clause, ast.Stages))
        return clock, evaluate_globals(scheme, {}).scope.with_names({"w": place}, {})


_NAMED = variable("D", *NAMES, "m", "m", "w")
_CALLS = st.tuples(around(_NAMED), _NAMED).map(lambda arguments: call_of_function("f", ("x", "y"), arguments))
CASES = st.builds(Case, around(_NAMED, _CALLS), around(variable("x", "y")))
"""Cases in which a function is called with any formulas, and in any formula."""


def naive(case: Case, m: int, s: int) -> int | None:
    """The value of a formula, or None if it has none."""
    try:
        return case.formula.value({"D": D, "m": m, "s": s, "w": (s + 3) % D, "f": case.body})
    except Undefined:
        return None


def integer(formula: Closure, *frame: int) -> int | Fault:
    """The value of a compiled formula, or why it has none."""
    try:
        return formula(frame)
    except Fault as fault:
        return fault


def closure(expression: ast.Expression, scope: Scope) -> Closure:
    return compiled(expression, scope.with_variables(*NAMES))


def has_value_throughout(expression: ast.Expression, scope: Scope) -> bool:
    """Whether each part has a value on the whole grid; so not if it calls a function, whose parts are elsewhere."""
    parts = list(ast.walk(expression))
    if any(isinstance(part, ast.Call) and part.function.text in scope.functions for part in parts):
        return False
    values = (integer(closure(part, scope), *pair) for part in parts for pair in PAIRS)
    return not any(isinstance(value, Fault) for value in values)


@examples(75)
@given(CASES)
def test_integers_columns_and_laws_are_the_naive_values_or_refused(case: Case) -> None:
    expression, scope = case.parsed()
    require_integers(case, expression, scope)
    require_columns(case, expression, scope)
    for s in STAGES:
        require_law(expression, scope, s)
        require_eventual_law(expression, scope, s)


def require_integers(case: Case, expression: ast.Expression, scope: Scope) -> None:
    formula = closure(expression, scope)
    for pair in PAIRS:
        value = integer(formula, *pair)
        assert naive(case, *pair) == (None if isinstance(value, Fault) else value)


def require_columns(case: Case, expression: ast.Expression, scope: Scope) -> None:
    """Columns are refused only if a part lacks a value somewhere."""
    try:
        column = Grid(MICROS, STAGES, NAMES, scope).values(expression)
    except UndefinedOnGrid:
        assert not has_value_throughout(expression, scope)
        return
    assert column == [naive(case, *pair) for pair in PAIRS]


def require_law(expression: ast.Expression, scope: Scope, s: int) -> None:
    try:
        derived = law(expression, scope.with_value("s", s), "m", MOST)
    except Fault:
        return
    require_followed(derived, range(-2 * derived.period - 10, 2 * derived.period + 10), expression, scope, s)


def require_eventual_law(expression: ast.Expression, scope: Scope, s: int) -> None:
    try:
        derived = eventual_law(expression, scope.with_value("s", s), "m", MOST)
    except Fault:
        return
    start = derived.since
    require_followed(derived, range(start, start + 4 * derived.period + 20), expression, scope, s)


def require_followed(derived: Law, micros: range, expression: ast.Expression, scope: Scope, s: int) -> None:
    """The integers follow a law; they may leave the 64 bits where the law goes on."""
    formula = closure(expression, scope)
    for m in micros:
        value = integer(formula, m, s)
        if isinstance(value, Fault):
            assert isinstance(value.diagnostic(Instance()), Overflow)
        else:
            assert value == derived.at(m)


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        ("if D == 2 then m + s else m / s", [m + s for m, s in PAIRS]),
        ("if D == 3 and m / s > 0 or D == 2 then m else s", [m for m, _ in PAIRS]),
        ("if D == 2 or m / s > 0 then m else share(m, 0, s)", [m for m, _ in PAIRS]),
    ],
)
def test_what_a_known_condition_leaves_out_needs_no_value_in_any_domain(formula: str, expected: list[int]) -> None:
    expression, scope = Case(Formula(formula, lambda names: 0), Formula("x", lambda names: 0)).parsed()
    assert Grid(MICROS, STAGES, NAMES, scope).values(expression) == expected
    assert [integer(closure(expression, scope), *pair) for pair in PAIRS] == expected
    laws = [law(expression, scope.with_value("s", s), "m", MOST) for s in STAGES]
    assert [laws[s].at(m) for m, s in PAIRS] == expected


@pytest.mark.parametrize("formula", ["if m > 9 then m / s else s", "if m % 2 == 0 or m / s > 0 then 1 else 2"])
def test_columns_and_laws_need_both_sides_of_a_condition_that_is_not_known(formula: str) -> None:
    expression, scope = Case(Formula(formula, lambda names: 0), Formula("x", lambda names: 0)).parsed()
    assert isinstance(integer(closure(expression, scope), 4, 0), int)
    with pytest.raises(UndefinedOnGrid):
        Grid(MICROS, STAGES, NAMES, scope).values(expression)
    with pytest.raises(Fault):
        law(expression, scope.with_value("s", 0), "m", MOST)
