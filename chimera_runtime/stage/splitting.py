"""A backward in two halves: first the gradient of the input, later those of the weights.

    x ---> fork ---> fork ---> y          from y back to x is the way of the first half;
            ^         ^                   a fork is a node on the way with edges that lead off it, to weights
            w         v

The first half asks autograd for the gradient of x alone. So a fork computes the gradient of x and leaves out that of w.
The second half calls each fork again, with the same gradients of its outputs, and asks for the gradient of w alone. A
fork that has computed both in the first half, as custom functions do, is not called again. So each gradient is computed
once.

A call of a fork does not continue along the way, as a run of the engine from fork to fork would. So weights that are
used several times along the way get each of their gradients once.
"""

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from chimera_runtime.stage import engine
from chimera_runtime.stage.engine import Roots
from chimera_runtime.values.nested import Tensors

# The graph that autograd keeps for a backward: its nodes, and the tensors that they have saved.


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


_RUN_AGAIN = "torch.utils.checkpoint"
"""The module whose hooks for saved tensors run a forward again, in every run of the engine that needs one of them."""

_WHOLE = {
    "CheckpointFunctionBackward": _RUN_AGAIN,
    "RegisterPostBackwardFunctionBackward": "fully_shard",
}
"""Nodes that must run in one run of the engine with all others, by name, and where they come from."""


class MovedGradient(Protocol):
    """A gradient that was moved to the host, of which ``unpacked`` returns the tensor once it is back."""

    def unpacked(self) -> torch.Tensor:
        """Returns the gradient, in the memory of the device."""


Operand = torch.Tensor | MovedGradient
"""A gradient that is kept for the second half of a backward."""

EdgeGradients = list[tuple[GradientEdge, Operand]]
"""Gradients, each with the edge of the autograd graph along which the backward continues to the weights."""

_AT_ONCE = 2**22
"""Bytes of gradients after which a run of autograd's engine ends, so that they are added before the next run."""


NumberedEdge = tuple[int, GradientEdge]
"""An edge of a node, with its number there."""


class LateFork(NamedTuple):
    """Fork whose weight gradients the second half computes: its node, and its edges to these weights.

    ``gradients`` are the gradients of the fork's outputs, with which the node is called again.
    """

    node: Node
    edges: Sequence[NumberedEdge]
    gradients: tuple[Operand | None, ...]


JointRun = tuple[EdgeGradients, list[LateFork]]
"""Gradients from the first half, and forks that will give further ones, for one run of the engine to the weights."""


