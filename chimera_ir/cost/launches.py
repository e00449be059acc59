"""The launches of gradient sums and the steps of each worker, and the free time for the sums (sections 3.2, 3.4)."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace

from chimera_ir.cost.simulate import Launched, Stepped, Timed, Timeline, occupying
from chimera_ir.cost.window import steady_window
from chimera_ir.ir.ids import WeightGroup, Worker
from chimera_ir.ir.lane_parts import LaneParts
from chimera_ir.ir.levels import Program
from chimera_ir.ir.ops import AllReduce, Step, WaitAllReduce

LaunchPlaces = Sequence[Sequence[tuple[int, WeightGroup]]]
"""Launches by worker, in order: the number of operations that run before the launch, and the group that is summed."""


def launches(program: Program, timeline: Timeline) -> tuple[Launched, ...]:
    """The launches of gradient sums, worker by worker in the order of the lanes, with their times in the timeline.

    For a stream these are only the launches in a stretch of the steady state (`steady_window`); there are none if the
    timeline shows no such stretch.
    """
    all_launches = tuple(_launches(program, timeline))
    if not program.header.asynchronous:
        return all_launches
    window = steady_window(timeline)
    if window is None:
        return ()
    start, end = window.start * timeline.tick, window.end * timeline.tick
    return tuple(launched for launched in all_launches if start < launched.at <= end)


def launch_places(program: Program) -> LaunchPlaces:
    """The launches of each worker in the order of its lane.

    A launch is a pair: the number of compute operations before it in the lane, and its weight group.
    """
    return [
        [(done, instruction.group) for done, instruction in _after(parts) if isinstance(instruction, AllReduce)]
        for parts in program.parts
    ]


def steps(program: Program, timeline: Timeline) -> tuple[Stepped, ...]:
    """All steps of a stream, worker by worker, each at the end of the operation before the step."""
    return tuple(
        Stepped(Worker(worker), instruction.group, instruction.version, _end(timed, done) * timeline.tick)
        for worker, (parts, timed) in enumerate(zip(program.parts, timeline.lanes, strict=True))
        for done, instruction in _after(parts)
        if isinstance(instruction, Step) and instruction.version is not None
    )


def with_events(timeline: Timeline, program: Program) -> Timeline:
    """Returns the timeline with the events that a picture marks: launches of sums or, without a flush, steps."""
    events = steps if program.header.steps_inside else launches
    return replace(timeline, events=events(program, timeline))


def _launches(program: Program, timeline: Timeline) -> Iterator[Launched]:
    for worker, (parts, timed) in enumerate(zip(program.parts, timeline.lanes, strict=True)):
        lines = list(_after(parts))
        waits = {
            (instruction.group, instruction.version): done
            for done, instruction in lines
            if isinstance(instruction, WaitAllReduce)
        }
        for done, instruction in lines:
            if isinstance(instruction, AllReduce):
                waited = waits[instruction.group, instruction.version]
                yield _launched(Worker(worker), instruction.group, timed, done, waited, timeline)


def _after(parts: LaneParts) -> Iterator[tuple[int, AllReduce | WaitAllReduce | Step]]:
    """Yields the launches, waits for sums and steps of a lane, each with the number of compute operations before it."""
    for place, instruction in parts.updates:
        if isinstance(instruction, AllReduce | WaitAllReduce | Step):
            yield bisect_left(parts.computes.places, place), instruction


def _launched(
    worker: Worker, group: WeightGroup, timed: tuple[Timed, ...], done: int, waited: int, timeline: Timeline
) -> Launched:
    """Makes the `Launched` of a sum that comes after the first ``done`` operations of the lane ``timed``.

    The worker waits for the sum after the first ``waited`` operations of the lane.
    """
    header, at, last = timeline.header, _end(timed, done), _end(timed, len(timed))
    until = timed[waited].start if waited < len(timed) else last
    busy = sum(interval.end - interval.start for interval in occupying(header, timed[done:waited]))
    flush = 0 if waited < len(timed) or header.steps_inside else timeline.span - last
    return Launched(
        worker=worker,
        group=group,
        strategy=header.strategy(group),
        at=at * timeline.tick,
        free=(until - at - busy) * timeline.tick,
        flush=flush * timeline.tick,
    )


def _end(timed: tuple[Timed, ...], done: int) -> int:
    """The tick at which the first ``done`` operations of lane ``timed`` are over; 0 if ``done`` is 0."""
    return timed[done - 1].end if done else 0
