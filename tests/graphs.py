"""Plans for models that are no chain: groups of stages with names, and edges between them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

Groups = Mapping[str, int]
"""The number of stages of each group."""


class Edge(NamedTuple):
    """An edge from a stage to another; ``keyword`` is the name of the argument, if it has one."""

    source: int
    target: int
    keyword: str = ""


def named(groups: Groups) -> str:
    """The line of a header that names the groups."""
    runs, start = [], 0
    for name, size in groups.items():
        runs.append(f"{name} {start}..{start + size}")
        start += size
    return f"named {' '.join(runs)}"


def edges_of(groups: Groups, feeds: Sequence[Edge]) -> list[Edge]:
    """All edges: those inside groups, then ``feeds``."""
    inside, start = list[Edge](), 0
    for size in groups.values():
        inside += [Edge(stage, stage + 1) for stage in range(start, start + size - 1)]
        start += size
    return [*inside, *feeds]


Operation = tuple[str, int, int]
"""Kind, number of the first micro-batch, and stage."""


def operations(
    stages: int,
    edges: Sequence[Edge],
    micro_batches: int,
    *,
    split: Sequence[int] = (),
    frozen: Sequence[int] = (),
    slices: int = 1,
    together: Sequence[int] = (),
    lacks: Callable[[int, int], bool] = lambda _micro, _stage: False,
) -> dict[Operation, list[Operation]]:
    """The operations, each with those that it waits for; micro-batches are counted in ``slices``. An operation of a
    stage has so many micro-batches ``together``, by default one, and its number is that of the first. ``lacks`` says
    which stages have none for a micro-batch.
    """
    backing = set[int]()
    for stage in range(stages):
        if stage not in frozen or any(edge.target == stage and edge.source in backing for edge in edges):
            backing.add(stage)
    letters = {stage: "I" if stage in split or stage in frozen else "B" for stage in backing}
    sizes = together or (1,) * stages

    def of(letter: str, stage: int, micros: range) -> list[Operation]:
        """The operations of a stage on these micro-batches."""
        size = sizes[stage]
        return [(letter, first, stage) for first in dict.fromkeys(micro // size * size for micro in micros)]

    waits: dict[Operation, list[Operation]] = {}
    for stage in range(stages):
        for micro in range(0, micro_batches, sizes[stage]):
            block = range(micro, micro + sizes[stage])
            before = [("F", micro - 1, stage)] if micro % slices else []
            fed_by = [each for edge in edges if edge.target == stage for each in of("F", edge.source, block)]
            waits["F", micro, stage] = [*before, *fed_by]
            if (letter := letters.get(stage)) is None:
                continue
            after = [(letter, micro + 1, stage)] if (micro + 1) % slices else []
            feeds = [
                each for edge in edges if edge.source == stage for each in of(letters[edge.target], edge.target, block)
            ]
            waits[letter, micro, stage] = [("F", micro, stage), *after, *feeds]
            if stage in split and stage not in frozen:
                waits["W", micro, stage] = [(letter, micro, stage)]
    return {
        operation: [other for other in before if not lacks(*other[1:])]
        for operation, before in waits.items()
        if not lacks(*operation[1:])
    }


def clocks(
    waits: Mapping[Operation, Sequence[Operation]], worker_of: Callable[[Operation], int]
) -> dict[Operation, int]:
    """A clock for each operation: a worker runs one that is ready at a time, backwards first, in the order of
    micro-batches.
    """
    clock_of: dict[Operation, int] = {}
    clock = 0
    while len(clock_of) < len(waits):
        busy = dict[int, Operation]()
        for operation in sorted(waits, key=lambda each: ("IBWF".index(each[0]), each[1:])):
            worker = worker_of(operation)
            is_ready = all(clock_of.get(before, clock) < clock for before in waits[operation])
            if operation not in clock_of and is_ready and worker not in busy:
                busy[worker] = operation
        clock_of.update(dict.fromkeys(busy.values(), clock))
        clock += 1
    return clock_of


def plan(
    groups: Groups,
    feeds: Sequence[Edge],
    micro_batches: int,
    on: Sequence[Sequence[int]] | None = None,
    *,
    split: Sequence[int] = (),
    frozen: Sequence[int] = (),
    recompute: Sequence[int] = (),
    together: int | Sequence[int] = 1,
    lengths: Sequence[int] = (1,),
    tied: Sequence[int] = (),
    absent: Mapping[str, Sequence[int]] = MappingProxyType({}),
    name: str = "graph",
) -> str:
    """The text of a plan. ``on`` has for each pipe the worker of each stage, by default one pipe with a worker for each
    stage. An operation has so many micro-batches ``together``, or of stage s ``together[s]``; the largest blocks take
    the pipes in turn. In one pipe a micro-batch may be cut into slices of relative ``lengths``. Groups have no part in
    those of the largest blocks that they are ``absent`` from.
    """
    stages, slices = sum(groups.values()), len(lengths)
    sizes = (together,) * stages if isinstance(together, int) else together
    on = [range(stages)] if on is None else on
    group_of, size = [group for group, size in groups.items() for _ in range(size)], max(sizes) * slices

    def lacks(micro: int, stage: int) -> bool:
        return micro // size in absent.get(group_of[stage], ())

    options = {"split": split, "frozen": frozen, "slices": slices, "together": sizes, "lacks": lacks}
    waits = operations(stages, edges_of(groups, feeds), micro_batches * slices, **options)

    def worker_of(operation: Operation) -> int:
        _, first, stage = operation
        return on[first // max(sizes) % len(on)][stage]

    def lines() -> Iterator[str]:
        yield f"plan {name}"
        yield f"workers {1 + max(map(max, on))}"
        yield f"stages {stages}"
        of_lengths = f" lengths {' '.join(map(str, lengths))}" if len({*lengths}) > 1 else ""
        yield f"micro_batches {micro_batches * slices}" + (f" slices {slices}{of_lengths}" if slices > 1 else "")
        if split:
            yield "kinds F I W" if len({*split, *frozen}) == stages else "kinds F B I W"
        if frozen:
            yield f"frozen {' '.join(f'{stage}..{stage + 1}' for stage in frozen)}"
        yield named(groups)
        for source, target, keyword in feeds:
            yield f"feeds s{source}->s{target}" + (f" as {keyword}" if keyword else "")
        for group, numbers in absent.items():
            yield f"absent {group} {' '.join(f'{size * number}..{size * (number + 1)}' for number in numbers)}"
        if tied:
            yield f"tied {' '.join(f's{stage}' for stage in tied)}"
        for number, workers in enumerate(on):
            starts = range(number * size, micro_batches * slices, len(on) * size)
            micros = " ".join(f"{start}..{start + size}" for start in starts)
            again = f" recompute {' '.join(f'{stage}..{stage + 1}' for stage in recompute)}" if recompute else ""
            yield f"pipe p{number} on {' '.join(map(str, workers))} micros {micros}{again}"
        yield ""
        of_clocks = clocks(waits, worker_of)
        for (letter, first, stage), clock in sorted(of_clocks.items(), key=lambda each: (each[1], each[0])):
            micros = ",".join(f"m{micro}" for micro in range(first, first + sizes[stage]))
            if slices > 1:
                micros = f"m{first // slices} q{first % slices}"
            yield f"{letter} {micros} s{stage} @ {clock} on w{worker_of((letter, first, stage))}"

    return "\n".join(lines()) + "\n"
