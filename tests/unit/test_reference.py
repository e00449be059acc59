"""What one process computes for the check, against the formulas of the schemes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from support.batches import Batches
from support.model import Model
from support.reference import ADAPTIVE_TOLERANCES, TOLERANCES, Reference

RATE, UPDATES, ITEMS = 0.2, 6, 24


def item(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.tensor([1.0, number / ITEMS], dtype=torch.float64)
    return x, x.sum().sin().reshape(1)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


class Layer(nn.Module):
    """The first of two maps to two numbers, through a function that is not linear; the second to one."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__()
        self.last = stage == stages - 1
        start = torch.arange(2 if self.last else 4, dtype=torch.float64).reshape(-1, 2) / 5 + 0.1
        self.weight = nn.Parameter(start)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t() if self.last else torch.tanh(x @ self.weight.t())


def model(optimizer: Any = lambda parameters: torch.optim.SGD(parameters, lr=RATE)) -> Model:
    return Model(Path("model.py"), Layer, loss, lambda: [item(i) for i in range(ITEMS)], optimizer)


def reference(micro_batches: int, copies: int = 1, **changed: Any) -> Reference:
    return Reference(model(**changed), 2, 1, micro_batches, 1, copies, 0, torch.device("cpu"))


def batch(micro_batches: int, update: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The micro-batches of an update, as the ranks load them."""
    batches = Batches(model().dataset(), 1, micro_batches, 1, 1, 0, 0)
    return [(batches.input(update, micro), batches.target(update, micro)) for micro in range(micro_batches)]


def gradient(weights: list[torch.Tensor], data: list[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """Of the mean loss of some data, with respect to the weights of both stages."""
    first, second = (w.clone().requires_grad_() for w in weights)
    total = sum(loss(torch.tanh(x @ first.t()) @ second.t(), target) for x, target in data) / len(data)
    return list(torch.autograd.grad(total, [first, second]))


def start() -> list[torch.Tensor]:
    return [Layer(s, 2).weight.detach() for s in range(2)]


def assert_weights(found: Any, expected: list[torch.Tensor]) -> None:
    for (mine,), theirs in zip(found.tensors, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-13, atol=1e-13)


def test_two_buffered_weights_step_with_the_gradient_on_the_weights_before() -> None:
    """w(t+1) = w(t) - rate * gradient(w(t-1)), and w(1) = w(0) - rate * gradient(w(0))."""
    history = [start()]
    for update in range(UPDATES):
        slope = gradient(history[max(0, update - 1)], batch(3, update))
        history.append([w - RATE * g for w, g in zip(history[-1], slope, strict=True)])
    found = reference(3).train(UPDATES, 3, (((-1, 3),), ((-1, 3),)))
    assert (found.kind, found.tolerances) == ("weight", TOLERANCES)
    assert_weights(found, history[-1])


def test_every_stage_steps_with_the_gradient_on_its_own_version() -> None:
    """One micro-batch an update; the first of two stages is an update behind the last."""
    history = [start()]
    for update in range(UPDATES):
        late, new = history[max(0, update - 1)], history[-1]
        slope = gradient([late[0], new[1]], batch(1, update))
        history.append([w - RATE * g for w, g in zip(new, slope, strict=True)])
    assert_weights(reference(1).train(UPDATES, 1, (((-1, 1),), ((0, 1),))), history[-1])


def test_a_period_of_two_updates_reads_as_twice_a_period_of_one() -> None:
    short = reference(2).train(UPDATES, 2, (((-1, 1), (0, 1)), ((0, 2),)))
    long = reference(2).train(UPDATES, 4, (((-1, 1), (0, 2), (1, 1)), ((0, 2), (1, 2))))
    assert short.losses == long.losses
    assert_weights(long, [w for (w,) in short.tensors])


def test_versions_without_delay_are_training_as_usual() -> None:
    weights, losses = start(), []
    for update in range(UPDATES):
        data = batch(4, update)
        losses.append(float(sum(loss(torch.tanh(x @ weights[0].t()) @ weights[1].t(), t) for x, t in data) / 4))
        weights = [w - RATE * g for w, g in zip(weights, gradient(weights, data), strict=True)]
    found = reference(4).train(UPDATES, 4, (((0, 4),), ((0, 4),)))
    assert found.losses == pytest.approx(losses, rel=1e-13)
    assert_weights(found, weights)


def test_copies_average_over_as_many_times_the_data() -> None:
    """Two copies of two micro-batches are one of four."""
    two = reference(2, copies=2).train(3, 2, (((-1, 2),), ((-1, 2),)))
    one = reference(4).train(3, 4, (((-1, 4),), ((-1, 4),)))
    assert two.losses == pytest.approx(one.losses, rel=1e-13)
    assert_weights(two, [w for (w,) in one.tensors])


def test_an_optimizer_that_divides_by_gradients_has_a_wider_tolerance() -> None:
    adam = reference(1, optimizer=torch.optim.Adam).train(1, 1, (((0, 1),), ((0, 1),)))
    assert adam.tolerances == ADAPTIVE_TOLERANCES


def test_micro_batches_counted_from_an_earlier_update_are_the_same() -> None:
    """Over several epochs: those of all updates in a row, for a copy of three, cut in halves."""
    batches = Batches(model().dataset(), 2, 2, 2, 3, 1, 7)
    for micro in range(20):
        update, number = divmod(micro, 4)
        assert torch.equal(batches.input(0, micro), batches.input(update, number))
        assert torch.equal(batches.target(1, micro), batches.target(update + 1, number))
