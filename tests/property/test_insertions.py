"""Windows changed by a line or a slot: what is said of any number of turns holds for the program written out."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

import chimera_ir
from chimera_ir import library
from chimera_ir.cost.durations import Costs
from chimera_ir.diagnostics.model import Rejected
from chimera_ir.ir.levels import Header, Program
from chimera_ir.ir.ops import Instruction, Recv, Slot
from chimera_ir.ir.rolled import RolledProgram
from chimera_ir.lower.lower import lower
from chimera_ir.repeated import ScheduledWindow, cuts_in, extended, scheduled
from chimera_ir.verify.insertion import insertion
from chimera_ir.verify.verify import verify_program
from tests.repeatable import examples

SCHEMES = (
    *("dapple", "dapple_recompute", "dapple_offload", "chimera", "eager_1f1b", "gems", "dualpipe"),
    *("zb_h1", "zb_h2", "zb_v", "v_half", "waves", "interleaved", "seq1f1b", "seq1f1b_zb"),
)


class Known(NamedTuple):
    """The program of a window, and where its turns are."""

    program: Program
    header: Header
    left_out: int
    step: int
    cuts: list[tuple[int, int]]


@cache
def known(name: str) -> Known:
    """The smallest window of a library scheme that is accepted."""
    compilation = chimera_ir.compile(name, **{"P" if "P" in library.parameters(name) else "D": 4, "N": 80})
    windows = (in_program(found) for found in scheduled(compilation._outlined, Costs()))
    return next(window for window in windows if accepted(window, window.program))


def in_program(found: ScheduledWindow) -> Known:
    program, window = lower(found.schedule, net=found.turns.net), found.window
    assert isinstance(program, Program)
    cuts = cuts_in(program.lanes, window)
    return Known(program, window.header, window.left_out * window.step, window.step, cuts)


def accepted(window: Known, program: Program) -> Program | None:
    """The program with all turns, written out; None if the window is wrong, or nothing is said of more turns."""
    try:
        verified = verify_program(program)
    except Rejected:
        return None
    rolled = extended(verified, window.header, window.left_out, window.step, window.cuts)
    if rolled is None:
        return None
    assert isinstance(rolled.level, RolledProgram)
    return rolled.level.unrolled


def moved(lane: Sequence[Instruction], start: int, to: int) -> tuple[Instruction, ...]:
    rest = [*lane[:start], *lane[start + 1 :]]
    return (*rest[:to], lane[start], *rest[to:])


def with_other_slots(lane: Sequence[Instruction], start: int, by: int) -> tuple[Instruction, ...]:
    """The lane in which one receive, the first from ``start`` on, takes another slot."""
    place = next((p for p in range(start, len(lane)) if isinstance(lane[p], Recv)), None)
    if place is None:
        return tuple(lane)
    receive = lane[place]
    assert isinstance(receive, Recv)
    return (*lane[:place], replace(receive, slot=Slot(receive.slot + by)), *lane[place + 1 :])


@given(st.sampled_from(SCHEMES), st.data())
@examples(400)
def test_what_is_accepted_obeys_every_rule_when_it_is_written_out(name: str, data: st.DataObject) -> None:
    window = known(name)
    worker = data.draw(st.integers(0, window.program.header.workers - 1))
    lane = window.program.lanes[worker]
    place = data.draw(st.integers(0, len(lane) - 1))
    if data.draw(st.booleans()):
        by = data.draw(st.integers(-6, 6))
        changed = moved(lane, place, min(max(place + by, 0), len(lane) - 1))
    else:
        changed = with_other_slots(lane, place, data.draw(st.sampled_from([1, -1, 2])))
    lanes = (*window.program.lanes[:worker], changed, *window.program.lanes[worker + 1 :])
    whole = accepted(window, Program(window.program.header, lanes))
    event("refused" if whole is None else "accepted")
    if whole is not None:
        verify_program(whole)


@pytest.mark.parametrize("name", SCHEMES)
def test_so_does_a_window_without_a_change(name: str) -> None:
    window = known(name)
    whole = accepted(window, window.program)
    assert whole is not None
    verify_program(whole)


def test_a_slot_that_one_turn_alone_takes_is_refused() -> None:
    window = known("dapple")
    start, end = window.cuts[1]
    lane = window.program.lanes[1]
    place = next(p for p in range(start, end) if isinstance(lane[p], Recv))
    receive = lane[place]
    assert isinstance(receive, Recv)
    unused = 1 + max(other.slot for other in lane if isinstance(other, Recv))
    changed = (*lane[:place], replace(receive, slot=Slot(unused)), *lane[place + 1 :])
    program = Program(window.program.header, (window.program.lanes[0], changed, *window.program.lanes[2:]))
    verify_program(program)
    assert accepted(window, program) is None


def test_a_receive_that_one_turn_alone_posts_early_is_refused() -> None:
    window = known("dapple")
    _, end = window.cuts[1]
    lane = window.program.lanes[1]
    place = next(p for p in range(end, len(lane)) if isinstance(lane[p], Recv))
    program = Program(
        window.program.header,
        (window.program.lanes[0], moved(lane, place, end - 1), *window.program.lanes[2:]),
    )
    assert insertion(program, window.header, window.left_out, window.step, window.cuts) is None
