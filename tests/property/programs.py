"""Plans to test with: random ones, and the schemes of the paper, without the language."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import networkx as nx
from hypothesis import strategies as st

from chimera_ir.ir.graph import Absence, Feed, NamedStages
from chimera_ir.ir.kinds import BACKWARD, FORWARD, INPUT_GRADIENT
from chimera_ir.ir.levels import Header, Pipe, Plan
from chimera_ir.ir.ops import Clock, Compute, Micro, Planned, Stage, WeightGroup, Worker
from chimera_ir.source import Span


def one_direction(depth: int, micro_batches: int) -> Plan:
    """1F1B with a flush: F(m, s) @ 2m + s, B(m, s) @ 2m + 2D-1 - s."""
    return _clocked([(list(range(depth)), list(range(micro_batches)))], depth)


def two_directions(depth: int, micro_batches: int) -> Plan:
    """The same clock in both directions over the same workers (section 3.1), D/2 of every D micro-batches in each."""
    half = depth // 2
    down = [m for m in range(micro_batches) if m % depth < half]
    up = [m for m in range(micro_batches) if m % depth >= half]
    return _clocked([(list(range(depth)), down), (list(reversed(range(depth))), up)], half)


def _clocked(pipes: list[tuple[list[int], list[int]]], unit: int) -> Plan:
    depth = len(pipes[0][0])
    micro_batches = sum(len(micros) for _, micros in pipes)
    header = _header(depth, depth, [(placement, micros) for placement, micros in pipes], micro_batches)
    planned = []
    for pipe in header.pipes:
        for index, micro in enumerate(pipe.micros):
            start = 2 * (index % unit) + 2 * depth * (index // unit) if len(pipes) > 1 else 2 * index
            for s, worker in enumerate(pipe.workers):
                planned.append(Planned(Clock(start + s), worker, Compute(FORWARD, (micro,), Stage(s))))
                planned.append(Planned(Clock(start + 2 * depth - 1 - s), worker, Compute(BACKWARD, (micro,), Stage(s))))
    return Plan(header, tuple(planned))


def _header(workers: int, stages: int, pipes: Iterable[tuple[list[int], list[int]]], micro_batches: int) -> Header:
    return Header(
        scheme="test",
        parameters=(("D", stages), ("N", micro_batches)),
        workers=workers,
        stages=stages,
        micro_batches=micro_batches,
        pipes=tuple(
            Pipe(f"pipe[{i}]", tuple(Worker(w) for w in placement), tuple(Micro(m) for m in micros))
            for i, (placement, micros) in enumerate(pipes)
        ),
    )


def random_plan(seed: int, trouble: float) -> Plan:
    """Random pipes on random workers, with clocks that run along the data; a share of them moved at random."""
    rng = random.Random(seed)
    workers, stages, micro_batches = rng.randint(1, 4), rng.randint(1, 4), rng.randint(1, 5)
    micros = rng.sample(range(micro_batches), micro_batches)
    parts: list[list[int]] = [[] for _ in range(rng.randint(1, 3))]
    for micro in micros:
        rng.choice(parts).append(micro)
    header = _header(
        workers, stages, [([rng.randrange(workers) for _ in range(stages)], part) for part in parts], micro_batches
    )
    halves = micro_batches % 2 == 0 and rng.random() < 0.3
    header = replace(header, pipes=tuple(_recomputing(pipe, rng) for pipe in header.pipes), halves=halves)
    forwards, backwards = _groups(header, rng), _groups(header, rng)
    if all(len(group) == 1 for group in (*forwards, *backwards)):
        header = replace(header, pipes=tuple(map(_recomputing_some, header.pipes)))
    clock = 0
    planned = []
    ready: list[Compute] = [Compute(FORWARD, group, Stage(0)) for group in forwards]
    done: set[Micro] = set()
    while ready:
        operation = ready.pop(rng.randrange(len(ready)))
        group, stage = operation.micros, operation.stage
        late = rng.randrange(-30, 30) if rng.random() < trouble else 0
        origin = Span(10 * len(planned), 10 * len(planned) + 5)
        where = header.worker(group[0], stage)
        planned.append(Planned(Clock(clock + late), where, Compute(operation.kind, group, stage, origin)))
        clock += rng.randint(1, 2)
        if operation.kind is BACKWARD:
            ready += [Compute(BACKWARD, group, Stage(stage - 1))] if stage > 0 else []
        elif stage < stages - 1:
            ready.append(Compute(FORWARD, group, Stage(stage + 1)))
        else:
            before, done = done, done | set(group)
            ready += [
                Compute(BACKWARD, each, stage) for each in backwards if set(each) <= done and not set(each) <= before
            ]
    rng.shuffle(planned)
    return Plan(replace(header, ties=random_ties(rng, range(stages))), tuple(planned))


def random_ties(rng: random.Random, stages: Sequence[int]) -> tuple[WeightGroup, ...]:
    """No ties as often as some, of random stages."""
    most = rng.choice([0, 0, 1, 2]) if len(stages) > 1 else 0
    return tuple(
        sorted({tuple(map(Stage, sorted(rng.sample(stages, rng.randint(2, len(stages)))))) for _ in range(most)})
    )


def with_ties(plan: Plan, *ties: tuple[int, ...]) -> Plan:
    """The plan of a model whose stages share parameters."""
    return replace(plan, header=replace(plan.header, ties=tuple(tuple(map(Stage, tie)) for tie in ties)))


def with_frozen(plan: Plan, *frozen: int) -> Plan:
    """The plan of a model with frozen stages, and without the operations that these lack.

    Trained stages, and all stages behind them, make gradients of their inputs. What is tied to a frozen stage is tied
    no more.
    """
    backs = {*range(plan.header.stages)} - {*frozen}
    for stage, before in enumerate(plan.header.feeding):
        backs |= {stage} if backs & {*before} else set()
    kept = []
    for planned in plan.operations:
        operation = planned.operation
        if operation.stage not in backs and not operation.kind.opens:
            continue
        if operation.stage in frozen and operation.kind is BACKWARD:
            planned = planned._replace(operation=replace(operation, kind=INPUT_GRADIENT))
        kept.append(planned)
    pipes = (
        replace(
            pipe,
            recompute=tuple(stage for stage in pipe.recompute if stage in backs),
            recomputed=tuple(some for some in pipe.recomputed if some[0] in backs),
        )
        for pipe in plan.header.pipes
    )
    ties = tuple(tie for tie in plan.header.ties if not {*frozen} & {*tie})
    header = replace(plan.header, frozen=tuple(map(Stage, sorted(frozen))), pipes=tuple(pipes), ties=ties)
    return replace(plan, header=header, operations=tuple(kept))


def random_graph(seed: int) -> Plan:
    """Random pipes of a model that is no chain: groups of stages, with random edges that connect all of them."""
    rng = random.Random(seed)
    workers, stages, micro_batches = rng.randint(1, 4), rng.randint(2, 6), rng.randint(1, 4)
    parts: list[list[int]] = [[] for _ in range(rng.randint(1, 2))]
    for micro in range(micro_batches):
        rng.choice(parts).append(micro)
    placed = [([rng.randrange(workers) for _ in range(stages)], part) for part in parts]
    starts = sorted({0, *(s for s in range(1, stages) if rng.random() < 0.5)})
    named = tuple(
        NamedStages(f"g{start}", Stage(start), Stage(stop))
        for start, stop in zip(starts, [*starts[1:], stages], strict=True)
    )
    inside = {(s - 1, s) for s in range(1, stages) if s not in starts}
    feeds: set[tuple[int, int]] = set()
    while not (feeds and nx.is_connected(nx.Graph([*inside, *feeds, *((s, s) for s in range(stages))]))):
        source, target = sorted(rng.sample(range(stages), 2))
        feeds |= {(source, target)} - inside
        if len(inside) == stages - 1 and stages == 2:  # a chain of two has no further edge
            return random_graph(seed + 100_000)
    header = _header(workers, stages, placed, micro_batches)
    edges = tuple(Feed(Stage(s), Stage(t), "") for s, t in rng.sample(sorted(feeds), len(feeds)))
    header = replace(header, named=named, feeds=edges, pipes=tuple(_recomputing(pipe, rng) for pipe in header.pipes))
    return Plan(header, tuple(_in_some_order(header, _blocks(header, rng), inside | feeds, rng)))


def _blocks(header: Header, rng: random.Random) -> list[Compute]:
    """A forward and a backward of each micro-batch on each stage; a group takes some together, or one by one."""
    together, wide = _groups(header, rng), rng.random() < 0.5
    single = [(micro,) for group in together for micro in group]
    computes = []
    for _, start, stop in header.named:
        for kind in (FORWARD, BACKWARD):
            blocks = together if wide and rng.random() < 0.5 else single
            computes += [Compute(kind, block, Stage(stage)) for block in blocks for stage in range(start, stop)]
    return computes


def with_absent(plan: Plan, seed: int) -> Plan:
    """The plan without some micro-batches on some groups, so that what a stage makes is still read by one.

    Micro-batches that share an operation with others stay.
    """
    rng, header = random.Random(seed), plan.header
    alone = list(range(header.micro_batches))
    for planned in plan.operations:
        if len(planned.operation.micros) > 1:
            alone = [m for m in alone if m not in planned.operation.micros]
    absent: dict[str, list[Micro]] = {}
    for micro in map(Micro, alone):
        for group in rng.sample(header.named, rng.randint(0, len(header.named) - 1)):
            absent.setdefault(group.name, []).append(micro)
            lacking = {
                (s, m) for name, start, stop in header.named for m in absent.get(name, ()) for s in range(start, stop)
            }
            has = [s for s in range(header.stages) if (s, micro) not in lacking]
            if not has or any(header.fed[s] and not {*header.fed[s]} & {*has} for s in has):
                absent[group.name].pop()
    listed = tuple(Absence(group.name, tuple(absent[group.name])) for group in header.named if absent.get(group.name))
    header = replace(header, absent=listed)
    kept = tuple(p for p in plan.operations if header.has(p.operation.micros[0], p.operation.stage))
    return replace(plan, header=header, operations=kept)


def _in_some_order(
    header: Header, left: list[Compute], edges: set[tuple[int, int]], rng: random.Random
) -> Iterator[Planned]:
    """All forwards and backwards, in a random order along the edges."""
    done: set[tuple[object, Micro, int]] = set()
    clock = 0
    while left:
        ready = [each for each in left if all(need in done for need in _needs(each, edges))]
        operation = rng.choice(ready)
        left.remove(operation)
        done |= {(operation.kind, micro, operation.stage) for micro in operation.micros}
        worker = header.worker(operation.micros[0], operation.stage)
        origin = Span(10 * clock, 10 * clock + 5)
        yield Planned(Clock(clock), worker, replace(operation, origin=origin))
        clock += 1


def _needs(operation: Compute, edges: set[tuple[int, int]]) -> Iterator[tuple[object, Micro, int]]:
    forward = operation.kind is FORWARD
    for micro in operation.micros:
        for source, target in edges:
            if operation.stage == (target if forward else source):
                yield operation.kind, micro, source if forward else target
        if not forward:
            yield FORWARD, micro, operation.stage


def _recomputing(pipe: Pipe, rng: random.Random) -> Pipe:
    share = rng.choice([0.0, 0.0, 0.5, 1.0])
    return replace(pipe, recompute=tuple(Stage(s) for s in range(len(pipe.workers)) if rng.random() < share))


def _recomputing_some(pipe: Pipe) -> Pipe:
    """A pipe whose odd stages recompute every second micro-batch alone, if they recompute."""
    some = pipe.micros[::2]
    stages = pipe.recompute if len(some) < len(pipe.micros) else ()
    return replace(pipe, recomputed=tuple((stage, some) for stage in stages if stage % 2))


def _groups(header: Header, rng: random.Random) -> list[tuple[Micro, ...]]:
    """The micro-batches of every pipe, often one by one, sometimes several in an operation."""
    most = rng.choice([1, 1, 2, 3])
    groups: list[tuple[Micro, ...]] = []
    for pipe in header.pipes:
        left = list(pipe.micros)
        while left:
            size = rng.randint(1, most)
            groups.append(tuple(left[:size]))
            left = left[size:]
    return groups


def doubled(depth: int, units: int) -> Plan:
    """Section 3.5, forward doubling: two directions, forwards over two micro-batches, backwards over one."""
    half, unit = depth // 2, 2 * depth
    down = [m for m in range(units * unit) if m % unit < depth]
    up = [m for m in range(units * unit) if m % unit >= depth]
    placements = [list(range(depth)), list(reversed(range(depth)))]
    header = _header(depth, depth, zip(placements, [down, up], strict=True), units * unit)
    planned = []
    for pipe in header.pipes:
        for index in range(0, len(pipe.micros), 2):
            start = 4 * (index // 2 % half) + 4 * depth * (index // 2 // half)
            pair = pipe.micros[index : index + 2]
            for s, worker in enumerate(pipe.workers):
                planned.append(Planned(Clock(start + 2 * s), worker, Compute(FORWARD, pair, Stage(s))))
                for i, micro in enumerate(pair):
                    clock = Clock(start + 4 * depth - 2 - 2 * s + i)
                    planned.append(Planned(clock, worker, Compute(BACKWARD, (micro,), Stage(s))))
    return Plan(header, tuple(planned))


plans = st.builds(random_plan, st.integers(0, 2**32), st.sampled_from([0.0, 0.0, 0.05, 0.3]))
"""Random plans: many that can run, some whose clocks contradict the data."""
