"""The instructions of a lane by kind, for passes that walk along a lane more than once."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from operator import itemgetter
from typing import Any, Generic, TypeVar

from chimera_ir.ir import ops

T = TypeVar("T", covariant=True)


@dataclass(frozen=True, slots=True)
class Lines(Generic[T]):
    """Instructions of a lane and, in the same order, their places in it."""

    places: "array[int]"
    lines: list[T]

    def __iter__(self) -> Iterator[tuple[int, T]]:
        return zip(self.places, self.lines, strict=True)


@dataclass(frozen=True, slots=True)
class LaneParts:
    """The instructions of a lane, ``length`` in all, by kind.

    The kinds are compute, the four about messages, the waits for moves of memory, and the rest.
    """

    length: int
    computes: Lines[ops.Operation]
    sends: Lines[ops.Send]
    recvs: Lines[ops.Recv]
    wait_sends: Lines[ops.WaitSend]
    wait_recvs: Lines[ops.WaitRecv]
    wait_moves: Lines[ops.WaitMove]
    updates: Lines[ops.AllReduce | ops.WaitAllReduce | ops.Step | ops.Stash | ops.Drop]

    @property
    def steps(self) -> Iterator[ops.Compute | ops.WaitMove]:
        """The compute operations one by one, and the waits for those that move memory, in their order."""
        if not self.wait_moves.lines:
            return (part for _, part in self.singles)
        lines: tuple[Iterator[tuple[int, ops.Compute | ops.WaitMove]], ...] = self.singles, iter(self.wait_moves)
        return (step for _, step in merge(*lines, key=itemgetter(0)))

    @property
    def singles(self) -> Iterator[tuple[int, ops.Compute]]:
        """The compute operations with their places, one by one: a pair yields its forward, then its backward."""
        return ((place, part) for place, operation in self.computes for part in operation.parts)


def parts_of(lane: Sequence[ops.Instruction]) -> LaneParts:
    """The instructions of a lane by kind."""
    parts = LaneParts(len(lane), *(Lines(array("q"), []) for _ in range(7)))
    of_kind: dict[type, Lines[Any]] = {
        ops.Compute: parts.computes,
        ops.Pair: parts.computes,
        ops.Send: parts.sends,
        ops.Recv: parts.recvs,
        ops.WaitSend: parts.wait_sends,
        ops.WaitRecv: parts.wait_recvs,
        ops.WaitMove: parts.wait_moves,
        **dict.fromkeys((ops.AllReduce, ops.WaitAllReduce, ops.Step, ops.Stash, ops.Drop), parts.updates),
    }
    for place, instruction in enumerate(lane):
        lines = of_kind[type(instruction)]
        lines.places.append(place)
        lines.lines.append(instruction)
    return parts
