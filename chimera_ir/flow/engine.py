"""The engine: plays lanes until each of them ends or waits for ever, and computes when each event ends.

A lane is a sequence of events, by number. ``before[n]`` are the other events that event n waits for; some may be in the
lane of n. No event is ever undone, so how far a lane gets does not depend on the order in which lanes are played.

    lane 0:                            lane 1:                            order: 0 2 3 1
      0  F m0 s0                         2  F m0 s1    waits for 0
      1  B m0 s0    waits for 3          3  B m0 s1
"""

import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    import networkx as nx

    IntGraph = nx.DiGraph[int]


# Graphs of networkx, and the shortest cycles in them. The only module that knows networkx.

_SEARCH = 2_000_000
"""The most edges that the search for a shortest cycle looks at before it stops."""


def digraph(nodes: Iterable[Mapping[str, object]], edges: Iterable[tuple[int, int, dict[str, object]]]) -> "IntGraph":
    """Makes a graph of networkx: node n has the attributes ``nodes[n]``; an edge is (from, to, its attributes)."""
    import networkx as nx  # takes a while, and few calls need it

    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from((number, dict(attributes)) for number, attributes in enumerate(nodes))
    graph.add_edges_from(edges)
    return graph


def node_link_text(graph: "IntGraph") -> str:
    """The graph as JSON, with a line for each node and edge; `networkx.node_link_graph` reads it."""
    import networkx as nx

    *head, nodes, edges = nx.node_link_data(graph, edges="edges").items()
    rows = (f'"{key}": [\n' + ",\n".join(map(json.dumps, values)) + "\n]" for key, values in (nodes, edges))
    return "{" + ",\n".join([*(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head), *rows]) + "}\n"


def is_acyclic(graph: "IntGraph") -> bool:
    """Whether no path of the graph leads back to where it began."""
    import networkx as nx

    return nx.is_directed_acyclic_graph(graph)


def shortest_cycle(graph: "IntGraph") -> tuple[int, ...]:
    """Returns a shortest cycle of nodes that each have an edge to the next; of equally short ones, of the lowest start.

    Examples
    --------
    >>> shortest_cycle(digraph([{}] * 4, [(0, 1, {}), (1, 2, {}), (1, 3, {}), (2, 0, {}), (3, 1, {})]))
    (1, 3)
    """
    import networkx as nx

    # Every cycle is within a strongly connected component.
    knots = [knot for knot in nx.strongly_connected_components(graph) if len(knot) > 1]
    knot = set(nx.nodes_with_selfloops(graph)).union(*knots)
    within: nx.DiGraph[int] = nx.DiGraph()
    within.add_edges_from((node, after) for node in knot for after in graph.adj[node] if after in knot)
    best: tuple[int, ...] = ()
    searched = 0
    for start in sorted(knot):
        if len(best) == 1 or searched >= _SEARCH:
            break
        # Breadth-first from the start, to nodes with which a cycle is shorter than the best one.
        before, most = {start: start}, len(best) - 1 if best else len(knot)
        for parent, node in chain([(start, start)], nx.bfs_edges(within, start, depth_limit=most - 1)):
            before[node] = parent
            searched += within.out_degree(node)
            if within.has_edge(node, start):
                best = _path(before, start, node)
                break
    return best


def _path(before: Mapping[int, int], start: int, end: int) -> tuple[int, ...]:
    nodes = [end]
    while nodes[-1] != start:
        nodes.append(before[nodes[-1]])
    return tuple(reversed(nodes))


Time = TypeVar("Time", int, float)


class Played(NamedTuple):
    """The result of playing lanes.

    ``order`` has every event that happens, each after all events that it waits for. Lane l stops at ``places[l]``: its
    length or, where the lane waits for ever, the place of the event that waits.
    """

    order: Sequence[int]
    places: Sequence[int]


def play(lanes: Sequence[Sequence[int]], before: Sequence[Sequence[int]]) -> Played:
    """Plays lanes of events, where event n waits for the events ``before[n]``, in time linear in the number of waits.

    Each lane is played until it must wait, and again when it may go on. In the example event 3 waits for event 4, which
    is in no lane and so never happens: lane 1 stops at place 1.

    Examples
    --------
    >>> play([[0, 1], [2, 3]], [[], [2], [0], [4], []]).places
    [2, 1]
    """
    order = array("q")
    done = bytearray(len(before))
    places = [0] * len(lanes)
    # The rest of each lane, as an iterator: a lane may be woken up for each of its events, and slices would be copies.
    # The event at which a lane sleeps has left the iterator, so it stands in ``blocked``.
    upcoming = [iter(lane) for lane in lanes]
    blocked: list[tuple[int, ...]] = [()] * len(lanes)
    # The lanes that sleep until an event happens: each on one event, and not looked at again before it happens.
    sleepers: dict[int, list[int]] = {}
    awake = list(range(len(lanes)))
    while awake:
        number = awake.pop()
        begun = len(order)
        for event in chain(blocked[number], upcoming[number]):
            for other in before[event]:
                if not done[other]:  # the lane sleeps
                    sleepers.setdefault(other, []).append(number)
                    blocked[number] = (event,)
                    break
            else:  # the event happens, and wakes up the lanes that have slept on it
                done[event] = 1
                order.append(event)
                if event in sleepers:
                    awake += sleepers.pop(event)
                continue
            break
        places[number] += len(order) - begun
    return Played(order, places)


