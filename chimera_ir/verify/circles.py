"""Shortest circles among nodes that wait for each other."""

from collections import deque
from typing import TypeVar

Node = TypeVar("Node", bound=int)


def shortest_circle(waits: dict[Node, list[Node]]) -> list[Node]:
    """A shortest circle in a graph whose nodes all have successors; the lowest start decides between equal ones."""
    best: list[Node] = []
    for start in sorted(_knotted(waits)):
        circle = _circle_through(start, waits, len(best) or len(waits) + 1)
        best = circle or best
        if len(best) == 1:
            break
    return best


def _knotted(waits: dict[Node, list[Node]]) -> set[Node]:
    """The nodes in circles and on paths between them: nodes that no other waits for are removed until none is left."""
    count = dict.fromkeys(waits, 0)
    for peers in waits.values():
        for peer in peers:
            count[peer] += 1
    loose = [node for node, waiting in count.items() if waiting == 0]
    left = set(waits)
    while loose:
        node = loose.pop()
        left.remove(node)
        for peer in waits[node]:
            count[peer] -= 1
            if count[peer] == 0:
                loose.append(peer)
    return left


def _circle_through(start: Node, waits: dict[Node, list[Node]], shorter_than: int) -> list[Node]:
    """A shortest circle from a node to itself; empty if none is short enough."""
    paths = deque([[start]])
    visited = {start}
    while paths:
        path = paths.popleft()
        if len(path) >= shorter_than:
            return []
        for peer in waits[path[-1]]:
            if peer == start:
                return path
            if peer not in visited:
                visited.add(peer)
                paths.append([*path, peer])
    return []
