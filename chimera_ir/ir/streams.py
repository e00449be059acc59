"""Streams: schedules and programs of a scheme without a flush, each as one turn of every worker.

schedule stashing                 what two updates show
workers 2
stages 2
micro_batches 1
updates 1 per turn
pipe down on 0 1 micros 0..1

worker 0:                         worker 0:
  F m s0 v-1                        F m0 s0 v0
  B m-1 s0 v-2                      F m1 s0 v0
                                    B m0 s0 v0
                                    B m1 s0 v0
worker 1:                         worker 1:
  F m s1 v                          F m0 s1 v0
  B m s1 v                          B m0 s1 v0
                                    F m1 s1 v1
                                    B m1 s1 v1

A turn may begin at any of its lines, because it is repeated without end. The header is that of one turn.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import cycle, groupby, repeat

from chimera_ir.ir.levels import Header, OneLine, Pipe, Plan, Program, Schedule
from chimera_ir.ir.ops import Clock, Compute, Instruction, Micro, Planned, Unclocked, singles
from chimera_ir.ir.turns import Turn, by_turn, shifted, turns_of, unroll

MARGIN = 3
"""The fewest turns on each side of a view's middle turn, in addition to the ``spread`` of `LaneStream.updates_shown`.
"""


LONGEST_TURN = 8
"""The most turns of the formulas after which lanes must repeat where the compiler orders operations without clocks."""


@dataclass(frozen=True, repr=False)
class PlanStream(OneLine):
    """A plan without end: the ``operations`` of the first turn, line by line, which come again every ``clocks`` clocks.

    The first ``turns`` turns are enough to see warm-up, steady state and drain. ``rises`` says for each operation how
    much the value of its ``prefer`` line grows from one turn to the next; it is empty without such lines.
    """

    header: Header
    operations: tuple[Planned | Unclocked, ...]
    clocks: int
    turns: int
    rises: tuple[int, ...] = ()

    @property
    def is_clocked(self) -> bool:
        """Whether all operations have clocks."""
        return all(isinstance(planned, Planned) for planned in self.operations)

    @property
    def shown(self) -> Plan:
        """The plan of the first ``turns`` turns."""
        header, updates = self.header, self.turns * self.header.per_turn
        shown: list[Planned | Unclocked] = []
        rising = zip(self.operations, self.rises or repeat(0), strict=False)
        for _, line in groupby(rising, lambda entry: (self._pipe(entry[0]), entry[0].operation.origin)):
            entries = list(line)
            turn = by_turn(header, Turn(tuple(planned.operation for planned, _ in entries)), updates)
            for (planned, rise), (number, operation) in zip(cycle(entries), turn, strict=False):
                assert isinstance(operation, Compute), "a stream has no pairs"
                if isinstance(planned, Planned):
                    shown.append(Planned(Clock(planned.clock + number * self.clocks), planned.worker, operation))
                else:
                    preference = None if planned.preference is None else planned.preference + number * rise
                    shown.append(Unclocked(preference, planned.worker, operation))
        return Plan(header_of(header, updates), tuple(shown))

    def _pipe(self, planned: Planned | Unclocked) -> str:
        return self.header.pipe_of[planned.operation.parts[0].micros[0]].name


@dataclass(frozen=True, repr=False)
class LaneStream(OneLine):
    """Lanes without end: ``turns[w]`` is the turn of worker w."""

    header: Header
    turns: tuple[Turn, ...]

    @cached_property
    def updates_shown(self) -> int:
        """The number of updates that a view must have so that its middle turn is one of the steady state.

        Operations that run at the same time are up to ``spread`` turns apart, and all of these must be in the view.
        From turn ``settled`` on, turns read the versions of the steady state.
        """
        per_turn, period = self.header.per_turn, self.header.period
        operations = [operation for turn in self.turns for operation in computes(turn.instructions)]
        places = [micro // period for operation in operations for micro in operation.micros]
        spread = max(places, default=0) - min(places, default=0)
        settled = max(
            (-((operation.version or 0) // per_turn) + min(operation.micros) // period for operation in operations),
            default=0,
        )
        return per_turn * (2 * (spread + max(MARGIN, settled)) + 1)

    @property
    def operations(self) -> int:
        """The number of instructions in a view of `updates_shown` updates, without the stashes of initial weights."""
        turns = ((turns_of(self.header, turn, self.updates_shown, {}), turn.instructions) for turn in self.turns)
        return sum(len(numbers) * len(instructions) for numbers, instructions in turns)


class ScheduleStream(LaneStream):
    """A schedule without end: its turns have compute operations alone, in the order in which a worker runs them."""

    @cached_property
    def lanes(self) -> tuple[tuple[Compute, ...], ...]:
        """The operations of each worker's turn."""
        return tuple(tuple(computes(turn.instructions)) for turn in self.turns)

    def view(self, updates: int) -> Schedule:
        """The schedule of the first ``updates`` updates."""
        lanes = (tuple(computes(unroll(self.header, turn, updates))) for turn in self.turns)
        return Schedule(header_of(self.header, updates), tuple(lanes))


