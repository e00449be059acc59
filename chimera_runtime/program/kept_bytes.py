"""Computes the bytes that a worker keeps at a moment of the schedule, for the compiler and for train.py.

The compiler has the sizes of a micro-batch from a profile; train.py, with ``--memory-limit``, from the first
micro-batch.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, starmap
from typing import NamedTuple

from chimera_runtime.program.rank_facts import HostedMicros, KeptMicros


class MovedBytes(NamedTuple):
    """Bytes of a micro-batch that move to the host: its ``activations``, or its ``operands`` between the two halves."""

    activations: int
    operands: int = 0


class MicroBatchBytes(NamedTuple):
    """Bytes that a stage keeps of a micro-batch.

    ``activations`` are kept until the backward, ``input`` alone if the stage recomputes. The first half of a split
    backward frees ``released`` bytes of the activations, and leaves ``operands`` for the second half. A slice leaves
    ``carry`` for the next one, and ``carry_gradients`` for the one before. Of the activations, and of what is kept
    between the halves, ``resident`` and ``resident_operands`` bytes stay on the worker when the rest is off-loaded.
    """

    activations: int
    input: int
    released: int = 0
    operands: int = 0
    carry: int = 0
    carry_gradients: int = 0
    resident: int = 0
    resident_operands: int = 0

    @property
    def moved(self) -> MovedBytes:
        """Bytes that go to the host."""
        return MovedBytes(self.activations - self.resident, self.halfway - self.resident_operands)

    @property
    def halfway(self) -> int:
        """Bytes that are kept between the halves of a split backward."""
        return self.activations - self.released + self.operands

    @property
    def halving(self) -> int:
        """Bytes that the first half of a split backward may need while it runs, in addition to all that is kept."""
        return min(self.released, self.operands)

    def without_received(self, inputs: int, gradients: int) -> "MicroBatchBytes":
        """Returns the bytes without ``inputs`` bytes of input and ``gradients`` of gradients in receive buffers."""
        activations = max(0, self.activations - inputs)
        resident = max(0, self.resident - inputs)
        without = self._replace(
            activations=activations,
            input=max(0, self.input - inputs),
            released=min(activations, self.released),
            operands=max(0, self.operands - gradients),
            resident=min(activations, resident),
        )
        return without._replace(resident_operands=max(0, without.halfway - self.moved.operands))


def kept_bytes(moment: Iterable[Sequence[int]], sizes: Callable[[int], MicroBatchBytes], parts: int = 1) -> int:
    """Returns the bytes of activations that a worker keeps at a moment of the schedule.

    ``moment`` has for each stage the numbers of `KeptMicros`, in ``parts`` of micro-batches; ``sizes`` returns the
    bytes of a whole micro-batch on a stage. If a stage has micro-batches between the halves of their backward, the
    moment may be within a first half: then both what this half has made and what it is about to free are in memory.
    """
    total = halving = 0
    for stage, activations, inputs, begun, carries, carry_gradients, *on_host in starmap(KeptMicros, moment):
        of_stage = sizes(stage)
        resident = of_stage.resident, of_stage.resident_operands
        total += sum(share(count, size, parts) for count, size in zip(on_host, resident, strict=True))
        total += share(carries, of_stage.carry, parts) + share(carry_gradients, of_stage.carry_gradients, parts)
        total += share(activations, of_stage.activations, parts) + share(inputs, of_stage.input, parts)
        if begun:
            total += share(begun, of_stage.halfway, parts)
            halving = max(halving, of_stage.halving)
    return total + halving


def hosted_bytes(moment: Iterable[Sequence[int]], sizes: Callable[[int], MovedBytes], parts: int = 1) -> int:
    """Returns the bytes on the host at a moment of the schedule, as `kept_bytes` from the numbers of `HostedMicros`."""
    return sum(
        share(count, size, parts)
        for stage, *counts in starmap(HostedMicros, moment)
        for count, size in zip(counts, sizes(stage), strict=True)
    )


def share(count: int, size: int, parts: int) -> int:
    """Returns the bytes of ``count`` parts of micro-batches, rounded up; ``size`` is the bytes of ``parts`` parts."""
    return -(-count * size // parts)


def on_other_workers(
    neighbours: Iterable[int], stage: int, worker: int, placement: Iterable[Sequence[int]]
) -> list[int]:
    """Returns the ``neighbours`` of a stage whose values ``worker`` must receive from other workers.

    They are on another worker in each pipe of ``placement`` in which ``worker`` holds the stage.
    """
    here = [pipe for pipe in placement if pipe[stage] == worker]
    return [neighbour for neighbour in neighbours if not any(pipe[neighbour] == worker for pipe in here)]


def largest_mean(sizes: Sequence[int], lengths: Sequence[int]) -> int:
    """Returns the largest mean of the first k ``sizes`` of slices, for any k. With ``lengths`` a mean is bytes per
    length, times the length of the whole micro-batch.
    """
    whole, counts = sum(lengths) or 1, lengths or (1,) * len(sizes)
    sums = accumulate(sizes)
    return max(-(-total * whole // count) for count, total in zip(accumulate(counts), sums, strict=True))