class SplitBackward:
    """A backward that is split at its forks. The constructor runs the first half, which sets ``grad`` of ``leaves``.

    The backward begins at ``roots``, with the gradient of each; leaves that require no gradient are passed over. The
    object keeps the graph, and the gradients with which the second half begins, until `finish`.
    """

    def __init__(self, roots: Roots, gradients: Tensors, leaves: Tensors) -> None:
        # The way: all nodes from which a leaf is reached.
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        starts = [*map(engine.edge_of, roots)]
        self._owners: list[GradientEdge] = []
        way = (
            _way([start.node for start in starts], [get_gradient_edge(leaf).node for leaf in wanted]) if wanted else {}
        )
        # A root off the way leads to weights alone: all of its backward is left to the second half.
        self._parts: list[tuple[EdgeGradients, LateFork | None]] = [
            ([(start, gradient)], None)
            for start, gradient in zip(starts, gradients, strict=True)
            if start.node not in way
        ]
        # The other roots begin the first half, in which each fork notes what the second half needs.
        forks = _forks(way)
        starting = [
            (root, gradient)
            for root, start, gradient in zip(roots, starts, gradients, strict=True)
            if start.node in way
        ]
        if not starting:
            return
        handles = [node.register_hook(self._noting(node, edges)) for node, edges in forks.items()]
        roots, gradients = zip(*starting, strict=True)
        try:
            engine.run(roots, gradients, wanted, keep_graph=bool(forks))
        finally:
            for handle in handles:
                handle.remove()
        # Before torch 2.13, the node of a custom function is freed with the graph above it, even if it is named here.
        if any(isinstance(edge.node, BackwardCFunction) for early, _ in self._parts for edge, _ in early):
            self._owners = starts

    def _noting(self, node: Node, edges: list[NumberedEdge]) -> Callable[..., None]:
        """Returns a hook for a fork, which notes the weight gradients that the first half computes, and a `LateFork`.

        ``edges`` are the fork's edges to weights. The `LateFork` has those without a gradient. There is no `LateFork`
        if all have one, or if the fork is a custom function, which computes all gradients at once.
        """
        is_complete = isinstance(node, BackwardCFunction)

        def note(computed: Tensors, received: tuple[torch.Tensor | None, ...]) -> None:
            early: EdgeGradients = [(edge, computed[i]) for i, edge in edges if computed[i] is not None]
            late = [] if is_complete else [(i, edge) for i, edge in edges if computed[i] is None]
            self._parts.append((early, LateFork(node, late, received) if late else None))

        return note

    @property
    def operands(self) -> list[Operand]:
        """Gradients that are kept for the second half, apart from the tensors that the forward has saved."""
        early = [gradient for gradients, _ in self._parts for _, gradient in gradients]
        late = [gradient for _, fork in self._parts if fork is not None for gradient in fork.gradients]
        return [*early, *(gradient for gradient in late if gradient is not None)]

    def replace_operands(self, replacement: Callable[[Operand], Operand]) -> None:
        """Puts the ``replacement`` of each operand in its place."""
        for place, (early, late) in enumerate(self._parts):
            gradients = [(edge, replacement(gradient)) for edge, gradient in early]
            if late is not None:
                received = [None if gradient is None else replacement(gradient) for gradient in late.gradients]
                late = late._replace(gradients=tuple(received))
            self._parts[place] = gradients, late

    @property
    def nodes(self) -> list[Node]:
        """Nodes from which the second half runs; the graph behind them keeps what it needs of the forward."""
        late = [fork.node for _, fork in self._parts if fork is not None]
        return [*late, *(edge.node for early, _ in self._parts for edge, _ in early)]

    def finish(self) -> None:
        """Runs the second half, which adds to the gradients of the weights. Call it once."""
        for early, late in _batches(_joint(self._parts)) if len(self._parts) > 1 else map(_joined, self._parts):
            gradients = [*early, *_called_again(late)]
            if gradients:
                engine.run([edge for edge, _ in gradients], [_tensor(operand) for _, operand in gradients])
        self._parts, self._owners = [], []


def _tensor(operand: Operand) -> torch.Tensor:
    return operand if isinstance(operand, torch.Tensor) else operand.unpacked()


Edges = Sequence[tuple[Node | None, int]]


def _way(roots: Iterable[Node], inputs: Iterable[Node]) -> dict[Node, Edges]:
    """Returns all nodes on a way from ``roots`` to one of ``inputs``, both included, with the edges of each.

    The depth-first search uses a stack in place of recursion, because graphs are deep.
    """
    edges_of: dict[Node, Edges] = {}
    reaches_input = dict.fromkeys(inputs, True)
    stack: list[tuple[Node, Edges | None]] = [(root, None) for root in roots]
    while stack:
        node, edges = stack.pop()
        if edges is not None:
            for other, _ in edges:
                if other is not None and reaches_input[other]:
                    reaches_input[node] = True
                    break
        elif node not in reaches_input:
            reaches_input[node] = False
            edges = edges_of[node] = node.next_functions
            stack.append((node, edges))
            for other, _ in edges:
                if other is not None and other not in reaches_input:
                    stack.append((other, None))
    return {node: edges_of.get(node, ()) for node, reaches in reaches_input.items() if reaches}


def _forks(way: Mapping[Node, Edges]) -> dict[Node, list[NumberedEdge]]:
    """The nodes on the way that have edges off it, with these edges."""
    forks: dict[Node, list[NumberedEdge]] = {}
    for node, edges in way.items():
        for number, (other, place) in enumerate(edges):
            if other is not None and other not in way:
                forks.setdefault(node, []).append((number, GradientEdge(other, place)))
    return forks


