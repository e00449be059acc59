"""Names in the model: those of parameters, of buffers, and of further entries in the ``state_dict`` of stages.

They are the same for every schedule and, with layers, for every split.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from chimera_runtime.blame import UserCode
from chimera_runtime.errors import FAILED, MISUSED
from chimera_runtime.errors import model as mistakes
from chimera_runtime.model.model import Model
from chimera_runtime.model.ties import Modules, Tie, named
from chimera_runtime.program.job import group_of


def name_in_model(model: Model, stage: int, name: str) -> str:
    """Returns the model's own name of a parameter or a buffer, which a stage has under the name ``name``.

    The function ``name`` of the model file returns it. Without that function it is ``stages.<stage>.<name>``, of a
    group ``<group>.<place in it>.<name>``, or with layers ``layers.<layer>.<name in the layer>``. What belongs to the
    loss is always called ``loss.<name>``.

    Raises `Misuse` or `ModelError` if the function does not return a text, or raises an error.
    """
    kind, number, inside = model.locate(stage, name)
    if kind == "loss":
        return f"loss.{inside}"
    if model.name is None:
        group = group_of(model.groups, number) if kind == "stage" else None
        return f"{kind}s.{number}.{inside}" if group is None else f"{group[0]}.{group[1]}.{inside}"
    call = f"name({number}, {inside!r})"
    with UserCode(call, MISUSED):
        name_in_file = model.name(number, inside)
    if not isinstance(name_in_file, str):
        kind = f"a {type(name_in_file).__name__}"
        raise mistakes.result_is_wrong(file=model.file, call=call, kind=kind, wanted="the name of a parameter")
    return name_in_file


def names_in_model(model: Model, stage: int, module: torch.nn.Module) -> dict[str, str]:
    """Returns the model's own names of the parameters and buffers of a stage, by their names in the stage."""
    inside = (name for name, _ in (*module.named_parameters(), *module.named_buffers()))
    return {name: name_in_model(model, stage, name) for name in inside}


def parameters_by_name(model: Model, built: Modules, ties: Sequence[Tie]) -> dict[str, torch.nn.Parameter]:
    """Returns the parameters of some stages, each once, by the model's own names. A shared one has the name of its
    first end, the same on every rank.
    """
    return {name_in_model(model, *end): parameter for end, parameter in named(built, ties).items()}


def buffers_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yields name and tensor of each buffer of a module, and whether its ``state_dict`` has the buffer."""
    unsaved = {
        f"{place}.{name}" if place else name
        for place, part in module.named_modules()
        for name in part._non_persistent_buffers_set
    }
    return ((name, buffer, name not in unsaved) for name, buffer in module.named_buffers())


def further_entries(stage: int, module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields name and value of the entries in the ``state_dict`` of a stage that are no parameters or buffers. Raises
    `ModelError` if the stage cannot make it.
    """
    tensors = dict((*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)))
    ids = {id(tensor) for tensor in tensors.values()}
    with UserCode(f"state_dict() of stage {stage}", FAILED):
        entries = module.state_dict(keep_vars=True)
    for name, value in entries.items():
        if name not in tensors and id(value) not in ids:
            yield name, value
