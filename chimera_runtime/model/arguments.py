"""What the functions of a model file may take by name, beside what they are called with."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from chimera_runtime.errors import Misuse

_NAMED = "named_parameters"
_NAME = "_name_in_model"
"""The attribute in which a parameter carries its name, for an optimizer that asks for it."""


def bound(function: Callable[..., Any], positional: int, offered: Mapping[str, Any], file: Path) -> Callable[..., Any]:
    """The function with what it takes by name of what is offered; ``positional`` are the arguments it is called with.

    Raises
    ------
    Misuse
        If it needs something else.
    """
    by_name = _by_name(function, positional)
    given = {p.name: offered[p.name] for p in by_name if p.name in offered}
    unknown = [p.name for p in by_name if p.name not in offered and p.default is p.empty]
    if unknown:
        raise Misuse(
            f"{file}: {getattr(function, '__name__', 'a function')} takes {', '.join(unknown)}, which it is not given: "
            f"by name it may take {', '.join(offered) or 'nothing here'}"
        )
    if not given:
        return function

    @wraps(function)
    def called(*arguments: Any) -> Any:
        return function(*arguments, **given)

    return called


def takes(function: Any, positional: int, name: str) -> bool:
    """Whether `bound` would give the function what is offered under this name."""
    return any(parameter.name == name for parameter in _by_name(function, positional))


def _by_name(function: Any, positional: int) -> list[inspect.Parameter]:
    """The parameters behind the first ones that may be given by name; none if the function does not tell."""
    try:
        parameters = [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):
        return []
    return [p for p in parameters[positional:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def takes_names(optimizer: Callable[..., Any]) -> bool:
    """Whether the parameter of an optimizer's function is called ``named_parameters``."""
    try:
        return next(iter(inspect.signature(optimizer).parameters), None) == _NAMED
    except (TypeError, ValueError):
        return False


def label(parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Lets parameters carry their names, for `with_names`."""
    for name, parameter in parameters.items():
        setattr(parameter, _NAME, name)


def with_names(optimizer: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """An ``optimizer(named_parameters)`` as one that is called with parameters that carry their names."""

    @wraps(optimizer)
    def made(parameters: Sequence[torch.nn.Parameter]) -> Any:
        return optimizer([(getattr(parameter, _NAME), parameter) for parameter in parameters])

    return made
