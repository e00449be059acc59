"""From a schedule without end to a program without end: a turn is lowered among turns like it, and cut out.

worker 0:                     worker 0:
  F m s0 v-1                    recv m-1 s1->s0 from w1 into 0 of 1
  B m-1 s0 v-2                  wait all_reduce s0 v-1
                                stash s0 v-2
                                step s0 v-1
                                F m s0 v-1
                                send m s0->s1 to w1
                                wait recv m-1 s1->s0
                                wait send m-1 s0->s1
                                B m-1 s0 v-2
                                drop s0 v-2
                                all_reduce s0 v

There are over twice as many turns before it and after it as are under way at once, so what is cut out is the steady
state.
"""

from collections.abc import Iterable

from chimera_ir.ir.ids import Micro, Stage
from chimera_ir.ir.kinds import Kind
from chimera_ir.ir.levels import Program, Schedule
from chimera_ir.ir.ops import Compute, Operation
from chimera_ir.ir.streams import MARGIN, ProgramStream, ScheduleStream, stream_of
from chimera_ir.ir.turns import Turn, later, lines_before, updates_a_turn
from chimera_ir.lower.buffers import rings
from chimera_ir.lower.comm import AHEAD, communicate
from chimera_ir.lower.place import placed
from chimera_ir.lower.sync import Duration, Insertions
from chimera_ir.lower.updates import update


def lower_stream(stream: ScheduleStream, ahead: int, duration: Duration) -> ProgramStream:
    """The program that runs a schedule without end; see `lower.lower`."""
    turn = 2 * _span(stream) + 2
    wide = _Wide(stream, stream.view((2 * turn + 1) * updates_a_turn(stream.header)), turn)
    return wide.lowered(ahead, list(update(wide.schedule, wide.durations(duration))))


def sketch(schedule: Schedule) -> Program:
    """A program with messages only, to see how much memory they take, in less time than `lower_stream` takes.

    It has no sums, steps or stashes (`updates.copies` counts these), and as many turns as are under way at once.
    ``schedule`` shows all that ever happens in a stream.
    """
    stream, shown = stream_of(schedule), schedule.header.micro_batches // schedule.header.period
    wide = _Wide(stream, schedule, shown // 2)
    lowered = wide.lowered(AHEAD, [Insertions({}, {})] * len(stream.turns))
    return lowered.view((_span(stream) + MARGIN) * updates_a_turn(stream.header))


class _Wide:
    """A schedule of so many updates that its turn in the middle, ``turn``, is in the steady state."""

    def __init__(self, stream: ScheduleStream, schedule: Schedule, turn: int) -> None:
        self._header = stream.header
        self.schedule, self._turn = schedule, turn
        self._places = [self._middle(turn) for turn in stream.turns]

    def durations(self, duration: Duration) -> Duration:
        """The durations of operations, which are those of the first turn."""
        known: dict[tuple[Kind, Micro, Stage], int] = {}

        def same(operation: Operation) -> int:
            assert isinstance(operation, Compute), "a stream has no pairs"
            turn, place = divmod(operation.micros[0], self._header.period)
            key = operation.kind, Micro(place), operation.stage
            if key not in known:
                first = later(self._header, operation, -turn)
                assert isinstance(first, Compute)
                known[key] = duration(first)
            return known[key]

        return same

    def lowered(self, ahead: int, insertions: Iterable[Insertions]) -> ProgramStream:
        """The turn in the middle with messages and insertions, as the first turn."""
        traffics = communicate(self.schedule, ahead)
        lanes = zip(self.schedule.lanes, self._places, traffics, insertions, strict=True)
        start, period = self._turn * self._header.period, self._header.period
        turns: list[Turn] = []
        for lane, places, traffic, inserted in lanes:
            slots, sizes = rings(traffic.postings, places, start, period)
            instructions = placed(lane, places, traffic, slots, inserted)
            turns.append(
                Turn(tuple(later(self._header, instruction, -self._turn) for instruction in instructions), sizes)
            )
        return ProgramStream(self._header, tuple(turns))

    def _middle(self, turn: tuple[Compute, ...]) -> range:
        """The places of the turn in the middle of a lane."""
        before = lines_before(self._header, Turn(turn), self._turn, self.schedule.header.updates)
        return range(before, before + len(turn))


def _span(stream: ScheduleStream) -> int:
    """The number of turns over which the micro-batches and versions in one turn of all lanes spread."""
    period, per_turn = stream.header.period, updates_a_turn(stream.header)
    operations = [operation for turn in stream.turns for operation in turn]
    turns = [micro // period for operation in operations for micro in operation.micros]
    turns += [(operation.version or 0) // per_turn for operation in operations]
    return max(turns, default=0) - min(turns, default=0)
