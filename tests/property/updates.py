"""Asynchronous schedules with where their updates belong, without the language and the compiler's own placement.

A lane's order is that of its clocks over all integer micro-batches. Sums, steps, stashes and drops are placed in that
endless lane as docs/ir.md says; then what is about no micro-batch and no update of the instance is left out.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from chimera_ir.ir.ids import Micro, Stage, Version, Worker
from chimera_ir.ir.levels import Header, Pipe, Program, Schedule
from chimera_ir.ir.ops import (
    AllReduce,
    Backward,
    Compute,
    Drop,
    Forward,
    Instruction,
    Stash,
    Step,
    WaitAllReduce,
)
from chimera_ir.lower.lower import lower


class Stream(NamedTuple):
    """A scheme whose micro-batches stream: ``places[p][s]`` is the worker of stage s in pipe p.

    Micro-batch m takes pipe ``m % len(places)``; its operations on stage s have the clocks ``forward(j, s)`` and
    ``backward(j, s)``, j its number within the pipe, and read the version ``reads(m, s)``, or 0 if that is less.
    """

    places: list[list[int]]
    per_update: int
    forward: Callable[[int, int], int]
    backward: Callable[[int, int], int]
    reads: Callable[[int, int], int]


def every_one(depth: int) -> Stream:
    """An update after every micro-batch; the weights of a forward wait for its backward."""
    return _one_way(depth, 1, lambda m, s: m - (depth - 1 - s))


def double_buffered(depth: int, per_update: int) -> Stream:
    """An update every N >= D micro-batches, which read the version before the newest."""
    return _one_way(depth, per_update, lambda m, s: m // per_update - 1)


def both_ways(per_update: int) -> Stream:
    """Two stages on two workers, a pipe in each direction: every sum has two members, and no worker is ever idle."""
    return Stream(
        [[0, 1], [1, 0]],
        per_update,
        lambda j, s: 4 * j + s,
        lambda j, s: 4 * j + 3 - s,
        lambda m, s: m // per_update - 1,
    )


def _one_way(depth: int, per_update: int, reads: Callable[[int, int], int]) -> Stream:
    clocks = (lambda j, s: 2 * j + s, lambda j, s: 2 * j + 2 * depth - 1 - s)
    return Stream([list(range(depth))], per_update, *clocks, reads)


def instance(stream: Stream, updates: int) -> Program:
    """The program of the first updates, as the compiler lowers it."""
    return lower(schedule(stream, updates))


def schedule(stream: Stream, updates: int) -> Schedule:
    """The schedule of the first updates."""
    micros, pipes, depth = updates * stream.per_update, len(stream.places), len(stream.places[0])
    header = Header(
        scheme="stream",
        parameters=(),
        workers=depth,
        stages=depth,
        micro_batches=micros,
        pipes=tuple(
            Pipe(f"pipe[{p}]", tuple(map(Worker, place)), tuple(map(Micro, range(p, micros, pipes))))
            for p, place in enumerate(stream.places)
        ),
        updates=updates,
        period=stream.per_update,
    )
    lanes = (_endless(stream, updates, worker) for worker in range(depth))
    return Schedule(header, tuple(tuple(_computes(stream, lane, micros)) for lane in lanes))


def synchronised(stream: Stream, updates: int) -> tuple[tuple[Instruction, ...], ...]:
    """The lanes of the first updates, without messages."""
    return tuple(tuple(_lane(stream, updates, worker)) for worker in range(len(stream.places[0])))


class _Endless(NamedTuple):
    """An operation of the endless lane."""

    clock: int
    micro: int
    stage: int
    backward: bool


def _endless(stream: Stream, updates: int, worker: int) -> list[_Endless]:
    pipes, depth, margin = len(stream.places), len(stream.places[0]), 2 * stream.per_update * len(stream.places[0]) + 2
    return sorted(
        _Endless(clock(m // pipes, s), m, s, backward)
        for m in range(-margin, updates * stream.per_update + margin)
        for s in range(depth)
        if stream.places[m % pipes][s] == worker
        for backward, clock in ((False, stream.forward), (True, stream.backward))
    )


def _computes(stream: Stream, lane: list[_Endless], micros: int) -> Iterator[Compute]:
    for each in lane:
        if 0 <= each.micro < micros:
            kind = Backward if each.backward else Forward
            version = Version(max(0, stream.reads(each.micro, each.stage)))
            yield kind((Micro(each.micro),), Stage(each.stage), version=version)


def _lane(stream: Stream, updates: int, worker: int) -> Iterator[Instruction]:
    endless = _endless(stream, updates, worker)
    before, after = _placed(stream, updates, endless)
    for index, each in enumerate(endless):
        yield from before[index]
        yield from _computes(stream, [each], updates * stream.per_update)
        yield from after[index]


def _placed(
    stream: Stream, updates: int, endless: list[_Endless]
) -> tuple[dict[int, list[Instruction]], dict[int, list[Instruction]]]:
    """What stands right before and right after each operation of the endless lane."""
    before: dict[int, list[Instruction]] = defaultdict(list)
    after: dict[int, list[Instruction]] = defaultdict(list)
    for stage in sorted({Stage(each.stage) for each in endless}):
        here = [(index, each) for index, each in enumerate(endless) if each.stage == stage]
        for k in range(updates):
            made, old = Version(k + 1), Version(k)
            last = max(i for i, each in here if each.backward and each.micro // stream.per_update == k)
            readers = [i for i, each in here if stream.reads(each.micro, stage) == k]
            use = min(
                i
                for i, each in here
                if stream.reads(each.micro, stage) == made or (each.backward and each.micro // stream.per_update > k)
            )
            stashed = max(readers) >= use
            after[last].append(AllReduce(stage, version=made))
            before[use] += [WaitAllReduce(stage, version=made), *([Stash(stage, old)] if stashed else [])]
            before[use].append(Step(stage, version=made))
            after[max(readers)] += [Drop(stage, old)] if stashed else []
    return before, after