class ProgramStream(LaneStream):
    """A program without end."""

    def view(self, updates: int) -> Program:
        """The program of the first ``updates`` updates."""
        lanes = (tuple(unroll(self.header, turn, updates)) for turn in self.turns)
        return Program(header_of(self.header, updates), tuple(lanes))

    @cached_property
    def shown(self) -> Program:
        """The program of enough updates to show all that ever happens: warm-up, some turns and drain."""
        return self.view(self.updates_shown)

    @property
    def schedule(self) -> ScheduleStream:
        """The stream of the compute operations alone, in the same order."""
        return stream_with(self.header, (computes(turn.instructions) for turn in self.turns))


Level = Plan | Schedule | ScheduleStream | Program | ProgramStream
"""Any level that has a text."""


def stream_with(header: Header, lanes: Iterable[Iterable[Instruction]]) -> ScheduleStream:
    """The schedule without end in which a turn of worker w has the operations ``lanes[w]``."""
    return ScheduleStream(header, tuple(Turn(tuple(lane)) for lane in lanes))


def computes(lane: Iterable[Instruction]) -> Iterator[Compute]:
    """The compute operations of a lane."""
    return (instruction for instruction in lane if isinstance(instruction, Compute))


def header_of(turn: Header, updates: int) -> Header:
    """The header for the first ``updates`` updates of a stream, from the header of a turn or of other updates."""
    count, period = updates * turn.per_update, turn.period

    def repeated(micros: tuple[Micro, ...]) -> tuple[Micro, ...]:
        starts = range(0, count, period)
        return tuple(Micro(start + micro) for start in starts for micro in micros if micro < min(period, count - start))

    pipes = tuple(_renumbered(pipe, repeated) for pipe in turn.pipes)
    weights = tuple(turn.weights[micro % len(turn.weights)] for micro in range(count if turn.weights else 0))
    return replace(turn, micro_batches=count, updates=updates, pipes=pipes, weights=weights)


def _renumbered(pipe: Pipe, number: Callable[[tuple[Micro, ...]], tuple[Micro, ...]]) -> Pipe:
    recomputed = tuple((stage, number(micros)) for stage, micros in pipe.recomputed)
    return replace(pipe, micros=number(pipe.micros), recomputed=recomputed)


def stream_of(schedule: Schedule) -> ScheduleStream:
    """The stream whose first updates a schedule shows; raises `ValueError` if a lane shows no turn."""
    turns = [turn_in(schedule.header, singles(lane)) for lane in schedule.lanes]
    if None in turns:
        raise ValueError("the schedule shows no turn of a steady state")
    header = header_of(schedule.header, schedule.header.per_turn)
    return ScheduleStream(header, tuple(turn for turn in turns if turn is not None))


def turn_in(header: Header, lane: Sequence[Compute]) -> Turn | None:
    """Finds the turn that a lane of some updates repeats; None if its middle is not repeated.

    It begins with the first operation on a micro-batch of the middle turn, and ends where this operation comes again.
    """
    if not lane:
        return Turn(())
    turn = header.micro_batches // header.period // 2
    updates = turn * header.per_turn
    # From the first operation on a micro-batch of the middle turn to the same operation a turn later.
    within = range(turn * header.period, (turn + 1) * header.period)
    start = next((place for place, operation in enumerate(lane) if min(operation.micros) in within), len(lane))
    next_first = [shifted(operation, header.period, header.per_turn) for operation in lane[start : start + 1]]
    stop = next((place for place in range(start + 1, len(lane)) if lane[place] == next_first[0]), None)
    if stop is None:
        return None
    return Turn(tuple(shifted(operation, -within.start, -updates) for operation in lane[start:stop]))


def view_of(program: Program | ProgramStream) -> Program:
    """Returns a program with a flush as it is; for a stream, the view that shows all that ever happens."""
    return program if isinstance(program, Program) else program.shown


def longer(program: Program | ProgramStream, updates: int) -> Program:
    """A program of ``updates`` updates that follow one another without a barrier.

    A program with a flush becomes one long update, in which the numbers of micro-batches and sums continue.
    """
    if isinstance(program, ProgramStream):
        return program.view(updates)
    assert not program.header.period, "what some updates of a stream show ends with these"
    old, every = program.header, range(updates)
    pipes = tuple(
        _renumbered(pipe, lambda micros: tuple(Micro(m + u * old.per_update) for u in every for m in micros))
        for pipe in old.pipes
    )
    return Program(
        replace(old, micro_batches=updates * old.per_update, pipes=pipes),
        tuple(tuple(shifted(line, u * old.per_update, u) for u in every for line in lane) for lane in program.lanes),
    )
