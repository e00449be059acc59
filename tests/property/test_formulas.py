"""A formula has the same value wherever it stands: the one that a naive evaluation gives, or none at all."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chimera_ir.diagnostics.model import Rejected
from chimera_ir.diagnostics.render import render_all
from chimera_ir.elaborate.elaborate import elaborate
from chimera_ir.ir.levels import Plan
from chimera_ir.ir.ops import Micro, Stage
from chimera_ir.source import Source
from chimera_ir.syntax.parser import parse
from tests.property.formulas import Formula, Undefined, Value, conditions, numbers
from tests.repeatable import examples

D, STAGES, MICROS = 2, range(3), range(2)
PAIRS = [{"m": m, "s": s} for m, s in product(MICROS, STAGES)]
_SOME = examples(20)


@dataclass(frozen=True)
class Place:
    """Where a formula may stand: the scheme around it, its names, what the plan then says, and what it should say.

    ``text`` has the word FORMULA where it stands.
    """

    text: str
    names: tuple[str, ...]
    said: Callable[[Plan], object]
    meant: Callable[[Value], object]
    condition: bool = False


def scheme(*, header: str = "", stages: str = "0..3 on s", micros: str = "0..2", lines: str = "F(m, s) @ m") -> str:
    """A scheme of two pipes, of which the first has the formula; the second holds all three workers."""
    return f"""scheme a(D = {D})
    workers 3
    {header}
    pipe p {{ stages s in {stages}
      micros m in {micros}
      {lines}
    }}
    pipe q {{ stages s in 0..3 on s
      micros m in 0..0
      F(m, s) @ D
    }}"""


def clocks(plan: Plan) -> list[int]:
    return [planned.clock for planned in plan.operations]


def places_of_operations(plan: Plan) -> list[tuple[int, ...]]:
    return [(*planned.operation.micros, planned.operation.stage) for planned in plan.operations]


def on_all(value: Value) -> list[int]:
    """The value for each micro-batch and stage."""
    return [value({"D": D, **pair}) for pair in PAIRS]


def on_stages(value: Value) -> list[int]:
    return [value({"D": D, "s": s}) for s in STAGES]


def held(value: Value) -> tuple[int, ...]:
    return tuple(s for s, holds in zip(STAGES, on_stages(value), strict=True) if holds)


def once(value: Value) -> int:
    return value({"D": D})


M, S, MS, ALONE = ("D", "m"), ("D", "s"), ("D", "m", "s"), ("D",)
_PIPE = "stages s in 0..1 on s micros m in 0..D F(m, s) @"
_PARAMETER = f"scheme a(D = 2, x = FORMULA) pipe p {{ {_PIPE} x }}"
_INDEX = f"scheme a(D = 2) pipe p[i in FORMULA..FORMULA + 2] {{ {_PIPE} i }}"
_WORKERS = """scheme a(D = 2)
    workers 1 + FORMULA % 3
    pipe p { stages s in 0..3 on s % (1 + FORMULA % 3)
      micros m in 0..D
      F(m, s) @ s
    }"""

PLACES = {
    "clock": Place(scheme(lines="F(m, s) @ FORMULA"), MS, clocks, on_all),
    "clock by a function": Place(scheme(header="fn f(m, s) = FORMULA", lines="F(m, s) @ f(m, s)"), MS, clocks, on_all),
    "clock by a function of a formula": Place(
        scheme(header="fn f(x) = x - 1", lines="F(m, s) @ f(FORMULA)"),
        MS,
        clocks,
        lambda value: on_all(lambda names: _checked(value(names) - 1)),
    ),
    "clock in a branch that counts": Place(
        scheme(lines="F(m, s) @ if m > 0 then FORMULA else s"),
        MS,
        clocks,
        lambda value: [value({"D": D, **pair}) if pair["m"] else pair["s"] for pair in PAIRS],
    ),
    "let": Place(scheme(header="let x = FORMULA", lines="F(m, s) @ x"), ALONE, clocks, lambda value: [once(value)] * 6),
    "let of a condition": Place(
        scheme(header="let x = FORMULA", lines="F(m, s) @ if x then 1 else 0"),
        ALONE,
        clocks,
        lambda value: [int(once(value))] * 6,
        condition=True,
    ),
    "let of a pipe": Place(scheme(lines="let x = FORMULA F(m, s) @ x"), MS, clocks, on_all),
    "let of a pipe by another": Place(
        scheme(stages="0..3 on w = s", lines="F(m, s) @ y let x = FORMULA let y = if m > 0 then x else w"),
        MS,
        clocks,
        lambda value: [value({"D": D, **pair}) if pair["m"] else pair["s"] for pair in PAIRS],
    ),
    "entry": Place(
        scheme(header="let t = [FORMULA, D]", lines="F(m, s) @ t[m]"),
        ALONE,
        clocks,
        lambda value: [[once(value), D][pair["m"]] for pair in PAIRS],
    ),
    "position": Place(
        scheme(lines="let t = [5, D] F(m, s) @ t[FORMULA]"),
        MS,
        clocks,
        lambda value: [_entry([5, D], position) for position in on_all(value)],
    ),
    "frozen": Place(
        scheme(header="frozen 1 - 1, 0..1 + FORMULA % 2"),
        ALONE,
        lambda plan: plan.header.frozen,
        lambda value: tuple(map(Stage, range(1 + once(value) % 2))),
    ),
    "parameter": Place(_PARAMETER, ALONE, lambda plan: plan.header.parameters[1][1], once),
    "require": Place(
        scheme(header='require FORMULA, "so it is"'),
        ALONE,
        lambda plan: True,
        lambda value: _met(once(value)),
        condition=True,
    ),
    "workers": Place(_WORKERS, ALONE, lambda plan: plan.header.workers, lambda value: 1 + once(value) % 3),
    "except": Place(
        scheme(stages="0..3 on s", header="").replace("workers 3", "workers 5 except 3..4 + 0*(FORMULA), 4"),
        ALONE,
        lambda plan: plan.header.workers,
        lambda value: 5 + 0 * _checked(0 * once(value)),
    ),
    "memory": Place(
        scheme(header="memory weights <= FORMULA"),
        ALONE,
        lambda plan: plan.header.bounds[0].limits,
        lambda value: (once(value),) * 3,
    ),
    "memory of each worker": Place(
        scheme(header="memory bytes on s <= FORMULA"),
        S,
        lambda plan: plan.header.bounds[0].limits,
        lambda value: tuple(on_stages(value)),
    ),
    "index": Place(_INDEX, ALONE, clocks, lambda value: [once(value)] * 2 + [_checked(once(value) + 2) - 1] * 2),
    "stages": Place(
        scheme(stages="0..3 + 0*FORMULA on s"),
        ALONE,
        lambda plan: plan.header.stages,
        lambda value: 3 + 0 * once(value),
    ),
    "on": Place(
        scheme(stages="0..3 on FORMULA % 3"),
        S,
        lambda plan: plan.header.pipes[0].workers,
        lambda value: tuple(each % 3 for each in on_stages(value)),
    ),
    "micros": Place(
        scheme(micros="0..abs(FORMULA) % 7"),
        ALONE,
        lambda plan: plan.header.micro_batches,
        lambda value: abs(once(value)) % 7 or _empty(),
    ),
    "by": Place(
        scheme(micros="0..6 by 1 + FORMULA % 3"),
        ALONE,
        places_of_operations,
        lambda value: [(m, s) for m in range(0, 6, 1 + once(value) % 3) for s in STAGES],
    ),
    "as": Place(
        scheme(micros="0..2 as FORMULA % 2"),
        M,
        lambda plan: plan.header.pipes[0].micros,
        lambda value: _numbering(tuple(value({"D": D, "m": m}) % 2 for m in MICROS)),
    ),
    "weigh": Place(
        scheme(micros="0..2 weigh FORMULA % 7 + 1"),
        M,
        lambda plan: plan.header.weights or (1, 1),
        lambda value: tuple(value({"D": D, "m": m}) % 7 + 1 for m in MICROS),
    ),
    "micro-batch": Place(
        scheme(lines="F(FORMULA % 2, s) @ m"),
        MS,
        places_of_operations,
        lambda value: [(number % 2, pair["s"]) for number, pair in zip(on_all(value), PAIRS, strict=True)],
    ),
    "group": Place(
        scheme(lines="\n".join(f"F(0..1 + FORMULA % 2, s) @ m when m == {m}" for m in MICROS)),
        MS,
        places_of_operations,
        lambda value: [(*range(1 + number % 2), pair["s"]) for number, pair in zip(on_all(value), PAIRS, strict=True)],
    ),
    "stage": Place(
        scheme(lines="F(m, FORMULA % 3) @ m"),
        MS,
        places_of_operations,
        lambda value: [(pair["m"], number % 3) for number, pair in zip(on_all(value), PAIRS, strict=True)],
    ),
    "when": Place(
        scheme(lines="F(m, s) @ m when FORMULA"),
        MS,
        places_of_operations,
        lambda value: [(pair["m"], pair["s"]) for holds, pair in zip(on_all(value), PAIRS, strict=True) if holds],
        condition=True,
    ),
    "recompute": Place(
        scheme(lines="F(m, s) @ m recompute when FORMULA"),
        S,
        lambda plan: plan.header.pipes[0].recompute,
        held,
        condition=True,
    ),
    "recompute of micro-batches": Place(
        scheme(lines="F(m, s) @ m recompute when FORMULA"),
        MS,
        lambda plan: [plan.header.recomputes(Micro(pair["m"]), Stage(pair["s"])) for pair in PAIRS],
        lambda value: [bool(holds) for holds in on_all(value)],
        condition=True,
    ),
    "sync": Place(
        scheme(lines="F(m, s) @ m sync lazy when FORMULA"),
        S,
        lambda plan: tuple(stage for stage, _ in plan.header.strategies),
        held,
        condition=True,
    ),
}

_STREAM = """scheme a(D = 2) workers 3 update every {every}
    pipe p {{ stages s in 0..3 on s
      micros m in {start}..
      reads version max(0, m - {start} - {version})
      F(m, s) @ 9*(m - {start}) + 2*s + {clock}
    }}"""


def _stream(**formulas: str) -> str:
    return _STREAM.format(**{"every": "1", "start": "0", "version": "1", "clock": "0", **formulas})


def first(plan: Plan) -> list[int]:
    """The clocks of the first micro-batch, by stage."""
    return clocks(plan)[:3]


def newest(plan: Plan) -> list[int]:
    """How many updates old the weights are that the last micro-batch reads, by stage."""
    last = plan.header.micro_batches - 1
    return [last - (planned.operation.version or 0) for planned in plan.operations[-3:]]


STREAMS = {
    "clock of a stream": Place(
        _stream(clock="FORMULA"),
        S,
        first,
        lambda value: [_checked(2 * s + each) for s, each in enumerate(on_stages(value))],
    ),
    "growing clock of a stream": Place(
        _stream(clock="0*FORMULA"),
        MS,
        first,
        lambda value: [2 * s + 0 * value({"D": D, "m": 0, "s": s}) for s in STAGES],
    ),
    "let of a stream": Place(
        _stream(clock="x let x = t[m % 2] - 7 let t = [FORMULA, 7]"),
        ALONE,
        first,
        lambda value: [_checked(2 * s + once(value) - 7) for s in STAGES],
    ),
    "start of a stream": Place(
        _stream(start="FORMULA"), ALONE, first, lambda value: [2 * s + 0 * once(value) for s in STAGES]
    ),
    "version": Place(_stream(version="FORMULA % 4"), S, newest, lambda value: [each % 4 for each in on_stages(value)]),
    "update": Place(
        _stream(every="1 + FORMULA % 3").replace("m - 0 - 1", "m/(1 + FORMULA % 3) - 1"),
        ALONE,
        lambda plan: plan.header.per_update,
        lambda value: 1 + once(value) % 3,
    ),
}
"""Formulas in pipes without end; those in m have a law, or else a diagnostic though they have values."""


def _checked(value: int) -> int:
    if abs(value) >= 2**63:
        raise Undefined
    return value


def _entry(entries: list[int], position: int) -> int:
    return entries[position] if 0 <= position < len(entries) else _empty()


def _met(condition: int) -> bool:
    return bool(condition) or _empty() > 0


def _empty() -> int:
    raise Undefined


def _numbering(numbers: tuple[int, ...]) -> tuple[int, ...]:
    return numbers if sorted(numbers) == [0, 1] else (_empty(),)


def compiled(text: str) -> Plan | str:
    """The plan, or the message instead; an exception of any other kind fails the test."""
    source = Source("a.chim", text)
    try:
        return elaborate(parse(source), {}, 10_000)[0]
    except Rejected as rejected:
        return render_all(rejected.diagnostics, source)


def require_same(place: Place, formula: Formula, *, may_reject: bool) -> None:
    text = place.text.replace("FORMULA", formula.text)
    plan = compiled(text)
    try:
        expected = place.meant(formula.value)
    except Undefined:
        assert isinstance(plan, str), text
        return
    if isinstance(plan, str):
        assert may_reject, f"{text}\n{plan}"
        return
    assert place.said(plan) == expected, text


def formulas(place: Place) -> st.SearchStrategy[Formula]:
    return (conditions if place.condition else numbers)(*place.names)


@pytest.mark.parametrize("name", PLACES)
@_SOME
@given(st.data())
def test_a_formula_has_its_value_or_none_in_every_place(name: str, data: st.DataObject) -> None:
    place = PLACES[name]
    require_same(place, data.draw(formulas(place)), may_reject=False)


@pytest.mark.parametrize("name", STREAMS)
@_SOME
@given(st.data())
def test_a_formula_of_a_stream_has_its_value_or_is_rejected(name: str, data: st.DataObject) -> None:
    place = STREAMS[name]
    require_same(place, data.draw(formulas(place)), may_reject=True)
