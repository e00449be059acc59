"""The state of a module except its parameters is found, compared, replaced for a time, or restored."""

import math
import random
from collections import Counter, deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from chimera_runtime.stage import module_state
from chimera_runtime.stage.module_state import ModuleState, ParameterSnapshot, Writes


class Tally:
    """An object that a module has."""

    def __init__(self) -> None:
        self.number = 0


class Holder(nn.Module):
    """Holds something of every kind, and changes what it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.register_buffer("seen", torch.zeros(2))
        self.seen: torch.Tensor
        self.calls, self.word, self.flags = 1000, "a", (1, 2)
        self.past, self.recent, self.known, self.counts = [1.0], deque([1], 3), {1}, Counter("ab")
        self.table: dict[Any, Any] = {"x": {"y": [1]}, 3: torch.ones(2)}
        self.tally, self.space = Tally(), SimpleNamespace(depth=0)
        self.plain = torch.ones(2)
        self.draws, self.python, self.numpy = (
            torch.Generator().manual_seed(0),
            random.Random(1),
            np.random.default_rng(1),
        )


CHANGES = {
    "seen": lambda module: module.seen.add_(1),
    "calls": lambda module: setattr(module, "calls", module.calls + 1),
    "flags": lambda module: setattr(module, "flags", (3,)),
    "past": lambda module: module.past.append(2.0),
    "recent": lambda module: module.recent.extend([2, 3, 4]),
    "known": lambda module: module.known.add(2),
    "counts.a": lambda module: module.counts.update("a"),
    "table.x.y": lambda module: module.table["x"]["y"].append(2),
    "table.3": lambda module: module.table[3].mul_(2),
    "tally.number": lambda module: setattr(module.tally, "number", 1),
    "space.depth": lambda module: setattr(module.space, "depth", 1),
    "plain": lambda module: module.plain.data.add_(1),
    "draws": lambda module: torch.rand(2, generator=module.draws),
    "python": lambda module: module.python.random(),
    "numpy": lambda module: module.numpy.random(),
    "inner.1.running_mean": lambda module: module.inner[1].running_mean.data.add_(1),
    "new": lambda module: setattr(module, "new", 1),
    "word": lambda module: delattr(module, "word"),
    "inner.0.extra": lambda module: module.inner[0].register_buffer("extra", torch.ones(1)),
    "_forward_hooks": lambda module: module.register_forward_hook(print),
}
"""Changes of a module, by the name of what changes."""


def written(module: Holder) -> str:
    """All that it holds, in words."""
    generators = (module.draws.get_state().tolist(), module.python.getstate(), module.numpy.bit_generator.state)
    names = sorted({*vars(module)} - {"draws", "python", "numpy", "tally"})
    values = [(name, vars(module)[name]) for name in names]
    return repr(
        (values, vars(module.tally), sorted(n for n, _ in module.named_buffers()), module.state_dict(), generators)
    )


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_named_and_undone(name: str) -> None:
    module = Holder()
    state = ModuleState(module)
    contents, before = state.snapshot(thorough=True), written(module)
    assert state.changed(contents) == []
    CHANGES[name](module)  # type: ignore[no-untyped-call]
    assert state.changed(contents)[-1].startswith(name)
    state.restore(contents)
    assert written(module) == before


@pytest.mark.parametrize("name", CHANGES)
def test_an_earlier_state_is_there_for_a_time_and_nothing_remains_of_what_is_done_then(name: str) -> None:
    module = Holder()
    state, change = ModuleState(module), CHANGES[name]
    before, then = written(module), state.snapshot(thorough=True)
    change(module)  # type: ignore[no-untyped-call]
    then, after = state.with_changes(then, thorough=True), written(module)
    with state.as_of(then, thorough=True) as strays:
        assert written(module) == before
        if name != "inner.0.extra":
            change(module)  # type: ignore[no-untyped-call]
            assert written(module) == after or name == "_forward_hooks"
    assert written(module) == after
    assert strays == []


def test_what_changes_for_the_first_time_inside_is_a_stray() -> None:
    module = Holder()
    state = ModuleState(module)
    then = state.with_changes(state.snapshot())
    with state.as_of(then) as strays:
        module.seen += 1
    assert strays == ["seen"]


def test_without_a_thorough_look_buffers_and_what_has_changed_before_are_watched() -> None:
    module = Holder()
    state = ModuleState(module)
    contents = state.snapshot(thorough=True)
    module.past.append(2.0)
    state.with_changes(contents, thorough=True)
    for change, is_seen in ((CHANGES["past"], True), (CHANGES["seen"], True), (CHANGES["recent"], False)):
        before = state.snapshot()
        change(module)  # type: ignore[no-untyped-call]
        assert bool(state.with_changes(before).written) == is_seen


def test_a_tensor_that_does_not_change_is_copied_once() -> None:
    module = Holder()
    state = ModuleState(module)
    first, second = state.snapshot(), state.snapshot()
    assert first.versions.keys() == second.versions.keys()
    assert all(first.versions[key].copy is second.versions[key].copy for key in first.versions)
    module.seen += 1
    third = state.snapshot()
    assert [key for key in first.versions if third.versions[key].copy is not first.versions[key].copy] == [
        id(module.seen)
    ]


def test_what_is_no_number_does_not_change_by_that() -> None:
    module = Holder()
    module.seen.fill_(math.nan)
    module.plain.fill_(math.nan)
    state = ModuleState(module)
    assert state.changed(state.snapshot(thorough=True)) == []


def test_tensors_without_values_and_the_parameters_are_left_alone() -> None:
    module = Holder().to("meta")
    state = ModuleState(module)
    contents = state.snapshot(thorough=True)
    assert state.changed(contents) == []
    module.seen += 1
    assert state.changed(contents) == ["seen"]
    state.restore(contents)
    assert not any(isinstance(version.tensor, nn.Parameter) for version in contents.versions.values())


# Parameters.


def frozen_and_trained() -> nn.Module:
    """A trained layer of 48 bytes, and frozen parameters of 16, 32 and 400 bytes."""
    module = nn.Linear(3, 3)
    for size in (100, 4, 8):
        module.register_parameter(f"of_{size}", nn.Parameter(torch.zeros(size), requires_grad=False))
    return module


@pytest.mark.parametrize(("room", "copied"), [(0, {"of_4", "of_8"}), (1000, {"of_4", "of_8", "of_100"})])
def test_of_parameters_there_are_no_more_copies_than_gradients_will_take(
    monkeypatch: pytest.MonkeyPatch, room: int, copied: set[str]
) -> None:
    """What is not copied is watched by its bits."""
    monkeypatch.setattr(module_state, "_ROOM", room)
    module = frozen_and_trained()
    snapshot = ParameterSnapshot(module, None)
    for parameter in module.parameters():
        parameter.data.add_(1)
    writes = snapshot.writes()
    assert writes.changed == writes.touched == ("weight", "bias", "of_100", "of_4", "of_8")
    assert {*writes.lost} == {"of_100", "of_4", "of_8"} - copied
    assert writes.replaced == ()
    snapshot.restore()
    assert {name for name, p in module.named_parameters() if not p.any()} == copied


def test_copies_of_what_was_not_written_are_freed_and_memory_stays() -> None:
    module = frozen_and_trained()
    place = module.of_8.data_ptr()
    snapshot = ParameterSnapshot(module, None)
    module.of_8.data = torch.ones(8)
    with torch.no_grad():
        module.of_4.add_(0)
    assert snapshot.writes() == Writes(("of_4", "of_8"), ("of_8",), (), ())
    assert [version.copy is not None for version in snapshot._versions.values()] == [False, False, False, True, True]
    number = module.of_8._version
    snapshot.restore()
    assert module.of_8.data_ptr() == place
    assert not module.of_8.any()
    assert module.of_8._version == number, "autograd would refuse a backward that needs it"


def test_where_writes_are_known_version_numbers_tell_of_others() -> None:
    module = frozen_and_trained()
    snapshot = ParameterSnapshot(module, ("of_4",))
    with torch.no_grad():
        module.of_4.add_(1)
    assert snapshot.writes() == Writes(("of_4",), ("of_4",), (), ())
    with torch.no_grad():
        module.bias.zero_()
    assert snapshot.writes().lost == ("bias",)


def test_a_module_that_holds_nothing_is_not_looked_at_again() -> None:
    state = ModuleState(nn.Linear(2, 2))
    assert state.snapshot() is state.snapshot()
    with state.as_of(state.snapshot()) as strays:
        pass
    assert strays == []
