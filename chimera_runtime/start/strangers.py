"""Strangers: what a forward or the loss trains or writes, and the pipeline does not know."""

import gc
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

from chimera_runtime.errors import Misuse
from chimera_runtime.errors import start as mistakes
from chimera_runtime.stage.splitting import reachable
from chimera_runtime.values.mesh_tensors import is_spread
from chimera_runtime.values.nested import leaves

Named = Mapping[str, Any]


def leaves_of(tensors: Iterable[Any]) -> dict[int, torch.Tensor]:
    """The tensors in which the graphs of some tensors end and that get a gradient, by id."""
    with_graph = [t for t in tensors if isinstance(t, torch.Tensor) and t.requires_grad]
    ends = [t for t in with_graph if t.grad_fn is None]
    nodes = reachable(t.grad_fn for t in with_graph if t.grad_fn is not None)
    ends += [node.variable for node in nodes if hasattr(node, "variable")]
    return {id(t): t for t in ends}


def surroundings(function: Any) -> dict[str, Any]:
    """Values that a function refers to: variables around it, arguments of a partial, attributes of an object."""
    if isinstance(function, partial):
        arguments = {f"argument {number}": value for number, value in enumerate(function.args)}
        return {**surroundings(function.func), **arguments, **function.keywords}
    owner = getattr(function, "__self__", None if inspect.isfunction(function) else function)
    code = inspect.unwrap(
        getattr(function, "__func__", function if inspect.isfunction(function) else type(owner).__call__)
    )
    variables = inspect.getclosurevars(code) if inspect.isfunction(code) else None
    around = {} if variables is None else {**variables.globals, **variables.nonlocals}
    return {**around, **getattr(owner, "__dict__", {})}


def _tensors_in(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors in a value of `surroundings`, with words for each."""
    if isinstance(value, torch.nn.Module):
        named = (*value.named_parameters(), *value.named_buffers())
        yield from ((f"{inside} of {name}", tensor) for inside, tensor in named)
    elif isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, element in value.items():
            yield from _tensors_in(f"{name}[{key!r}]", element)
    elif isinstance(value, list | tuple):
        for place, element in enumerate(value):
            yield from _tensors_in(f"{name}[{place}]", element)


@dataclass
class Strangers:
    """Looks for strangers in one forward of a stage and, on the last stage, in the loss. Make it before the forward.

    ``loss`` is the loss if no module of it stands beside the stage. Leaves that a forward makes, as by
    ``requires_grad_()`` of an input, are no strangers: they are gone with the graph, and `complaint` comes after that.
    ``is_spread`` says whether the module had DTensors before the forward: FSDP puts others in their place.
    """

    stage: int
    module: InitVar[torch.nn.Module]
    loss: InitVar[Callable[..., Any] | None]
    given: InitVar[Any]
    _around: dict[str, Any] = field(default_factory=dict, init=False)
    _buffers: list[tuple[str, torch.Tensor, int]] = field(default_factory=list, init=False)
    _found: list[tuple[str, bool, TensorWeakRef]] = field(default_factory=list, init=False)
    _written: str | None = field(default=None, init=False)

    def __post_init__(self, module: torch.nn.Module, loss: Callable[..., Any] | None, given: Any) -> None:
        self._known = {*map(id, module.parameters())}.union(leaves_of(leaves(given)))
        self.is_spread = any(map(is_spread, module.parameters()))
        self._around = {} if loss is None else surroundings(loss)
        known = {*map(id, module.buffers())}
        for name, value in self._around.items():
            if isinstance(value, torch.nn.Module) and self._known.isdisjoint(map(id, value.parameters())):
                buffers = [(f"{inside} of {name}", b) for inside, b in value.named_buffers() if id(b) not in known]
                self._buffers += [(words, b, b._version) for words, b in buffers if not b.is_inference()]

    def look(self, module: torch.nn.Module, made: Iterable[int], returned: Iterable[Any], loss: Any) -> None:
        """Looks at the graphs of what the stage ``returned``, and of the ``loss`` if there is one.

        ``made`` are the ids of tensors that the forward has made, or was given apart from what is ``given``.
        """
        around, self._around, known = self._around, {}, self._known.union(made)
        if self.is_spread or any(map(is_spread, module.parameters())):
            return
        of_stage = leaves_of(returned)
        for key, leaf in {**of_stage, **leaves_of([loss])}.items():
            if key not in known:
                self._found.append((_words(leaf, module, around), key in of_stage, TensorWeakRef(leaf)))
        self._written = next((words for words, buffer, version in self._buffers if buffer._version != version), None)
        self._buffers.clear()

    def complaint(self) -> Misuse | None:
        """The error about a stranger, if there is one; call it when the graphs are gone."""
        if self._written is not None:
            return mistakes.loss_writes_what_is_unknown(words=self._written)
        if any(ref() is not None for *_, ref in self._found):
            gc.collect()
        for words, is_of_stage, ref in self._found:
            if ref() is not None:
                return mistakes.leaf_is_unknown(self.stage if is_of_stage else None, words)
        return None


def _words(leaf: torch.Tensor, module: torch.nn.Module, around: Named) -> str:
    """Words for a leaf: its name in the module, or ``around`` the loss, if it has one."""
    named = dict(around)
    for place, part in module.named_modules():
        named |= {f"{place}.{name}".lstrip("."): value for name, value in vars(part).items() if name[:1] != "_"}
    words = (words for name, value in named.items() for words, tensor in _tensors_in(name, value) if tensor is leaf)
    return next(words, f"a tensor of shape {tuple(leaf.shape)}")
