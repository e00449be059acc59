"""The pass that adds moves to the host to a schedule, where they fit beside its operations (`--offload auto`).

memory activations <= 4 (none declared)   memory activations <= 2 ..

worker 0:                                 worker 0:
  F m0 s0                                   F m0 s0
  F m1 s0                                   offload m0 s0       (runs beside F m1)
  ..                                        F m1 s0
  B m0 s0                                   ..
                                            reload m0 s0        (runs beside the operation before B m0)
                                            ..
                                            B m0 s0

The rule is that of selective offload (Wan et al., "PipeOffload", ICML 2025): activations move only if the time of both
transfers lies between the operation that makes them and the first that reads them, and a stage that feeds no other
keeps everything, because its backwards come right after its forwards. `host_plan` chooses among these activations. If
the schedule declares a bound on activations, as many move as the bound asks for. Else each worker keeps as little as it
can while no operation waits for a transfer, and this amount becomes a declared bound of the schedule: a lane waits for
an offload only where it would keep more.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from chimera_ir.cost.durations import Durations
from chimera_ir.cost.host_plan import HostPlan, MoveLaunch, Time, TimedLane, TimedStep
from chimera_ir.cost.simulate import Timeline, ticks
from chimera_ir.errors import WrongOption
from chimera_ir.flow.cycles import steady_run
from chimera_ir.flow.host_moves import most_kept
from chimera_ir.flow.net import Net, net_of
from chimera_ir.flow.turn_net import turn_net
from chimera_ir.ir.levels import Header, Schedule
from chimera_ir.ir.memory_bounds import Bound, Quantity
from chimera_ir.ir.ops import Compute, Operation, singles
from chimera_ir.ir.streams import ScheduleStream, stream_with
from chimera_ir.ir.turns import moved, turn_number

_SHARES = (Fraction(1), Fraction(1, 2), Fraction(1, 4), Fraction(0))
"""Factors on the time of transfers, as if the link were faster.

Moves are planned with one factor after another, until a plan keeps no more than the schedule's declared bound.
"""


class Moved(NamedTuple):
    """A schedule to which moves were added, and the timeline that it had without them (``before``)."""

    schedule: Schedule | ScheduleStream
    before: Timeline


def offload(
    level: Schedule | ScheduleStream, durations: Durations, net: Net | None = None
) -> Schedule | ScheduleStream:
    """Adds offloads and reloads to a schedule, by the rule of this module; returns it as it is if nothing can move.

    ``level`` must have no moves yet, and no errors, except that it may exceed its declared bounds. ``net`` is the graph
    of waits of a schedule with a flush, if the caller has it.
    """
    header = replace(level.header, moves=True)
    tick, duration = ticks(header, durations)

    def of_move(operation: Compute) -> Time:
        """The duration of a move, which need not be a whole number of ticks."""
        return durations.duration(operation, header) / tick

    if isinstance(level, Schedule):
        net = net or net_of(level)
        lengths = list(map(duration, net.operations))
        ends = net.ends(lengths)
        timed = [
            TimedLane([TimedStep(net.operations[n], ends[n] - lengths[n], ends[n]) for n in numbers])
            for numbers in net.lanes
        ]
    else:
        timed = list(_steady_lanes(level, duration))
    declared = next((bound.limits for bound in header.bounds if bound.quantity is Quantity.ACTIVATIONS), None)
    lanes = [
        moving_lane(header, lane, of_move, int(limit * header.units))
        for lane, limit in zip(timed, declared or (0,) * len(timed), strict=True)
    ]
    if not any(operation.kind.moves for lane in lanes for operation in lane.operations):
        return level
    if declared is None:
        limits = tuple(Fraction(lane.limit, header.units) for lane in lanes)
        header = replace(header, bounds=(*header.bounds, Bound(Quantity.ACTIVATIONS, limits)))
    if isinstance(level, Schedule):
        return Schedule(header, tuple(lane.operations for lane in lanes))
    return stream_with(header, [tuple(singles(lane.operations)) for lane in lanes])


def require_movable(schedule: Schedule | ScheduleStream, *, is_program: bool) -> None:
    """Raises `WrongOption` for a schedule to which no moves can be added.

    Such a schedule has moves of its own, or is that of a program, whose text says everything that each worker does.
    """
    name = schedule.header.scheme
    if is_program:
        raise WrongOption("offload", f": the text of the program of {name} says itself what moves; give its schedule")
    if schedule.header.moves:
        raise WrongOption("offload", f": {name} says itself what moves to the host, and when")


class LaneWithMoves(NamedTuple):
    """A lane, or the turn of one, with its moves; it keeps at most ``limit`` units (`Header.units` a micro-batch)."""

    operations: tuple[Operation, ...]
    limit: int


def _steady_lanes(stream: ScheduleStream, duration: Callable[[Operation], int]) -> Iterator[TimedLane]:
    """Yields for each lane of a stream its operations in several turns, at the times of the earliest run that repeats.

    ``duration`` gives the time of an operation. The turn in the middle is the one to plan.
    """
    header, net = stream.header, turn_net(stream)
    lengths = list(map(duration, net.operations))
    run = steady_run(net.waits, lengths, [turn_number(header, operation) for operation in net.operations])
    for lane in net.lanes:
        # As many turns on both sides of the one that is planned as activations can wait.
        turns = [micro // header.period for operation in lane.operations for micro in operation.micros]
        spread = max(turns, default=0) - min(turns, default=0) + 1
        steps = []
        for number in range(-spread, spread + 1):
            for node, operation in enumerate(lane.operations, lane.first):
                end = run.ends[node] + number * run.ratio
                later = replace(operation, micros=moved(operation.micros, number * header.period))
                steps.append(TimedStep(later, end - lengths[node], end))
        yield TimedLane(steps, spread, 2 * spread + 1, run.ratio)


def moving_lane(header: Header, lane: TimedLane, of_move: Callable[[Compute], Time], declared: int) -> LaneWithMoves:
    """Adds moves to a lane, so that it keeps no more than ``declared`` units or, if that is 0, as few as possible.

    ``of_move`` gives the time that a move takes.

    If the link is too slow for the declared bound, moves are planned as for a faster link, and the lane then waits for
    them. If that does not help either, the lane is returned without moves.
    """
    operations = [lane.steps[place].operation for place in lane.places]
    for share in _SHARES if declared else _SHARES[:1]:
        plan = HostPlan(header, lane, _faster(of_move, share))
        for limit in [declared] if declared else range(plan.least, plan.peak):
            launches = plan.launches(limit)
            if launches is None:
                continue
            moving = tuple(_offloaded(header, operations, launches))
            if most_kept(header, moving, limit) <= limit:
                return LaneWithMoves(moving, limit)
    return LaneWithMoves(tuple(operations), plan.peak)


def _faster(of_move: Callable[[Compute], Time], share: Fraction) -> Callable[[Compute], Time]:
    """Returns ``of_move``, the time of a move, with each time multiplied by ``share``: as on a faster link."""
    return lambda move: of_move(move) * share


def _offloaded(header: Header, lane: Sequence[Operation], launches: Sequence[MoveLaunch]) -> Iterator[Operation]:
    """Yields the operations of a lane with its moves, each before the operation whose number is the launch's place."""
    before = {place: list(several) for place, several in groupby(launches, attrgetter("place"))}
    for place in range(len(lane) + 1):
        for launch in before.get(place, ()):
            micros = moved(launch.operation.micros, launch.turns * header.period)
            yield replace(launch.operation, micros=micros)
        yield from lane[place : place + 1]
