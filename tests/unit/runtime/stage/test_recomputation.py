"""A forward that is run again does what the first did: as in a stage that keeps everything, or with a message."""

import math
import random
import re
from collections import Counter, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from chimera_runtime import auxiliary_loss
from chimera_runtime.blame import ModelError
from chimera_runtime.errors import BadModel
from chimera_runtime.program.numbering import Micros, Numbering
from chimera_runtime.stage import module_state
from chimera_runtime.stage.module_runs import Backward
from chimera_runtime.stage.module_state import ModuleState, ParameterSnapshot, Writes
from chimera_runtime.stage.stage import Stage
from chimera_runtime.stage.stage_output import LossOutput
from chimera_runtime.values.boundary import Traits
from tests.unit.runtime.staged import (
    CAN,
    MICROS,
    ROWS,
    SEED,
    WIDTH,
    assert_close,
    assert_like_autograd,
    by_hand,
    data,
    groups,
    linear,
    loss_output,
    rows,
    run,
    stage,
)

ALL = set(range(MICROS))
DRAWS = Traits((), "draws random numbers", seeds_all=True)


class Base(nn.Module):
    """A layer whose result depends on what `factor` returns, which differs from call to call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.ready()

    def ready(self) -> None:
        """Prepares what a module needs in addition to its layer."""

    def factor(self, y: torch.Tensor) -> Any:
        return 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        return torch.tanh(y * self.factor(y))


class Begins(Base):
    """A statistic that begins with the third micro-batch, or where the update of the others is over."""

    def ready(self) -> None:
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.calls: torch.Tensor
        self.seen: torch.Tensor

    def factor(self, y: torch.Tensor) -> Any:
        self.calls.add_(1)
        if self.calls > 2:
            self.seen.add_(y.detach().abs().mean(0))
        return 1 + self.seen.clone()


class Rebound(Begins):
    """Buffers that are replaced, one of them by a larger one."""

    def factor(self, y: torch.Tensor) -> Any:
        self.calls = torch.cat([self.calls.reshape(-1), torch.ones(1)])
        self.seen = self.seen + y.detach().mean(0)
        return self.calls.sum() + self.seen


class Data(Begins):
    """A buffer that is changed behind its version counter."""

    def factor(self, y: torch.Tensor) -> Any:
        self.seen.data.add_(y.detach().abs().mean(0))
        return 1 + self.seen.clone()


class Tally:
    """An object that a module has."""

    def __init__(self) -> None:
        self.number = 0


class Counts(Base):
    """Attributes: a number, a list, an object, a tensor that is no buffer, and something that the first call makes."""

    def ready(self) -> None:
        self.calls, self.past, self.tally, self.total = 0, [1.0], Tally(), torch.zeros(())

    def factor(self, y: torch.Tensor) -> Any:
        if not hasattr(self, "scale"):
            self.scale = 3.0
        self.calls += 1
        self.past.append(float(y.detach().mean()))
        self.tally.number += 2
        self.total += y.detach().sum()
        return self.calls + sum(self.past) + self.tally.number + self.total.clone() + self.scale


class Own(Base):
    """Generators of its own."""

    def ready(self) -> None:
        self.torch = torch.Generator().manual_seed(1)
        self.numpy = np.random.default_rng(2)
        self.python = random.Random(3)

    def factor(self, y: torch.Tensor) -> Any:
        return torch.rand(y.shape, generator=self.torch) + self.numpy.random() + self.python.random()


class Inner(Base):
    """Differentiates within its forward, in both of the ways that torch has."""

    def factor(self, y: torch.Tensor) -> Any:
        (slope,) = torch.autograd.grad(y.square().sum(), y, create_graph=True)
        return slope + torch.func.grad(lambda x: x.square().sum())(y)


class Mode(Base):
    def factor(self, y: torch.Tensor) -> Any:
        return 2.0 if torch.is_grad_enabled() and y.requires_grad else 3.0


class Python(Base):
    def factor(self, y: torch.Tensor) -> Any:
        return random.random() + random.gauss(0, 1)


class NumPy(Base):
    def factor(self, y: torch.Tensor) -> Any:
        return float(np.random.rand())


def held(module: nn.Module) -> list[Any]:
    """The state of a module at the end."""
    plain = [vars(module).get(name) for name in ("calls", "past", "total", "scale")]
    return [*module.buffers(), *plain, getattr(getattr(module, "tally", None), "number", None)]


@pytest.mark.parametrize(
    ("kind", "traits"),
    [
        *[(kind, CAN) for kind in (Begins, Rebound, Data, Counts, Own, Inner, Mode)],
        *[(kind, DRAWS) for kind in (Python, NumPy)],
    ],
)
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 2)])
@pytest.mark.parametrize("backwards", ["in order", "last first"])
def test_a_stage_that_runs_again_gives_bitwise_what_one_that_keeps_everything_gives(
    kind: Callable[[], Base], traits: Traits, sizes: tuple[int, ...], backwards: str
) -> None:
    results = []
    for again in (set[int](), ALL):
        one = stage(kind(), traits=traits, recomputed=again)
        order = groups(1, 1, 1, 1) if backwards == "in order" else groups(1, 1, 1, 1)[::-1]
        made, back = run(one, groups(*sizes) if again else groups(1, 1, 1, 1), order)
        results.append([*made, *back, *(p.grad for p in one.module.parameters()), *held(one.module)])
    for mine, theirs in zip(*results, strict=True):
        if kind is Mode or kind is Inner:  # run together, which may round differently
            torch.testing.assert_close(mine, theirs)
        else:
            assert torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs


def first_and_again(module: nn.Module, update: int = 0, **options: Any) -> Stage:
    """A stage that has run a micro-batch of an update forward and back."""
    one = stage(module, recomputed=ALL, **options)
    one.begin(update)
    one.forward(0, rows(data(1), 0))
    one.backward(0, rows(data(2), 0))
    return one


def test_a_statistic_that_begins_in_an_update_that_is_not_compared_is_put_back_all_the_same() -> None:
    results = []
    for again in (set[int](), ALL):
        one = stage(Begins(), traits=CAN, recomputed=again)
        one.begin(57)
        made, back = run(one, groups(1, 1, 1, 1), groups(1, 1, 1, 1))
        results.append([*made, *back, *one.module.buffers()])
    assert all(map(torch.equal, *results))


class Outside(Base):
    """Depends on something that no look at the module finds."""

    def factor(self, y: torch.Tensor) -> Any:
        OUTSIDE.append(len(OUTSIDE))
        return 1 + len(OUTSIDE)


OUTSIDE: list[int] = []


@pytest.mark.parametrize("kind", [Outside, Python])
def test_whatever_else_differs_is_found_in_the_first_updates_and_in_every_hundredth(kind: Callable[[], Base]) -> None:
    for update in (0, 2, 100, 200):
        words = rf"stage 1 gives something else for micro-batch 0 of update {update + 1} when its forward is run again"
        with pytest.raises(BadModel, match=words):
            first_and_again(kind(), update)
    first_and_again(kind(), 3)
    one = stage(kind(), recomputed=ALL)
    one.count_from(57)
    one.begin(57)
    one.forward(0, rows(data(1), 0))
    with pytest.raises(BadModel, match="of update 58"):
        one.backward(0, rows(data(2), 0))


def test_what_the_second_run_alone_changes_is_named() -> None:
    class Later(Base):
        def ready(self) -> None:
            self.register_buffer("seen", torch.zeros(()))

        def factor(self, y: torch.Tensor) -> Any:
            OUTSIDE.append(0)
            if len(OUTSIDE) == 2:
                self.seen += 1
            return 1

    OUTSIDE.clear()
    with pytest.raises(BadModel, match="stage 1 changes seen when its forward is run again"):
        first_and_again(Later())


def test_an_input_that_is_changed_later_than_at_first_is_refused() -> None:
    class Hasty(Base):
        def factor(self, y: torch.Tensor) -> Any:
            return 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.detach().mul_(2))

    with pytest.raises(BadModel, match="changes an input, a target or a keyword argument in place"):
        first_and_again(Hasty())


def test_each_run_gets_containers_of_its_own() -> None:
    """Inputs, keyword arguments and targets; those of the user stay as they are."""

    class Greedy(Base):
        def forward(self, state: dict[str, Any], extra: dict[str, list[Any]]) -> torch.Tensor:
            state["x"] = state["x"] * 1.3
            extra["more"].append(extra["more"].pop() * 2)
            extra["more"][0] = extra["more"][0] + 1
            return torch.tanh(self.linear(state["x"])) + extra["more"][0]

    def loss(output: torch.Tensor, target: list[torch.Tensor]) -> torch.Tensor:
        target[0] = target[0] * 2
        return (output - target[0]).square().mean()

    x, more, target = data(1)[0], data(2)[0], data(3)[0]
    results = []
    for again in (set[int](), ALL):
        loss_output = LossOutput(loss, 1.0, Numbering(SEED, 0, MICROS, MICROS))
        one = stage(Greedy(), 0, None, loss_output, Traits((), "", ("extra",)), again)
        given: Any = {"x": x}, {"extra": {"more": [more]}}, [target]
        one.runs.load_keywords = lambda *_, given=given: given[1]  # type: ignore[misc]
        one.forward(0, given[0], given[2])
        one.backward(0)
        if again:
            assert given == ({"x": x}, {"extra": {"more": [more]}}, [target])
        results.append([p.grad for p in one.module.parameters()])
    assert all(map(torch.equal, *results))


# Parameters.


class Following(Base):
    """A copy of the weight follows it in every forward; the result does not depend on that."""

    def ready(self) -> None:
        self.slow = nn.Parameter(torch.zeros(WIDTH, WIDTH), requires_grad=False)

    @torch.no_grad()
    def factor(self, _y: torch.Tensor) -> float:
        self.slow.add_(self.linear.weight - self.slow, alpha=0.5)
        return 1.0


class Bounded(Base):
    """A second write changes nothing, as in an embedding with a largest norm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(max=0.1)
        return super().forward(x)


