"""Gradients of several steps as those of one mini-batch, and what is refused before a step."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from chimera_runtime.errors import Misuse
from chimera_runtime.update.accumulation import Accumulation


def parameter(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values))


def steps(accumulation: Accumulation, of: nn.Parameter, *gradients: torch.Tensor | None) -> None:
    """Steps that each make a new gradient, or none, as a rank's script does."""
    for gradient in gradients:
        accumulation.begin(accumulate=True)
        of.grad = None if gradient is None else gradient.clone()
        accumulation.end(SimpleNamespace(weight=1.0))  # type: ignore[arg-type]


def test_the_gradient_of_several_steps_is_their_mean() -> None:
    weight = parameter(1.0, 2.0)
    gradients = [torch.tensor([float(i), -2.0 * i]) for i in range(1, 5)]
    steps(Accumulation({"w": weight}), weight, *gradients)
    torch.testing.assert_close(weight.grad, torch.stack(gradients).mean(0))


def test_a_step_without_a_gradient_counts_in_the_mean() -> None:
    """One parameter of two is not used in every step; one that never is has no gradient."""
    first, second, unused = parameter(1.0), parameter(1.0), parameter(1.0)
    accumulation = Accumulation({"first": first, "second": second, "unused": unused})
    for made in ((6.0, None), (None, 3.0), (3.0, 3.0)):
        accumulation.begin(accumulate=True)
        for weight, value in zip((first, second), made, strict=True):
            weight.grad = None if value is None else torch.tensor([value])
        accumulation.end(SimpleNamespace(weight=1.0))  # type: ignore[arg-type]
    assert (first.grad, second.grad, unused.grad) == (torch.tensor([3.0]), torch.tensor([2.0]), None)


def test_clearing_the_gradients_begins_anew() -> None:
    weight = parameter(1.0)
    accumulation = Accumulation({"w": weight})
    steps(accumulation, weight, torch.tensor([4.0]), torch.tensor([8.0]))
    weight.grad = None
    steps(accumulation, weight, torch.tensor([2.0]), torch.tensor([4.0]))
    assert weight.grad == torch.tensor([3.0])


def test_a_parameter_that_was_cleared_by_itself_begins_anew_by_itself() -> None:
    weight, bias = parameter(1.0), parameter(1.0)
    accumulation = Accumulation({"weight": weight, "bias": bias})
    for value in (4.0, 8.0):
        bias.grad = None
        accumulation.begin(accumulate=True)
        weight.grad, bias.grad = torch.tensor([value]), torch.tensor([value])
        accumulation.end(SimpleNamespace(weight=1.0))  # type: ignore[arg-type]
    assert (weight.grad, bias.grad) == (torch.tensor([6.0]), torch.tensor([8.0]))


def test_a_rank_whose_first_step_gave_no_gradient_counts_that_step() -> None:
    weight = parameter(1.0)
    accumulation = Accumulation({"w": weight})
    accumulation.begin(accumulate=False)
    accumulation.end(SimpleNamespace(weight=1.0))  # type: ignore[arg-type]
    steps(accumulation, weight, torch.tensor([3.0]))
    assert weight.grad == torch.tensor([1.5])


@pytest.mark.parametrize("gradient", [torch.tensor([1.0]), torch.tensor([float("nan")])])
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
    weight.grad = torch.zeros(1)
    Accumulation({"w": weight}).begin(accumulate=False)


def test_a_gradient_of_zeros_is_there_until_it_is_cleared() -> None:
    """A mean must not depend on whether a rank has seen anything but zeros."""
    weight = parameter(1.0)
    accumulation = Accumulation({"w": weight})
    steps(accumulation, weight, torch.tensor([0.0]), torch.tensor([4.0]))
    assert weight.grad == torch.tensor([2.0])
    weight.grad.zero_()
    steps(accumulation, weight, torch.tensor([4.0]))
    assert weight.grad == torch.tensor([4.0])


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
    accumulation = Accumulation({"w": weight})
    for gradient, count in ((4.0, 1.0), (0.0, 0.0), (8.0, 3.0)):
        accumulation.begin(accumulate=True)
        weight.grad = torch.tensor([gradient])
        accumulation.end(SimpleNamespace(weight=count))  # type: ignore[arg-type]
    assert weight.grad == torch.tensor([7.0])
