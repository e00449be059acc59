"""Keyword arguments: a dict that travels with a micro-batch, of which each stage or layer takes the names it knows."""

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from chimera_runtime.errors import BadModel, Misuse
from chimera_runtime.values.aliases import versions
from chimera_runtime.values.nested import taken_apart

Keywords = dict[str, Any]
"""Pytrees with the items along dimension 0, by the names that stages know them by."""


@dataclass(frozen=True)
class KeywordNames:
    """The names of keyword arguments: all of the example's, and the ``needed`` ones, which stages of this rank take."""

    known: frozenset[str]
    needed: frozenset[str]

    def require(self, keywords: Mapping[str, Any], what: str) -> None:
        """Passes if every keyword argument reaches the stages that take it, and none that this rank needs is missing.

        Raises
        ------
        Misuse
            If one has a name that the example lacks, or a needed one is missing from ``what``.
        """
        names = keywords.keys()
        if names == self.known:
            return
        if unknown := sorted(names - self.known):
            raise Misuse(
                f"{what} has the keyword argument {unknown[0]} and the example of the pipeline has none of that name, "
                "so no stage would get it: make the pipeline with an example that has all keyword arguments"
            )
        if missing := sorted(self.needed - names):
            raise Misuse(
                f"{what} has no keyword argument {missing[0]}, and the example of the pipeline has one: give all "
                "mini-batches the same names"
            )


class Watched:
    """Keyword arguments that other stages take as well, while a forward of this stage runs."""

    def __init__(self, stage: int, keywords: Keywords, shared: Collection[str]) -> None:
        self._stage = stage
        self._tensors = {name: taken_apart(keywords[name])[0] for name in shared}
        self._before = {name: versions(tensors) for name, tensors in self._tensors.items()}

    def require_unwritten(self) -> None:
        """Passes if the forward has not changed them.

        Raises
        ------
        BadModel
            If it has: whether another stage sees that depends on where it is.
        """
        for name, tensors in self._tensors.items():
            if versions(tensors) != self._before[name]:
                raise BadModel(
                    f"stage {self._stage} changes its keyword argument {name} in place, and other stages take it, too; "
                    "let it work on a copy, as .clone() makes it"
                )


def require_unused(loss: Callable[..., Any], names: Collection[str]) -> None:
    """Passes unless the loss has a parameter with the name of a keyword argument, which only stages get.

    Raises
    ------
    Misuse
        If it has.
    """
    try:
        parameters = inspect.signature(loss).parameters
    except (TypeError, ValueError):
        return
    given = getattr(loss, "keywords", {})  # those of a functools.partial
    if name := next((name for name in [*parameters][2:] if name in names and name not in given), None):
        raise Misuse(
            f"loss has a parameter {name}, but keyword arguments are for stages and loss(output, target) gets none: "
            "put what the loss needs into the target, or give Pipeline a loss with two parameters"
        )


def accepted(module: torch.nn.Module, names: Collection[str]) -> tuple[str, ...]:
    """The names that a stage takes beside what it is called on: the parameters of its ``forward``, or all."""
    if isinstance(module, Stack):
        known = {name for layer in module.values() for name in accepted(layer, names)}
        return tuple(name for name in names if name in known)
    forward = getattr(module, "_orig_mod", module).forward  # what torch.compile has wrapped
    parameters = list(inspect.signature(forward).parameters.values())
    positional = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
    if parameters and parameters[0].kind in positional:
        del parameters[0]
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return tuple(names)
    known = {
        parameter.name
        for parameter in parameters
        if parameter.kind in {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    }
    return tuple(name for name in names if name in known)


class Stack(torch.nn.ModuleDict):
    """A stage that is made of layers, by their index in the model: each is called on what the one before returned."""

    def forward(self, value: Any, **keywords: Any) -> Any:
        """Runs the layers; each is given the keyword arguments that it knows."""
        for layer in self.values():
            value = layer(value, **{name: keywords[name] for name in accepted(layer, keywords)})
        return value
