"""What the schedule promises: a program played with what its operations cost, where messages and sums take no time."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from chimera_ir.flow import run
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
    served = [list(instructions(program, worker, updates)) for worker in range(program.header.workers)]
    bounds = pairwise(accumulate(map(len, served), initial=0))
    lanes = [range(start, end) for start, end in bounds]
    before, durations = _waits(served, lanes), [_length(each, cost) for lane in served for _, each in lane]
    played = run.play(lanes, before)
    assert len(played.order) == len(before), "a verified program ends"
    ends = run.ends(played.order, before, durations)
    pairs = zip(served, lanes, strict=True)
    return tuple(tuple(_spans(lane, ends[numbers.start : numbers.stop])) for lane, numbers in pairs)


_Served = Sequence[tuple[int, Instruction]]
"""The instructions of a lane, each with the update that it serves."""


def _waits(served: Iterable[_Served], lanes: Iterable[range]) -> list[list[int]]:
    """What each instruction waits for: the one before it, and what is posted elsewhere."""
    posted: dict[Hashable, list[int]] = defaultdict(list)
    awaited: dict[int, Hashable] = {}
    before: list[list[int]] = []
    for lane, numbers in zip(served, lanes, strict=True):
        for number, (update, instruction) in zip(numbers, lane, strict=True):
            needs = [number - 1] if number > numbers.start else []
            match instruction:
                case Send(message):
                    posted[update, message].append(number)
                case AllReduce(stage):
                    posted[update, stage].append(number)
                case WaitRecv(message):
                    awaited[number] = update, message
                case WaitAllReduce(stage):
                    awaited[number] = update, stage
                case _:
                    pass
            before.append(needs)
    for number, key in awaited.items():
        before[number] += posted[key]
    return before


def _length(instruction: Instruction, cost: Cost) -> int:
    return 0 if isinstance(instruction, WaitRecv | WaitAllReduce) else cost(instruction)


def _spans(lane: _Served, ends: Sequence[int]) -> Iterator[Span]:
    """The instructions of a lane, each from the end of the one before it."""
    for (update, instruction), start, end in zip(lane, [0, *ends], ends, strict=False):
        yield Span(instruction, update, start, end)
