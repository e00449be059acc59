"""What the schedule promises: a program played with what its operations cost, where messages and sums take no time."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence

from chimera_ir.ir.levels import Program
from chimera_ir.ir.ops import AllReduce, Instruction, Send, WaitAllReduce, WaitRecv
from chimera_ir.trace.match import instructions
from chimera_ir.trace.spans import Lane, Span

Cost = Callable[[Instruction], int]
"""How long an operation takes, in nanoseconds; waits are not asked for."""


class Stuck(Exception):
    """The program does not finish: it was not verified."""


def play(program: Program, updates: int, cost: Cost) -> tuple[Lane, ...]:
    """Every worker's lane, as early as possible, from time 0.

    A wait lasts until what it waits for is there: a message when it is sent, a sum when its last holder launches it.

    Raises
    ------
    Stuck
        If a wait never ends.
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
    if any(len(spans) < len(lane) for lane, spans in zip(todo, done, strict=True)):
        raise Stuck
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
