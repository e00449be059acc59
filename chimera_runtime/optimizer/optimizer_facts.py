"""Which optimizers step the parameters of a rank and with which settings, whoever makes them.

torch calls a function after each step of any optimizer of the process; those that have parameters of this rank are
remembered. What is no torch.optim.Optimizer is not seen.
"""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from chimera_runtime.program.weight_groups import Group
from chimera_runtime.ranks.agreement import Fact, Key, Text, digest_of, settings_of, short

_LEFT_OUT = frozenset({"params", "param_names"})
GroupSettings = tuple[str, type, int, list[Any], Mapping[str, Any]]
"""Of a group of an optimizer: its first parameter, the optimizer's class, its steps, the values, the group."""


class _Known:
    """An optimizer of parameters of this rank: its steps since they were counted last, and how many groups it has."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.groups = 0  # none has been looked at
        self.steps = 0
        self._kept: dict[int, tuple[list[Any], int]] = {}

    @property
    def has_changed(self) -> bool:
        """Whether there are other groups than there were, or none any more."""
        return len(_groups(self.optimizer())) != self.groups

    def look_again(self) -> None:
        """The groups have changed."""
        self.groups, self._kept = len(_groups(self.optimizer())), {}

    def settings(self, number: int, optimizer: torch.optim.Optimizer) -> tuple[list[Any], int]:
        """The values of a group as they are, and a digest of them, which is kept as long as they stay."""
        group = optimizer.param_groups[number]
        kept, values = self._kept.get(number), [*group.values()]
        if kept is not None and _are_same(kept[0], values):
            return kept
        settings = {name: _value(value) for name, value in group.items() if name not in _LEFT_OUT}
        made = values, digest_of(f"{type(optimizer).__name__} {settings}")
        if not any(isinstance(value, torch.Tensor) for value in values):  # which could change in place
            self._kept[number] = made
        return made


class OptimizerFacts:
    """The optimizers of some parameters, by weight group.

    Parameters
    ----------
    parameters
        Those that optimizers step, by weight group, in the same order on all ranks that hold the group.
    compared
        The weight groups whose settings other ranks have as well.
    names
        Of the parameters.
    """

    def __init__(
        self,
        parameters: Mapping[Group, Sequence[torch.Tensor]],
        compared: Iterable[Group],
        names: Mapping[torch.Tensor, str],
    ) -> None:
        self._parameters = parameters
        self._all = {parameter for of_group in parameters.values() for parameter in of_group}
        self._compared = [group for group in compared if parameters.get(group)]
        self._keys = {group: settings_of(group) for group in self._compared}
        self._names = names
        self._optimizers: weakref.WeakKeyDictionary[Any, _Known | None] = weakref.WeakKeyDictionary()
        self._known: list[_Known] = []
        self._plans: dict[Group, tuple[int, list[tuple[_Known, int, str]]]] = {}
        noted = weakref.WeakMethod(self._note)

        def note(optimizer: torch.optim.Optimizer, *_: object) -> None:
            if (method := noted()) is not None:
                method(optimizer)

        self.close = weakref.finalize(self, register_optimizer_step_post_hook(note).remove)

    @property
    def has_parameters(self) -> bool:
        """Whether there is anything to step."""
        return bool(self._all)

    @property
    def steps(self) -> int:
        """How many steps since `take` the optimizer has made that has made the most."""
        return max([known.steps for known in self._known], default=0)

    def take(self, groups: Iterable[Group] | None = None) -> dict[Key, Fact]:
        """How weight groups are stepped now, by default all that are compared; then steps are counted anew.

        Groups whose optimizer is not known are left out.
        """
        facts = {}
        if self._known and self._compared:
            if any(known.has_changed for known in self._known):
                self._plan()
            chosen = self._plans if groups is None else [group for group in groups if group in self._plans]
            facts = {self._keys[group]: self._fact(*self._plans[group]) for group in chosen}
        for known in self._known:
            known.steps = 0
        return facts

    def _note(self, optimizer: torch.optim.Optimizer) -> None:
        known = self._optimizers.get(optimizer)
        if known is None:
            if optimizer in self._optimizers:
                return
            held = any(p in self._all for group in optimizer.param_groups for p in group["params"])
            known = self._optimizers[optimizer] = _Known(optimizer) if held else None
            if known is None:
                return
            self._known.append(known)
        known.steps += 1

    def _plan(self) -> None:
        """Finds for each weight group in which groups of which optimizers its parameters are."""
        self._known = [known for known in self._known if known.optimizer() is not None]
        places: dict[torch.Tensor, tuple[_Known, int]] = {}
        for known in self._known:
            known.look_again()
            for number, listed in enumerate(_groups(known.optimizer())):
                places |= dict.fromkeys(listed["params"], (known, number))
        self._plans = {}
        for group in self._compared:
            parts: dict[tuple[_Known, int], str] = {}
            order = []
            for parameter in self._parameters[group]:
                place = places.get(parameter)
                if place is not None:
                    parts.setdefault(place, self._names[parameter])
                order.append(None if place is None else [*parts].index(place))
            if parts:
                self._plans[group] = digest_of(repr(order)), [(*place, first) for place, first in parts.items()]

    def _fact(self, structure: int, parts: Sequence[tuple[_Known, int, str]]) -> Fact:
        digest = structure
        settings: list[GroupSettings] = []
        for known, number, first in parts:
            optimizer: Any = known.optimizer()
            values, made = known.settings(number, optimizer)
            digest = hash((digest, known.steps, made))
            settings.append((first, type(optimizer), known.steps, values, optimizer.param_groups[number]))
        return short(digest), lambda: _text(structure, settings)


def _groups(optimizer: torch.optim.Optimizer | None) -> list[dict[str, Any]]:
    return [] if optimizer is None else optimizer.param_groups


def _value(value: Any) -> Any:
    """A setting as it is compared: a tensor of the CPU by its number, one of a device not at all, so as not to wait."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 and value.device.type == "cpu" else None
    if isinstance(value, tuple | list):
        return [_value(entry) for entry in value]
    if isinstance(value, float):
        return float(value)  # of NumPy, too
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
        values = {name: value for name, value in zip(group, entries, strict=False) if name not in _LEFT_OUT}
        named = {"optimizer": kind.__name__, "steps since the last update": steps, **values}
        text |= {f"{name}{where}": f"{_value(value)}" for name, value in named.items()}
    return text
