"""State of optimizers by the names of parameters, so that other ranks under another schedule can read it.

optimizer.state_dict()                         by_name([optimizer], [scheduler], names)
  state         {0: {"exp_avg": ..}}             state   {"h.0.weight": {"exp_avg": ..}}
  param_groups  [{"lr": .., "params": [0]}]      groups  {"h.0.weight": SavedGroup({"lr": ..}, entries, schedulers)}
  anything else                                  entries of each group of the optimizer
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from chimera_runtime.blame import UserCode
from chimera_runtime.errors import FAILED, Misuse
from chimera_runtime.errors import stage as mistakes
from chimera_runtime.values.fingerprint import fingerprint, shown
from chimera_runtime.values.mesh_tensors import local
from chimera_runtime.values.nested import to_device

# State of learning-rate schedulers by parameter group, so that a scheduler with other groups can read it.
#
# scheduler.state_dict()    `GroupStates`, for each group of its optimizer
#   last_epoch  3             common    {"last_epoch": 3}
#   base_lrs    [0.1, 0.2]    of_group  {"base_lrs": 0.1}   {"base_lrs": 0.2}

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
    """State of a scheduler for one parameter group: entries that all groups share, and those of this group."""

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


def schedulers_of(schedulers: Sequence[Any], names: NameOf) -> Mapping[torch.Tensor, States]:
    """Returns the states of the schedulers of each parameter; without one it has none."""
    by_parameter: defaultdict[torch.Tensor, States] = defaultdict(list)
    for scheduler in schedulers:
        groups = groups_of(scheduler, names)
        if groups is None:
            continue
        with UserCode(f"state_dict() of the scheduler {class_of(scheduler)}", FAILED):
            state = scheduler.state_dict()
        for number, group in enumerate(groups):
            of_group = class_of(scheduler), _cut(state, number, len(groups))
            for parameter in group["params"]:
                by_parameter[parameter].append(of_group)
    return by_parameter


def restore_schedulers(schedulers: Sequence[Any], names: NameOf, saved: Mapping[str, States]) -> None:
    """Loads into schedulers the states that were saved, by the names of the parameters that they schedule here."""
    remaining = {parameter: iter(saved.get(name, ())) for parameter, name in names.items()}
    for scheduler in schedulers:
        groups = groups_of(scheduler, names) or []
        current = scheduler.state_dict()
        states: list[GroupStates] = []
        for number, group in enumerate(groups):
            part = _cut(current, number, len(groups))
            for parameter in group["params"]:
                _, part = next(remaining[parameter])
            states.append(part)
        first = next((states[k] for k, group in enumerate(groups) if group["params"]), None)
        if first is None:
            continue  # this rank has no parameter that it schedules
        with UserCode(f"load_state_dict() of the scheduler {class_of(scheduler)}", FAILED):
            scheduler.load_state_dict(_joined(first.common, [state.of_group for state in states]))


def _cut(state: Mapping[str, Any], number: int, count: int) -> GroupStates:
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
    """Returns a scheduler's state of format 1, saved by another rank, with the rates of this rank's groups in it."""
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", ())
    rates = {"_last_lr": [group["lr"] for group in groups]}
    if all("initial_lr" in group for group in groups):
        rates["base_lrs"] = [group["initial_lr"] for group in groups]
    state: dict[str, Any] = {**scheduled, **{key: rates[key] for key in rates if groups and key in scheduled}}
    if _PARTS in scheduled:
        parts = zip(scheduler._schedulers, scheduled[_PARTS], strict=True)
        state[_PARTS] = [for_groups_of(part, of_part) for part, of_part in parts]
    return state


def settings_in(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings in a parameter group of an optimizer: all but its parameters and their names."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


@dataclass(frozen=True)
class SavedGroup:
    """A parameter group of an optimizer, as a checkpoint saves it for each parameter in it.

    ``settings`` are the learning rate and the like; ``entries`` are other entries of the optimizer's ``state_dict``
    than settings and the state of parameters. ``schedulers`` are in order, each with its state for this group alone.
    Format 1 has no ``optimizer`` and no ``schedulers``.
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

    Raises `Misuse` if a parameter has no name or is stepped twice, or a ``state_dict`` does not have the form of
    torch's.
    """
    named, of_parameter = OptimizerState(), schedulers_of(schedulers, names)
    for optimizer in optimizers:
        optimizer_class = class_of(optimizer)
        indexed = _indexed(optimizer)
        entries = _entries(indexed)
        for group, saved in zip(optimizer.param_groups, indexed["param_groups"], strict=True):
            states = of_parameter[group["params"][0]] if group["params"] else []
            record = SavedGroup(dict(sorted(settings_in(saved).items())), entries, optimizer_class, states)
            for parameter, index in zip(group["params"], saved["params"], strict=True):
                name = _name(parameter, names)
                if name in named.groups:
                    raise mistakes.two_optimizers_step(parameter=name)
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
                    return mistakes.state_is_missing(parameter=name)
                if not optimizer_class.can_read(saved[name].optimizer):
                    return mistakes.optimizers_differ(
                        parameter=name, saved=f"{saved[name].optimizer}", here=f"{optimizer_class}"
                    )
                first = first or name
                here = [scheduler for scheduler, _ in of_parameter[group["params"][0]]]
                complaint = (
                    _against_schedulers(name, saved[name], here)
                    or _against_one_optimizer(saved, first, name)
                    or _against_one_group(saved, of_group[0], name)
                )
                if complaint:
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
    """Why two parameters cannot be in one parameter group: a saved setting differs."""
    if saved[first] is saved[other]:
        return None
    settings, others = saved[first].settings, saved[other].settings
    for key in sorted({*settings, *others}):
        value, different = settings.get(key), others.get(key)
        if fingerprint(value) != fingerprint(different):
            return mistakes.settings_differ(
                first=first, other=other, setting=key, of_first=shown(value), of_other=shown(different)
            )
    return None


def _against_one_optimizer(saved: Mapping[str, SavedGroup], first: str, other: str) -> str | None:
    """Why one optimizer cannot step both parameters: other saved entries, or those of schedulers, differ."""
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
            groups.append({**settings_in(group), **record.settings, "params": [*range(first, first + len(of_group))]})
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
    """The ``state_dict`` of an optimizer, in which parameters are numbers, if it has the form of torch's."""
    with UserCode(f"state_dict() of the optimizer {class_of(optimizer)}", FAILED):
        indexed = optimizer.state_dict()
    groups = indexed.get("param_groups")
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if "state" not in indexed or groups is None or [len(group["params"]) for group in groups] != sizes:
        raise mistakes.state_dict_has_another_form(optimizer=f"{class_of(optimizer)}")
    return indexed


def _entries(indexed: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a ``state_dict`` of no parameter and no group; those inside ``state`` under the key ``state``."""
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
