"""Arguments that functions of a model file may take by name, in addition to their positional ones."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial, update_wrapper, wraps
from pathlib import Path
from typing import Any

import torch

from chimera_runtime.errors import model as mistakes

_NAMED = "named_parameters"
_NAME = "_name_in_model"
"""Attribute of a parameter with its name, for an optimizer that takes named parameters."""


def bound(function: Callable[..., Any], positional: int, offered: Mapping[str, Any], file: Path) -> Callable[..., Any]:
    """Returns the function with some parameters filled in: those that have the name of an ``offered`` argument.

    The result takes only the first ``positional`` arguments of the function.

    Raises `Misuse` if the function needs a further argument that is not offered; the message names ``file``, in which
    the function is defined.
    """
    by_name = _by_name(function, positional)
    by_keyword = {p.name: offered[p.name] for p in by_name if p.name in offered}
    unknown = [p.name for p in by_name if p.name not in offered and p.default is p.empty]
    if unknown:
        name = getattr(function, "__name__", "a function")
        raise mistakes.parameter_is_unknown(file, name, unknown, offered)
    if not by_keyword:
        return function

    return update_wrapper(partial(function, **by_keyword), function)


def takes(function: Any, positional: int, name: str) -> bool:
    """Whether `bound` would fill in ``name``: the function has such a parameter after its ``positional`` first ones."""
    return any(parameter.name == name for parameter in _by_name(function, positional))


def _by_name(function: Any, positional: int) -> list[inspect.Parameter]:
    """Returns parameters that can be passed by name, after the ``positional`` first ones; none without a signature."""
    try:
        parameters = [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):
        return []
    return [p for p in parameters[positional:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def takes_names(optimizer: Callable[..., Any]) -> bool:
    """Whether the first parameter of a function that makes an optimizer is called ``named_parameters``."""
    try:
        return next(iter(inspect.signature(optimizer).parameters), None) == _NAMED
    except (TypeError, ValueError):
        return False


def label(parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Stores the name of each parameter in the parameter itself, for `with_names`."""
    for name, parameter in parameters.items():
        setattr(parameter, _NAME, name)


def with_names(optimizer: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a function of parameters that calls ``optimizer`` with (name, parameter) pairs; see `label`."""

    @wraps(optimizer)
    def of_parameters(parameters: Sequence[torch.nn.Parameter]) -> Any:
        return optimizer([(getattr(parameter, _NAME), parameter) for parameter in parameters])

    return of_parameters
