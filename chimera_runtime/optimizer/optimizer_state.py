"""State of optimizers by the names of parameters, so that other ranks under another schedule can read it.

optimizer.state_dict()                         by_name([optimizer], [scheduler], names)
  state         {0: {"exp_avg": ..}}             state   {"h.0.weight": {"exp_avg": ..}}
  param_groups  [{"lr": .., "params": [0]}]      groups  {"h.0.weight": SavedGroup({"lr": ..}, entries, schedulers)}
  anything else                                  entries of each group of the optimizer
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from chimera_runtime.blame import UserCode
from chimera_runtime.errors import FAILED, Misuse
from chimera_runtime.errors import optimizer as mistakes
from chimera_runtime.optimizer.scheduler_state import GroupStates, NameOf, States, TorchClass, class_of, schedulers_of
from chimera_runtime.values.fingerprint import fingerprint, shown
from chimera_runtime.values.mesh_tensors import local
from chimera_runtime.values.nested import to_device

_OF_THE_GROUP = ("params", "param_names")


@dataclass(frozen=True)
class SavedGroup:
    """A parameter group of an optimizer, as a checkpoint saves it for each parameter in it.

    ``settings`` are the learning rate and the like; ``entries`` are entries of the optimizer's ``state_dict`` other
    than settings and the state of parameters. ``optimizer`` is the optimizer's class; ``schedulers`` are its schedulers
    in order, each with its state for this group alone. Both are None if they come from a checkpoint of format 1.
    """

    settings: dict[str, Any]
    entries: dict[str, Any] = field(default_factory=dict)
    optimizer: TorchClass | None = None
    schedulers: States | None = None


@dataclass
class OptimizerState:
    """The state that an optimizer keeps of each parameter, and the group of each parameter, by names of parameters."""

    state: dict[str, dict[Any, Any]] = field(default_factory=dict)
    groups: dict[str, SavedGroup] = field(default_factory=dict)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Returns the parameters of an optimizer, group after group: torch numbers them in this order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def by_name(
    optimizers: Iterable[torch.optim.Optimizer], names: NameOf, schedulers: Sequence[Any] = ()
) -> OptimizerState:
    """Returns the state of optimizers and schedulers by the names of parameters; the tensors in it are not copied.

    Raises `Misuse` if an optimizer steps a parameter that has no name, if two step the same one, or if a
    ``state_dict`` does not have the form of torch's.
    """
    named, of_parameter = OptimizerState(), schedulers_of(schedulers, names)
    for optimizer in optimizers:
        optimizer_class = class_of(optimizer)
        indexed = _indexed(optimizer)
        entries = _entries(indexed)
        for group, saved in zip(optimizer.param_groups, indexed["param_groups"], strict=True):
            settings = {key: saved[key] for key in sorted(saved) if key not in _OF_THE_GROUP}
            states = of_parameter(group["params"][0]) if group["params"] else []
            record = SavedGroup(settings, entries, optimizer_class, states)
            for parameter, index in zip(group["params"], saved["params"], strict=True):
                name = _name(parameter, names)
                if name in named.groups:
                    raise mistakes.two_optimizers_step(name)
                named.groups[name] = record
                if index in indexed["state"]:
                    named.state[name] = dict(indexed["state"][index])
    return named


def refusal(
    optimizers: Iterable[torch.optim.Optimizer],
    names: NameOf,
    schedulers: Sequence[Any],
    saved: Mapping[str, SavedGroup],
) -> str | None:
    """Returns why optimizers cannot continue from the saved groups, which `by_name` returned; None if they can."""
    of_parameter = schedulers_of(schedulers, names)
    for optimizer in optimizers:
        optimizer_class, first = class_of(optimizer), None
        for group in optimizer.param_groups:
            of_group = [_name(parameter, names) for parameter in group["params"]]
            for name in of_group:
                if name not in saved:
                    return mistakes.state_is_missing(name)
                if not optimizer_class.can_read(saved[name].optimizer):
                    return mistakes.optimizers_differ(name, f"{saved[name].optimizer}", f"{optimizer_class}")
                here = [scheduler for scheduler, _ in of_parameter(group["params"][0])]
                if complaint := _against_schedulers(name, saved[name], here):
                    return complaint
                first = first or name
                if complaint := _against_one_optimizer(saved, first, name) or _against_one_group(
                    saved, of_group[0], name
                ):
                    return complaint
    return None


def _against_schedulers(name: str, saved: SavedGroup, here: Sequence[TorchClass]) -> str | None:
    if saved.schedulers is None:
        return None
    there = [scheduler for scheduler, _ in saved.schedulers]
    if len(there) == len(here) and all(map(TorchClass.can_read, here, there)):
        return None
    return mistakes.schedulers_differ(name, [*map(str, there)], [*map(str, here)])


def _against_one_group(saved: Mapping[str, SavedGroup], first: str, other: str) -> str | None:
    """Returns why parameters ``first`` and ``other`` cannot be in one parameter group: a saved setting differs.

    The result is None if all settings are equal.
    """
    if saved[first] is saved[other]:
        return None
    settings, others = saved[first].settings, saved[other].settings
    for key in sorted({*settings, *others}):
        value, different = settings.get(key), others.get(key)
        if fingerprint(value) != fingerprint(different):
            return mistakes.settings_differ(first, other, key, shown(value), shown(different))
    return None


def _against_one_optimizer(saved: Mapping[str, SavedGroup], first: str, other: str) -> str | None:
    """Returns why one optimizer cannot step both parameters: other saved entries, or those of schedulers, differ.

    The result is None if they are equal.
    """
    first_group, other_group = saved[first], saved[other]
    if first_group is other_group:
        return None
    if fingerprint(first_group.entries) != fingerprint(other_group.entries):
        entries = sorted(map(str, {*first_group.entries, *other_group.entries}))
        return mistakes.optimizers_were_apart(first, other, entries)
    common, other_common = (
        [fingerprint(states.common) for _, states in group.schedulers or ()] for group in (first_group, other_group)
    )
    if common != other_common:
        return mistakes.optimizers_were_apart(first, other)
    return None


def restore(optimizers: Iterable[torch.optim.Optimizer], names: NameOf, saved: OptimizerState) -> None:
    """Loads into optimizers the state that `by_name` returned. Call `refusal` before: it must have returned None."""
    for optimizer in optimizers:
        # torch numbers the parameters of an optimizer from 0, group after group.
        groups: list[dict[str, Any]] = []
        state: dict[Any, dict[str, Any]] = {}
        entries = _entries(_indexed(optimizer))
        for group in optimizer.param_groups:
            first = sum(len(before["params"]) for before in groups)
            of_group = [_name(parameter, names) for parameter in group["params"]]
            record = saved.groups[of_group[0]] if of_group else SavedGroup({})
            entries |= record.entries
            settings = {key: value for key, value in group.items() if key not in _OF_THE_GROUP}
            groups.append({**settings, **record.settings, "params": [*range(first, first + len(of_group))]})
            state |= {first + k: saved.state[name] for k, name in enumerate(of_group) if name in saved.state}
        of_all = entries.pop("state", {})
        with UserCode(f"load_state_dict() of the optimizer {class_of(optimizer)}", FAILED):
            optimizer.load_state_dict({**entries, "state": {**state, **of_all}, "param_groups": groups})
        _undo_conversions(getattr(optimizer, "of_shards", optimizer), state)


def _undo_conversions(optimizer: torch.optim.Optimizer, state: Mapping[Any, Mapping[str, Any]]) -> None:
    """Puts back the state of parameters that torch's ``load_state_dict`` has converted.

    torch converts tensors to the dtype of the parameter, and anything that can be iterated, texts too, to iterators.
    """
    parameters = parameters_of(optimizer)
    for index, saved_values in state.items():
        values = optimizer.state.get(parameters[index], {})
        for key, value in saved_values.items():
            now = values.get(key)
            if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor):
                part = local(value)  # a sharded optimizer keeps only its shard
                if now.shape == part.shape and now.dtype != part.dtype:
                    values[key] = part.to(now.device, copy=True)
            elif type(now) is type(value):
                values[key] = to_device(value, parameters[index].device)


def _indexed(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the ``state_dict`` of an optimizer, in which parameters are numbers, if it has the form of torch's."""
    with UserCode(f"state_dict() of the optimizer {class_of(optimizer)}", FAILED):
        indexed = optimizer.state_dict()
    groups = indexed.get("param_groups")
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if "state" not in indexed or groups is None or [len(group["params"]) for group in groups] != sizes:
        raise mistakes.state_dict_has_another_form(f"{class_of(optimizer)}")
    return indexed