def _batches(groups: Iterable[JointRun]) -> Iterator[JointRun]:
    """Yields the groups, small ones joined into larger ones, because each run of the engine has a fixed cost."""
    early: EdgeGradients = []
    late: list[LateFork] = []
    size = 0
    for more_early, more_late in groups:
        early += more_early
        late += more_late
        size += sum(_size(edge) for fork in more_late for _, edge in fork.edges)
        if size >= _AT_ONCE:
            yield early, late
            early, late, size = [], [], 0
    yield early, late


def _size(edge: GradientEdge) -> int:
    expected: Any = edge.node._input_metadata[edge.output_nr]
    return int(math.prod(expected.shape) * expected.dtype.itemsize)


def _joined(part: tuple[EdgeGradients, LateFork | None]) -> JointRun:
    """The run of a part by itself."""
    early, late = part
    return [*early], [late] if late else []


def _joint(parts: Iterable[tuple[EdgeGradients, LateFork | None]]) -> list[JointRun]:
    """Returns the runs of the engine that the second half needs: parts that share a node go into one run.

    A part is what `_noting` has noted of one fork. A shared node, neither on the way nor a weight, must run once, with
    all gradients. Parts that share only a weight stay apart: each adds to the gradient of the weight.
    """
    groups: list[JointRun] = []
    group_of: dict[Node, JointRun] = {}
    for early, late in parts:
        first = {
            edge.node for edge in [*(edge for edge, _ in early), *((edge for _, edge in late.edges) if late else ())]
        }
        nodes = [node for node in reachable(first) if node.next_functions]  # all but the weights
        joined = _joined((early, late))
        for group in {id(group_of[node]): group_of[node] for node in nodes if node in group_of}.values():
            joined[0].extend(group[0])
            joined[1].extend(group[1])
            groups.remove(group)
            nodes += [node for node, other in group_of.items() if other is group]
        group_of.update(dict.fromkeys(nodes, joined))
        groups.append(joined)
    return groups


def _called_again(forks: Sequence[LateFork]) -> EdgeGradients:
    """Calls forks for the gradients of their edges to weights, and of no other edges.

    A node computes the gradients that the running engine needs. So the calls are made from within a run of the engine
    that asks for those edges alone: a run that begins at a token of its own.
    """
    if not forks:
        return []
    gradients: EdgeGradients = []

    def call() -> None:
        for node, edges, received in forks:
            gradients_of_outputs = [None if operand is None else _tensor(operand) for operand in received]
            result: Any = node(*gradients_of_outputs)  # type: ignore[operator]
            computed = result if isinstance(result, tuple) else (result,)
            gradients.extend((edge, _fitted(edge, computed[i])) for i, edge in edges if computed[i] is not None)

    wanted = {edge: None for _, edges, _ in forks for _, edge in edges}
    _START.call = call
    try:
        engine.run([_START.result], [_START.token], [_START.token, *wanted], keep_graph=True, accumulate=False)
    finally:
        _START.call = None
    return gradients


def _fitted(edge: GradientEdge, gradient: torch.Tensor) -> torch.Tensor:
    """Sums and casts a gradient to the shape and dtype of the tensor that it is the gradient of.

    In an ordinary backward torch's engine does so, where the tensor was broadcast or cast.
    """
    expected: Any = edge.node._input_metadata[edge.output_nr]
    if gradient.is_complex() and not expected.dtype.is_complex:
        gradient = gradient.real
    if gradient.shape != expected.shape:
        gradient = gradient.sum_to_size(expected.shape)
    return gradient if gradient.dtype is expected.dtype else gradient.to(expected.dtype)


class _EngineCall(torch.autograd.Function):
    """Calls a function in its backward, and so from within a run of the engine."""

    @staticmethod
    def forward(context: Any, token: torch.Tensor, start: "_Start") -> torch.Tensor:
        context.start = start
        return token.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        context.start.call()
        return gradient, None