def test_a_parameter_that_a_second_run_would_write_once_more_is_named() -> None:
    one = stage(Following(), traits=Traits((), "", changed=("slow",), touched=("slow",)), recomputed=ALL)
    one.forward(0, data(1)[:1])
    with pytest.raises(BadModel, match="stage 1 writes its parameter slow, but is to run again for the backward"):
        one.backward(0, data(2)[:1])
    bounded = stage(Bounded(), traits=Traits((), "", touched=("linear.weight",)), recomputed=ALL)
    bounded.forward(0, data(1)[:1])
    bounded.backward(0, data(2)[:1])


# Several micro-batches at once.


class Together(Base):
    """Items that influence each other."""

    def factor(self, y: torch.Tensor) -> Any:
        return torch.softmax(y, 0)


class Statistics(Base):
    def factor(self, y: torch.Tensor) -> Any:
        return (y - y.mean(0)) / (y.std(0) + 1)


class Length(Base):
    def factor(self, y: torch.Tensor) -> Any:
        return 1 / len(y)


@pytest.mark.parametrize("kind", [Together, Statistics, Length, Outside])
@pytest.mark.parametrize("last", [False, True])
def test_items_that_influence_each_other_are_found_where_several_micro_batches_are_run_at_once(
    kind: Callable[[], Base], last: bool
) -> None:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square().mean()

    output = {"output": LossOutput(loss, 1.0, Numbering(SEED, 0, MICROS, MICROS))} if last else {}
    one = stage(kind(), recomputed=ALL, **output)  # type: ignore[arg-type]
    one.forward((0, 1), rows(data(1), (0, 1)), data(3)[:2])
    words = "stage 1 gives something else for micro-batch 0 of update 1 alone than together with 1 other"
    with pytest.raises(BadModel, match=words):
        one.backward((0, 1), () if last else rows(data(2), (0, 1)))


