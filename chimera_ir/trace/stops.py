"""Places where the ranks of a run that ended early stopped: behind the last operation that each has recorded."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from typing import NamedTuple

from chimera_ir.escapes import visible_lines
from chimera_ir.ir.ops import Instruction
from chimera_ir.predict.events import Events
from chimera_ir.trace.match import ahead
from chimera_ir.trace.spans import Lane, awaited_worker, words
from chimera_ir.trace.trace_files import Trace


@dataclass(frozen=True, slots=True)
class StoppedRank:
    """The place where a rank stopped.

    ``line`` is the line of the program, empty if the rank has left no record or had done everything. ``event`` is the
    number, on the page, of the event of this line or else of the next line that has one; -1 if no such line follows in
    the update. ``update`` is 0 if the rank has left no record. ``begun`` is False if the rank had not begun the update,
    and stopped before ``line`` and not in it. ``awaited`` is the worker whose message it waited for, or that was to
    take one; -1 if there is none. ``seconds`` is how long the rank had been there, 0 if that is not known. ``message``
    is the error message with which it ended.
    """

    rank: int
    worker: int
    event: int
    line: str
    update: int
    begun: bool
    awaited: int
    seconds: float
    message: str


class Stopped(NamedTuple):
    """The end of a run that ended early.

    ``update`` is the last update that any worker of copy 0 began. ``lanes`` are the recorded lanes of the workers of
    copy 0. ``ranks`` says where each rank stopped.
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
    rest = ahead(trace, rank, lane)
    following = next(rest, None)
    ended = visible_lines(rank.ended or "")
    if following is None or not rank.is_recorded:
        return StoppedRank(rank.rank, rank.worker, -1, "", _last_update([lane]), False, -1, 0.0, ended)
    update, instruction = following
    waited = 0.0 if rank.ended_at is None or not lane else (rank.ended_at - lane[-1].end) / 1e9
    of_update = (later for _, later in takewhile(lambda entry: entry[0] == update, rest))
    return StoppedRank(
        rank=rank.rank,
        worker=rank.worker,
        event=event_at(events, rank.worker, chain([instruction], of_update)),
        line=words(instruction, trace.header),
        update=update,
        begun=any(span.update == update for span in reversed(lane)),
        awaited=awaited_worker(trace.header, instruction),
        seconds=max(waited, 0.0),
        message=ended,
    )


def event_at(events: Events, worker: int, instructions: Iterable[Instruction]) -> int:
    """Returns the number of the first event on the lane of ``worker`` that belongs to one of ``instructions``.

    Of ``instructions``, the first that has an event decides; the result is -1 if none has one. Events are numbered lane
    by lane, as on a page.
    """
    before = sum(map(len, events.lanes[:worker]))
    places = {
        events.nodes[event].instruction: place for place, event in enumerate(events.lanes[worker][1:], before + 1)
    }
    return next((places[instruction] for instruction in instructions if instruction in places), -1)
