"""What is derived of a formula agrees with the formula, for every m that is tried."""

from functools import cache

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from chimera_ir.diagnostics.catalogue.values import Instance, RepeatsTooLate
from chimera_ir.elaborate.affine import Law, eventual_law, law
from chimera_ir.elaborate.evaluate import Fault, Scope, compiled
from chimera_ir.elaborate.settings import evaluate_globals
from chimera_ir.source import Source
from chimera_ir.syntax import ast
from chimera_ir.syntax.parser import parse

MOST = 5_000
FUNCTIONS = "fn half(a) = a/2 fn mix(a, b) = half(a) + (if b % 3 == 1 then 5 else -1) + k"


def scoped(formula: str) -> tuple[ast.Expression, Scope]:
    """A formula of m with the values k = 3 and j = -2, and functions."""
    pipe = f"pipe p {{ stages s in 0..1 on s micros m in 0..1 F(m, s) @ {formula} }}"
    scheme = parse(Source("", f"scheme a(k = 3, j = -2) {FUNCTIONS} {pipe}"))
    clauses = next(item.clauses for item in scheme.items if isinstance(item, ast.PipeBlock))
    clock = next(clause.clock for clause in clauses if isinstance(clause, ast.Operation))
    return clock, evaluate_globals(scheme, {}).scope


def law_of(formula: str) -> Law:
    return law(*scoped(formula), "m", MOST)


def eventual(formula: str) -> Law:
    return eventual_law(*scoped(formula), "m", MOST)


def values(formula: str, where: range) -> list[int]:
    expression, scope = scoped(formula)
    value = compiled(expression, scope.with_variables("m"))
    return [value((m,)) for m in where]


@cache
def periodic() -> st.SearchStrategy[str]:
    """Formulas that repeat."""
    return st.one_of(
        st.integers(0, 9).map(str),
        st.sampled_from(["k", "j"]),
        st.builds("({}) % {}".format, st.deferred(lambda: growing()), st.integers(1, 7)),
    )


@cache
def conditions() -> st.SearchStrategy[str]:
    comparison = st.builds("({}) {} ({})".format, periodic(), st.sampled_from(["<", "==", "!=", ">="]), periodic())
    return st.one_of(comparison, st.builds("(not {} or {})".format, comparison, comparison))


@cache
def growing() -> st.SearchStrategy[str]:
    """Formulas that are quasi-affine by their form."""

    def combined(part: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        return st.one_of(
            st.builds("({} {} {})".format, part, st.sampled_from("+-"), part),
            st.builds("({}*{})".format, st.integers(-4, 4).map(lambda n: f"({n})"), part),
            st.builds("(({})/{})".format, part, st.integers(1, 6)),
            st.builds("(if {} then {} else m + {})".format, conditions(), st.just("m - 2"), periodic()),
            st.builds("mix({}, m)".format, part),
            st.builds("max({}, {})".format, periodic(), periodic()),
            periodic(),
        )

    return st.recursive(st.just("m"), combined, max_leaves=6)


@given(growing())
def test_a_law_is_the_formula_for_all_integers(formula: str) -> None:
    try:
        found = law_of(formula)
    except Fault as fault:
        assume(type(fault.diagnostic(Instance())) is not RepeatsTooLate)
        raise
    tried = range(-2 * found.period - 20, 2 * found.period + 20)
    assert [found.at(m) for m in tried] == values(formula, tried)


@given(growing())
def test_no_shorter_period_would_do(formula: str) -> None:
    try:
        found = law_of(formula)
    except Fault:
        assume(False)
    tried = [found.at(m) for m in range(3 * found.period)]
    for shorter in (p for p in range(1, found.period) if found.period % p == 0):
        differences = {after - before for before, after in zip(tried, tried[shorter:], strict=False)}
        assert len(differences) > 1


def extremes() -> st.SearchStrategy[str]:
    both = st.sampled_from(["max", "min"])
    inner = st.builds("{}({}, {})".format, both, growing(), growing())
    return st.builds("{}({}, {}, {})/2 + m".format, both, inner, growing(), growing())


@given(extremes())
def test_the_law_of_extremes_holds_from_where_it_says(formula: str) -> None:
    try:
        found = eventual(formula)
    except Fault:
        assume(False)
    tried = range(found.since, found.since + 2 * found.period + 50)
    assert [found.at(m) for m in tried] == values(formula, tried)


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        ("2*m + 7", Law((7,), 2)),
        ("m/2*2 + m % 2", Law((0,), 1)),
        ("m/3 - 1", Law((-1, -1, -1), 1)),
        ("-m % 4", Law((0, 3, 2, 1), 0)),
        ("if m/2*2 == m then 3*m else 3*m + 1", Law((0, 4), 6)),
        ("m*0", Law((0,), 0)),
    ],
)
def test_laws_that_one_can_check_by_eye(formula: str, expected: Law) -> None:
    assert law_of(formula) == expected


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        ("max(0, m - 3)", Law((-3,), 1, since=3)),
        ("max(0, m/4 - 1)", Law((-1,) * 4, 1, since=4)),
        ("max(m/2, m - 3)", Law((-3,), 1, since=5)),
        ("min(m, 2*m)", Law((0,), 1)),
        ("max(m, m - 1 + 2*(m % 2))", Law((0, 2), 2)),
        ("m * min(m, 3)", Law((0,), 3, since=3)),
        ("m / min(m, 3)", Law((0, 0, 0), 1, since=3)),
        ("m % min(m, 3)", Law((0, 1, 2), 0, since=3)),
        ("if min(m, 3) == 3 then m - 3 else 0", Law((-3,), 1, since=3)),
        ("if min(m, 3) < 3 then 2*m else m", Law((0,), 1, since=3)),
        ("if min(m, 3) == 3 and m % 2 == 0 then 1 else 0", Law((1, 0), 0, since=3)),
    ],
)
def test_extremes_that_one_can_check_by_eye(formula: str, expected: Law) -> None:
    assert eventual(formula) == expected


@pytest.mark.parametrize(
    ("formula", "why"),
    [
        ("m*m", "GrowingProduct"),
        ("(m % 2)*m", "GrowingProduct"),
        ("m/(1 + m % 2)", "ChangingDivisor"),
        ("m % m", "ChangingDivisor"),
        ("m/j", "BadDivisor"),
        ("max(m, 4)", "GrowingExtreme"),
        ("share(m, 2, 0)", "GrowingArgument"),
        ("abs(m)", "GrowingArgument"),
        ("share(m % 2, 2, m % 3)", "BadShare"),
        ("m + m % 70 + m % 73", "RepeatsTooLate"),
        ("if m < 4 then m else m + 1", "GrowingCondition"),
        ("if m % 2 == 0 then m else 2*m", "BranchesDrift"),
    ],
)
def test_what_is_not_quasi_affine_is_refused(formula: str, why: str) -> None:
    with pytest.raises(Fault) as fault:
        law_of(formula)
    assert type(fault.value.diagnostic(Instance())).__name__ == why


def test_a_formula_as_deep_as_is_allowed_has_a_law() -> None:
    """Two hundred levels, each a call within an operand."""
    formula = "m"
    for _ in range(30):
        formula = f"half({formula} + 1)*2"
    assert law_of(formula).rate == 1


def test_only_what_is_chosen_must_be_quasi_affine() -> None:
    assert law_of("if k == 3 then m else m*m") == Law((0,), 1)
    assert law_of("if k == 4 and m*m > 7 or k == 3 then m else 1/0") == Law((0,), 1)
