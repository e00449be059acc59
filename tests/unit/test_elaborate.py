"""Formulas have the values that they say, and operations the places and clocks."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chimera_ir.diagnostics.model import Rejected
from chimera_ir.elaborate.elaborate import elaborate, parameter_names
from chimera_ir.errors import ParameterError
from chimera_ir.ir.kinds import BACKWARD, FORWARD
from chimera_ir.ir.levels import Bound, Pipe, Plan, Quantity
from chimera_ir.ir.ops import Compute
from chimera_ir.source import Source, schemes
from chimera_ir.syntax.formatter import show
from chimera_ir.syntax.parser import parse

LIMIT = 1_000_000


def plan_of(text: str, **settings: int) -> Plan:
    plan, _ = elaborate(parse(Source("test", text)), settings, LIMIT)
    return plan


def library_plan(name: str, **settings: int) -> Plan:
    plan, warnings = elaborate(parse(Source(name, (schemes() / f"{name}.chim").read_text())), settings, LIMIT)
    assert warnings == ()
    return plan


def codes(text: str, limit: int = LIMIT, **settings: int) -> list[str]:
    with pytest.raises(Rejected) as rejected:
        elaborate(parse(Source("test", text)), settings, limit)
    return [type(diagnostic).__name__ for diagnostic in rejected.value.diagnostics]


ONE = "pipe p { stages s in 0..1 on 0 micros m in 0..1 F(m, s) @ "


def value(formula: str, before: str = "") -> int:
    return plan_of(f"scheme a {before} {ONE} {formula} }}").operations[0].clock


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        ("7/2", 3),
        ("-7/2", -4),
        ("-7 % 3", 2),
        ("7 % 3", 1),
        ("1 - 2 - 3", -4),
        ("2 + 3*4", 14),
        ("share(7, 3, 0)*100 + share(7, 3, 1)*10 + share(7, 3, 2)", 322),
        ("min(3, 1, 2) + 10*max(3, 1, 2) + 100*abs(-4)", 431),
        ("if 1 < 2 <= 2 then 5 else 1/0", 5),
        ("if 2 < 1 and 1/0 == 0 or not 1 == 2 then 1 else 0", 1),
        ("if m == 0 or 1/m == 0 then 3 else 4", 3),
        ("if 1 < 0 then 7 / (if 0 < 1 then 0 else m) else 5", 5),
        ("if 1 < 0 then 7 % (if 0 < 1 then -1 else m) else 5", 5),
        ("if 1 < 0 then share(2, 2, if 0 < 1 then 2 else m) else 5", 5),
        ("if 1 < 0 then 9223372036854775807 + (if 0 < 1 then 1 else m) else 5", 5),
        ("9223372036854775807 - m", 2**63 - 1),
        ("-9223372036854775807 + s", -(2**63) + 1),
    ],
)
def test_a_formula_has_its_value(formula: str, expected: int) -> None:
    assert value(formula) == expected


def test_functions_and_values_build_on_earlier_ones() -> None:
    values = "let a = 3 let even = a % 2 == 0"
    before = f"{values} fn f(x, y) = x*10 + y fn g(x) = f(x, a) + (if even then 1000 else 0) fn h() = 5"
    assert value("g(h()) + f(m + 1, s)", before) == 53 + 10


numbers = st.integers(-20, 20)


@given(numbers, numbers, numbers)
def test_arithmetic_on_variables_agrees_with_arithmetic_on_numbers(a: int, b: int, c: int) -> None:
    """A variable keeps the closures; a number folds them away."""
    divisor = abs(b) + 1
    text = "x*y - z + (x / d)*2 + y % d + (if x < y then x else -y) + min(x, z)"
    expected = a * b - c + (a // divisor) * 2 + b % divisor + (a if a < b else -b) + min(a, c)
    settings = {"x": a, "y": b, "z": c, "d": divisor}
    assert plan_of(f"scheme a(x = 0, y = 0, z = 0, d = 1) {ONE} {text} }}", **settings).operations[0].clock == expected
    assert value(f"f(m + {a}, s + {b}, m + {c}, s + {divisor})", f"fn f(x, y, z, d) = {text}") == expected


def test_a_default_may_refer_to_earlier_parameters_and_is_not_asked_for_if_set() -> None:
    text = f"scheme a(D = 4, N = 2*D, k = 1/(D - 5)) {ONE} D*10000 + N*100 + k }}"
    assert plan_of(text, D=6).header.parameters == (("D", 6), ("N", 12), ("k", 1))
    assert plan_of(text, N=3, D=5, k=0).header.parameters == (("D", 5), ("N", 3), ("k", 0))


def test_operations_come_in_the_order_of_the_text() -> None:
    plan = plan_of(
        """scheme a(D = 2, N = 2)
        memory weights <= D + 1
        memory bytes on w <= 2*w + D*kB
        memory host_bytes <= 3*MiB
        pipe p[i in 1..3] {
          stages s in 0..D on D-1-s
          micros m in 5..5+N/2
          F(m, s) @ 2*m + s when s > 0
          B(m, D-1-s) @ -i
        }"""
    )
    assert plan.header.bounds == (
        Bound(Quantity.WEIGHTS, (3, 3)),
        Bound(Quantity.BYTES, (2000, 2002)),
        Bound(Quantity.HOST_BYTES, (3 << 20, 3 << 20)),
    )
    assert plan.header.pipes == (Pipe("p[1]", (1, 0), (0,)), Pipe("p[2]", (1, 0), (1,)))
    assert [(o.clock, o.worker, o.operation) for o in plan.operations] == [
        (11, 0, Compute(FORWARD, (0,), 1)),
        (-1, 0, Compute(BACKWARD, (0,), 1)),
        (-1, 1, Compute(BACKWARD, (0,), 0)),
        (11, 0, Compute(FORWARD, (1,), 1)),
        (-2, 0, Compute(BACKWARD, (1,), 1)),
        (-2, 1, Compute(BACKWARD, (1,), 0)),
    ]


def test_an_operation_knows_its_line() -> None:
    source = Source("", f"scheme a {ONE} 2*m + s when s == 0 }}")
    plan, _ = elaborate(parse(source), {}, LIMIT)
    start, end, _ = plan.operations[0].operation.origin
    assert source.text[start:end] == "F(m, s) @  2*m + s when s == 0"


def test_workers_are_as_many_as_stages_unless_the_scheme_says_otherwise() -> None:
    pipe = "pipe p { stages s in 0..4 on s % 2 micros m in 0..1 F(m, s) @ s }"
    assert plan_of(f"scheme a workers 2 {pipe}").header.workers == 2
    assert codes(f"scheme a {pipe}") == ["IdleWorker"]


def test_workers_that_are_left_out_keep_their_numbers_and_have_no_stage() -> None:
    text = "scheme a(D = 3) workers 2*D except 1, 4..2*D, D..D pipe p { stages s in 0..D on "
    plan = plan_of(text + "if s > 0 then s + 1 else 0  micros m in 0..1  F(m, s) @ s }")
    assert plan.header.workers == 6
    assert plan.header.stages_of == ((0,), (), (1,), (2,), (), ())


def test_a_setting_of_no_parameter_is_no_mistake_of_the_scheme() -> None:
    scheme = parse(Source("", f"scheme a(depth = 4) {ONE} depth }}"))
    assert parameter_names(scheme) == ("depth",)
    with pytest.raises(ParameterError, match=r"no parameter dept \(did you mean depth\?\); its parameters are depth"):
        elaborate(scheme, {"dept": 1}, LIMIT)
    with pytest.raises(ParameterError, match=r"depth is beyond 2\*\*63 - 1"):
        elaborate(scheme, {"depth": 2**63}, LIMIT)


def test_operations_are_counted_before_they_are_enumerated() -> None:
    pipe = "pipe p { stages s in 0..D on s micros m in 0..N F(m, s) @ m when m < 0 }"
    assert codes(f"scheme a(D = 4, N = 4) {pipe}", N=10**6) == ["TooManyOperations"]
    assert codes(f"scheme a(D = 4, N = 4) {pipe}", D=60_000, N=20) == ["TooManyOperations"]
    assert codes(f"scheme a(D = 4, N = 4) {pipe}", limit=15) == ["TooManyOperations"]
    assert plan_of(f"scheme a(D = 4, N = 4) {pipe}").operations == ()


def test_a_failed_requirement_explains_what_follows_from_it() -> None:
    text = f'scheme a(f = 0) require f >= 1, "f is 1 or more" let u = 4/f {ONE} u }}'
    assert codes(text) == ["RequirementFails"]
    assert codes(text.replace('require f >= 1, "f is 1 or more"', "")) == ["BadDivisor"]


def test_all_lines_that_fail_are_reported_once_each() -> None:
    text = """scheme a pipe p[i in 0..3] {
      stages s in 0..2 on s
      micros m in 0..4
      F(m, s) @ 1/m
      B(m + 1, s) @ 0
      B(m, s - 1) @ 0
    }"""
    assert codes(text) == ["BadDivisor", "NoSuchMicro", "NoSuchStage"]


def test_a_variable_may_have_any_name() -> None:
    text = "scheme self pipe cls { stages self in 0..2 on self/0 micros name in 0..4 as name/0 F(name, self) @ 0 }"
    assert codes(text) == ["BadDivisor", "BadDivisor"]
    assert codes(text.replace("/0", "").replace("@ 0", "@ 1/self")) == ["BadDivisor"]


def test_functions_that_call_each_other_too_often_are_rejected_in_no_time() -> None:
    functions = "fn f0(x) = x " + " ".join(f"fn f{i}(x) = f{i - 1}(x) + f{i - 1}(x)" for i in range(1, 300))
    assert "FormulaTooLarge" in codes(f"scheme a {functions} {ONE} f299(m) }}")


def chimera_settings() -> Iterator[tuple[int, int, int]]:
    for stages in (2, 4, 6, 8, 12):
        for f in range(1, stages // 2 + 1):
            if stages % (2 * f) == 0:
                yield from ((stages, f, total) for total in range(1, 3 * stages + 2))


def test_two_directions_are_numbered_as_in_the_paper() -> None:
    for stages, f, total in chimera_settings():
        plan = library_plan("chimera", D=stages, N=total, f=f)
        assert {pipe.name: list(pipe.micros) for pipe in plan.header.pipes} == numbered(stages, f, total)


def numbered(stages: int, f: int, total: int) -> dict[str, list[int]]:
    """Unit after unit, each pipe takes the next numbers; the last, shorter unit is shared out as evenly as can be."""
    names = [f"{direction}[{i}]" for i in range(f) for direction in ("down", "up")]
    numbers: dict[str, list[int]] = {name: [] for name in names}
    following = iter(range(total))
    for start in range(0, total, stages):
        in_unit = min(stages, total - start)
        for position, name in enumerate(names):
            share = in_unit // (2 * f) + (position < in_unit % (2 * f))
            numbers[name] += [next(following) for _ in range(share)]
    return numbers


CONDITIONS = """
  stages s in 0..D on if {even(D)} then s else 0
  micros m in {range}
  F(m, s) @ {clock} + (if {even(m)} and not {last(s)} then s else s)
  B(m, s) @ {late} when {even(m)}
  I(m, s) @ {late} when not {even(m)}
  W(m, s) @ {late} + 1 when not {even(m)}
  recompute when {last(s)}
