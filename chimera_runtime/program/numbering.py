"""Numbering of micro-batches within updates, and the seeds that depend on it."""

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from chimera_runtime.blame import LaneOperation
from chimera_runtime.errors.data import number_cannot_be_made
from chimera_runtime.values.nested import draw_seed, draw_seeds

Micros = int | tuple[int, ...]
"""The number of a micro-batch, or the numbers of several in one operation or message."""


def numbers_of(micros: Micros) -> tuple[int, ...]:
    """Returns the numbers of the micro-batches of an operation or a message as a tuple."""
    return micros if isinstance(micros, tuple) else (micros,)


class Round(NamedTuple):
    """A run of the program for ``number`` micro-batches, of which the first is ``start`` in the update.

    A copy without micro-batches has one round of none. After the round that ``is_last`` gradients are summed.
    """

    number: int
    start: int = 0
    is_last: bool = True

    @property
    def stop(self) -> int:
        """The micro-batch of the update behind the last one of the round."""
        return self.start + self.number


def rounds_of(number: int, programs: Collection[int]) -> tuple[Round, ...]:
    """Returns the fewest rounds that make ``number`` micro-batches of those for which there are ``programs``, the
    largest first. Raises `Misuse` if none do.
    """
    numbers = _fewest(number, tuple(sorted(programs, reverse=True)))
    if numbers is None:
        raise number_cannot_be_made(number=number, programs=sorted(programs))
    starts = [sum(numbers[:place]) for place in range(len(numbers))]
    last = len(numbers) - 1
    return tuple(Round(n, start, place == last) for place, (n, start) in enumerate(zip(numbers, starts, strict=True)))


@cache
def _fewest(number: int, programs: tuple[int, ...]) -> tuple[int, ...] | None:
    """The fewest numbers among ``programs``, which descend, with the sum ``number``; of several the largest first."""
    if number in (0, *programs):
        return (number,)
    best: dict[int, tuple[int, ...]] = {0: ()}
    for total in range(1, number + 1):
        made = [(program, *best[total - program]) for program in programs if total - program in best]
        if made:
            best[total] = min(made, key=lambda numbers: (len(numbers), [-n for n in numbers]))
    return best.get(number)


@dataclass
class Numbering:
    """Numbers the micro-batches of a lane within their updates, and draws the seeds of operations from these numbers.

    ``passes`` is the largest number of micro-batches, or parts of them, of a copy in a round. The schedule repeats
    after ``cycle`` of them. ``first`` is the update whose first micro-batch has number 0 in the lane. If the update has
    several rounds, that one has number ``start`` in the update, and the round may be the last.
    """

    seed: int
    copy: int
    passes: int
    cycle: int
    first: int = 0
    slices: int = 1
    start: int = 0
    is_last_round: bool = True
    _seeds: tuple[tuple[int, int, int] | None, list[int]] = field(default=(None, []), repr=False)

    def place(self, micro: int) -> tuple[int, int]:
        """The update of a micro-batch, and the number of the micro-batch within the update."""
        later, number = divmod(micro, self.passes)
        return self.first + later, self.start + number

    def forward_seed(self, micro: int, stage: int) -> int:
        """Returns the seed of a stage's forward; those of an update are drawn together."""
        later, number = divmod(micro, self.passes)
        of, seeds = self._seeds
        if of != (stage, self.first + later, self.start):
            update, each = self.first + later, range(self.start, self.start + self.passes)
            seeds = draw_seeds("forward", self.seed, update, self.copy, each=each, last=stage)
            self._seeds = (stage, update, self.start), seeds
        return seeds[number]

    def step_seed(self, update: int, *group: int) -> int:
        """Returns the seed of a weight group's step, the same on all replicas."""
        return draw_seed("step", self.seed, update, *group)

    def operation(self, kind: str, micros: Micros, stage: int) -> LaneOperation:
        """Returns the `LaneOperation` that names an operation on micro-batches in error messages."""
        several = numbers_of(micros)
        update, _ = self.place(several[0])
        return LaneOperation(kind, stage, tuple(self.place(micro)[1] for micro in several), update, self.slices)
