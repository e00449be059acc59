"""A backward in two halves: first the gradient of the input, later those of the weights.

    x ---> fork ---> fork ---> y          from y back to x is the way of the first half;
            ^         ^                   a fork is a node on the way with edges that lead off it, to weights
            w         v

The first half runs the way. A fork computes the gradient of x there; autograd leaves out that of w, for which nobody
asks. The second half calls each fork once more, with the same gradients of its outputs, and autograd leaves out that of
x. A fork that gives the gradient of w in the first half already, as custom functions do, is not called again. So what
a backward computes is computed once.

Unlike a run of the engine from fork to fork, a call of a fork does not go on along the way: weights that are used
several times, one use behind another, get every gradient once.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from chimera_runtime.values.tensors import Tensors

_RUN_AGAIN = "torch.utils.checkpoint"
"""The module whose hooks for saved tensors run a forward again, in every run of the engine that needs one of them."""

_WHOLE = {
    "CheckpointFunctionBackward": _RUN_AGAIN,
    "RegisterPostBackwardFunctionBackward": "fully_shard",
}
"""Nodes that must be in one run of the engine with all others, and what they are from."""

EdgeGradients = list[tuple[GradientEdge, torch.Tensor]]
"""Gradients, each with the place in the graph from which it goes on to the weights."""


_AT_ONCE = 2**22
"""Bytes of weights' gradients that one run of the engine makes before they are added, if no single one is larger."""


class SecondHalf(Protocol):
    """A backward between its two halves."""

    @property
    def kept(self) -> list[torch.Tensor]:
        """The gradients that are kept for the second half, beside what the forward has saved."""

    def finish(self) -> None:
        """Adds to the gradients of the weights; once."""


class HalfBackward(NamedTuple):
    """A micro-batch between the two halves of its backward, and what it counts in the loss."""

    halfway: SecondHalf
    counts: Tensors


class LateFork(NamedTuple):
    """A fork that is called again: the numbers of its edges to weights, and the gradients of its outputs."""

    node: Node
    edges: Sequence[int]
    gradients: tuple[torch.Tensor | None, ...]


JointRun = tuple[EdgeGradients, list[LateFork]]
"""Gradients that are there, and forks that give others, all of which have to go on to the weights in one run."""


class SplitBackward:
    """The second half of a backward of which the first has run: the gradients of ``leaves`` are there.

    Until `finish` it keeps the graph, and the gradients with which the weights' gradients begin.

    Parameters
    ----------
    roots, gradients
        Where the backward begins, with the gradient of each.
    leaves
        The tensors whose gradients are wanted first; those that need none are passed over.
    """

    def __init__(self, roots: Tensors, gradients: Tensors, leaves: Tensors) -> None:
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        starts = list(map(get_gradient_edge, roots))
        way = (
            _way([start.node for start in starts], [get_gradient_edge(leaf).node for leaf in wanted]) if wanted else {}
        )
        self._parts: list[tuple[EdgeGradients, LateFork | None]] = [
            ([(start, gradient)], None)
            for start, gradient in zip(starts, gradients, strict=True)
            if start.node not in way
        ]
        forks = {node: edges for node in way if (edges := _edges_off(node, way))}
        begin = [
            (root, gradient)
            for root, start, gradient in zip(roots, starts, gradients, strict=True)
            if start.node in way
        ]
        if begin:
            self._run(begin, wanted, forks)

    def _run(
        self, begin: list[tuple[torch.Tensor, torch.Tensor]], wanted: list[torch.Tensor], forks: dict[Node, list[int]]
    ) -> None:
        handles = [node.register_hook(self._noting(node, edges)) for node, edges in forks.items()]
        roots, gradients = zip(*begin, strict=True)
        try:
            torch.autograd.backward(roots, gradients, inputs=wanted, retain_graph=bool(forks))
        finally:
            for handle in handles:
                handle.remove()

    def _noting(self, node: Node, edges: list[int]) -> Callable[..., None]:
        """Notes, when a fork has run, the gradients that it has given for weights, or those that it is to be given."""
        complete = isinstance(node, BackwardCFunction)

        def note(given: Tensors, received: tuple[torch.Tensor | None, ...]) -> None:
            early = [(_edge(node, i), given[i]) for i in edges if given[i] is not None]
            late = [] if complete else [i for i in edges if given[i] is None]
            self._parts.append((early, LateFork(node, late, received) if late else None))

        return note

    @property
    def kept(self) -> list[torch.Tensor]:
        """The gradients with which those of the weights begin, and the gradients of the outputs of forks."""
        early = [gradient for gradients, _ in self._parts for _, gradient in gradients]
        late = [gradient for _, fork in self._parts if fork is not None for gradient in fork.gradients]
        return [*early, *(gradient for gradient in late if gradient is not None)]

    def finish(self) -> None:
        """Adds to the gradients of the weights."""
        for early, late in _batches(_joint(self._parts)):
            gradients = [*early, *_called_again(late)]
            if gradients:
                torch.autograd.backward([edge for edge, _ in gradients], [gradient for _, gradient in gradients])
        self._parts = []


