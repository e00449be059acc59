"""The state of optimizers by the names of parameters, so that other ranks under another schedule can read it.

optimizer.state_dict()                         by_name(optimizer, names)
  state         {0: {"exp_avg": ..}}             state   {"h.0.weight": {"exp_avg": ..}}
  param_groups  [{"lr": .., "params": [0]}]      groups  {"h.0.weight": (("lr", ..), ..)}
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from chimera_runtime.errors import BadCheckpoint, Misuse

NameOf = Mapping[torch.Tensor, str]
"""The name of each parameter that an optimizer may step."""

Settings = tuple[tuple[str, Any], ...]
"""Learning rate and the like, of the group of an optimizer that a parameter is in."""


@dataclass
class OptimizerState:
    """``state`` has what an optimizer keeps of each parameter, most of it tensors; ``groups`` its settings."""

    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: dict[str, Settings] = field(default_factory=dict)


def by_name(optimizers: Iterable[torch.optim.Optimizer], names: NameOf) -> OptimizerState:
    """The state of some optimizers; its tensors are theirs.

    Raises
    ------
    Misuse
        If one steps a parameter that has no name.
    """
    named = OptimizerState()
    for optimizer in optimizers:
        indexed = optimizer.state_dict()
        for group, saved in zip(optimizer.param_groups, indexed["param_groups"], strict=True):
            settings = tuple((key, saved[key]) for key in sorted(saved) if key not in _OF_THE_GROUP)
            for parameter, index in zip(group["params"], saved["params"], strict=True):
                name = _name(parameter, names)
                named.groups[name] = settings
                if index in indexed["state"]:
                    named.state[name] = dict(indexed["state"][index])
    return named


_OF_THE_GROUP = ("params", "param_names")


def restore(optimizers: Iterable[torch.optim.Optimizer], names: NameOf, saved: OptimizerState) -> None:
    """Gives optimizers the state that `by_name` read from others of the same kind.

    Raises
    ------
    BadCheckpoint
        If the parameters of a group had different settings.
    """
    for optimizer in optimizers:
        groups: list[dict[str, Any]] = []
        state: dict[int, dict[str, Any]] = {}
        for group in optimizer.param_groups:
            first = sum(len(known["params"]) for known in groups)
            of_group = [_name(parameter, names) for parameter in group["params"]]
            settings = [saved.groups[name] for name in of_group]
            if any(repr(other) != repr(settings[0]) for other in settings):
                raise BadCheckpoint(
                    f"{of_group[0]} and other parameters are in one group of the optimizer, and were saved with "
                    "different settings: make the groups that there were"
                )
            kept = {key: value for key, value in group.items() if key not in _OF_THE_GROUP}
            groups.append(
                {**kept, **dict(settings[0] if settings else ()), "params": [*range(first, first + len(of_group))]}
            )
            state |= {first + k: saved.state[name] for k, name in enumerate(of_group) if name in saved.state}
        optimizer.load_state_dict({"state": state, "param_groups": groups})


def _name(parameter: torch.Tensor, names: NameOf) -> str:
    if parameter not in names:
        raise Misuse(
            "an optimizer steps a parameter that the pipeline does not have: make it of pipe.named_parameters()"
        )
    return names[parameter]
