"""What parameters are called in the model as a whole: the same under every schedule and, with layers, every split."""

from collections.abc import Sequence

import torch

from chimera_runtime.blame import UserCode
from chimera_runtime.errors import MISUSED, Misuse
from chimera_runtime.model.model import Model
from chimera_runtime.model.ties import Modules, Tie, named


def name_in_model(model: Model, stage: int, name: str) -> str:
    """The model's own name of what a stage calls ``name``, a parameter or a buffer.

    It is what the model file's ``name`` returns. Without that it is ``stages.<stage>.<name>``, or with layers
    ``layers.<layer>.<name in the layer>``.

    Raises
    ------
    Misuse, ModelError
        If the model file's function returns no text, or raises an error.
    """
    kind, number, inside = model.locate(stage, name)
    if model.name is None:
        return f"{kind}s.{number}.{inside}"
    with UserCode(f"name({number}, {inside!r})", MISUSED):
        given = model.name(number, inside)
    if not isinstance(given, str):
        returned = type(given).__name__
        raise Misuse(f"{model.file}: name({number}, {inside!r}) returned a {returned}, not the name of a parameter")
    return given


def names_in_model(model: Model, stage: int, module: torch.nn.Module) -> dict[str, str]:
    """The model's own names of the parameters and buffers of a stage, by their names in the stage."""
    inside = (name for name, _ in (*module.named_parameters(), *module.named_buffers()))
    return {name: name_in_model(model, stage, name) for name in inside}


def parameters_by_name(model: Model, built: Modules, ties: Sequence[Tie]) -> dict[str, torch.nn.Parameter]:
    """The parameters of some stages, each once, by the model's own names.

    What is shared has the name of the end that is declared first, so that it is the same on every rank.

    Raises
    ------
    Misuse
        If two have one name.
    """
    parameters: dict[str, torch.nn.Parameter] = {}
    ends: dict[str, tuple[int, str]] = {}
    for end, parameter in named(built, ties).items():
        name = name_in_model(model, *end)
        if name in parameters:
            raise Misuse(
                f"{model.file}: name gives {name} to {model.words(ends[name])} and to {model.words(end)}: give each "
                "parameter a name of its own; if they are one, declare it in tied(num_stages)"
            )
        parameters[name], ends[name] = parameter, end
    return parameters
