"""Keyword arguments: a dict that travels with a micro-batch, of which each stage or layer takes the names it knows."""

import inspect
from collections.abc import Collection
from typing import Any

import torch

Keywords = dict[str, Any]
"""Pytrees with the items along dimension 0, by the names that stages know them by."""


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
