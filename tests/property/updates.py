"""Asynchronous schedules with where their updates belong, without the language and the compiler's own placement.

A lane's order is that of its clocks over all integer micro-batches. Sums, steps, stashes and drops are placed in that
endless lane as docs/reference/ir.md says; then what is about no micro-batch and no update of the instance is left out.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from math import lcm
from typing import NamedTuple

from chimera_ir.ir.kinds import BACKWARD, FORWARD
from chimera_ir.ir.levels import Header, Pipe, Program, Schedule
from chimera_ir.ir.ops import (
    AllReduce,
    Compute,
    Drop,
    Instruction,
    Micro,
    Stage,
    Stash,
    Step,
    Version,
    WaitAllReduce,
    WeightGroup,
    Worker,
)
from chimera_ir.ir.streams import ProgramStream, stream_of
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
    ties: tuple[WeightGroup, ...] = ()

    @property
    def groups(self) -> tuple[WeightGroup, ...]:
        """Each stage by itself, then the ties."""
        return (*((Stage(s),) for s in range(len(self.places[0]))), *self.ties)


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


def in_turns(workers: int, late: int) -> Stream:
    """A whole model on every worker, each of which makes every so manieth update alone; it reads what is so late."""
    return Stream(
        [[worker] for worker in range(workers)], 1, lambda j, s: 2 * j, lambda j, s: 2 * j + 1, lambda m, s: m - late
    )


def _one_way(depth: int, per_update: int, reads: Callable[[int, int], int]) -> Stream:
    clocks = (lambda j, s: 2 * j + s, lambda j, s: 2 * j + 2 * depth - 1 - s)
    return Stream([list(range(depth))], per_update, *clocks, reads)


def level(stream: Stream) -> ProgramStream:
    """The program without end, as the compiler lowers it."""
    depth, pipes = len(stream.places[0]), len(stream.places)
    turns = 4 * depth + 4 * pipes + 7
    return lower(stream_of(schedule(stream, turns * lcm(stream.per_update, pipes) // stream.per_update)))


def instance(stream: Stream, updates: int) -> Program:
    """The program of the first updates."""
    return level(stream).view(updates)


def schedule(stream: Stream, updates: int) -> Schedule:
    """The schedule of the first updates."""
    micros, pipes, depth = updates * stream.per_update, len(stream.places), len(stream.places[0])
    workers = _workers(stream)
    header = Header(
        scheme="stream",
        parameters=(),
        workers=workers,
        stages=depth,
        micro_batches=micros,
        pipes=tuple(
            Pipe(f"pipe[{p}]", tuple(map(Worker, place)), tuple(map(Micro, range(p, micros, pipes))))
            for p, place in enumerate(stream.places)
        ),
        updates=updates,
        period=lcm(stream.per_update, pipes),
        ties=stream.ties,
    )
    lanes = (_endless(stream, updates, worker) for worker in range(workers))
    return Schedule(header, tuple(tuple(_computes(stream, lane, micros)) for lane in lanes))


def synchronised(stream: Stream, updates: int) -> tuple[tuple[Instruction, ...], ...]:
    """The lanes of the first updates, without messages."""
    return tuple(tuple(_lane(stream, updates, worker)) for worker in range(_workers(stream)))


def _workers(stream: Stream) -> int:
    return 1 + max(worker for place in stream.places for worker in place)


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
            kind = BACKWARD if each.backward else FORWARD
            version = Version(max(0, stream.reads(each.micro, each.stage)))
            yield Compute(kind, (Micro(each.micro),), Stage(each.stage), version=version)


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
    for group in stream.groups:
        here = [(index, each) for index, each in enumerate(endless) if each.stage in group]
        if not here:
            continue
        for k in range(-1, updates):
            made, old = Version(k + 1), Version(k)
            added, next_added = (
                [i for i, each in here if each.backward and each.micro // stream.per_update == number]
                for number in (k, k + 1)
            )
            readers = [i for i, each in here if stream.reads(each.micro, each.stage) == k]
            use = min(i for i, each in here if _uses(stream, each, k))
            if not next_added:
                settled = _behind_sum(stream, updates, group, k)
                use = min(use, next(i for i, each in enumerate(endless) if each in settled))
            stashed = max(readers, default=-1) >= use
            if k >= 0:
                if added:
                    after[max(added)].append(AllReduce(group, version=made))
                before[use] += [WaitAllReduce(group, version=made), *([Stash(group, old)] if stashed else [])]
                before[use].append(Step(group, version=made))
                after[max(readers, default=-1)] += [Drop(group, old)] if stashed else []
            if not next_added and k + 1 < updates:
                before[use].append(AllReduce(group, version=Version(made + 1)))
    return before, after


def _uses(stream: Stream, each: _Endless, update: int) -> bool:
    """Whether an operation needs the step of an update of its stage, or its memory for gradients."""
    newer = each.backward and each.micro // stream.per_update > update
    return newer or stream.reads(each.micro, each.stage) > update


def _behind_sum(stream: Stream, updates: int, group: WeightGroup, update: int) -> set[_Endless]:
    """All operations that come after the sum of an update: by data, by their place in a lane, or by another sum."""
    lanes = [_endless(stream, updates, worker) for worker in range(_workers(stream))]
    operations = {(each.micro, each.stage, each.backward): each for lane in lanes for each in lane}
    following = dict(pair for lane in lanes for pair in pairwise(lane))
    last = len(stream.places[0]) - 1

    def behind(group: WeightGroup, update: int) -> list[_Endless]:
        return [each for each in operations.values() if each.stage in group and _uses(stream, each, update)]

    todo, seen = behind(group, update), set[_Endless]()
    while todo:
        each = todo.pop()
        if each in seen:
            continue
        seen.add(each)
        todo += [following[each]] if each in following else []
        forward = (each.micro, each.stage + 1, False) if each.stage < last else (each.micro, last, True)
        data = [(each.micro, each.stage - 1, True)] if each.backward else [forward, (each.micro, each.stage, True)]
        todo += [operations[key] for key in data if key in operations]
        update = each.micro // stream.per_update
        todo += [one for g in stream.groups if each.stage in g and each.backward for one in behind(g, update)]
    return seen
