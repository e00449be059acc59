"""An order in the form that formulas are fitted to: the operations, and which of them come before which.

An operation comes before another one because it stands before it in the lane of its worker, or because it makes a value
that the other one takes. Operations are written here with the pair (micro-batch counted in its pipe, stage):

worker 0: F m0 s0, F m1 s0, B m0 s0           F (0, 0)  before  F (1, 0)  before  B (0, 0)        by the lane
worker 1: F m0 s1, B m0 s1, ..                F (0, 0)  before  F (0, 1)                          by a value
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise

from chimera_ir.errors import NotFitted
from chimera_ir.fitting.terms import Point
from chimera_ir.flow.net import numbered, reads_of
from chimera_ir.ir.levels import Header, Schedule
from chimera_ir.ir.ops import Compute


@dataclass(frozen=True)
class Observed:
    """A verified schedule at one size, with the parts that a fit needs.

    It has no pairs, operations over several micro-batches, halves or strategies for sums, and it has a flush. ``names``
    are the parameters whose values differ among the orders that are fitted.
    """

    schedule: Schedule
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        header = self.schedule.header
        whole = all(isinstance(part, Compute) and part.size == 1 for part in chain.from_iterable(self.schedule.lanes))
        reasons = {
            "it has no flush": header.asynchronous,
            "its micro-batches count halves": header.halves,
            "it has pairs, or operations over several micro-batches": not whole,
            "it gives stages strategies of sums": bool(header.strategies),
        }
        for reason, holds in reasons.items():
            if holds:
                raise NotFitted(f"{header.title}: {reason}")

    @property
    def header(self) -> Header:
        """The header of the schedule."""
        return self.schedule.header

    @property
    def settings(self) -> Mapping[str, int]:
        """The values that this order has of the parameters ``names``."""
        return {name: value for name, value in self.header.parameters if name in self.names}

    @property
    def size(self) -> int:
        """The number of operations."""
        return sum(map(len, self.schedule.lanes))

    @cached_property
    def kinds(self) -> tuple[tuple[str, str], ...]:
        """The pipe and the letter of each operation, lane by lane."""
        pipe_of = self.header.pipe_of
        return tuple((pipe_of[part.micros[0]].name, part.kind.letter) for part in self._operations)

    @cached_property
    def points(self) -> tuple[Point, ...]:
        """The values of m, s and q for each operation, lane by lane: micro-batch counted in its pipe, stage, slice."""
        slices = self.header.slices
        places = {micro: place for pipe in self.header.pipes for place, micro in enumerate(pipe.micros)}
        return tuple(
            (places[part.micros[0]] // slices, part.stage, part.micros[0] % slices) for part in self._operations
        )

    @cached_property
    def _operations(self) -> tuple[Compute, ...]:
        return tuple(part for lane in self.schedule.lanes for operation in lane for part in operation.parts)

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Yields pairs of operations, by number, of which the first runs before the second.

        The second is next in the lane of the first, or reads a value that the first makes.
        """
        for lane in numbered(self.schedule):
            yield from pairwise(lane)
        for number, others in enumerate(reads_of(self.schedule)):
            yield from ((other, number) for other in others)