"""
WRITTEN_OUT = {"even(D)": "D % 2 == 0", "even(m)": "m % 2 == 0", "last(s)": "(s == D - 1 or 2 < 1)"}


@pytest.mark.parametrize(
    ("before", "micros", "clauses"),
    [("", "0..N", ""), ("update every 2 ", "0..", "reads version max(0, m/2 - 2)")],
    ids=["with a flush", "without"],
)
def test_a_function_returns_a_condition_wherever_a_condition_stands(before: str, micros: str, clauses: str) -> None:
    numbers = {"range": micros, "clock": "6*m", "late": "3*(2*m + 2*D-1 - s)"}

    def plan(functions: str, conditions: dict[str, str]) -> Plan:
        body = CONDITIONS
        for name, text in {**numbers, **conditions}.items():
            body = body.replace(f"{{{name}}}", text)
        return plan_of(
            f'scheme a(D = 4, N = 8) {functions}{before}require {conditions["even(D)"]}, "" pipe p {{{body}{clauses} }}'
        )

    functions = "fn even(x) = x % 2 == 0 fn last(s) = (if s == D - 1 then not 2 < 1 else 2 < 1) "
    assert plan(functions, {name: name for name in WRITTEN_OUT}) == plan("", WRITTEN_OUT)


# A name for the worker of a stage: what it stands for, written out, gives the same plan.


NAMED = """
scheme named(P = 3, N = 4)
workers P
pipe down[i in 0..2] {{
  stages s in 0..2*P on {name}(s + i) % P
  micros m in 0..N/2
  recompute when {w} > 0
  sync lazy when {w} == 1
  F(m, s) @ 60*m + 20*i + 2*s + {w} when {w} < P
  B(m, s) @ 60*m + 20*i + 300 - 3*s + {w}
}}
"""

NAMED_STREAM = """
scheme named(P = 2)
workers P
update every 1
pipe down {{
  stages s in 0..2*P on {name}s % P
  micros m in 0..
  reads version max(0, m - 4 + {w})
  F(m, s) @ 16*m + 2*s
  B(m, s) @ 16*m + 4*(2*P - s) + 9 + {w}
}}
"""


def plan_named(text: str, name: str, w: str) -> Plan:
    return elaborate(parse(Source("", text.format(name=name, w=w))), {}, 10_000)[0]


@pytest.mark.parametrize(("text", "written"), [(NAMED, "((s + i) % P)"), (NAMED_STREAM, "(s % P)")])
def test_a_name_for_the_worker_is_what_it_stands_for(text: str, written: str) -> None:
    assert plan_named(text, "w = ", "w") == plan_named(text, "", written)


def test_the_name_is_printed_and_reads_back() -> None:
    scheme = parse(Source("", NAMED.format(name="w = ", w="w")))
    assert "stages s in 0..2*P on w = (s + i) % P" in show(scheme)
    assert parse(Source("", show(scheme))) == scheme
