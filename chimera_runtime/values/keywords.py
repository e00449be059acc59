"""Keyword arguments: a dict that goes with a micro-batch; each stage or layer takes the names in its signature."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

import torch

from chimera_runtime.errors import values as mistakes
from chimera_runtime.values.carries import CARRY, OF_LAYERS, START, SliceArguments, slice_arguments
from chimera_runtime.values.last_stage import alone
from chimera_runtime.values.nested import leaves, taken_apart
from chimera_runtime.values.shared_memory import versions

Keywords = dict[str, Any]
"""Nested tensors by the names of the stages' parameters: with items along dimension 0, or anything under a `Whole`."""


class Whole(str):
    """Name of a keyword argument that is never cut: see `whole`. It equals the name without the declaration."""

    __slots__ = ()


def whole(name: str) -> str:
    """The name of a keyword argument that every micro-batch gets as it is, such as borders of packed documents.

    It stands in the example's keyword arguments, ``{whole("borders"): borders}``, or in those of a dataset's items. The
    value has no items along dimension 0, and may differ from step to step. Later batches may have the plain name.
    """
    return Whole(name)


def cut(keywords: Keywords, part: Callable[[Any], Any]) -> Keywords:
    """Returns keyword arguments with a ``part`` of each, but of those that are whole."""
    return {name: value if isinstance(name, Whole) else part(value) for name, value in keywords.items()}


def cut_alone(keywords: Keywords) -> Keywords:
    """Returns the keyword arguments that are cut."""
    return {name: value for name, value in keywords.items() if not isinstance(name, Whole)}


def borders_in(keywords: Keywords) -> str | None:
    """Returns the first of the keyword arguments that are cut with whole numbers that rise from 0, as borders do."""
    for name, value in cut_alone(keywords).items():
        for leaf in leaves(value):
            if isinstance(leaf, torch.Tensor) and leaf.dim() == 1 and len(leaf) > 2 and not leaf.is_meta:
                numbers = leaf.tolist() if leaf.dtype in _WHOLE_NUMBERS else [1]
                if numbers[0] == 0 < numbers[-1] and numbers == sorted(numbers):
                    return name
    return None


_WHOLE_NUMBERS = {torch.int16, torch.int32, torch.int64}


@dataclass(frozen=True)
class KeywordNames:
    """Names of keyword arguments: all that the ``example`` has, and the ones ``needed`` by stages of this rank.

    ``whole`` are the ones that the example declares as whole.
    """

    example: frozenset[str]
    needed: frozenset[str]
    whole: frozenset[str] = frozenset()

    def declared(self, keywords: Keywords, what: str) -> Keywords:
        """Returns keyword arguments with a `Whole` for each name that the example has so.

        Raises `Misuse` if the example lacks a name in ``keywords``, or has it without the declaration, or if
        ``keywords`` lacks one that this rank needs. ``what`` names the keyword arguments in the error.
        """
        self._require(keywords, what)
        if undeclared := [name for name in keywords if isinstance(name, Whole) and name not in self.whole]:
            raise mistakes.keyword_is_not_whole_in_the_example(what, undeclared[0])
        if not self.whole:
            return keywords
        return {Whole(name) if name in self.whole else name: value for name, value in keywords.items()}

    def _require(self, keywords: Mapping[str, Any], what: str) -> None:
        names = keywords.keys()
        if names == self.example:
            return
        if unknown := sorted(names - self.example):
            raise mistakes.keyword_is_not_in_the_example(what, unknown[0])
        if missing := sorted(self.needed - names):
            raise mistakes.keyword_is_missing(what, missing[0])


@contextmanager
def unwritten(stage: int, keywords: Keywords, shared: Collection[str]) -> Iterator[None]:
    """Raises `BadModel` if the forward inside writes a ``shared`` keyword argument, which other stages take as well.

    The change would reach other stages on this rank, but not on others.
    """
    tensors_of = {name: taken_apart(keywords[name])[0] for name in shared}
    before = {name: versions(tensors) for name, tensors in tensors_of.items()}
    yield
    for name, tensors in tensors_of.items():
        if versions(tensors) != before[name]:
            raise mistakes.keyword_was_written(stage, name)


def require_unused(loss: Callable[..., Any], names: Collection[str]) -> None:
    """Raises `Misuse` if the loss has a parameter with the name of a keyword argument: only stages get these."""
    try:
        parameters = signature(loss).parameters
    except (TypeError, ValueError):
        return
    bound = getattr(loss, "keywords", {})  # the arguments of a functools.partial
    if name := next((name for name in [*parameters][2:] if name in names and name not in bound), None):
        raise mistakes.loss_takes_a_keyword(name)


def accepted(module: torch.nn.Module, names: Collection[str]) -> tuple[str, ...]:
    """Returns the names that the ``forward`` of a stage takes in addition to its input; all if it has ``**kwargs``."""
    if not names:
        return ()
    module = alone(module)
    if isinstance(module, Stack):
        taken_by_layers = {name for layer in module.values() for name in accepted(layer, names)}
        return tuple(name for name in names if name in taken_by_layers)
    forward = getattr(module, "_orig_mod", module).forward  # the module inside that of torch.compile
    parameters = list(signature(forward).parameters.values())
    if parameters and parameters[0].kind in {Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD}:
        del parameters[0]
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters):
        return tuple(names)
    taken_by_name = {Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY}
    by_name = {parameter.name for parameter in parameters if parameter.kind in taken_by_name}
    return tuple(name for name in names if name in by_name)


class Stack(torch.nn.ModuleDict):
    """A stage made of layers, under their index in the model; each layer gets the output of the layer before.

    If some layers have carries, the stage has one as well: a dict of these layers' carries, by index.
    """

    def __init__(self, layers: Mapping[str, torch.nn.Module]) -> None:
        super().__init__(layers)
        self._takes = {index: slice_arguments(layer) for index, layer in layers.items()}
        takes = self._takes.values()
        self.slice_arguments = SliceArguments(any(t.carry for t in takes), any(t.start for t in takes), by_layer=True)

    def forward(self, value: Any, **keywords: Any) -> Any:
        """Runs the layers, each with the keyword arguments that it accepts, and with its own carry."""
        of_slice = keywords.pop(OF_LAYERS, {})
        before, carries = of_slice.get(CARRY) or {}, {}
        for index, layer in self.items():
            takes = self._takes[index]
            named = {name: keywords[name] for name in accepted(layer, keywords)}
            if takes.start and START in of_slice:
                named[START] = of_slice[START]
            if takes.carry and CARRY in of_slice:
                returned = layer(value, **named, carry=before.get(index))
                value, carries[index] = takes.split_result(f"layer {index}", returned)
            else:
                value = layer(value, **named)
        return (value, carries) if CARRY in of_slice else value
