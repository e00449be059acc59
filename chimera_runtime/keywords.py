"""Keyword arguments of stages: a dict that travels with a micro-batch, of which each stage takes the names it knows."""

import inspect
from collections.abc import Iterable
from typing import Any

import torch

Keywords = dict[str, Any]
"""Pytrees with the items along dimension 0, by the names that stages know them by."""


def accepted(module: torch.nn.Module, names: Iterable[str]) -> tuple[str, ...]:
    """The names that a stage takes beside what it is called on: the parameters of its ``forward``, or all."""
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
