"""Time of an update in the long run, where updates follow one another: the critical cycle of a program's events.

Every turn has the same events and the same waits between them. The time of an update follows from the cycle of waits
with the largest ratio of seconds to turns, which is found exactly, without a long replay.
"""

from collections.abc import Hashable, Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter
from math import asinh, exp, lcm
from random import Random
from statistics import NormalDist
from typing import NamedTuple

from chimera_ir.flow.engine import NO_CYCLE, Waits, critical
from chimera_ir.ir.levels import Header
from chimera_ir.ir.turns import in_turn, turn_number
from chimera_ir.predict.events import Events, Node, Role


class TimedTurn(NamedTuple):
    """One turn of the events that repeat: node n is event ``events[n]`` and takes ``seconds[n]``.

    ``waits[n]`` lists the nodes that node n waits for, each with how many turns ago, as in `flow.cycles`: 0 is the same
    turn, a negative number a later one, where turns overlap. A turn makes ``updates`` updates.
    """

    events: Sequence[int]
    waits: Waits
    seconds: Sequence[float]
    updates: int


def turn_of(header: Header, events: Events, order: Sequence[int]) -> TimedTurn:
    """The turn that a program without barriers repeats; ``order`` has events after all that they wait for."""
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


# Time that an update loses because the times of operations scatter, from many turns with random times.
#
# An event that waits for several others waits for the slowest of them. So the mean time of an update is longer than the
# time of an update in which every operation takes its mean, above all if all workers advance together and none has
# slack. No formula gives the difference for a graph of waits, so many turns are simulated.
#
# A random time has a normal logarithm: it is never negative, and has a longer tail above than below, as measured times
# have. Its median is the profile's, and the distance between its quartiles is the noise, as a share of the median.

MOST = 300_000
"""The most events of all copies together in `FEWEST` turns; one copy may have more."""

USUAL = 100_000
"""The events that a simulation plays, unless `FEWEST` turns have more."""

FEWEST = 8
"""The fewest turns that a simulation plays; the first quarter of its turns does not count."""

_SEED = 0
_QUARTILE = NormalDist().inv_cdf(0.75)

_Row = Sequence[Sequence[float]]
"""The times at which the events of a turn end: by the number of the event in the turn, then by copy."""


def sigma(noise: float) -> float:
    """Standard deviation of the logarithm of times whose quartiles are ``noise`` apart, as a share of the median.

    Examples
    --------
    >>> from math import exp
    >>> quartile = sigma(0.1) * NormalDist().inv_cdf(0.75)
    >>> round(exp(quartile) - exp(-quartile), 12)
    0.1
    """
    return asinh(noise / 2) / _QUARTILE


def longer_by(turn: TimedTurn, noise: Sequence[float], joint: Sequence[bool], copies: int) -> float:
    """Seconds by which noise makes the mean update longer, in the long run.

    ``noise`` has the spread of the time of each node of the turn, ``joint`` whether it is one event of all ``copies``
    together, as a sum is. Of many copies of a large program only some are simulated. The same turns are played with and
    without noise, so that the effect of the start cancels out.
    """
    player, nodes = _TurnPlayer(turn, joint), len(turn.seconds)
    copies = max(1, min(copies, MOST // max(1, FEWEST * nodes)))
    turns = max(FEWEST, USUAL // max(1, nodes * copies))
    noisy = player.mean([sigma(share) for share in noise], copies, turns)
    return (noisy - player.mean([0.0] * nodes, 1, turns)) / turn.updates


class _TurnPlayer:
    """Simulator of turns whose events take random times; ``_order`` has nodes after those that they wait for."""

    def __init__(self, turn: TimedTurn, joint: Sequence[bool]) -> None:
        self._seconds = turn.seconds
        self._joint = joint
        self._waits = _forward(turn.waits)
        self._order = _ordered(self._waits)
        self._longest = max((ago for waits in self._waits for _, ago in waits), default=0)

    def mean(self, sigmas: Sequence[float], copies: int, turns: int) -> float:
        """Mean seconds of a turn, of ``turns``; ``sigmas`` are deviations of the logarithms of nodes' times."""
        random = Random(_SEED)
        rows: list[_Row] = [[[0.0] * copies] * len(sigmas)] * self._longest
        ends = []
        for _ in range(turns):
            row = self._row(rows, sigmas, copies, random)
            rows = [row, *rows[: self._longest - 1]] if self._longest else []
            ends.append(max(map(max, row), default=0.0))
        first = turns // 4
        return (ends[-1] - ends[first]) / (turns - 1 - first)

    def _row(self, rows: Sequence[_Row], sigmas: Sequence[float], copies: int, random: Random) -> _Row:
        """When each event of one more turn ends, in each copy; ``rows`` are the turns before, the last one first."""
        now: list[Sequence[float]] = [()] * len(sigmas)
        past, nothing = [now, *rows], [0.0] * copies
        for node in self._order:
            ends = [past[ago][before] for before, ago in self._waits[node]]
            starts = [*map(max, *ends)] if len(ends) > 1 else ends[0] if ends else nothing
            seconds, deviation = self._seconds[node], sigmas[node]
            if self._joint[node]:
                starts = [max(starts)] * copies
            if not seconds:
                now[node] = starts
            elif deviation:
                now[node] = [start + seconds * exp(random.gauss(0.0, deviation)) for start in starts]
            else:
                now[node] = [start + seconds for start in starts]
        return now


def _forward(waits: Waits) -> Waits:
    """Renumbers turns so that no node waits for a later turn: a node that did so is counted to that later turn.

    Raises `ValueError` if a node waits for itself within a turn, or for one of its own later turns.
    """
    later = [0] * len(waits)
    for _ in range(len(waits) + 1):
        previous = later[:]
        for node, node_waits in enumerate(waits):
            later[node] = max([later[before] - ago for before, ago in node_waits] + [later[node]])
        if later == previous:
            break
    else:
        raise ValueError("an operation waits for itself; only a verified program has a steady state")
    return [
        [(before, ago + later[node] - later[before]) for before, ago in node_waits]
        for node, node_waits in enumerate(waits)
    ]


def _ordered(waits: Waits) -> list[int]:
    now = {node: [before for before, ago in node_waits if not ago] for node, node_waits in enumerate(waits)}
    try:
        return [*TopologicalSorter(now).static_order()]
    except CycleError:
        raise ValueError("an operation waits for itself; only a verified program has a steady state") from None
