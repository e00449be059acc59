"""Gradients of several steps as those of one mini-batch, and what is refused before a step."""

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st
from torch import nn

from chimera_runtime.errors import Misuse
from chimera_runtime.optimizer.optimizer_facts import next_moment
from chimera_runtime.update.updates import NOTHING_CLEARED, Accumulation, Clearings


def parameter(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=torch.float64))


def outcome(weight: float = 1.0, clearings: Clearings = NOTHING_CLEARED) -> Any:
    return SimpleNamespace(weight=weight, clearings=clearings)


def step(accumulation: Accumulation, gradients: Mapping[nn.Parameter, float | None], accumulate: bool = True) -> None:
    """A step of the only rank, as a script makes it: each gradient is new, or None."""
    accumulation.begin(accumulate)
    for of, value in gradients.items():
        of.grad = None if value is None else torch.full_like(of, value)
    accumulation.end(outcome(clearings=accumulation.clearings()))


def steps(accumulation: Accumulation, of: nn.Parameter, *values: float | None) -> None:
    for value in values:
        step(accumulation, {of: value})


def value_of(of: nn.Parameter) -> float | None:
    return None if of.grad is None else of.grad.item()


def test_the_gradient_of_several_steps_is_their_mean() -> None:
    weight = parameter(1.0)
    steps(Accumulation({"w": weight}), weight, 1.0, 2.0, 3.0, 6.0)
    assert value_of(weight) == 3.0


def test_a_step_without_a_gradient_counts_in_the_mean() -> None:
    """One parameter of two is not used in every step; one that never is has no gradient."""
    first, second, unused = parameter(1.0), parameter(1.0), parameter(1.0)
    accumulation = Accumulation({"first": first, "second": second, "unused": unused})
    for made in ((6.0, None), (None, 3.0), (3.0, 3.0)):
        step(accumulation, {first: made[0], second: made[1]})
    assert [*map(value_of, (first, second, unused))] == [3.0, 2.0, None]


def test_clearing_the_gradients_begins_anew() -> None:
    weight = parameter(1.0)
    accumulation = Accumulation({"w": weight})
    steps(accumulation, weight, 4.0, 8.0)
    weight.grad = None
    steps(accumulation, weight, 2.0, 4.0)
    assert value_of(weight) == 3.0


def test_a_parameter_that_was_cleared_by_itself_begins_anew_by_itself() -> None:
    weight, bias = parameter(1.0), parameter(1.0)
    accumulation = Accumulation({"weight": weight, "bias": bias})
    for value in (4.0, 8.0):
        bias.grad = None
        step(accumulation, {weight: value, bias: value})
    assert [*map(value_of, (weight, bias))] == [6.0, 8.0]


def test_a_rank_whose_first_step_gave_no_gradient_counts_that_step() -> None:
    weight = parameter(1.0)
    accumulation = Accumulation({"w": weight})
    step(accumulation, {}, accumulate=False)
    steps(accumulation, weight, 3.0)
    assert value_of(weight) == 1.5


@pytest.mark.parametrize("gradient", [torch.tensor([x], dtype=torch.float64) for x in (1.0, float("nan"))])
def test_a_gradient_that_was_not_cleared_is_refused_by_its_name(gradient: torch.Tensor) -> None:
    weight = parameter(1.0)
    weight.grad = gradient
    with pytest.raises(Misuse) as refused:
        Accumulation({"stages.0.w": weight}).begin(accumulate=False)
    assert str(refused.value) == (
        "stages.0.w still has the gradient of the step before: call optimizer.zero_grad() after optimizer.step(), of "
        "an optimizer that holds pipe.parameters(), or step(accumulate=True) to add to it"
    )


def test_zeros_are_cleared_gradients() -> None:
    weight = parameter(1.0)
    weight.grad = torch.zeros(1, dtype=torch.float64)
    Accumulation({"w": weight}).begin(accumulate=False)


def test_a_gradient_of_zeros_is_there_until_it_is_cleared() -> None:
    """A mean must not depend on whether a rank has seen anything but zeros."""
    weight = parameter(1.0)
    accumulation = Accumulation({"w": weight})
    steps(accumulation, weight, 0.0, 4.0)
    assert value_of(weight) == 2.0
    weight.grad.zero_()  # type: ignore[union-attr]
    steps(accumulation, weight, 4.0)
    assert value_of(weight) == 4.0


