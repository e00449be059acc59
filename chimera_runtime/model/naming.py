"""Names of parameters in the model as a whole: the same for every schedule and, with layers, for every split."""

from collections.abc import Sequence

import torch

from chimera_runtime.blame import UserCode
from chimera_runtime.errors import MISUSED
from chimera_runtime.errors import model as mistakes
from chimera_runtime.model.model import Model
from chimera_runtime.model.ties import Modules, Tie, named


def name_in_model(model: Model, stage: int, name: str) -> str:
    """Returns the model's own name of a parameter or a buffer that has the name ``name`` in a stage.

    The model file's ``name`` decides. Without that function it is ``stages.<stage>.<name>``, or with layers
    ``layers.<layer>.<name in the layer>``.

    Raises `Misuse` or `ModelError` if the model file's function does not return a text, or raises an error.
    """
    kind, number, inside = model.locate(stage, name)
    if model.name is None:
        return f"{kind}s.{number}.{inside}"
    call = f"name({number}, {inside!r})"
    with UserCode(call, MISUSED):
        name_in_file = model.name(number, inside)
    if not isinstance(name_in_file, str):
        kind = f"a {type(name_in_file).__name__}"
        raise mistakes.result_is_wrong(model.file, call, kind, "the name of a parameter")
    return name_in_file


def names_in_model(model: Model, stage: int, module: torch.nn.Module) -> dict[str, str]:
    """Returns the model's own names of the parameters and buffers of a stage, by their names in the stage."""
    inside = (name for name, _ in (*module.named_parameters(), *module.named_buffers()))
    return {name: name_in_model(model, stage, name) for name in inside}


def parameters_by_name(model: Model, built: Modules, ties: Sequence[Tie]) -> dict[str, torch.nn.Parameter]:
    """Returns the parameters of some stages, each once, by the model's own names.

    A parameter that stages share has the name of its first end, a stage and the parameter's name in that stage; so the
    name is the same on every rank.

    Raises `Misuse` if two parameters have the same name.
    """
    parameters: dict[str, torch.nn.Parameter] = {}
    ends: dict[str, tuple[int, str]] = {}
    for end, parameter in named(built, ties).items():
        name = name_in_model(model, *end)
        if name in parameters:
            raise mistakes.names_are_equal(model.file, name, model.words(ends[name]), model.words(end))
        parameters[name], ends[name] = parameter, end
    return parameters