class _Start(threading.local):
    """Where runs of the engine of a thread begin that are to make a ``call``: from the ``result`` to the ``token``."""

    def __init__(self) -> None:
        self.call: Callable[[], None] | None = None
        with torch.inference_mode(False), torch.enable_grad():
            self.token = torch.zeros((), requires_grad=True)
            self.result: torch.Tensor = _EngineCall.apply(self.token, self)  # type: ignore[no-untyped-call]


_START = _Start()


class WholeBackward:
    """A backward that cannot be split: the constructor runs all of it.

    If ``apart``, the gradients of the weights are kept here until `finish`; otherwise they are added to ``grad`` at
    once.
    """

    def __init__(
        self, roots: Roots, gradients: Tensors, parameters: Iterable[torch.nn.Parameter], *, apart: bool
    ) -> None:
        before = [(parameter, parameter.grad) for parameter in parameters] if apart else []
        for parameter, _ in before:
            parameter.grad = None
        engine.run(roots, gradients)
        self._apart: list[tuple[torch.nn.Parameter, Operand]] = [
            (parameter, parameter.grad) for parameter, _ in before if parameter.grad is not None
        ]
        for parameter, gradient in before:
            parameter.grad = gradient

    @property
    def operands(self) -> list[Operand]:
        """Gradients of the weights that `finish` will add."""
        return [gradient for _, gradient in self._apart]

    def replace_operands(self, replacement: Callable[[Operand], Operand]) -> None:
        """Puts the ``replacement`` of each operand in its place."""
        self._apart = [(parameter, replacement(gradient)) for parameter, gradient in self._apart]

    @property
    def nodes(self) -> list[Node]:
        """No nodes: the graph is no longer needed."""
        return []

    def finish(self) -> None:
        """Adds the gradients that were kept. Call it once."""
        for parameter, operand in self._apart:
            gradient = _tensor(operand)
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad += gradient
        self._apart = []


SecondHalf = SplitBackward | WholeBackward
"""A backward whose first half has run; `finish` runs the second half."""


def run_first_half(
    roots: Roots,
    gradients: Tensors,
    leaves: Tensors,
    parameters: Iterable[torch.nn.Parameter],
    *,
    is_whole: bool,
    apart: bool,
) -> SecondHalf:
    """Runs the first half of a backward, or all of it if it cannot be split (``is_whole``); returns the second half.

    Other arguments are those of `SplitBackward` and `WholeBackward`.
    """
    if is_whole:
        return WholeBackward(roots, gradients, parameters, apart=apart)
    return SplitBackward(roots, gradients, leaves)


class HalfBackward(NamedTuple):
    """A micro-batch between the two halves of its backward, with its loss count."""

    second_half: SecondHalf
    counts: Tensors


def obstacle(roots: Sequence[torch.Tensor], leaves: Tensors) -> str:
    """The reason why a backward from ``roots`` to ``leaves`` cannot be split; empty if it can.

    Custom functions compute all of their gradients at once: if all forks are such functions, nothing is left for the
    second half. If no leaf is reached, the first half has nothing to do, and the second is an ordinary backward.
    """
    starts = [engine.edge_of(root).node for root in roots]
    way = _way(starts, [get_gradient_edge(leaf).node for leaf in leaves if leaf.requires_grad])
    if not way:
        return ""
    for node in reachable(starts):
        if (origin := _WHOLE.get(type(node).__name__)) is not None:
            return origin
        if any(_unpacks_by_running(saved) for saved, _ in saved_tensors_of(node)):
            return _RUN_AGAIN
    forks = _forks(way)
    if forks and all(isinstance(node, BackwardCFunction) for node in forks):
        return ", ".join(sorted({type(node).__name__.removesuffix("Backward") for node in forks}))
    return ""


def _unpacks_by_running(saved: Any) -> bool:
    return getattr(getattr(saved, "unpack_hook", None), "__module__", None) == _RUN_AGAIN
