"""Graphs of networkx, and the shortest cycles in them. The only module that knows networkx."""

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

import networkx as nx

_SEARCH = 2_000_000
"""The most edges that the search for a shortest cycle looks at before it stops."""


if TYPE_CHECKING:
    IntGraph = nx.DiGraph[int]
else:
    IntGraph = nx.DiGraph


def digraph(nodes: Iterable[Mapping[str, object]], edges: Iterable[tuple[int, int, int]]) -> IntGraph:
    """Makes a graph of networkx: node n has the attributes ``nodes[n]``; an edge is (from, to, delay)."""
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from((number, dict(attributes)) for number, attributes in enumerate(nodes))
    graph.add_weighted_edges_from(edges, weight="delay")
    return graph


def shortest_cycle(waits: Mapping[int, Collection[int]]) -> tuple[int, ...]:
    """Returns a shortest cycle of nodes that each wait for the next; of equally short ones, one with the lowest start.

    Examples
    --------
    >>> shortest_cycle({0: [1], 1: [2, 3], 2: [0], 3: [1]})
    (1, 3)
    """
    graph = nx.DiGraph([(node, other) for node, others in waits.items() for other in others])
    return _shortest(waits, set[int]().union(*_knots(graph)))


def _knots(graph: "nx.DiGraph[int]") -> list[set[int]]:
    """The strongly connected components that have a cycle; every cycle is within one of them."""
    knots = nx.strongly_connected_components(graph)
    return [knot for knot in knots if len(knot) > 1 or any(graph.has_edge(node, node) for node in knot)]


def _shortest(successors: Mapping[int, Iterable[int]], knot: Collection[int]) -> tuple[int, ...]:
    """Returns a shortest cycle among the nodes of ``knot`` or, after `_SEARCH` edges, the shortest found so far."""
    best: tuple[int, ...] = ()
    budget = _SEARCH
    for start in sorted(knot):
        cycle, searched = _around(start, successors, knot, len(best) or len(knot) + 1)
        best = cycle or best
        budget -= searched
        if budget <= 0:
            break
    return best


def _around(
    start: int, successors: Mapping[int, Iterable[int]], knot: Collection[int], shorter_than: int
) -> tuple[tuple[int, ...], int]:
    """Returns a shortest cycle through ``start`` within ``knot``, and the number of edges that were searched.

    The search is breadth-first. The cycle is empty if every cycle through ``start`` has ``shorter_than`` nodes or more.
    """
    came_from: dict[int, int] = {}
    depth = {start: 0}
    queue = deque([start])
    searched = 0
    while queue:
        node = queue.popleft()
        if depth[node] + 1 >= shorter_than:
            break
        for after in successors[node]:
            searched += 1
            if after == start:
                return _path(came_from, start, node), searched
            if after in knot and after not in depth:
                depth[after] = depth[node] + 1
                came_from[after] = node
                queue.append(after)
    return (), searched


def _path(came_from: dict[int, int], start: int, end: int) -> tuple[int, ...]:
    nodes = [end]
    while nodes[-1] != start:
        nodes.append(came_from[nodes[-1]])
    return tuple(reversed(nodes))
