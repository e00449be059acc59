"""Recomputation as an operation: where it stands, what it waits for, and texts that do not mention it."""

import re

import pytest

import chimera_ir
from chimera_ir import Options, library
from chimera_ir.compilation import Compilation
from chimera_ir.cost.durations import Costs
from chimera_ir.cost.simulate import simulate
from chimera_ir.errors import TextError
from chimera_ir.ir.kinds import INPUT, KEPT, RECOMPUTATION
from chimera_ir.ir.levels import Plan
from chimera_ir.ir.ops import singles
from chimera_ir.ir.streams import PlanStream
from chimera_ir.ir.text.printer import show
from chimera_ir.ir.text.reader import parse
from chimera_ir.source import Source
from chimera_ir.verify.verify import schedule_in
from tests.executor import verdicts
from tests.test_architecture import ROOT

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


# Recomputations with clocks of their own: where they run, what they hide, which stages they make recompute.


BUBBLE = (ROOT / "tests" / "e2e" / "schemes" / "bubble.chim").read_text(encoding="utf-8")
CLOCKED = "  recompute(m, s) @ N + m when s == 0\n"


def compiled(text: str, options: Options | None = None, **sizes: int) -> Compilation:
    return chimera_ir.compile(Source("own.chim", text), options=options or Options(), **sizes)


def changed(name: str, *changes: tuple[str, str]) -> str:
    """A scheme of the library with lines replaced, each of which it has once."""
    text = library.source(name).text
    for before, after in changes:
        assert text.count(before) == 1
        text = text.replace(before, after)
    return text


STREAM = changed(
    "pipedream_2bw",
    ("F(m, s) @ 2*m + s", "F(m, s) @ 4*m + 2*s"),
    ("B(m, s) @ 2*m + 2*D-1 - s", "recompute(m, s) @ 4*m + 4*D-3 - 2*s\n  B(m, s) @ 4*m + 4*D-2 - 2*s"),
)
CLOCKED_SPLIT = changed(
    "zb_h1",
    ("F(m, s) @ 2*(2*m + s)", "F(m, s) @ 4*(2*m + s)"),
    ("I(m, s) @ 2*back(m, s)", "recompute(m, s) @ 4*back(m, s) - 1 when s < D-1\n  I(m, s) @ 4*back(m, s)"),
    ("W(m, s) @ 2*back(m + s, s) + 1", "W(m, s) @ 4*back(m + s, s) + 2"),
)


def test_in_a_bubble_it_takes_no_time() -> None:
    """GPipe on four workers takes 3 (N + D - 1). The first has 11 units to spare before its first gradients."""
    plain, short = BUBBLE.replace(CLOCKED, ""), BUBBLE.replace(CLOCKED, "  recompute when s == 0\n")
    found = [compiled(text, D=4, N=8).report for text in (plain, BUBBLE, short)]
    assert [report.makespan for report in found] == [33, 33, 40]
    assert [report.stashed_inputs[0] for report in found] == [0, 8, 8]
    assert [report.activations[0] for report in found] == [8, 8, 1]


@pytest.mark.parametrize("name", ["dapple", "chimera", "pipedream_2bw"])
def test_right_before_the_backward_it_is_the_short_form(name: str) -> None:
    """Twice each clock, so that there is one before each of a backward."""
    text = library.source(name).text
    lines = text.splitlines()
    for place, line in enumerate(lines):
        operation, _, clock = line.strip().partition(" @ ")
        if clock:
            lines[place] = f"  {operation} @ 2*({clock})"
            if operation.startswith("B"):
                lines[place] += f"  {operation.replace('B', 'recompute')} @ 2*({clock}) - 1"
    short = compiled(text, Options(recompute=True), D=4).verified
    clocked = compiled("\n".join(lines), D=4).verified
    assert clocked.program == short.program


@pytest.mark.parametrize(("text", "stages"), [(STREAM, 4), (CLOCKED_SPLIT, 3), (BUBBLE, 1)])
def test_its_stages_are_those_that_recompute(text: str, stages: int) -> None:
    compilation = compiled(text, D=4)
    (pipe,) = compilation.plan.header.pipes
    assert pipe.recompute == tuple(range(stages))
    assert verdicts(compilation.verified.program, seeds=2) == {"finished"}


@pytest.mark.parametrize("text", [STREAM, CLOCKED_SPLIT, BUBBLE])
def test_a_plan_from_a_text_is_the_plan_of_the_scheme(text: str) -> None:
    compilation = compiled(text)
    read = parse(Source("plan.sir", show(compilation.plan)))
    assert read == compilation.plan
    assert any(planned.operation.kind is RECOMPUTATION for planned in read.operations)
    assert chimera_ir.compile(Source("plan.sir", show(read))).verified.program == compilation.verified.program


def test_a_pipe_with_clocks_leaves_the_short_form_to_another_on_the_same_workers() -> None:
    pipe = BUBBLE[BUBBLE.index("pipe") :]
    late = pipe.replace("down", "late").replace("0..N", "N..2*N").replace(CLOCKED, "  recompute\n")
    text = BUBBLE + late.replace("m + s", "50 + m + s").replace("(N-1 - m)", "(9*N - m)")
    program = compiled(text).verified.program
    again = [part for parts in program.parts for part in parts.computes.lines if INPUT in part.kind.reads]
    assert len(again) == 4 + 2 * 4
    assert verdicts(program, seeds=2) == {"finished"}


def test_a_request_that_all_stages_recompute_leaves_a_pipe_with_clocks_alone() -> None:
    assert compiled(BUBBLE, Options(recompute=True)).plan == compiled(BUBBLE).plan


def test_a_formula_without_a_value_is_reported_with_its_operation() -> None:
    text = BUBBLE.replace("when s == 0", "when m / s > 0")
    with pytest.raises(TextError, match="CH230"):
        _ = compiled(text).plan
