"""What the schedule promises: a program played with what its operations cost, where messages and sums take no time."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from chimera_ir.ir.levels import Header, Program
from chimera_ir.ir.ops import AllReduce, Instruction, Send, WaitAllReduce, WaitRecv
from chimera_ir.trace.match import instructions
from chimera_ir.trace.spans import Lane, Span, Window

Cost = Callable[[Instruction], int]
"""How long an operation takes, in nanoseconds; waits are not asked for."""


class Promised(NamedTuple):
    """What is predicted: ``windows[u][w]`` is update u on worker w, whose lane is ``lanes[w]``.

    ``shown`` is an update like those that are measured; the mean of the ``counted`` ones is what one is predicted to
    take.
    """

    lanes: tuple[Lane, ...]
    windows: Sequence[tuple[Window, ...]]
    shown: int
    counted: range


def played_updates(header: Header, barriered: bool) -> int:
    """How many updates show one like those that are measured.

    With a barrier before each, one; of updates that follow one another, some; of a stream as many as the program shows.
    """
    return header.updates if header.asynchronous else 1 if barriered else 4


def alike(header: Header, updates: int, typical: int) -> int:
    """Which of so many updates is like the typical one of a run.

    One after others; in the middle of a stream, even or odd as the typical one is.
    """
    shown = updates // 2
    return shown - (shown - typical) % 2 if header.asynchronous and shown > 1 else shown


def play(program: Program, updates: int, cost: Cost) -> tuple[Lane, ...]:
    """Every worker's lane of a verified program, as early as possible, from time 0.

    A wait lasts until what it waits for is there: a message when it is sent, a sum when its last holder launches it.
    """
    todo = [list(instructions(program, worker, updates)) for worker in range(program.header.workers)]
    done: list[list[Span]] = [[] for _ in todo]
    holders = [len(workers) for workers in program.header.holders]
    there: dict[Hashable, list[int]] = defaultdict(list)
    moved = True
    while moved:
        moved = False
        for lane, spans in zip(todo, done, strict=True):
            before = len(spans)
            _advance(lane, spans, holders, there, cost)
            moved = moved or len(spans) > before
    assert [*map(len, done)] == [*map(len, todo)], "a verified program ends"
    return tuple(map(tuple, done))


def _advance(
    lane: Sequence[tuple[int, Instruction]],
    spans: list[Span],
    holders: Sequence[int],
    there: dict[Hashable, list[int]],
    cost: Cost,
) -> None:
    """Goes on with a lane until it has to wait for another."""
    now = spans[-1].end if spans else 0
    for update, each in lane[len(spans) :]:
        match each:
            case WaitRecv(message=message):
                key: Hashable = update, message
                if key not in there:
                    return
                end = max(now, *there[key])
            case WaitAllReduce(stage=stage):
                launched = there[update, stage]
                if len(launched) < holders[stage]:
                    return
                end = max(now, *launched)
            case _:
                end = now + cost(each)
                if isinstance(each, Send):
                    there[update, each.message].append(end)
                elif isinstance(each, AllReduce):
                    there[update, each.stage].append(end)
        spans.append(Span(each, update, now, end))
        now = end
