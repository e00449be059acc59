"""Plans whose micro-batches are cut into slices: that of Seq1F1B without the language, and random ones."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from hypothesis import strategies as st

from chimera_ir.ir.kinds import KINDS
from chimera_ir.ir.levels import Header, Pipe, Plan, normalized
from chimera_ir.ir.ops import Clock, Compute, Micro, Planned, Stage, Worker
from chimera_ir.source import Span
from tests.property.programs import random_ties

Done = tuple[str, int, int]
"""An operation by its letter, the number of its slice and its stage."""


def seq1f1b(depth: int, micro_batches: int, slices: int) -> Plan:
    """Backwards take the slices in reverse; each waits for the forward of the last slice on the last stage."""
    header = _header(depth, [list(range(depth))], [list(range(micro_batches))], slices)
    planned = []
    for m, q, s in product(range(micro_batches), range(slices), range(depth)):
        forward = 2 * (slices * m + q) + s
        backward = 2 * (slices * m + 2 * (slices - 1) - q) + 2 * depth - 1 - s
        for letter, clock in (("F", forward), ("B", backward)):
            operation = Compute(KINDS[letter], (Micro(slices * m + q),), Stage(s))
            planned.append(Planned(Clock(clock), Worker(s), operation))
    return Plan(header, tuple(planned))


def offloading(depth: int, micro_batches: int) -> Plan:
    """1F1B whose activations go to the host right after the forward, and come back a clock before the backward."""
    header = _header(depth, [list(range(depth))], [list(range(micro_batches))], 1)
    planned = []
    for m, s in product(range(micro_batches), range(depth)):
        forward, backward = 2 * m + s, 2 * m + 2 * depth - 1 - s
        moves = [("offload", forward + 1), ("reload", backward - 1)] if s < depth - 1 else []
        for letter, clock in (("F", forward), *moves, ("B", backward)):
            planned.append(Planned(Clock(clock), Worker(s), Compute(KINDS[letter], (Micro(m),), Stage(s))))
    return Plan(replace(header, moves=depth > 1), tuple(planned))


def _header(workers: int, placements: list[list[int]], micros: list[list[int]], slices: int) -> Header:
    pipes = tuple(
        Pipe(
            f"pipe[{number}]",
            tuple(map(Worker, placement)),
            tuple(Micro(slices * m + q) for m in of_pipe for q in range(slices)),
        )
        for number, (placement, of_pipe) in enumerate(zip(placements, micros, strict=True))
    )
    count = sum(len(pipe.micros) for pipe in pipes)
    return Header("sliced", (), workers, len(placements[0]), count, pipes, slices=slices)


def random_sliced_plan(seed: int, trouble: float, moving: float = 0.0) -> Plan:
    """Random pipes and slices, backwards whole or split, in a random order that the data allow.

    A share of the clocks, ``trouble``, is moved; a share of what stages keep, ``moving``, goes to the host and back, of
    activations and of operands.
    """
    rng = random.Random(seed)
    workers, stages, micro_batches, slices = (rng.randint(1, most) for most in (3, 3, 3, 3))
    parts: list[list[int]] = [[] for _ in range(rng.randint(1, 2))]
    for micro in rng.sample(range(micro_batches), micro_batches):
        rng.choice(parts).append(micro)
    header = _header(workers, [[rng.randrange(workers) for _ in range(stages)] for _ in parts], parts, slices)
    again = rng.choice([0.0, 0.0, 0.5])
    pipes = (
        replace(pipe, recompute=tuple(Stage(s) for s in range(stages) if rng.random() < again)) for pipe in header.pipes
    )
    header = replace(header, pipes=tuple(pipes), ties=random_ties(rng, range(stages)))
    split = {cell for cell in product(range(header.micro_batches), range(stages)) if rng.random() < 0.4}
    kept = [(n, s) for n, s in product(range(header.micro_batches), range(stages)) if not header.recomputes(n, s)]
    out = {cell for cell in kept if moving and rng.random() < moving}
    operands_out = {cell for cell in sorted(split) if moving and rng.random() < moving}
    header = replace(header, moves=bool(out or operands_out))
    waiting = {key: set(needs) for key, needs in _needs(header, split, out, operands_out)}
    clock, planned = 0, []
    while waiting:
        letter, number, stage = rng.choice([key for key, needs in waiting.items() if needs.isdisjoint(waiting)])
        del waiting[letter, number, stage]
        late = rng.randrange(-30, 30) if rng.random() < trouble else 0
        origin = Span(10 * len(planned), 10 * len(planned) + 5)
        operation = Compute(KINDS[letter], (Micro(number),), Stage(stage), origin)
        planned.append(Planned(Clock(clock + late), header.worker(Micro(number), Stage(stage)), operation))
        clock += rng.randint(1, 2)
    rng.shuffle(planned)
    lengths = normalized([rng.randint(1, 4) for _ in range(slices)])
    return Plan(replace(header, lengths=lengths), tuple(planned))


def _needs(
    header: Header, split: set[tuple[int, int]], out: set[tuple[int, int]], operands_out: set[tuple[int, int]]
) -> Iterator[tuple[Done, list[Done]]]:
    """Every operation with those that it waits for.

    In a cell of ``split`` the backward has two halves; what a cell of ``out`` keeps goes to the host and back, and what
    a cell of ``operands_out`` keeps between the halves.
    """

    def back(number: int, stage: int) -> Done:
        return "I" if (number, stage) in split else "B", number, stage

    last, slices = header.stages - 1, header.slices
    for n, s in product(range(header.micro_batches), range(header.stages)):
        place = n % slices
        yield ("F", n, s), [*([("F", n, s - 1)] if s else []), *([("F", n - 1, s)] if place else [])]
        later = [*([back(n, s + 1)] if s < last else []), *([back(n + 1, s)] if place < slices - 1 else [])]
        if (n, s) in out:
            yield ("offload", n, s), [("F", n, s)]
            yield ("reload", n, s), [("offload", n, s)]
        yield back(n, s), [("reload" if (n, s) in out else "F", n, s), *later]
        if (n, s) in split:
            moved = (n, s) in operands_out
            yield ("W", n, s), [("reload_operands" if moved else "I", n, s)]
            if moved:
                yield ("offload_operands", n, s), [("I", n, s)]
                yield ("reload_operands", n, s), [("offload_operands", n, s)]


moving_plans = st.builds(
    random_sliced_plan, st.integers(0, 2**32), st.sampled_from([0.0, 0.0, 0.05, 0.3]), st.sampled_from([0.3, 1.0])
)
"""Random plans with slices whose activations go to the host and back."""

sliced_plans = st.builds(random_sliced_plan, st.integers(0, 2**32), st.sampled_from([0.0, 0.0, 0.05, 0.3]))
"""Random plans with slices: many that can run, some whose clocks contradict the data."""
