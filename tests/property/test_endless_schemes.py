"""Whatever an asynchronous scheme says: it is rejected, or its lanes repeat as the plan says they do."""

from hypothesis import given
from hypothesis import strategies as st

from chimera_ir.diagnostics.model import Rejected
from chimera_ir.elaborate.elaborate import Outline, outline
from chimera_ir.elaborate.operations import operations
from chimera_ir.ir.levels import Plan
from chimera_ir.ir.ops import Stage, Version
from chimera_ir.lower.lower import order
from chimera_ir.source import Source
from chimera_ir.syntax.parser import parse
from chimera_ir.verify.scripts import repeats
from tests.repeatable import either, examples

LIMIT = 20_000
_SOME = examples(either(50, 100))


@st.composite
def schemes(draw: st.DrawFn) -> str:
    """One to three pipes whose numbers and versions fit together; a clock is rarely that of two operations."""
    stages, count = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    per_update, pace = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    unit = draw(st.integers(1, 3))
    pipes = [_pipe(draw, number, count, stages, per_update, pace, unit) for number in range(count)]
    return f"scheme a\nupdate every {per_update}\n" + "\n".join(pipes)


def _pipe(draw: st.DrawFn, number: int, count: int, stages: int, per_update: int, pace: int, unit: int) -> str:
    place = draw(st.sampled_from(["s", f"{stages - 1} - s", f"(s + {number}) % {stages}"]))
    start, late, lag = draw(st.integers(-2, 5)), draw(st.integers(0, 30)), draw(st.integers(0, 8))
    global_number = f"({count}*(m - {start}) + {number})".replace("- -", "+ ")
    own = [f"{number * 32 + letter * 16} + s" for letter in range(2)]
    clock = f"{2 * pace * unit}*(m/{unit}) + {draw(st.integers(1, 5))}*(m % {unit})"
    guard = draw(st.sampled_from(["", f" when m % {unit} == 0 or m % {unit} > 0", " when s >= 0 and m % 2 < 2"]))
    return f"""pipe p{number} {{
      stages s in 0..{stages} on {place}
      micros m in {start}.. as {global_number}
      reads version max(0, {global_number}/{per_update} - {lag} - (s - s/2))
      F(m, s) @ 96*({clock} + {late} + s) + {own[0]}
      B(m, s) @ 96*({clock} + {late} + {2 * stages} - s + {draw(st.integers(0, 3))}*(m % {unit + 1})) + {own[1]}{guard}
    }}"""


def outlined(text: str) -> Outline | None:
    try:
        return outline(parse(Source("a.chim", text)), {}, LIMIT)
    except Rejected:
        return None


def planned(text: str) -> Plan | None:
    found = outlined(text)
    return None if found is None else found.plan()


@_SOME
@given(schemes())
def test_every_turn_is_what_the_formulas_give_for_its_micro_batches(text: str) -> None:
    """The plan goes on from one turn by the laws; here every micro-batch is put into the formulas."""
    found = outlined(text)
    if found is None:
        return
    pipes = {
        shape.name: (shape.lengthened(len(pipe.micros)), pipe)
        for shape, pipe in zip(found.shapes, found.header.pipes, strict=True)
    }
    wanted: list[object] = []
    for shape, pipe in pipes.values():
        cells = dict(zip(shape.names, (shape.micro_range, shape.stage_range), strict=True))
        numbers = dict(zip(shape.micro_range, pipe.micros, strict=True))
        versions = shape.values(shape.reads.version, cells)
        reads = {(numbers[micro], Stage(stage)): Version(version) for (micro, stage), version in versions}
        for line in shape.operations:
            wanted += operations(line, shape, pipe, reads, pipes)
    assert list(found.plan().operations) == wanted


@_SOME
@given(schemes())
def test_what_is_elaborated_repeats_every_turn(text: str) -> None:
    plan = planned(text)
    if plan is not None and len({(each.worker, each.clock) for each in plan.operations}) == len(plan.operations):
        assert list(repeats(order(plan))) == []


@_SOME
@given(schemes())
def test_a_micro_batch_reads_what_the_one_a_turn_before_reads_and_as_many_updates_more(text: str) -> None:
    plan = planned(text)
    if plan is None:
        return
    header = plan.header
    reads = {(each.operation.micros[0], each.operation.stage): each.operation.version for each in plan.operations}
    for (micro, stage), version in reads.items():
        earlier = reads.get((micro - header.period, stage))
        assert not earlier or version == earlier + header.period // header.per_update