def _way(roots: Iterable[Node], inputs: Iterable[Node]) -> dict[Node, bool]:
    """The nodes from which an input is reached."""
    leads = dict.fromkeys(inputs, True)
    ahead: list[tuple[Node, tuple[Node, ...] | None]] = [(root, None) for root in roots]
    while ahead:
        node, behind = ahead.pop()
        if behind is not None:
            leads[node] = any(leads[other] for other in behind)
        elif node not in leads:
            leads[node] = False
            behind = tuple([other for other, _ in node.next_functions if other is not None])
            ahead.append((node, behind))
            ahead += [(other, None) for other in behind if other not in leads]
    return {node: True for node, does in leads.items() if does}


def _edges_off(node: Node, way: dict[Node, bool]) -> list[int]:
    return [i for i, (other, _) in enumerate(node.next_functions) if other is not None and other not in way]


def _edge(node: Node, number: int) -> GradientEdge:
    other, input_number = node.next_functions[number]
    assert other is not None
    return GradientEdge(other, input_number)


def _batches(groups: Iterable[JointRun]) -> Iterator[JointRun]:
    """Groups to be run together: small ones, for a run of the engine takes its time; large ones by themselves."""
    early: EdgeGradients = []
    late: list[LateFork] = []
    size = 0
    for more_early, more_late in groups:
        early += more_early
        late += more_late
        size += sum(_size(_edge(fork.node, i)) for fork in more_late for i in fork.edges)
        if size >= _AT_ONCE:
            yield early, late
            early, late, size = [], [], 0
    yield early, late


def _size(edge: GradientEdge) -> int:
    expected: Any = edge.node._input_metadata[edge.output_nr]
    return int(math.prod(expected.shape) * expected.dtype.itemsize)


def _joint(parts: Iterable[tuple[EdgeGradients, LateFork | None]]) -> list[JointRun]:
    """Parts that share a node behind them together: the node has to run once, with all gradients for it.

    Where parts share a weight alone, each adds to its gradient.
    """
    groups: list[JointRun] = []
    group_of: dict[Node, JointRun] = {}
    for early, late in parts:
        behind = {edge.node for edge, _ in early} | ({_edge(late.node, i).node for i in late.edges} if late else set())
        nodes = [node for node in _closure(behind) if node.next_functions]
        joined: JointRun = ([*early], [late] if late else [])
        for group in {id(group_of[node]): group_of[node] for node in nodes if node in group_of}.values():
            joined[0].extend(group[0])
            joined[1].extend(group[1])
            groups.remove(group)
            nodes += [node for node, other in group_of.items() if other is group]
        group_of.update(dict.fromkeys(nodes, joined))
        groups.append(joined)
    return groups


def _closure(nodes: Iterable[Node]) -> set[Node]:
    """All nodes that some nodes lead to, themselves included."""
    reached: set[Node] = set()
    ahead = list(nodes)
    while ahead:
        node = ahead.pop()
        if node not in reached:
            reached.add(node)
            ahead += [other for other, _ in node.next_functions if other is not None]
    return reached


