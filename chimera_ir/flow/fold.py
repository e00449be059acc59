"""Folding some updates of a stream into one turn: each operation stands for that operation in every turn.

worker 0: ...                0  F m0 s0   waits for 3, two turns ago
  F m4 s0 v3                 1  F m0 s1   waits for 0, and for 2 a turn ago
  B m3 s0 v2                 2  B m0 s1   waits for 1
  F m5 s0 v4                 3  B m0 s0   waits for 0 a turn later, for 2, and for 3 a turn ago
worker 1: ...
  F m3 s1 v3
  B m3 s1 v3
  F m4 s1 v4
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from chimera_ir.flow.cycles import Waits
from chimera_ir.flow.net import Net
from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import Instruction
from chimera_ir.ir.turns import in_turn, turn_number

Place = Callable[[int], tuple[Hashable, int] | None]
"""A function from an event to its name within its turn, and the number of the turn.

It is None for an event that does not come again in every turn.
"""


@dataclass(frozen=True)
class FoldedTurn:
    """A turn as a periodic system (see `flow.cycles`); node n stands for ``events[n]``, one event of several turns.

    ``nodes`` has the node of each name within the turn.
    """

    nodes: Mapping[Hashable, int]
    events: Sequence[Sequence[int]]
    waits: Waits

    @cached_property
    def numbers(self) -> list[int]:
        """The first event of each node."""
        return [events[0] for events in self.events]

    @property
    def middle(self) -> list[int]:
        """The middle event of each node."""
        return [events[len(events) // 2] for events in self.events]


def fold(net: Net) -> FoldedTurn:
    """The turn that the net of some updates of a stream repeats, if it shows all waits of the steady state."""
    header, operations = net.schedule.header, net.operations
    inside = within_folded(header, net.order, operations.__getitem__)
    return folded(inside, net.predecessors, lambda number: in_turn(header, operations[number]))


def within_folded(header: Header, order: Iterable[int], event: Callable[[int], Instruction]) -> list[int]:
    """The events of ``order`` that `folded` needs, those of three turns; ``event`` gives the instruction of an event.

    The last turn shows all waits for earlier turns, and the first turn all waits for later turns: versions below 0 hide
    only waits for earlier turns. The middle turn shows the times of the steady state.
    """
    last = header.micro_batches // header.period - 1
    turns = {0, last // 2, last}
    return [number for number in order if turn_number(header, event(number)) in turns]


def folded(order: Iterable[int], before: Sequence[Sequence[int]], place: Place) -> FoldedTurn:
    """The turn of the events that come again in every turn, by their ``place`` in it.

    Event n waits for the events ``before[n]``, and comes after them in ``order``.

    Some events are missing in warm-up and drain. There an event may wait directly for an event for which, in the steady
    state, it waits through others. Such a direct wait changes nothing, as the path through the others takes longer.
    """
    place = cache(place)
    nodes: dict[Hashable, int] = {}
    events: list[list[int]] = []
    nearest: list[dict[int, int]] = []
    for number in order:
        where = place(number)
        if where is None:
            continue
        node, turn = nodes.setdefault(where[0], len(nodes)), where[1]
        if node == len(events):
            events.append([])
            nearest.append({})
        events[node].append(number)
        waits = nearest[node]
        for earlier in filter(None, map(place, before[number])):
            other, ago = nodes[earlier[0]], turn - earlier[1]
            # Of several waits for a node, the one that goes back the fewest turns implies the others.
            if waits.get(other, ago) >= ago:
                waits[other] = ago
    return FoldedTurn(nodes, events, [tuple(waits.items()) for waits in nearest])
