"""The state of optimizers by the names of parameters, so that other ranks under another schedule can read it.

optimizer.state_dict()                         by_name([optimizer], [scheduler], names)
  state         {0: {"exp_avg": ..}}             state   {"h.0.weight": {"exp_avg": ..}}
  param_groups  [{"lr": .., "params": [0]}]      groups  {"h.0.weight": KeptGroup({"lr": ..}, entries, schedulers)}
  anything else                                  entries of each group of the optimizer
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from chimera_runtime.blame import UserCode
from chimera_runtime.errors import FAILED, Misuse
from chimera_runtime.optimizer.optimizer_kinds import Kind, is_same_kind, kind_of
from chimera_runtime.optimizer.scheduler_state import GroupStates, NameOf, States, schedulers_of
from chimera_runtime.values.fingerprint import fingerprint, shown
from chimera_runtime.values.shards import local

_OF_THE_GROUP = ("params", "param_names")


@dataclass(frozen=True)
class KeptGroup:
    """What is kept of a group of an optimizer, for each parameter in it.

    Attributes
    ----------
    settings
        Learning rate and the like.
    entries
        What the optimizer's ``state_dict`` has beside settings and the state of parameters.
    kind
        That of the optimizer; None if it is not known.
    schedulers
        Those of the optimizer in their order, each with its state as if there were no other group; None if they are not
        known.
    """

    settings: dict[str, Any]
    entries: dict[str, Any] = field(default_factory=dict)
    kind: Kind | None = None
    schedulers: States | None = None


@dataclass
class OptimizerState:
    """``state`` has what an optimizer keeps of each parameter, most of it tensors; ``groups`` the group it is in."""

    state: dict[str, dict[Any, Any]] = field(default_factory=dict)
    groups: dict[str, KeptGroup] = field(default_factory=dict)


def by_name(
    optimizers: Iterable[torch.optim.Optimizer], names: NameOf, schedulers: Sequence[Any] = ()
) -> OptimizerState:
    """The state of some optimizers and of their schedulers; its tensors are theirs.

    Raises
    ------
    Misuse
        If one steps a parameter that has no name, two step the same, or one has a ``state_dict`` of another form.
    """
    named, of_parameter = OptimizerState(), schedulers_of(schedulers, names)
    for optimizer in optimizers:
        kind = kind_of(optimizer)
        indexed = _indexed(optimizer)
        entries = _entries(indexed)
        for group, saved in zip(optimizer.param_groups, indexed["param_groups"], strict=True):
            settings = {key: saved[key] for key in sorted(saved) if key not in _OF_THE_GROUP}
            states = of_parameter(group["params"][0]) if group["params"] else []
            record = KeptGroup(settings, entries, kind, states)
            for parameter, index in zip(group["params"], saved["params"], strict=True):
                name = _name(parameter, names)
                if name in named.groups:
                    raise Misuse(f"two optimizers step {name}: a checkpoint keeps the state of one by its name")
                named.groups[name] = record
                if index in indexed["state"]:
                    named.state[name] = dict(indexed["state"][index])
    return named


def refusal(
    optimizers: Iterable[torch.optim.Optimizer],
    names: NameOf,
    schedulers: Sequence[Any],
    saved: Mapping[str, KeptGroup],
) -> str | None:
    """Why optimizers cannot go on with groups that `by_name` read from others; None if nothing is known against it."""
    of_parameter = schedulers_of(schedulers, names)
    for optimizer in optimizers:
        kind, first = kind_of(optimizer), None
        for group in optimizer.param_groups:
            of_group = [_name(parameter, names) for parameter in group["params"]]
            for name in of_group:
                if name not in saved:
                    return f"it has no optimizer state of {name}, which an optimizer steps here"
                if not is_same_kind(saved[name].kind, kind):
                    return (
                        f"{name} was stepped by {saved[name].kind} and is stepped by {kind} here, which gives "
                        f"their state another meaning: resume with {saved[name].kind}; or read the weights alone, "
                        "with torch.distributed.checkpoint.load into pipe.state_dict()"
                    )
                here = [kind for kind, _ in of_parameter(group["params"][0])]
                if complaint := _of_schedulers(name, saved[name], here):
                    return complaint
                other = first or name
                if complaint := _apart(saved, other, name) or _in_one_group(saved, of_group[0], name):
                    return complaint
                first = other
    return None


def _of_schedulers(name: str, saved: KeptGroup, here: Sequence[Kind]) -> str | None:
    if saved.schedulers is None:
        return None
    there = [kind for kind, _ in saved.schedulers]
    if len(there) == len(here) and all(map(is_same_kind, there, here)):
        return None
    return (
        f"the optimizer of {name} had {_listed(there)}, and here it has {_listed(here)}: give schedulers= of the same "
        "classes, in the same order"
    )


def _listed(kinds: Sequence[Kind]) -> str:
    return f"the scheduler{'s' * (len(kinds) > 1)} {' and '.join(map(str, kinds))}" if kinds else "no scheduler"


def _in_one_group(saved: Mapping[str, KeptGroup], first: str, other: str) -> str | None:
    """Why two parameters cannot be in one group."""
    if saved[first] is saved[other]:
        return None
    settings, others = saved[first].settings, saved[other].settings
    key = next(
        (key for key in sorted({*settings, *others}) if fingerprint(settings.get(key)) != fingerprint(others.get(key))),
        None,
    )
    if key is None:
        return None
    return (
        f"{first} and {other} are in one group of the optimizer, and were saved with different settings ({key}: "
        f"{shown(settings.get(key))} and {shown(others.get(key))}): make the groups that there were"
    )


def _apart(saved: Mapping[str, KeptGroup], first: str, other: str) -> str | None:
    """Why two parameters cannot be stepped by one optimizer."""
    first_group, other_group = saved[first], saved[other]
    if first_group is other_group:
        return None
    what = None
    if fingerprint(first_group.entries) != fingerprint(other_group.entries):
        keys = sorted(map(str, {*first_group.entries, *other_group.entries}))
        what = f"its {', '.join(keys)} differed"
    elif [fingerprint(states.common) for _, states in first_group.schedulers or ()] != [
        fingerprint(states.common) for _, states in other_group.schedulers or ()
    ]:
        what = "their schedulers were at different points"
    if what is None:
        return None
    return (
        f"one optimizer steps {first} and {other}, and when they were saved {what}: make the optimizers that there "
        "were, under the schedule that there was"
    )


def restore(optimizers: Iterable[torch.optim.Optimizer], names: NameOf, saved: OptimizerState) -> None:
    """Gives optimizers the state that `by_name` read from others, against which `refusal` says nothing."""
    for optimizer in optimizers:
        groups: list[dict[str, Any]] = []
        state: dict[Any, dict[str, Any]] = {}
        entries = _entries(_indexed(optimizer))
        for group in optimizer.param_groups:
            first = sum(len(known["params"]) for known in groups)
            of_group = [_name(parameter, names) for parameter in group["params"]]
            record = saved.groups[of_group[0]] if of_group else KeptGroup({})
            entries |= record.entries
            kept = {key: value for key, value in group.items() if key not in _OF_THE_GROUP}
            groups.append({**kept, **record.settings, "params": [*range(first, first + len(of_group))]})
            state |= {first + k: saved.state[name] for k, name in enumerate(of_group) if name in saved.state}
        of_all = entries.pop("state", {})
        with UserCode(f"load_state_dict() of the optimizer {kind_of(optimizer)}", FAILED):
            optimizer.load_state_dict({**entries, "state": {**state, **of_all}, "param_groups": groups})
        _as_saved(getattr(optimizer, "of_shards", optimizer), state)


def _as_saved(optimizer: torch.optim.Optimizer, state: Mapping[Any, Mapping[str, Any]]) -> None:
    """Undoes what ``load_state_dict`` of torch makes of the state of parameters.

    It converts tensors to the dtype of the parameter, and what can be iterated, texts too, to iterators.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, kept in state.items():
        values = optimizer.state.get(parameters[index], {})
        for key, value in kept.items():
            now = values.get(key)
            if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor):
                part = local(value)  # of which a sharded optimizer keeps no more
                if now.shape == part.shape and now.dtype != part.dtype:
                    values[key] = part.to(now.device, copy=True)
            elif type(now) is type(value):
                values[key] = _moved(value, parameters[index].device)