def test_zeros_that_the_pipeline_clips_are_still_there() -> None:
    """The first gradients of a low-rank adapter: those of one factor are zeros."""
    up, down = parameter(1.0), parameter(1.0)
    accumulation = Accumulation({"up": up, "down": down})
    for value in (0.0, 8.0):
        step(accumulation, {up: 2.0, down: value})
        for of in (up, down):
            of.grad.mul_(0.5)  # type: ignore[union-attr]
        accumulation.note_scaled()
    assert [*map(value_of, (up, down))] == [0.75, 2.0]


@pytest.mark.parametrize("trained", [True, False])
def test_a_parameter_that_is_frozen_or_trained_later_is_refused(trained: bool) -> None:
    weight = parameter(1.0).requires_grad_(trained)
    accumulation = Accumulation({"w": weight})
    accumulation.begin(accumulate=False)
    weight.requires_grad_(not trained)
    with pytest.raises(Misuse, match="requires_grad of w has changed"):
        accumulation.begin(accumulate=True)


def test_a_step_weighs_its_count() -> None:
    """One that counts nothing has gradients of 0, and changes nothing."""
    weight = parameter(1.0)
    accumulation = Accumulation({"w": weight}, mean_in_mesh=lambda numbers, _mesh: [*numbers])
    for gradient, count in ((4.0, 1.0), (0.0, 0.0), (8.0, 3.0)):
        accumulation.begin(accumulate=True)
        weight.grad = torch.full_like(weight, gradient)
        accumulation.end(outcome(weight=count))
    assert value_of(weight) == 7.0


# Several pipelines of the same parameters.


def test_steps_of_all_pipelines_count_by_the_items_of_their_mini_batches() -> None:
    shared, of_first, of_second = parameter(1.0), parameter(1.0), parameter(1.0)
    first = Accumulation({"shared": shared, "first": of_first}, items=4)
    second = Accumulation({"shared": shared, "second": of_second}, items=12)
    step(first, {shared: 8.0, of_first: 1.0})
    step(second, {shared: 4.0, of_second: 1.0})
    step(first, {shared: 0.0, of_first: 3.0})
    assert [*map(value_of, (shared, of_first, of_second))] == [(4 * 8 + 12 * 4) / 20, 2.0, 1.0]
    for of in (shared, of_first, of_second):
        of.grad = None
    step(second, {shared: 5.0})
    assert value_of(shared) == 5.0


def test_means_and_counts_do_not_mix() -> None:
    weight = parameter(1.0)
    mean = Accumulation({"w": weight})
    step(mean, {weight: 1.0})
    with pytest.raises(Misuse, match="w has a gradient of a pipeline whose loss is of another kind"):
        Accumulation({"w": weight}, mean_in_mesh=lambda numbers, _mesh: [*numbers]).begin(True)


# What a step cannot be averaged with.


def stepped(accumulation: Accumulation, *parameters: nn.Parameter) -> None:
    moment = next_moment()
    accumulation.last_steps = lambda: dict.fromkeys(parameters, moment)


def test_a_gradient_that_an_optimizer_has_stepped_is_refused_until_it_is_cleared() -> None:
    weight, other = parameter(1.0), parameter(1.0)
    accumulation = Accumulation({"w": weight, "other": other})
    step(accumulation, {weight: 4.0, other: 2.0})
    stepped(accumulation, weight)
    with pytest.raises(Misuse, match=r"w still has the gradient with which .* call zero_grad\(\) after"):
        accumulation.begin(accumulate=True)
    weight.grad = None
    step(accumulation, {weight: 1.0, other: 4.0})
    assert [*map(value_of, (weight, other))] == [1.0, 3.0]


def test_a_gradient_of_the_users_own_is_refused_before_the_first_step_and_averaged_after() -> None:
    weight = parameter(1.0)
    accumulation = Accumulation({"w": weight})
    weight.grad = torch.ones(1, dtype=torch.float64)
    with pytest.raises(Misuse, match="add gradients of your own after the last step that accumulates"):
        accumulation.begin(accumulate=True)
    weight.grad = torch.zeros(1, dtype=torch.float64)
    step(accumulation, {weight: 4.0})
    weight.grad = torch.full_like(weight, 6.0)
    step(accumulation, {weight: 0.0})
    assert value_of(weight) == 3.0


def test_a_scale_that_changes_within_a_window_is_refused() -> None:
    weight = parameter(1.0)
    accumulation = Accumulation({"w": weight})
    accumulation.begin(True, 8.0)
    weight.grad = torch.ones(1, dtype=torch.float64)
    accumulation.end(outcome())
    accumulation.begin(True, 8.0)
    with pytest.raises(Misuse, match="scaled by 8, and the scale of the GradScaler is 4 now"):
        accumulation.begin(True, 4.0)
    accumulation.note_scaled([weight])
    with pytest.raises(Misuse, match="scaled by 1, and"):
        accumulation.begin(True, 8.0)


