"""Sorts the instructions of a lane by type, so that a pass finds those of one type without a walk along all of them."""

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
    """Instructions of one type in a lane: ``lines[i]`` stands at place ``places[i]`` of the lane."""

    places: "array[int]"
    lines: list[T]

    def __iter__(self) -> Iterator[tuple[int, T]]:
        return zip(self.places, self.lines, strict=True)


@dataclass(frozen=True, slots=True)
class LaneParts:
    """A lane of ``length`` instructions, sorted by their types.

    ``computes`` has the compute operations; ``sends``, ``recvs`` and the waits for both are about messages.
    ``wait_moves`` has the waits for offloads and reloads, ``updates`` all lines about sums, steps and weight versions.
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
        """Yields the compute operations and the waits for offloads and reloads, in the order of the lane.

        A pair is its forward, then its backward.
        """
        if not self.wait_moves.lines:
            return (part for _, part in self.singles)
        lines: tuple[Iterator[tuple[int, ops.Compute | ops.WaitMove]], ...] = self.singles, iter(self.wait_moves)
        return (step for _, step in merge(*lines, key=itemgetter(0)))

    @property
    def singles(self) -> Iterator[tuple[int, ops.Compute]]:
        """The compute operations with their places, one by one: a pair yields its forward, then its backward."""
        return ((place, part) for place, operation in self.computes for part in operation.parts)


def parts_of(lane: Sequence[ops.Instruction]) -> LaneParts:
    """Returns the instructions of a lane sorted by their types."""
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
