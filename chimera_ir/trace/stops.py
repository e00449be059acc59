"""Places where the ranks of a run that ended early stopped: behind the last operation that each has recorded."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from chimera_ir.escapes import visible_lines
from chimera_ir.ir.ops import Instruction
from chimera_ir.predict.events import Events
from chimera_ir.trace.match import instructions
from chimera_ir.trace.spans import Lane, Load, words
from chimera_ir.trace.trace_files import Trace


@dataclass(frozen=True, slots=True)
class StoppedRank:
    """The place where a rank stopped: in ``line`` of the program, at ``event`` of the schedule (-1 if there is none).

    ``line`` is empty if the rank has left no record or had done everything. ``update`` is -1 if that is not known.
    ``seconds`` is how long it had been there, 0 if that is not known; ``message`` is the one with which it ended.
    """

    rank: int
    worker: int
    event: int
    line: str
    update: int
    seconds: float
    message: str


class Stopped(NamedTuple):
    """The end of a run that ended early: the last ``update`` that any worker of a copy began, and where ranks stopped.

    ``lanes`` are those of the workers of the copy.
    """

    update: int
    lanes: Sequence[Lane]
    ranks: list[StoppedRank]


def stopped(trace: Trace, lanes: Sequence[Lane], events: Events) -> Stopped:
    """The places where the ranks of a run stopped; ``events`` are those of the schedule on the page."""
    of_copy = [lane for rank, lane in zip(trace.ranks, lanes, strict=True) if rank.copy == 0]
    ranks = [_stop(trace, lane, events, number) for number, lane in enumerate(lanes)]
    return Stopped(_last_update(of_copy), of_copy, ranks)


def _last_update(lanes: Sequence[Lane]) -> int:
    return max((span.update for lane in lanes for span in lane[-1:]), default=0)


def _stop(trace: Trace, lane: Lane, events: Events, number: int) -> StoppedRank:
    rank = trace.ranks[number]
    done = [span for span in lane if not isinstance(span.operation, Load)]
    ahead = next(islice(instructions(trace.program, rank.worker, trace.about.updates), len(done), None), None)
    ended = visible_lines(rank.ended or "")
    if ahead is None or not rank.is_recorded:
        return StoppedRank(rank.rank, rank.worker, -1, "", _last_update([lane]), 0.0, ended)
    update, instruction = ahead
    waited = 0.0 if rank.ended_at is None or not lane else (rank.ended_at - lane[-1].end) / 1e9
    event = event_at(events, rank.worker, instruction)
    return StoppedRank(rank.rank, rank.worker, event, words(instruction, trace.header), update, max(waited, 0.0), ended)


def event_at(events: Events, worker: int, instruction: Instruction) -> int:
    """The event of an instruction on its lane, counted lane by lane; -1 if it takes no time, or none is shown."""
    before = sum(map(len, events.lanes[:worker]))
    places = enumerate(events.lanes[worker][1:], before + 1)
    return next((place for place, event in places if events.nodes[event].instruction == instruction), -1)