# Parameters without a gradient, of which other ranks know whether they were cleared.


class Loop:
    """Ranks in lock step, each with two parameters for each of two optimizers, and what a window should hold.

    ``is_refusable`` says that nothing tells what was cleared: gradients were cleared in part, or zeros were scaled.
    """

    def __init__(self, ranks: int) -> None:
        self.parameters = [[parameter(1.0) for _ in range(4)] for _ in range(ranks)]
        self.ranks = [Accumulation({f"{i}": p for i, p in enumerate(of_rank)}) for of_rank in self.parameters]
        self.windows: dict[nn.Parameter, list[float]] = {p: [] for of_rank in self.parameters for p in of_rank}
        self.is_refusable = False

    def of_optimizer(self, number: int) -> list[nn.Parameter]:
        return [p for of_rank in self.parameters for p in of_rank[2 * number : 2 * number + 2]]

    def clear(self, parameters: Sequence[nn.Parameter], to_none: bool, by_step: bool) -> None:
        """To clear by hand what has no gradient does nothing."""
        if not by_step and all(of.grad is None for of in parameters):
            return
        for of in parameters:
            if of.grad is not None:
                of.grad = None if to_none else of.grad.zero_()
            self.windows[of] = []
        if by_step:
            moment = next_moment()
            for rank, of_rank in zip(self.ranks, self.parameters, strict=True):
                before = rank.last_steps()
                rank.last_steps = lambda new={**before, **{p: moment for p in of_rank if p in {*parameters}}}: new
        self.is_refusable = self.is_refusable or (len(parameters) < len(self.windows) and not by_step)

    def halve(self) -> None:
        for of, values in self.windows.items():
            if of.grad is not None:
                of.grad.mul_(0.5)
                self.is_refusable = self.is_refusable or not of.grad.any()
            self.windows[of] = [value / 2 for value in values]

    def step(self, values: Sequence[Sequence[float | None]]) -> bool:
        """Makes a step on all ranks; returns whether it is not refused."""
        clearings = []
        for rank, of_rank, made in zip(self.ranks, self.parameters, values, strict=True):
            rank.begin(accumulate=True)
            for of, value in zip(of_rank, made, strict=True):
                of.grad = None if value is None else torch.full_like(of, value)
                self.windows[of].append(value or 0.0)
            clearings.append(rank.clearings())
        summed = Clearings(*map(any, zip(*clearings, strict=True)))
        if all(summed):
            return False
        for rank in self.ranks:
            rank.end(outcome(clearings=summed))
        return True


_values = st.lists(st.sampled_from([None, None, 0.0, 1.0, 3.0, -2.0]), min_size=4, max_size=4)
_actions = st.sampled_from(["", "", "all", "all", "zeros", "skip", "first", "first zeros", "first by hand", "halve"])


@given(st.integers(1, 3), st.data())
def test_each_gradient_is_the_mean_of_its_window_on_every_rank(ranks: int, data: Any) -> None:
    """Whatever is cleared, by an optimizer or by hand; refused only where nothing tells what was cleared."""
    loop = Loop(ranks)
    actions: dict[str, Callable[[], None]] = {
        "": lambda: None,
        "all": lambda: [loop.clear(loop.of_optimizer(i), True, by_step=True) for i in range(2)] and None,
        "zeros": lambda: loop.clear([*loop.windows], False, by_step=False),
        "skip": lambda: loop.clear([*loop.windows], True, by_step=False),
        "first": lambda: loop.clear(loop.of_optimizer(0), True, by_step=True),
        "first zeros": lambda: loop.clear(loop.of_optimizer(0), False, by_step=True),
        "first by hand": lambda: loop.clear(loop.of_optimizer(0), True, by_step=False),
        "halve": loop.halve,
    }
    for action in data.draw(st.lists(_actions, min_size=1, max_size=6)):
        values = [data.draw(_values) for _ in range(ranks)]
        values[0][-1] = values[0][-1] or 1.0  # some parameter has a gradient in every step
        if not loop.step(values):
            event("refused")
            assert loop.is_refusable
            return
        for of, window in loop.windows.items():
            assert (0.0 if of.grad is None else of.grad.item()) == pytest.approx(sum(window) / len(window), abs=1e-9)
        actions[action]()
