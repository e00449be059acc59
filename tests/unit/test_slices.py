"""Slices with all else that a scheme may have: no flush, recomputation with clocks, pairs, two directions."""

from itertools import chain

import pytest

import chimera_ir
from chimera_ir import library
from chimera_ir.codegen.rolling import roll
from chimera_ir.compilation import Compilation
from chimera_ir.errors import TextError
from chimera_ir.ir.kinds import ACTIVATIONS
from chimera_ir.ir.ops import Recv
from chimera_ir.ir.rolled import unrolled
from chimera_ir.ir.text.printer import show
from chimera_ir.ir.text.reader import parse
from chimera_ir.planner.compiled import Variant
from chimera_ir.request import Request
from chimera_ir.source import Source
from chimera_ir.syntax import parser
from chimera_ir.syntax.formatter import Change
from tests.executor import verdicts

PIPE = """pipe down {{
  stages s in 0..{stages} on {on}
  micros m in 0..{micros}
  slices q in 0..k
  {lines}
}}
"""
FORWARD, BACKWARD = "F(m, s, q) @ 4*(k*m + q) + 2*s", "B(m, s, q) @ 4*(k*m + 2*(k-1) - q) + 2*(2*D-1 - s)"
STREAM = PIPE.format(
    stages="D", on="s", micros="", lines="\n  ".join([FORWARD, BACKWARD, "reads version max(0, m - 2)"])
)
RECOMPUTING = PIPE.format(
    stages="D",
    on="s",
    micros="3",
    lines="\n  ".join([FORWARD, BACKWARD, BACKWARD.replace("B(", "recompute(") + " - 1 when s == 0"]),
)
PAIRED = PIPE.format(
    stages="1",
    on="0",
    micros="3",
    lines="F(m, s, q) @ q when m == 0\n  F(m, s, q) & B(m-1, s, k-1-q) @ k*m + q when m > 0\n"
    "  B(m, s, q) @ 3*k + k-1-q when m == 2",
)
BOTH = (
    PIPE.format(stages="D", on="s", micros="2", lines=f"{FORWARD}\n  {BACKWARD}")
    + PIPE.format(stages="D", on="D-1 - s", micros="2", lines=f"{FORWARD} + 1\n  {BACKWARD} + 1")
).replace("pipe down", "pipe up", 1)
TEXTS = {
    "without a flush": "scheme a(D = 2, k = 3)\nupdate every 1\n" + STREAM,
    "recomputed at a clock": "scheme a(D = 2, k = 2)\n" + RECOMPUTING,
    "in pairs": "scheme a(k = 2)\n" + PAIRED,
    "in two directions": "scheme a(D = 2, k = 2)\n" + BOTH,
}


@pytest.mark.parametrize("name", TEXTS)
def test_slices_go_with_all_else_that_a_scheme_says(name: str) -> None:
    """From the text to scripts that are proven; the evaluation is, too, and every level reads back."""
    compilation = chimera_ir.compile(Source("a.chim", TEXTS[name]))
    program, evaluation = compilation.verified.program, compilation.evaluation
    assert verdicts(program, seeds=2) == verdicts(evaluation, seeds=1) == {"finished"}
    assert evaluation.header.slices == program.header.slices > 1
    for level in (compilation.plan, compilation.schedule, compilation.program, evaluation):
        assert parse(Source("", show(level))) == level
    assert " q1 s0" in compilation.scripts.files["rank_0.py"]


def test_messages_name_slices_as_texts_do() -> None:
    """Of a pair in a scheme, and of a line of a turn, which counts from the turn's own m."""
    pair = PIPE.format(stages="1", on="0", micros="3", lines="F(m, s, q) & B(m, s, q) @ k*m + q")
    both = "`F m0 q0 s0` and `B m0 q0 s0` cannot run together: both are about slice 0 of micro-batch 0"
    assert titles("scheme a(k = 2)\n" + pair) == [both]
    twice = show(chimera_ir.compile(Source("a.chim", TEXTS["without a flush"])).program)
    line = next(line for line in twice.splitlines() if line.startswith("  F m q2 s1"))
    assert titles(twice.replace(line, f"{line}\n{line}")) == [f"`{line.strip()}` is there twice"]


def titles(text: str) -> list[str]:
    """The titles of the diagnostics of a text that is wrong."""
    with pytest.raises(TextError) as error:
        _ = chimera_ir.compile(Source("", text)).verified
    return [diagnostic.fill(diagnostic.title) for diagnostic in error.value.diagnostics]


def test_all_slices_of_a_micro_batch_read_one_version() -> None:
    level = chimera_ir.compile(Source("a.chim", TEXTS["without a flush"])).schedule
    for turn in level.turns:
        reads = {(operation.micros[0] // 3, operation.version) for operation in turn.instructions}
        assert len({micro for micro, _ in reads}) == len(reads)


def test_slices_of_other_micro_batches_are_another_schedule() -> None:
    def digest(forward: str, backward: str) -> str | None:
        lines = "scheme a", "pipe p {", "stages s in 0..1 on s", "micros m in 0..2", "slices q in 0..2"
        text = "\n".join((*lines, f"F(m, s, q) @ {forward}", f"B(m, s, q) @ 8 + {backward}", "}"))
        return Variant(parser.parse(Source("a.chim", text)), (), Change(), 100, trusted=False).digest

    by_micro_batch = digest("2*m + q", "2*(1 - m) + 1 - q")
    assert by_micro_batch == digest("2*(1 - m) + q", "2*m + 1 - q")
    assert by_micro_batch != digest("m + 2*q", "2*(1 - q) + 1 - m")


@pytest.mark.parametrize(("name", "stages", "k"), [("seq1f1b", 6, 4), ("seq1f1b", 5, 3), ("seq1f1b_zb", 4, 4)])
def test_receives_of_nested_slices_take_the_fewest_slots_and_still_repeat(name: str, stages: int, k: int) -> None:
    lines: list[list[int]] = []
    for micros in (24, 48):
        request = Request(library.source(name), {"D": stages, "N": micros, "k": k})
        lowered = Compilation(request).program
        pieces = [roll(lowered.header, lane) for lane in lowered.lanes]
        lines.append([sum(len(piece.instructions) for piece in of_lane) for of_lane in pieces])
        assert [[*chain.from_iterable(map(unrolled, of_lane))] for of_lane in pieces] == [*map(list, lowered.lanes)]
        if name == "seq1f1b":
            # A worker keeps stages - 1 - worker + k slices, and a receive is posted one operation ahead.
            activations = [
                {line.slot for line in lane if isinstance(line, Recv) and line.message.value is ACTIVATIONS}
                for lane in lowered.lanes[1:]
            ]
            assert [*map(len, activations)] == [stages - 1 - worker + k + 1 for worker in range(1, stages)]
    assert lines[0] == lines[1], "the loops do not grow with the micro-batches"
