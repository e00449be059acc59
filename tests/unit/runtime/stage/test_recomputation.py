"""A forward that is run again does what the first did: as in a stage that keeps everything, or with a message."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from chimera_runtime.blame import ModelError
from chimera_runtime.errors import BadModel
from chimera_runtime.program.numbering import Numbering
from chimera_runtime.stage.stage import Stage
from chimera_runtime.stage.stage_output import LossOutput
from chimera_runtime.values.boundary import Traits
from tests.unit.runtime.staged import CAN, MICROS, ROWS, SEED, WIDTH, data, groups, rows, run, stage

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


class Counts(Base):
    """Attributes: a number, a list, an object, a tensor that is no buffer, and something that the first call makes."""

    def ready(self) -> None:
        class Tally:
            def __init__(self) -> None:
                self.number = 0

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