def test_a_stage_whose_state_several_at_once_would_change_otherwise_runs_them_one_by_one() -> None:
    """Each of them first at once; after the second time it is not tried again."""
    sizes: list[int] = []

    class Noting(Begins):
        def factor(self, y: torch.Tensor) -> Any:
            sizes.append(len(y))
            return super().factor(y)

    one = stage(Noting(), recomputed=ALL)
    for update in range(3):
        one.begin(update)
        for micros in ((0, 1), (2, 3)):
            one.forward(micros, rows(data(1), micros))
            one.outputs(micros)
    assert sizes == [2 * ROWS, ROWS, ROWS] * 2 + [ROWS, ROWS] * 4


# What the first run leaves behind.


def test_the_first_run_keeps_nothing_for_a_backward() -> None:
    saved: list[Any] = []

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            context.save_for_backward(x)
            saved.append(context)
            return x * x

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            (x,) = context.saved_tensors
            return 2 * x * gradient

    class Squares(Base):
        def factor(self, y: torch.Tensor) -> Any:
            return Square.apply(y)  # type: ignore[no-untyped-call]

    one = stage(Squares(), recomputed=ALL)
    one.forward(0, rows(data(1), 0))
    # Before torch 2.13 the node has been freed with its tensors.
    with pytest.raises(
        (BadModel, RuntimeError), match=r"stage 1 goes back into the graph of a forward|already been freed"
    ):
        _ = saved[0].saved_tensors
    one.backward(0, rows(data(2), 0))
    assert len(saved) == 2


