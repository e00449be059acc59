"""State of learning-rate schedulers by parameter group, so that a scheduler with other groups can read it.

scheduler.state_dict()    `GroupStates`, for each group of its optimizer
  last_epoch  3             common    {"last_epoch": 3}
  base_lrs    [0.1, 0.2]    of_group  {"base_lrs": 0.1}   {"base_lrs": 0.2}
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from chimera_runtime.blame import UserCode
from chimera_runtime.errors import FAILED

_TORCH_OPTIM = "torch.optim"
_ABSTRACT = ("Optimizer", "LRScheduler", "_LRScheduler")


@dataclass(frozen=True)
class TorchClass:
    """Name of a class, and name of the class of torch.optim that it is or derives from (``of_torch``, may be empty)."""

    name: str
    of_torch: str

    def can_read(self, saved: "TorchClass | None") -> bool:
        """Whether an object of this class can load a state of the class ``saved``; None is a class that is not known.

        It can if both have one name, or derive from one class of torch.optim; AdamW and Adam are different classes.
        """
        return saved is None or saved.name == self.name or (saved.of_torch == self.of_torch != "")

    def __str__(self) -> str:
        return self.name if self.of_torch in ("", self.name) else f"{self.name} ({self.of_torch})"


def class_of(value: Any) -> TorchClass:
    """Returns the class of an optimizer or a scheduler; for a sharded optimizer, the class that steps the shards."""
    of_value = type(getattr(value, "of_shards", value))
    of_torch = [
        base.__name__
        for base in of_value.__mro__
        if base.__module__.startswith(_TORCH_OPTIM) and base.__name__ not in _ABSTRACT
    ]
    return TorchClass(of_value.__name__, of_torch[0] if of_torch else "")


NameOf = Mapping[torch.Tensor, str]
"""The name of each parameter that an optimizer may step."""

_BY_GROUP = ("_last_lr", "base_lrs", "min_lrs", "max_lrs", "lr_lambdas", "base_momentums", "max_momentums")
"""Keys of the lists in the states of torch's schedulers that have an element for each parameter group."""

_PARTS = "_schedulers"
"""Key of the states of the schedulers that a scheduler such as `SequentialLR` is made of."""


@dataclass(frozen=True)
class GroupStates:
    """State of a scheduler for one parameter group.

    ``common`` has the entries that all groups share, ``of_group`` those of this group.
    """

    common: dict[str, Any]
    of_group: dict[str, Any]


States = list[tuple[TorchClass, GroupStates]]
"""The schedulers of an optimizer in their order, each with its class and its state for one parameter group."""


def groups_of(scheduler: Any, names: NameOf) -> list[dict[str, Any]] | None:
    """Returns the parameter groups of a scheduler, or of the one inside a wrapper; None if they cannot be found."""
    for candidate in (scheduler, getattr(scheduler, "scheduler", None), getattr(scheduler, "_scheduler", None)):
        groups = getattr(getattr(candidate, "optimizer", None), "param_groups", None)
        if groups is not None and all(parameter in names for group in groups for parameter in group["params"]):
            return list(groups)
    return None


def schedulers_of(schedulers: Sequence[Any], names: NameOf) -> Callable[[torch.Tensor], States]:
    """Returns a function from a parameter to the states of its schedulers."""
    by_parameter: dict[torch.Tensor, States] = {}
    for scheduler in schedulers:
        groups = groups_of(scheduler, names)
        if groups is None:
            continue
        with UserCode(f"state_dict() of the scheduler {class_of(scheduler)}", FAILED):
            state = scheduler.state_dict()
        for number, group in enumerate(groups):
            of_group = class_of(scheduler), _cut(state, number, len(groups))
            for parameter in group["params"]:
                by_parameter.setdefault(parameter, []).append(of_group)
    return lambda parameter: by_parameter.get(parameter, [])


def restore_schedulers(schedulers: Sequence[Any], names: NameOf, saved: Mapping[str, States]) -> None:
    """Loads into schedulers the states that were saved, by the names of the parameters that they schedule here."""
    position: dict[torch.Tensor, int] = {}
    for scheduler in schedulers:
        groups = groups_of(scheduler, names) or []
        current = scheduler.state_dict()
        states: list[GroupStates] = []
        for number, group in enumerate(groups):
            part = _cut(current, number, len(groups))
            for parameter in group["params"]:
                place = position.setdefault(parameter, 0)
                position[parameter] += 1
                _, part = saved[names[parameter]][place]
            states.append(part)
        first = next((states[k] for k, group in enumerate(groups) if group["params"]), None)
        if first is None:
            continue  # this rank has no parameter that it schedules
        with UserCode(f"load_state_dict() of the scheduler {class_of(scheduler)}", FAILED):
            scheduler.load_state_dict(_joined(first.common, [state.of_group for state in states]))


def _cut(state: Mapping[str, Any], number: int, count: int) -> GroupStates:
    """Returns the part of a scheduler's state that is about parameter group ``number`` of ``count``."""
    common: dict[str, Any] = {}
    of_group: dict[str, Any] = {}
    for key, value in state.items():
        if key in _BY_GROUP and isinstance(value, list | tuple) and len(value) == count:
            of_group[key] = value[number]
        elif key == _PARTS:
            parts = [_cut(part, number, count) for part in value]
            common[key], of_group[key] = [part.common for part in parts], [part.of_group for part in parts]
        else:
            common[key] = value
    return GroupStates(common, of_group)


def _joined(common: Mapping[str, Any], of_groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Builds the state of a scheduler from the parts of its groups; the inverse of `_cut`."""
    state = dict(common)
    for key in of_groups[0]:
        if key == _PARTS:
            parts = zip(common[key], *(of_group[key] for of_group in of_groups), strict=True)
            state[key] = [_joined(first, others) for first, *others in parts]
        else:
            state[key] = [of_group[key] for of_group in of_groups]
    return state


def for_groups_of(scheduler: Any, scheduled: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a scheduler's state of format 1, saved by another rank, with the rates of this rank's groups in it.

    The states of the schedulers inside it are changed in the same way.
    """
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", ())
    rates = {"_last_lr": [group["lr"] for group in groups]}
    if all("initial_lr" in group for group in groups):
        rates["base_lrs"] = [group["initial_lr"] for group in groups]
    state: dict[str, Any] = {**scheduled, **{key: rates[key] for key in rates if groups and key in scheduled}}
    if _PARTS in scheduled:
        parts = zip(scheduler._schedulers, scheduled[_PARTS], strict=True)
        state[_PARTS] = [for_groups_of(part, of_part) for part, of_part in parts]
    return state
