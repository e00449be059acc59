"""Recomputation as an operation: where it stands, what it waits for, and texts that do not mention it."""

import re

import pytest

import chimera_ir
from chimera_ir import Options
from chimera_ir.cost.durations import Costs
from chimera_ir.cost.simulate import simulate
from chimera_ir.errors import TextError
from chimera_ir.ir.kinds import KEPT, RECOMPUTATION
from chimera_ir.ir.levels import Plan
from chimera_ir.ir.ops import singles
from chimera_ir.ir.streams import PlanStream
from chimera_ir.ir.text.printer import show
from chimera_ir.ir.text.reader import parse
from chimera_ir.source import Source
from chimera_ir.verify.verify import schedule_in

AGAIN = Options(recompute=True)
SIZES = [
    ("dapple", {"D": 4, "N": 8}),
    ("gpipe", {"D": 3, "N": 5}),
    ("chimera", {"D": 4, "N": 8}),
    ("chimera_doubling", {"D": 4, "N": 8}),
    ("interleaved", {"P": 2, "N": 4}),
    ("zb_h1", {"D": 4, "N": 8}),
    ("dualpipe_v", {"P": 2, "N": 4}),
    ("pipedream_2bw", {"D": 3, "N": 3}),
    ("pipedream", {"D": 3}),
]


@pytest.mark.parametrize("level", ["schedule", "program"])
@pytest.mark.parametrize(("name", "sizes"), SIZES)
def test_a_text_without_lines_of_recomputation_means_the_same_schedule(
    name: str, sizes: dict[str, int], level: str
) -> None:
    """As texts were before there were such lines: the header alone lists the stages."""
    text = show(getattr(chimera_ir.compile(name, options=AGAIN, **sizes), level))
    before = re.sub(r"\n  recompute m.*", "", text)
    whole, read = (parse(Source("a.sir", each)) for each in (text, before))
    assert before != text == show(whole)
    assert not isinstance(whole, Plan | PlanStream)
    assert not isinstance(read, Plan | PlanStream)
    assert schedule_in(read) == schedule_in(whole)
    _ = chimera_ir.compile(Source("before.sir", before)).verified


@pytest.mark.parametrize(("name", "sizes"), SIZES)
def test_it_stands_right_before_the_operation_that_needs_it(name: str, sizes: dict[str, int]) -> None:
    schedule = chimera_ir.compile(name, options=AGAIN, **sizes).verified.schedule
    for lane in schedule.lanes:
        parts = [operation.parts for operation in lane]
        for place, operation in enumerate(lane):
            if operation.kind is RECOMPUTATION:
                (reader,) = (part for part in parts[place + 1] if KEPT in part.kind.reads)
                assert (reader.micros, reader.stage) == (operation.micros, operation.stage)
        assert any(part.kind is RECOMPUTATION for part in singles(lane))


def test_it_does_not_wait_for_the_gradients() -> None:
    """1F1B with D = 2 and N = 1: F0, then on worker 0 the forward again while worker 1 has forward, again, backward."""
    schedule = chimera_ir.compile("dapple", options=AGAIN, D=2, N=1).schedule
    first, last = (
        [(timed.operation.kind.letter, timed.start, timed.end) for timed in lane]
        for lane in simulate(schedule, Costs()).lanes
    )
    assert first == [("F", 0, 1), ("recompute", 1, 2), ("B", 5, 7)]
    assert last == [("F", 1, 2), ("recompute", 2, 3), ("B", 3, 5)]


@pytest.mark.parametrize(("name", "sizes"), SIZES)
def test_no_schedule_takes_longer_than_with_recomputation_as_a_part_of_the_backward(
    name: str, sizes: dict[str, int]
) -> None:
    """A cost of a backward that includes it is such a schedule: B = 3, I = 2, and a pair one more."""
    whole = Options(recompute=True, costs={"B": 3, "I": 2, "pair": 4})
    apart, together = (chimera_ir.compile(name, options=options, **sizes).report for options in (AGAIN, whole))
    assert apart.makespan <= together.makespan
    assert apart.work == together.work
    assert apart.clock_span == together.clock_span


def test_a_line_that_lacks_or_is_twice_is_an_error() -> None:
    text = show(chimera_ir.compile("dapple", options=AGAIN, D=2, N=2).schedule)
    for changed, code in (
        (text.replace("  recompute m0 s1\n", ""), "CH302"),
        (text.replace("  recompute m0 s1\n", "  recompute m0 s1\n  recompute m0 s1\n"), "CH303"),
        (text.replace(" recompute 0..2", ""), "CH"),
    ):
        assert changed != text
        with pytest.raises(TextError, match=code):
            _ = chimera_ir.compile(Source("changed.sir", changed)).report
