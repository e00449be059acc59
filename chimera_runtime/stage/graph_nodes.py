"""The graph that autograd keeps for a backward: its nodes, and the tensors that they have saved."""

from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch.autograd.graph import Node


def reachable(nodes: Iterable[Node]) -> dict[Node, None]:
    """All nodes that can be reached from ``nodes``, including these, each once."""
    reached: dict[Node, None] = {}
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in reached:
            reached[node] = None
            stack += [other for other, _ in node.next_functions if other is not None]
    return reached


def saved_tensors_of(node: Node) -> Iterator[tuple[Any, Callable[[], torch.Tensor | None]]]:
    """Yields each tensor that a node has saved, as it is stored, and a function that unpacks it.

    The function raises torch's error if the tensor was written since it was saved. Nodes that C++ code outside of torch
    defines do not show their tensors.
    """
    for raw, unpacked in _names(type(node)):
        stored = getattr(node, raw)
        if not isinstance(stored, tuple | list):
            yield stored, partial(getattr, node, unpacked)
        else:
            yield from ((saved, partial(_element, node, unpacked, place)) for place, saved in enumerate(stored))


def _element(node: Node, name: str, place: int) -> torch.Tensor | None:
    element: torch.Tensor | None = getattr(node, name)[place]
    return element


@cache
def _names(kind: type) -> tuple[tuple[str, str], ...]:
    """Names of the attributes of a class of nodes that show saved tensors: pairs of (as stored, unpacked)."""
    names = {*dir(kind)}
    raw = sorted(name for name in names if name.startswith("_raw_saved"))
    return tuple((name, plain if (plain := name.removeprefix("_raw")) in names else plain[1:]) for name in raw)