def test_a_graph_that_is_kept_from_one_forward_to_the_next_is_refused() -> None:
    class Recurrent(Base):
        def ready(self) -> None:
            self.last: Any = 0.0

        def factor(self, y: torch.Tensor) -> Any:
            before, self.last = self.last, y.square()
            return before

    one = stage(Recurrent(), recomputed=ALL)
    one.forward(0, rows(data(1), 0))
    one.forward(1, rows(data(1), 1))
    one.backward(0, rows(data(2), 0))
    with pytest.raises(ModelError) as refused:
        one.backward(1, rows(data(2), 1))
    assert "detach what the module keeps from one forward to the next" in str(refused.value)


# The state of a module except its parameters is found, compared, replaced for a time, or restored.


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


# Pairs: by the module's own method where it has one, else one after the other; the same numbers either way.


class JointRun(nn.Module):
    """A module with a method for both; ``how`` is what the method does with the backward."""

    def __init__(self, how: str = "before") -> None:
        super().__init__()
        self.inner = linear()
        self.how = how
        self.met: list[nn.Module] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)

    def forward_and_backward(self, x: torch.Tensor, backward: Backward) -> torch.Tensor:
        self.met.append(backward.module)
        if self.how == "before":
            backward()
        y = self.inner(x)
        if self.how == "behind":
            backward()
        if self.how == "by hand":
            torch.autograd.backward(backward.roots, backward.gradients)
        if self.how == "twice":
            backward()
            backward()
        if self.how == "fails":
            raise RuntimeError("no room")
        return y


def interleaved(ahead: Stage, behind: Stage, micros: list[Micros]) -> tuple[list[Any], list[Any]]:
    """The forwards of one stage, each but the first with the backward of the other's micro-batch before it."""
    outputs, gradients = [], []
    first, *rest = micros
    for one in {ahead, behind}:
        one.forward(first, rows(data(1), first))
        outputs += one.outputs(first)[0].split(3)
    before = first
    for micro in rest:
        if behind is not ahead:
            behind.forward(micro, rows(data(1), micro))
            behind.outputs(micro)
        ahead.pair((micro, rows(data(1), micro)), behind, (before, rows(data(2), before)))
        outputs += ahead.outputs(micro)[0].split(3)
        gradients += behind.input_gradients(before)[0].split(3)
        before = micro
    behind.backward(before, rows(data(2), before))
    gradients += behind.input_gradients(before)[0].split(3)
    return outputs, gradients


@pytest.mark.parametrize("recomputed", [set(), {0, 1, 2, 3}, {1}])
@pytest.mark.parametrize("how", ["before", "behind", "by hand", None])
def test_a_pair_gives_what_autograd_gives(how: str | None, recomputed: set[int]) -> None:
    one = stage(linear() if how is None else JointRun(how), recomputed=recomputed)
    assert_like_autograd(one, *interleaved(one, one, [0, 1, 2, 3]))


