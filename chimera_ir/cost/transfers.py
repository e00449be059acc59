"""The time that each worker's link to its host is in use, and how much of it the worker computes meanwhile."""

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from chimera_ir.cost.number_text import number
from chimera_ir.cost.simulate import Timed, Timeline, occupying
from chimera_ir.flow import live
from chimera_ir.ir.kinds import KEPT
from chimera_ir.ir.levels import Header, Schedule
from chimera_ir.ir.ops import singles


class Transfers(NamedTuple):
    """The ``time`` per update in which a worker's link to its host is in use, in the unit of the costs.

    ``hidden`` is the part of this time in which the worker computes as well.
    """

    time: Fraction
    hidden: Fraction


class Unmoved(NamedTuple):
    """The figures that a schedule had before ``--offload auto`` added moves to it, and how many moves there are.

    ``makespan`` and ``activations`` are as in a report. The schedule (of a stream, a turn of it) has ``forwards``
    forwards; the activations that ``offloads`` of these make move to the host.
    """

    makespan: Fraction
    activations: tuple[Fraction, ...]
    offloads: int
    forwards: int

    def as_json(self) -> dict[str, object]:
        """The figures as an object of report.json."""
        peaks = [number(peak) for peak in self.activations]
        counts = {"moved": self.offloads, "forwards": self.forwards}
        return {"makespan": number(self.makespan), "activations": peaks, **counts}


def transfers(timeline: Timeline) -> tuple[Transfers, ...]:
    """The time of each worker's transfers per update, and how much of it is hidden."""
    header = timeline.header
    if not header.moves:
        return (Transfers(Fraction(0), Fraction(0)),) * len(timeline.lanes)
    counted = header.micro_batches - header.micro_batches % (header.period or 1)
    share = timeline.tick * header.per_update / counted
    return tuple(_of_lane(header, lane, counted, share) for lane in timeline.lanes)


def _of_lane(header: Header, lane: Sequence[Timed], counted: int, share: Fraction) -> Transfers:
    moves = [timed for timed in lane if not timed.in_lane and timed.operation.parts[0].micros[0] < counted]
    computing, place, hidden = occupying(header, lane), 0, 0
    for move in moves:
        while place < len(computing) and computing[place].end <= move.start:
            place += 1
        beside = place
        while beside < len(computing) and computing[beside].start < move.end:
            hidden += min(move.end, computing[beside].end) - max(move.start, computing[beside].start)
            beside += 1
    return Transfers(sum(move.end - move.start for move in moves) * share, hidden * share)


def unmoved(schedule: Schedule, before: Timeline) -> Unmoved:
    """The figures of a schedule without its moves; ``before`` is the timeline that it had without them."""
    first = range(schedule.header.period or schedule.header.micro_batches)
    operations = [part for lane in schedule.lanes for part in singles(lane) if part.micros[0] in first]
    offloads = sum(part.kind.moves for part in operations) // 2
    forwards = sum(KEPT in part.kind.makes and not part.kind.moves for part in operations)
    lanes = tuple(tuple(timed.operation for timed in lane) for lane in before.lanes)
    peaks = live.whole(before.header, live.activations(Schedule(before.header, lanes)))
    return Unmoved(before.makespan, peaks, offloads, forwards)
