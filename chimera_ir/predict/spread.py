"""Time that an update loses because the times of operations scatter, from many turns with random times.

An event that waits for several others waits for the slowest of them. So the mean time of an update is longer than the
time of an update in which every operation takes its mean, above all if all workers advance together and none has slack.
No formula gives the difference for a graph of waits, so many turns are simulated.

A random time has a normal logarithm: it is never negative, and has a longer tail above than below, as measured times
have. Its median is the profile's, and the distance between its quartiles is the noise, as a share of the median.
"""

from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter
from math import asinh, exp
from random import Random
from statistics import NormalDist

from chimera_ir.flow.cycles import Waits
from chimera_ir.predict.steady import TimedTurn

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

    ``noise`` has the spread of the time of each node of the turn, 0 for a fixed time. ``joint`` says whether each node
    is one event of all ``copies`` together, which waits for all of them, as a sum does. Of many copies of a large
    program only some are simulated.

    The same turns are played with and without noise, so that the effect of the start cancels out.
    """
    player, nodes = _TurnPlayer(turn, joint), len(turn.seconds)
    copies = max(1, min(copies, MOST // max(1, FEWEST * nodes)))
    turns = max(FEWEST, USUAL // max(1, nodes * copies))
    noisy = player.mean([sigma(share) for share in noise], copies, turns)
    return (noisy - player.mean([0.0] * nodes, 1, turns)) / turn.updates


class _TurnPlayer:
    """Simulator of turns whose events (nodes of a `TimedTurn`) take random times.

    ``_order`` has every node after the nodes of the same turn that it waits for.
    """

    def __init__(self, turn: TimedTurn, joint: Sequence[bool]) -> None:
        self._seconds = turn.seconds
        self._joint = joint
        self._waits = _forward(turn.waits)
        self._order = _ordered(self._waits)
        self._longest = max((ago for waits in self._waits for _, ago in waits), default=0)

    def mean(self, sigmas: Sequence[float], copies: int, turns: int) -> float:
        """Mean seconds from the end of a turn to the end of the next one, in a simulation of ``turns`` turns.

        ``sigmas`` has for each node the standard deviation of the logarithm of its time.
        """
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
        """Plays one more turn; returns when each of its events ends, in each copy.

        ``rows`` has these times for the turns before, the last turn first.
        """
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

    The waits stay equivalent. Raises `ValueError` if a node waits for itself within a turn, or for one of its own later
    turns.
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
    """The indices of all nodes, each after the nodes of the same turn that it waits for."""
    now = {node: [before for before, ago in node_waits if not ago] for node, node_waits in enumerate(waits)}
    try:
        return [*TopologicalSorter(now).static_order()]
    except CycleError:
        raise ValueError("an operation waits for itself; only a verified program has a steady state") from None