def ordered(before: Sequence[Sequence[int]]) -> list[int]:
    """Returns all events in an order in which event n comes after the events ``before[n]``.

    Events that wait for ever, because they wait for each other, are left out.

    Examples
    --------
    >>> ordered([[1], [], [0, 1]])
    [1, 0, 2]
    """
    # ``missing`` counts the events that each event still waits for; at 0 the event joins the order.
    missing = [len(needs) for needs in before]
    after: list[list[int]] = [[] for _ in before]
    for event, needs in enumerate(before):
        for other in needs:
            after[other].append(event)
    order = [event for event, count in enumerate(missing) if not count]
    for event in order:
        for other in after[event]:
            missing[other] -= 1
            if not missing[other]:
                order.append(other)
    return order


def ends(order: Sequence[int], before: Sequence[Sequence[int]], durations: Sequence[Time]) -> list[Time]:
    """Returns the time at which each event ends, if each begins as soon as everything that it waits for has ended.

    ``order`` has the events, each after all that it waits for; an event that ``order`` lacks counts as ended at 0.
    ``before[n]`` are the events that event n waits for, the one before it in its lane included; an event that waits for
    none begins at 0.
    """
    times = [0 * duration for duration in durations]
    for event in order:
        start = times[event]
        for other in before[event]:
            if times[other] > start:
                start = times[other]
        times[event] = start + durations[event]
    return times


# Finds the critical cycle of a periodic system: an exact answer to how fast the system can go.
#
# In a periodic system, node n of turn t waits for node b of turn t - d, for each pair (b, d) in ``waits[n]``. A cycle
# of such waits has a ratio: the time that its nodes take together, divided by the number of turns that its waits go
# back together. In the long run a turn takes as long as the largest ratio, however the system begins (Reiter,
# "Scheduling Parallel Computations", J. ACM 15, 1968).

Waits = Sequence[Sequence[tuple[int, int]]]
"""The nodes that each node waits for, each as (node, number of turns that the wait goes back)."""

Steps = Mapping[int, tuple[int, int]]
"""Maps a node to the last step of the longest path to it: (the node before, the turns that this step goes back)."""


class WaitCycle(NamedTuple):
    """A cycle of ``nodes``, each of which waits for the one before it.

    ``turns`` is how many turns all waits of the cycle go back together. ``ratio`` is the time that its nodes take
    together, divided by ``turns``.
    """

    nodes: tuple[int, ...]
    turns: int
    ratio: Fraction


NO_CYCLE = WaitCycle((), 1, Fraction(0))
"""Stands for the critical cycle of a system in which no cycle takes any time."""


class Critical(NamedTuple):
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
        better = list(_cycles_among(steps, weights))
        if not better:
            return Critical(best, _tight(waits, weights, best.ratio, ends))
        best = max(better, key=lambda cycle: cycle.ratio)


class SteadyRun(NamedTuple):
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
    while longer and not any(_cycles_among(steps, weights)):
        longer = False
        for node, weight in enumerate(weights):
            for before, ago in waits[node]:
                end = ends[before] - ago * turn + weight * unit
                if end > ends[node]:
                    ends[node], steps[node], longer = end, (before, ago), True
    return ends, steps


def _cycles_among(steps: Steps, weights: Sequence[int]) -> Iterator[WaitCycle]:
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


def _cycle(end: int, steps: Steps, weights: Sequence[int]) -> WaitCycle:
    nodes = [end]
    while (node := steps[nodes[-1]][0]) != end:
        nodes.append(node)
    turns = sum(steps[node][1] for node in nodes)
    if turns <= 0:
        raise ValueError("an operation waits for itself; only a verified schedule has a steady state")
    return WaitCycle(tuple(reversed(nodes)), turns, Fraction(sum(weights[node] for node in nodes), turns))


def _tight(waits: Waits, weights: Sequence[int], ratio: Fraction, ends: Sequence[int]) -> Waits:
    """The waits on a longest path to each node; ``ends`` is from `longest_paths` for this ``ratio``."""
    turn, unit = ratio.numerator, ratio.denominator
    return [
        [(before, ago) for before, ago in waits[node] if ends[node] == ends[before] - ago * turn + weight * unit]
        for node, weight in enumerate(weights)
    ]
