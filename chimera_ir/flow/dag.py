"""The typed graph of a schedule: which node must come before which. The only module that knows networkx.

It shows a cycle where the net of the schedule has one (`flow.net`).

Nodes are integers: first the compute operations, lane by lane, then, where operations add to gradients, one sum per
weight group and update, and one step per group, update and worker that holds any of its stages. Edges are of three
kinds:

data
    an operation needs the operations that make the values it reads (`flow.flow`);
lane
    a worker runs its operations one after the other, those that occupy its lane as those on another resource;
sync
    the sum of a group needs, on every worker, the update's last operation that adds to its gradients; the steps need
    the sum. In a stream, a step also needs the step before it on its worker. The step is needed by all
    operations that read its version, and by all that add to the next update: both updates add up in the same memory.
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import Enum
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

import networkx as nx

from chimera_ir.flow.net import numbered, queued, reads_of
from chimera_ir.ir.ids import Worker
from chimera_ir.ir.kinds import Value
from chimera_ir.ir.levels import Header, Schedule
from chimera_ir.ir.ops import Operation

_SEARCH = 2_000_000
"""The number of edges after which the search for a shortest cycle stops."""


class Edge(Enum):
    """The kind of an edge: why one node comes before another."""

    DATA = "data"
    LANE = "lane"
    SYNC = "sync"


if TYPE_CHECKING:
    IntGraph = nx.DiGraph[int]
else:
    IntGraph = nx.DiGraph


class _Graph(IntGraph):
    """A graph without edge attributes: all edges share one empty dict."""

    _nothing: ClassVar[dict[str, object]] = {}
    _succ: dict[int, dict[int, dict[str, object]]]
    _pred: dict[int, dict[int, dict[str, object]]]

    def _empty(self) -> dict[str, object]:
        return self._nothing

    edge_attr_dict_factory = _empty
    node_attr_dict_factory = _empty

    def connect(self, edges: Iterable[tuple[int, int]]) -> None:
        """Adds edges between nodes of the graph."""
        successors, predecessors, nothing = self._succ, self._pred, self._nothing
        for before, after in edges:
            successors[before][after] = predecessors[after][before] = nothing


class Dag:
    """The graph of a schedule. It is a DAG only if `cycle` finds no cycle.

    The schedule has no errors by the rules "complete" and "placed".

    Examples
    --------
    >>> from chimera_ir.ir.levels import Header, Pipe
    >>> from chimera_ir.ir.kinds import BACKWARD, FORWARD
    >>> from chimera_ir.ir.ops import Compute
    >>> header = Header("one", (), 1, 1, 1, (Pipe("down", (Worker(0),), (0,)),))
    >>> dag = Dag(Schedule(header, ((Compute(FORWARD, (0,), 0), Compute(BACKWARD, (0,), 0)),)))
    >>> dag.graph.edges, dag.cycle()
    (OutEdgeView([(0, 1), (1, 2), (2, 3)]), ())
    """

    def __init__(self, schedule: Schedule) -> None:
        self.operations: tuple[Operation, ...] = tuple(operation for lane in schedule.lanes for operation in lane)
        self._owners = [Worker(worker) for worker, lane in enumerate(schedule.lanes) for _ in lane]
        self._header = schedule.header
        self.graph = _Graph()
        self.graph.add_nodes_from(range(len(self.operations)))
        for lane, numbers in zip(schedule.lanes, numbered(schedule), strict=True):
            waits = zip(queued(schedule.header, lane, numbers), numbers, strict=True)
            self.graph.connect((before, after) for others, after in waits for before in others)
        self._reads = reads_of(schedule)
        self.graph.connect((before, after) for after, read in enumerate(self._reads) for before in read)
        self.graph.add_edges_from(_sync(self.operations, self._owners, schedule.header))

    def clear(self) -> None:
        """Removes all nodes and edges to free their memory: networkx keeps a graph alive that is no longer in use."""
        self.graph.clear()

    def worker_of(self, node: int) -> Worker:
        """The worker that runs a compute operation."""
        return self._owners[node]

    def kind(self, before: int, after: int) -> Edge:
        """DATA if node ``after`` reads a value of node ``before``, else LANE in one lane, else SYNC."""
        if max(before, after) >= len(self.operations):
            return Edge.SYNC
        if before in self._reads[after]:
            return Edge.DATA
        in_lane = self._owners[before] == self._owners[after] and before < after
        return Edge.LANE if in_lane else Edge.SYNC

    def value(self, before: int, after: int) -> Value:
        """The first value that the operation ``before`` makes and the operation ``after`` reads."""
        makers, readers = self.operations[before].parts, self.operations[after].parts
        return next(
            value
            for reader in readers
            for value in reader.kind.reads
            for maker in makers
            if value in maker.kind.makes and maker.stage in self._header.makers(value, reader.stage)
            if not {micro - value.slices_on for micro in reader.micros}.isdisjoint(maker.micros)
        )

    def cycle(self) -> tuple[int, ...]:
        """A cycle of compute operations, each before the next and the last before the first; empty if there is none.

        The cycle is a shortest one, as far as a bounded search can tell. Sums and steps on it are left out.
        """
        if nx.is_directed_acyclic_graph(self.graph):
            return ()
        # The smallest component has the shortest messages.
        cycle = _shortest(self.graph.succ, min(_knots(self.graph), key=lambda knot: (len(knot), min(knot))))
        return tuple(node for node in cycle if node < len(self.operations))


def digraph(nodes: Iterable[Mapping[str, object]], edges: Iterable[tuple[int, int, int]]) -> IntGraph:
    """A graph of networkx: nodes by number, with their attributes, and edges with a delay."""
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
    """The strongly connected components with more than one node; every cycle is within one of them."""
    return [knot for knot in nx.strongly_connected_components(graph) if len(knot) > 1]


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

    The search is breadth-first. The cycle is empty if each one through ``start`` has ``shorter_than`` nodes or more.
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


def _sync(operations: tuple[Operation, ...], owners: list[Worker], header: Header) -> Iterator[tuple[int, int]]:
    """The edges to and from sums and steps.

    Nodes are numbered on behind the operations: first the sums, group by group and update by update, then the steps,
    group by group, worker by worker and update by update.
    """
    if not header.trains:
        return
    # ``sums`` is the first sum; ``steps`` has the first step of each worker and group.
    sums, updates = len(operations), header.updates
    held = [(worker, number) for number, group in enumerate(header.groups) for worker in header.members(group)]
    steps = {place: sums + (len(header.groups) + index) * updates for index, place in enumerate(held)}
    numbers = [[header.group_numbers[group] for group in groups] for groups in header.groups_with]
    # Steps come before operations that read their version, and before those that add to the next update.
    last: dict[tuple[int, int, int], int] = {}
    for node, operation in enumerate(operations):
        for part in operation.parts:
            worker, update = owners[node], header.update_of(part.micros) if part.kind.sums else None
            for number in numbers[part.stage]:
                if part.version:
                    yield steps[worker, number] + part.version - 1, node
                if update:
                    yield steps[worker, number] + update - 1, node
                if update is not None:
                    last[worker, number, update] = node
    # A worker's last operation that adds to an update comes before the sum, the sum before the steps.
    for (_, number, update), node in last.items():
        yield node, sums + number * updates + update
    for (_, number), step in steps.items():
        yield from ((sums + number * updates + update, step + update) for update in range(updates))
        yield from pairwise(range(step, step + updates))


def _path(came_from: dict[int, int], start: int, end: int) -> tuple[int, ...]:
    nodes = [end]
    while nodes[-1] != start:
        nodes.append(came_from[nodes[-1]])
    return tuple(reversed(nodes))
