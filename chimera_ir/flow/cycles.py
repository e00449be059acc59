"""Finds the critical cycle of a periodic system: an exact answer to how fast the system can go.

In a periodic system, node n of turn t waits for node b of turn t - d, for each pair (b, d) in ``waits[n]``. A cycle of
such waits has a ratio: the time that its nodes take together, divided by the number of turns that its waits go back
together. In the long run a turn takes as long as the largest ratio, however the system begins (Reiter, "Scheduling
Parallel Computations", J. ACM 15, 1968).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

Waits = Sequence[Sequence[tuple[int, int]]]
"""The nodes that each node waits for, each as (node, number of turns that the wait goes back)."""

Steps = Mapping[int, tuple[int, int]]
"""Maps a node to the last step of the longest path to it: (the node before, the turns that this step goes back)."""

Weights = Sequence[int] | Mapping[int, int]
"""The time that each node takes."""


@dataclass(frozen=True, slots=True)
class WaitCycle:
    """A cycle of ``nodes``, each of which waits for the one before it.

    ``turns`` is how many turns all waits of the cycle go back together. ``ratio`` is the time that its nodes take
    together, divided by ``turns``.
    """

    nodes: tuple[int, ...]
    turns: int
    ratio: Fraction


NO_CYCLE = WaitCycle((), 1, Fraction(0))
"""Stands for the critical cycle of a system in which no cycle takes any time."""


@dataclass(frozen=True, slots=True)
class Critical:
    """A ``cycle`` with the largest ratio, and for each node the waits that are ``tight``.

    A wait is tight if it can be part of a cycle with the largest ratio: a cycle has this ratio exactly if all of its
    waits are tight.
    """

    cycle: WaitCycle
    tight: Waits


def critical(waits: Waits, weights: Sequence[int]) -> Critical:
    """Returns a critical cycle and the tight waits of a system whose nodes take ``weights``, none of them negative.

    The search replaces a cycle by one with a larger ratio until there is none. To find a larger one, the ratio of the
    present cycle is subtracted from the length of a path for every turn that a wait goes back. Then a cycle has a
    larger ratio exactly if its length is more than 0. If no cycle has such a length, longest paths to all nodes exist,
    and they prove that the ratio is the largest.

    Raises `ValueError` if a cycle goes back no turn, so that none of its nodes ever starts.

    Examples
    --------
    >>> critical([[(1, 1)], [(0, 0), (1, 1)]], [1, 2]).cycle
    WaitCycle(nodes=(0, 1), turns=1, ratio=Fraction(3, 1))
    """
    best = NO_CYCLE
    while True:
        ends, steps = longest_paths(waits, weights, best.ratio)
        better = list(cycles_among(steps, weights))
        if not better:
            return Critical(best, _tight(waits, weights, best.ratio, ends))
        best = max(better, key=lambda cycle: cycle.ratio)


@dataclass(frozen=True, slots=True)
class SteadyRun:
    """A run that repeats every ``ratio``: node n of turn t ends at ``ends[n] + t * ratio``."""

    ends: Sequence[Fraction]
    ratio: Fraction


def steady_run(waits: Waits, weights: Sequence[int], turns: Sequence[int]) -> SteadyRun:
    """Returns the earliest run that repeats from turn to turn, for nodes that take ``weights``.

    ``turns`` fixes where it begins: turn ``-turns[n]`` of each node n begins at time 0 or later.

    Examples
    --------
    >>> steady_run([[(1, 1)], [(0, 0), (1, 1)]], [1, 2], [0, 0]).ends
    [Fraction(1, 1), Fraction(3, 1)]
    """
    ratio = critical(waits, weights).cycle.ratio
    unit = ratio.denominator
    starts = (weight * unit + turn * ratio.numerator for weight, turn in zip(weights, turns, strict=True))
    ends, _ = longest_paths(waits, weights, ratio, starts)
    return SteadyRun([Fraction(end, unit) for end in ends], ratio)


def longest_paths(
    waits: Waits, weights: Sequence[int], ratio: Fraction, starts: Iterable[int] | None = None
) -> tuple[list[int], Steps]:
    """Returns for each node the length of the longest path to it, and for some nodes the last step of this path.

    The length of a path is the sum of its nodes' ``weights``, less ``ratio`` for every turn that its waits go back; it
    is counted in units of 1 / ``ratio.denominator``. A path may begin at any node n, at length ``starts[n]``, or 0
    without ``starts``. A node where its longest path begins has no step. If the steps close a cycle, there are no
    longest paths, and the search stops.
    """
    # All lengths are multiplied by the ratio's denominator, so that they are integers.
    turn, unit = ratio.numerator, ratio.denominator
    ends = [0] * len(weights) if starts is None else [*starts]
    steps: dict[int, tuple[int, int]] = {}
    longer = True
    while longer and not any(cycles_among(steps, weights)):
        longer = False
        for node, weight in enumerate(weights):
            for before, ago in waits[node]:
                end = ends[before] - ago * turn + weight * unit
                if end > ends[node]:
                    ends[node], steps[node], longer = end, (before, ago), True
    return ends, steps


def cycles_among(steps: Steps, weights: Weights) -> Iterator[WaitCycle]:
    """Yields the cycles that are closed by ``steps``, a step being the wait of a node for one other node.

    As a node has at most one step, it is on at most one cycle.
    """
    start_of: dict[int, int] = {}
    for start in steps:
        node = start
        while node in steps and node not in start_of:
            start_of[node] = start
            node = steps[node][0]
        if start_of.get(node) == start:  # the walk has met itself, not an earlier walk
            yield _cycle(node, steps, weights)


def _cycle(end: int, steps: Steps, weights: Weights) -> WaitCycle:
    nodes = [end]
    while (node := steps[nodes[-1]][0]) != end:
        nodes.append(node)
    turns = sum(steps[node][1] for node in nodes)
    if turns <= 0:
        raise ValueError("an operation waits for itself; only a verified schedule has a steady state")
    return WaitCycle(tuple(reversed(nodes)), turns, Fraction(sum(weights[node] for node in nodes), turns))


def _tight(waits: Waits, weights: Sequence[int], ratio: Fraction, ends: Sequence[int]) -> Waits:
    """Returns for each node its tight waits: those on a longest path to the node.

    ``ends`` has the length of the longest path to each node, as `longest_paths` gives it for this ``ratio``.
    """
    turn, unit = ratio.numerator, ratio.denominator
    return [
        [(before, ago) for before, ago in waits[node] if ends[node] == ends[before] - ago * turn + weight * unit]
        for node, weight in enumerate(weights)
    ]
