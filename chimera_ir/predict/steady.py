"""Time of an update in the long run, where updates follow one another: the critical cycle of a program's events.

Every turn has the same events and the same waits between them. The time of an update follows from the cycle of waits
with the largest ratio of seconds to turns, which is found exactly, without a long replay.
"""

from collections.abc import Hashable, Sequence
from functools import cache
from math import lcm
from typing import NamedTuple

from chimera_ir.flow.cycles import NO_CYCLE, Waits, critical
from chimera_ir.ir.levels import Header
from chimera_ir.ir.turns import in_turn, turn_number
from chimera_ir.predict.events import Events, Node, Role


class TimedTurn(NamedTuple):
    """One turn of the events that repeat: the nodes of the graph of their waits, and how long each takes.

    Node n is event ``events[n]`` and takes ``seconds[n]``. ``waits[n]`` lists the nodes that node n waits for, each
    with a number of turns: 0 is the same turn, 1 the turn before, as in `flow.cycles`. The number is negative for a
    later turn, which is possible where turns overlap. A turn makes ``updates`` updates.
    """

    events: Sequence[int]
    waits: Waits
    seconds: Sequence[float]
    updates: int


def turn_of(header: Header, events: Events, order: Sequence[int]) -> TimedTurn:
    """The turn that a program without barriers repeats; ``order`` has its events, each after all that it waits for."""
    return _folded(header, events, order) if header.asynchronous else _whole(events, order)


def _folded(header: Header, events: Events, order: Sequence[int]) -> TimedTurn:
    """The turn of a stream, folded from three turns that the program shows: each node stands for an event of each.

    The last turn shows all waits for earlier turns, and the first turn all waits for later turns: versions below 0 hide
    only waits for earlier turns. The middle turn shows the times of the steady state: messages that share ports may
    take longer in one turn than in another.

    Some events are missing in warm-up and drain. There an event may wait directly for an event for which, in the steady
    state, it waits through others. Such a direct wait changes nothing, as the path through the others takes longer.
    """
    last = header.micro_batches // header.period - 1
    turns = {0, last // 2, last}
    place = cache(lambda number: _reduced(header, events.nodes[number]))
    numbers: dict[Hashable, int] = {}
    folded: list[list[int]] = []
    nearest: list[dict[int, int]] = []
    for number in order:
        where = place(number) if turn_number(header, events.nodes[number].instruction) in turns else None
        if where is None:
            continue
        node, turn = numbers.setdefault(where[0], len(numbers)), where[1]
        if node == len(folded):
            folded.append([])
            nearest.append({})
        folded[node].append(number)
        for name, before in filter(None, map(place, events.before[number])):
            # Of several waits for a node, the one that goes back the fewest turns implies the others.
            other = numbers[name]
            nearest[node][other] = min(turn - before, nearest[node].get(other, turn - before))
    middle = [of_node[len(of_node) // 2] for of_node in folded]
    seconds = [events.nodes[number].seconds for number in middle]
    return TimedTurn(middle, [tuple(waits.items()) for waits in nearest], seconds, header.per_turn)


def _whole(events: Events, order: Sequence[int]) -> TimedTurn:
    """The turn of a program with a flush: one update, which each lane begins once the lane has ended the update before.

    No other event waits for the update before, because a lane ends after all its messages and sums.
    """
    last = {lane[0]: lane[-1] for lane in events.lanes if lane}
    node = {number: place for place, number in enumerate(order)}
    waits = [
        ((node[last[number]], 1),) if number in last else tuple((node[other], 0) for other in events.before[number])
        for number in order
    ]
    return TimedTurn(order, waits, [events.nodes[number].seconds for number in order], 1)


def period(turn: TimedTurn) -> float:
    """Seconds per update in the long run, exact: the ratio of the critical cycle; `ValueError` if nothing repeats."""
    exact = [seconds.as_integer_ratio() for seconds in turn.seconds]
    unit = lcm(*(denominator for _, denominator in exact))
    cycle = critical(turn.waits, [numerator * (unit // denominator) for numerator, denominator in exact]).cycle
    if cycle == NO_CYCLE and any(turn.seconds):
        raise ValueError("the program is too short to show a steady state; only a verified one has its time")
    return float(cycle.ratio / unit) / turn.updates


def _reduced(header: Header, node: Node) -> tuple[tuple[object, ...], int] | None:
    """The key of an event, which is equal in every turn, and the number of its turn; None for a `Role.BEGIN`."""
    if node.role is Role.BEGIN:
        return None
    instruction, turn = in_turn(header, node.instruction)
    return (node.role, instruction, *node.workers), turn