def _moved(value: Any, device: torch.device) -> Any:
    """A value with the tensors in it on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if type(value) is dict:
        return {key: _moved(part, device) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_moved(part, device) for part in value)
    return value


def _indexed(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimizer as torch has it."""
    with UserCode(f"state_dict() of the optimizer {kind_of(optimizer)}", FAILED):
        indexed = optimizer.state_dict()
    groups = indexed.get("param_groups")
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if "state" not in indexed or groups is None or [len(group["params"]) for group in groups] != sizes:
        raise Misuse(
            f"state_dict() of the optimizer {kind_of(optimizer)} has no state and param_groups of its parameters, as "
            "those of torch.optim have: it cannot be saved by their names; of_rank= keeps any object with a state_dict"
        )
    return indexed


def _entries(indexed: Mapping[str, Any]) -> dict[str, Any]:
    """What a state has beside settings and state of parameters; in ``state`` may be more than that of parameters."""
    indices = {index for group in indexed["param_groups"] for index in group["params"]}
    entries = {key: value for key, value in indexed.items() if key not in ("state", "param_groups")}
    of_all = {key: value for key, value in indexed["state"].items() if key not in indices}
    return entries | ({"state": of_all} if of_all else {})


def _name(parameter: torch.Tensor, names: NameOf) -> str:
    if parameter not in names:
        raise Misuse(
            "an optimizer steps a parameter that the pipeline does not have: make it of pipe.named_parameters()"
        )
    return names[parameter]


def plain(group: KeptGroup) -> dict[str, Any]:
    """A group as containers alone, which any version can read."""
    assert group.kind is not None
    assert group.schedulers is not None
    schedulers = [((kind.name, kind.of_torch), states.common, states.of_group) for kind, states in group.schedulers]
    return {
        "settings": group.settings,
        "entries": group.entries,
        "kind": (group.kind.name, group.kind.of_torch),
        "schedulers": schedulers,
    }


def group_of(plain: Mapping[str, Any]) -> KeptGroup:
    """The inverse of `plain`."""
    schedulers = [(Kind(*kind), GroupStates(common, of_group)) for kind, common, of_group in plain["schedulers"]]
    return KeptGroup(plain["settings"], plain["entries"], Kind(*plain["kind"]), schedulers)
