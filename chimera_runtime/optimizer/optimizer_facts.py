"""Collects the settings of the optimizers that step this rank's parameters, for comparison with other ranks.

The user does not list the optimizers. torch calls a function after each step of any torch.optim.Optimizer of the
process, so they are found when they step. Optimizers of other classes are not found.
"""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from chimera_runtime.optimizer.optimizer_state import settings_in
from chimera_runtime.program.rank_facts import Group
from chimera_runtime.ranks.agreement import Fact, Key, Text, digest_of, settings_of, short

GroupSettings = tuple[str, type, int, list[Any], Mapping[str, Any]]
"""A parameter group: its first parameter's name, its optimizer's class and steps, values of settings, the group."""

_moments = count(1)


def next_moment() -> int:
    """A number larger than all that were returned before, to tell which of two things happened first."""
    return next(_moments)


class _TrackedOptimizer:
    """An optimizer that has stepped: its parameter groups, its steps since the last `take`, the moment of the last."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.groups = 0
        self.steps = 0
        self.last = 0
        self._digests: dict[int, tuple[list[Any], int]] = {}

    def refresh(self) -> list[dict[str, Any]]:
        groups = _groups(self.optimizer())
        self.groups, self._digests = len(groups), {}
        return groups

    def settings(self, number: int, optimizer: torch.optim.Optimizer) -> tuple[list[Any], int]:
        """The values of a parameter group, and a digest of its settings, which is computed anew only after a change."""
        group = optimizer.param_groups[number]
        before, values = self._digests.get(number), [*group.values()]
        if before is not None and _are_same(before[0], values):
            return before
        settings = {name: _value(value) for name, value in settings_in(group).items()}
        digest = digest_of(f"{type(optimizer).__name__} {settings}")
        if not any(isinstance(value, torch.Tensor) for value in values):  # a tensor could change in place
            self._digests[number] = values, digest
        return values, digest


class OptimizerFacts:
    """Collects the settings and steps of the optimizers that step this rank's parameters, by weight group.

    ``parameters`` has the trained parameters of each weight group, in the same order on all ranks that hold the group.
    ``compared`` are the weight groups whose settings are compared, because other ranks hold them as well.
    """

    def __init__(
        self,
        parameters: Mapping[Group, Sequence[torch.Tensor]],
        compared: Iterable[Group],
        names: Mapping[torch.Tensor, str],
    ) -> None:
        self._parameters = parameters
        self._all = {parameter for of_group in parameters.values() for parameter in of_group}
        self.has_parameters = bool(self._all)
        self._compared = [group for group in compared if parameters.get(group)]
        self._keys = {group: settings_of(group) for group in self._compared}
        self._names = names
        self._optimizers: weakref.WeakKeyDictionary[Any, _TrackedOptimizer | None] = weakref.WeakKeyDictionary()
        self._tracked: list[_TrackedOptimizer] = []
        self._plans: dict[Group, tuple[int, list[tuple[_TrackedOptimizer, int, str]]]] = {}
        weak_note = weakref.WeakMethod(self._note)

        def note(optimizer: torch.optim.Optimizer, *_: object) -> None:
            if (method := weak_note()) is not None:
                method(optimizer)

        self.close = weakref.finalize(self, register_optimizer_step_post_hook(note).remove)

    @property
    def steps(self) -> int:
        """Number of steps since the last `take`; of several optimizers, the largest."""
        return max([tracked.steps for tracked in self._tracked], default=0)

    def last_steps(self) -> dict[torch.Tensor, int]:
        """Returns the parameters of this rank's optimizers, each with the moment of its last step."""
        moments: dict[torch.Tensor, int] = {}
        for tracked in self._tracked:
            for group in _groups(tracked.optimizer()):
                moments |= {p: max(tracked.last, moments.get(p, 0)) for p in group["params"]}
        return moments

    def take(self, groups: Iterable[Group] | None = None) -> dict[Key, Fact]:
        """Returns the settings of the compared weight groups, or of some, and sets all step counts to 0.

        Groups whose optimizer has not stepped yet are left out.
        """
        facts = {}
        if self._tracked and self._compared:
            if any(len(_groups(tracked.optimizer())) != tracked.groups for tracked in self._tracked):
                self._plan()
            chosen = self._plans if groups is None else [group for group in groups if group in self._plans]
            facts = {self._keys[group]: self._fact(*self._plans[group]) for group in chosen}
        for tracked in self._tracked:
            tracked.steps = 0
        return facts

    def _note(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer not in self._optimizers:
            is_ours = any(p in self._all for group in optimizer.param_groups for p in group["params"])
            made = self._optimizers[optimizer] = _TrackedOptimizer(optimizer) if is_ours else None
            self._tracked += [] if made is None else [made]
        if (tracked := self._optimizers[optimizer]) is not None:
            tracked.steps += 1
            tracked.last = next_moment()

    def _plan(self) -> None:
        self._tracked = [tracked for tracked in self._tracked if tracked.optimizer() is not None]
        places: dict[torch.Tensor, tuple[_TrackedOptimizer, int]] = {}
        for tracked in self._tracked:
            for number, listed in enumerate(tracked.refresh()):
                places |= dict.fromkeys(listed["params"], (tracked, number))
        self._plans = {}
        for group in self._compared:
            parts: dict[tuple[_TrackedOptimizer, int], str] = {}
            order = []
            for parameter in self._parameters[group]:
                place = places.get(parameter)
                if place is not None:
                    parts.setdefault(place, self._names[parameter])
                order.append(None if place is None else [*parts].index(place))
            if parts:
                self._plans[group] = digest_of(repr(order)), [(*place, first) for place, first in parts.items()]

    def _fact(self, structure: int, parts: Sequence[tuple[_TrackedOptimizer, int, str]]) -> Fact:
        digest = structure
        settings: list[GroupSettings] = []
        for tracked, number, first in parts:
            optimizer: Any = tracked.optimizer()
            values, made = tracked.settings(number, optimizer)
            digest = hash((digest, tracked.steps, made))
            settings.append((first, type(optimizer), tracked.steps, values, optimizer.param_groups[number]))
        return short(digest), lambda: _text(structure, settings)


def _groups(optimizer: torch.optim.Optimizer | None) -> list[dict[str, Any]]:
    return [] if optimizer is None else optimizer.param_groups


def _value(value: Any) -> Any:
    """Returns a setting as ranks compare it: a CPU tensor of one number becomes the number.

    Other tensors become None: to read one on a GPU would take a wait. An object of another class becomes its name.
    """
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 and value.device.type == "cpu" else None
    if isinstance(value, tuple | list):
        return [_value(entry) for entry in value]
    if isinstance(value, float):
        return float(value)  # makes a plain one of NumPy's
    return value if value is None or isinstance(value, bool | int | str) else type(value).__name__


def _are_same(values: list[Any], others: list[Any]) -> bool:
    try:
        return values == others
    except RuntimeError:  # parameters are compared where the list of them is another one
        return False


def _text(structure: int, settings: Sequence[GroupSettings]) -> Text:
    text = {"division into groups": f"{structure:x}"}
    for first, kind, steps, entries, group in settings:
        where = f" of the group of {first}" if len(settings) > 1 else ""
        values = settings_in(dict(zip(group, entries, strict=False)))
        named = {"optimizer": kind.__name__, "steps since the last update": steps, **values}
        text |= {f"{name}{where}": f"{_value(value)}" for name, value in named.items()}
    return text
