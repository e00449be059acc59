"""Prediction from the costs of operations; messages and sums take no time."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from chimera_ir.flow import engine
from chimera_ir.ir.levels import Header, Program
from chimera_ir.ir.ops import AllReduce, Instruction, Send, WaitAllReduce, WaitRecv
from chimera_ir.ir.streams import ProgramStream, view_of
from chimera_ir.trace.match import instructions
from chimera_ir.trace.spans import Lane, LaneSpan, UpdateWindow

Cost = Callable[[Instruction], int]
"""Nanoseconds of an operation; never called for a wait."""


class PredictedLanes(NamedTuple):
    """A prediction: ``windows[u][w]`` is the window of update u on worker w, whose lane is ``lanes[w]``.

    ``shown`` is the update to show next to a measured one. The predicted time of an update is the mean of the
    ``counted`` updates.
    """

    lanes: tuple[Lane, ...]
    windows: Sequence[tuple[UpdateWindow, ...]]
    shown: int
    counted: range


def played_updates(program: Program | ProgramStream, barriered: bool) -> int:
    """Number of updates to predict so that one of them is like the measured ones.

    One if the run is ``barriered`` (has a barrier before each update), four if updates follow one another, and for a
    stream (a program without a flush) as many as its view has, which shows all that ever happens.
    """
    return view_of(program).header.updates if isinstance(program, ProgramStream) else 1 if barriered else 4


def like_typical(header: Header, updates: int, typical: int) -> int:
    """Index, among ``updates`` predicted updates, of the one that is most like ``typical``, an update of a run.

    The middle update is taken. Without a flush, even and odd updates differ: if only one of the middle update and
    ``typical`` is even, the update before the middle one is taken.
    """
    shown = updates // 2
    return shown - (shown - typical) % 2 if header.asynchronous and shown > 1 else shown


def play(program: Program | ProgramStream, updates: int, cost: Cost) -> tuple[Lane, ...]:
    """Lanes of ``updates`` updates of a verified program, in which everything runs as early as possible, from time 0.

    The wait for a message ends when the message is sent, the wait for a sum when the last holder launches it.
    """
    served = [list(instructions(program, worker, updates)) for worker in range(program.header.workers)]
    bounds = pairwise(accumulate(map(len, served), initial=0))
    lanes = [range(start, end) for start, end in bounds]
    before = _waits(served, lanes)
    durations = [
        0 if isinstance(instruction, WaitRecv | WaitAllReduce) else cost(instruction)
        for lane in served
        for _, instruction in lane
    ]
    played = engine.play(lanes, before)
    assert len(played.order) == len(before), "a verified program ends"
    ends = engine.ends(played.order, before, durations)
    pairs = zip(served, lanes, strict=True)
    return tuple(tuple(_spans(lane, ends[numbers.start : numbers.stop])) for lane, numbers in pairs)


_Served = Sequence[tuple[int, Instruction]]
"""The instructions of a lane, each with the update that it serves."""


def _waits(served: Iterable[_Served], lanes: Iterable[range]) -> list[list[int]]:
    """Lists, for each instruction, the instructions that it waits for.

    They are the instruction before it in its lane and, for a wait, the posts of the message or sum. An instruction is
    given by its index, counted lane by lane: ``lanes`` has the indices of each lane in ``served``.
    """
    posted: dict[Hashable, list[int]] = defaultdict(list)
    awaited: dict[int, Hashable] = {}
    before: list[list[int]] = []
    for lane, numbers in zip(served, lanes, strict=True):
        for number, (update, instruction) in zip(numbers, lane, strict=True):
            needs = [number - 1] if number > numbers.start else []
            match instruction:
                case Send(content) | AllReduce(content):
                    posted[update, content].append(number)
                case WaitRecv(content) | WaitAllReduce(content):
                    awaited[number] = update, content
                case _:
                    pass
            before.append(needs)
    for number, key in awaited.items():
        before[number] += posted[key]
    return before


def _spans(lane: _Served, ends: Sequence[int]) -> Iterator[LaneSpan]:
    """Yields the instructions of a lane with their times: from the end of the one before to its own in ``ends``."""
    for (update, instruction), start, end in zip(lane, [0, *ends], ends, strict=False):
        yield LaneSpan(instruction, update, start, end)
