"""What is lost because nothing takes equally long each time: turns are played one after another, with drawn times.

Whoever waits for several waits for the slowest of them. So the mean of an update is longer than an update in which
everything takes its mean, most of all where workers run in step and none has slack. No formula gives it for a graph of
waits; a long enough play with times drawn anew does.

A time is drawn as if its logarithm were normal: never negative, with a longer tail above than below, as measured times
have. Its median is the profile's, and the distance between its quartiles is the noise, as a share of the median.
"""

from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter
from math import asinh, exp
from random import Random
from statistics import NormalDist

from chimera_ir.flow.cycles import Waits
from chimera_ir.predict.steady import Turn

MOST = 300_000
"""So many events are played at most, but for FEWEST turns of one copy."""

FEWEST = 8
"""So many turns are played at least; the first quarter of them does not count."""

_SEED = 0
_QUARTILE = NormalDist().inv_cdf(0.75)

_Row = Sequence[Sequence[float]]
"""When each node of a turn ended, in every copy."""


def sigma(noise: float) -> float:
    """The deviation of the logarithm where quartiles are ``noise`` apart, as a share of the median.

    Examples
    --------
    >>> from math import exp
    >>> quartile = sigma(0.1) * NormalDist().inv_cdf(0.75)
    >>> round(exp(quartile) - exp(-quartile), 12)
    0.1
    """
    return asinh(noise / 2) / _QUARTILE


def longer_by(turn: Turn, noise: Sequence[float], joint: Sequence[bool], copies: int) -> float:
    """By how many seconds the mean of an update is longer than an update without noise, in the long run.

    Parameters
    ----------
    noise
        Of each node of the turn, the spread of its times; 0 where they are always the same.
    joint
        Whether a node is one for all copies, and waits for what it waits for in all of them: a sum.
    copies
        How often the program is replicated; of many copies of a large program only some are played.

    The same turns are played with and without noise, so what the start does to both is not in the difference.
    """
    played, nodes = _Played(turn, joint), len(turn.seconds)
    copies = max(1, min(copies, MOST // max(1, FEWEST * nodes)))
    turns = max(FEWEST, MOST // max(1, nodes * copies))
    drawn = played.mean([sigma(each) for each in noise], copies, turns)
    return (drawn - played.mean([0.0] * nodes, 1, turns)) / turn.updates


class _Played:
    """A turn, ready to be played: ``order`` has every node after those of the same turn that it waits for."""

    def __init__(self, turn: Turn, joint: Sequence[bool]) -> None:
        self._seconds = turn.seconds
        self._joint = joint
        self._waits = _forward(turn.waits)
        self._order = _ordered(self._waits)
        self._longest = max((ago for waits in self._waits for _, ago in waits), default=0)

    def mean(self, sigmas: Sequence[float], copies: int, turns: int) -> float:
        """Seconds from the end of a turn to that of the next."""
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
        """A turn after others, of which the last comes first."""
        now: list[Sequence[float]] = [()] * len(sigmas)
        past, nothing = [now, *rows], [0.0] * copies
        for node in self._order:
            waited = [past[ago][before] for before, ago in self._waits[node]]
            begin = [*map(max, *waited)] if len(waited) > 1 else waited[0] if waited else nothing
            seconds, deviation = self._seconds[node], sigmas[node]
            if self._joint[node]:
                begin = [max(begin)] * copies
            if not seconds:
                now[node] = begin
            elif deviation:
                now[node] = [each + seconds * exp(random.gauss(0.0, deviation)) for each in begin]
            else:
                now[node] = [each + seconds for each in begin]
        return now


def _forward(waits: Waits) -> Waits:
    """The same waits, none of them for a turn that is still to come: nodes are counted to a later turn where they are.

    Raises
    ------
    ValueError
        If a node waits for itself within a turn, or for one of its own later turns.
    """
    later = [0] * len(waits)
    for _ in range(len(waits) + 1):
        before_that = later[:]
        for node, several in enumerate(waits):
            later[node] = max([later[before] - ago for before, ago in several] + [later[node]])
        if later == before_that:
            break
    else:
        raise ValueError("an operation waits for itself; only a verified program has a steady state")
    return [
        [(before, ago + later[node] - later[before]) for before, ago in several] for node, several in enumerate(waits)
    ]


def _ordered(waits: Waits) -> list[int]:
    """Nodes after those of the same turn that they wait for."""
    now = {node: [before for before, ago in several if not ago] for node, several in enumerate(waits)}
    try:
        return [*TopologicalSorter(now).static_order()]
    except CycleError:
        raise ValueError("an operation waits for itself; only a verified program has a steady state") from None