def test_the_method_of_the_forward_s_module_runs_the_backward_of_another_stage() -> None:
    ahead, behind = stage(JointRun(), number=1), stage(linear(), number=2)
    interleaved(ahead, behind, [0, 1, 2, 3])
    assert isinstance(ahead.module, JointRun)
    assert ahead.module.met == [behind.module] * 3
    _, _, expected = by_hand(linear())
    assert_close([p.grad for p in behind.module.parameters()], expected)
    assert all(p.grad is None for p in ahead.module.parameters())


def test_a_group_and_a_forward_that_keeps_its_input_alone_run_before_the_backward() -> None:
    groups: list[Micros] = [(0, 1), (2, 3)]
    for recomputed in (set(), {0, 1, 2, 3}):
        one = stage(JointRun(), recomputed=recomputed)
        interleaved(one, one, groups if not recomputed else [0, 1, 2, 3])
        assert isinstance(one.module, JointRun)
        assert one.module.met == []


def test_the_last_stage_has_a_loss_with_the_method_too() -> None:
    torch.manual_seed(0)
    one, other = stage(JointRun(), output=loss_output()), stage(linear(), output=loss_output())
    for of in (one, other):
        of.forward(0, rows(data(1), 0), data(3)[0])
        of.pair((1, rows(data(1), 1), data(3)[1]), of, (0,))
        of.backward(1)
    assert_close([p.grad for p in one.module.parameters()], [p.grad for p in other.module.parameters()])
    assert one.take_loss(0) == other.take_loss(0)


class Noisy(JointRun):
    """Draws random numbers in its forward."""

    def __init__(self, joint: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
        if not joint:
            self.forward_and_backward = None  # type: ignore[assignment]


def test_random_numbers_are_those_of_the_micro_batch_with_the_method_or_without() -> None:
    made = []
    for joint in (True, False):
        torch.manual_seed(0)
        one = stage(Noisy(joint))
        made.append(interleaved(one, one, [0, 1, 2, 3]))
    for mine, theirs in zip(*made, strict=True):
        assert all(map(torch.equal, mine, theirs))


class Checkpointed(Noisy):
    """Runs its forward again in its backward, with what it draws at random and an auxiliary loss."""

    def part(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        auxiliary_loss("balance", y.square().mean())
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(self.part, x, use_reentrant=False)
        return y

    def forward_and_backward(self, x: torch.Tensor, backward: Backward) -> torch.Tensor:
        backward()
        return self(x)  # type: ignore[no-any-return]


def test_what_a_checkpoint_runs_again_in_a_pair_is_no_part_of_the_other_micro_batch() -> None:
    """Neither its auxiliary losses nor its random numbers."""
    made = []
    for joint in (True, False):
        torch.manual_seed(0)
        one = stage(Checkpointed(joint), traits=Traits((), "has auxiliary losses", (), ("balance",)))
        outputs, gradients = interleaved(one, one, [0, 1, 2, 3])
        sums = [torch.tensor(number) for number in one.take_loss(0).auxiliary.values()]
        assert len(sums) == 1
        made.append([*outputs, *gradients, *(p.grad for p in one.module.parameters()), *sums])
    assert all(map(torch.equal, *made))


@pytest.mark.parametrize(
    ("how", "words", "operation"),
    [
        ("never", "forward_and_backward of stage 1 returned without its backward", "B"),
        ("twice", "the backward of a pair runs once", "F"),
        ("fails", "no room", "F"),
    ],
)
def test_a_method_that_does_wrong_is_named(how: str, words: str, operation: str) -> None:
    one = stage(JointRun(how))
    one.forward(0, rows(data(1), 0))
    with pytest.raises(ModelError) as raised:
        one.pair((1, rows(data(1), 1)), one, (0, rows(data(2), 0)))
    assert re.search(words, str(raised.value))
    assert raised.value.operation is not None
    assert raised.value.operation.kind == operation