def _entries(indexed: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of a ``state_dict`` that belong to no parameter and no group.

    Entries of this kind inside ``state`` come under the key ``state``.
    """
    indices = {index for group in indexed["param_groups"] for index in group["params"]}
    entries = {key: value for key, value in indexed.items() if key not in ("state", "param_groups")}
    of_all = {key: value for key, value in indexed["state"].items() if key not in indices}
    return entries | ({"state": of_all} if of_all else {})


def _name(parameter: torch.Tensor, names: NameOf) -> str:
    if parameter not in names:
        raise Misuse(mistakes.PARAMETER_IS_NOT_OF_THE_PIPELINE)
    return names[parameter]


def plain(group: SavedGroup) -> dict[str, Any]:
    """Returns a group as plain containers, which any later version can read."""
    assert group.optimizer is not None
    assert group.schedulers is not None
    schedulers = [((of.name, of.of_torch), states.common, states.of_group) for of, states in group.schedulers]
    return {
        "settings": group.settings,
        "entries": group.entries,
        "kind": (group.optimizer.name, group.optimizer.of_torch),
        "schedulers": schedulers,
    }


def group_of(plain: Mapping[str, Any]) -> SavedGroup:
    """Returns the group from plain containers: the inverse of `plain`."""
    schedulers = [(TorchClass(*of), GroupStates(common, of_group)) for of, common, of_group in plain["schedulers"]]
    return SavedGroup(plain["settings"], plain["entries"], TorchClass(*plain["kind"]), schedulers)