def _called_again(forks: Sequence[LateFork]) -> EdgeGradients:
    """What forks give for their edges to weights, and for no other edge."""
    if not forks:
        return []
    made: EdgeGradients = []

    def call() -> None:
        for node, edges, received in forks:
            given: Any = node(*received)  # type: ignore[operator]
            given = given if isinstance(given, tuple) else (given,)
            made.extend((_edge(node, i), _fitted(_edge(node, i), given[i])) for i in edges if given[i] is not None)

    asked = {_edge(node, i): None for node, edges, _ in forks for i in edges}
    token = torch.zeros((), requires_grad=True)
    with torch.enable_grad():
        began: torch.Tensor = _EngineCall.apply(token, call)  # type: ignore[no-untyped-call]
    edges: Any = [token, *asked]
    torch.autograd.grad([began], edges, allow_unused=True)
    return made


def _fitted(edge: GradientEdge, gradient: torch.Tensor) -> torch.Tensor:
    """A gradient in the shape and dtype of what it is for, as the engine does it: operators leave broadcasts to it."""
    expected: Any = edge.node._input_metadata[edge.output_nr]
    if gradient.is_complex() and not expected.dtype.is_complex:
        gradient = gradient.real
    if gradient.shape != expected.shape:
        gradient = gradient.sum_to_size(expected.shape)
    return gradient.to(expected.dtype)


class _EngineCall(torch.autograd.Function):
    """Calls a function within a run of the engine: a node that is called there computes what the run asks for."""

    @staticmethod
    def forward(context: Any, token: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        context.call = call
        return token.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        context.call()
        return gradient, None


class WholeBackward:
    """The second half of a backward of which the first was all of it.

    ``apart``: the gradients of the weights are kept until `finish`; else they have been added at once.
    """

    def __init__(
        self, roots: Tensors, gradients: Tensors, parameters: Iterable[torch.nn.Parameter], *, apart: bool
    ) -> None:
        before = [(parameter, parameter.grad) for parameter in parameters] if apart else []
        for parameter, _ in before:
            parameter.grad = None
        torch.autograd.backward(roots, gradients)
        self._kept = [(parameter, parameter.grad) for parameter, _ in before]
        for parameter, gradient in before:
            parameter.grad = gradient

    @property
    def kept(self) -> list[torch.Tensor]:
        """The gradients of the weights that have not been added."""
        return [gradient for _, gradient in self._kept if gradient is not None]

    def finish(self) -> None:
        """Adds what was kept to the gradients of the weights."""
        for parameter, gradient in self._kept:
            if parameter.grad is None:
                parameter.grad = gradient
            elif gradient is not None:
                parameter.grad += gradient
        self._kept = []


def obstacle(roots: Sequence[torch.Tensor], leaves: Tensors) -> str:
    """What in the graph from ``roots`` to ``leaves`` keeps a backward from being split; empty if nothing does.

    Custom functions compute all of their gradients at once: if no other forks are there, nothing is left for later.
    Where no leaf is reached, the first half has nothing to do, and the second is a backward as any other.
    """
    starts = [get_gradient_edge(root).node for root in roots]
    way = _way(starts, [get_gradient_edge(leaf).node for leaf in leaves if leaf.requires_grad])
    if not way:
        return ""
    for node in _closure(starts):
        if (origin := _WHOLE.get(type(node).__name__)) is not None:
            return origin
        if any(_unpacks_by_running(node, name) for name in _saved(type(node))):
            return _RUN_AGAIN
    forks = [node for node in way if _edges_off(node, way)]
    if forks and all(isinstance(node, BackwardCFunction) for node in forks):
        return ", ".join(sorted({type(node).__name__.removesuffix("Backward") for node in forks}))
    return ""


@cache
def _saved(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved"))


def _unpacks_by_running(node: Node, name: str) -> bool:
    saved = getattr(node, name)
    tensors = saved if isinstance(saved, tuple | list) else (saved,)
    return any(getattr(getattr(tensor, "unpack_hook", None), "__module__", None) == _RUN_AGAIN for tensor in tensors)
