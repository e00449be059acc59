"""A stage at either end of the pipeline, and one that hands on several tensors."""

from typing import Any

import pytest
import torch
from torch import nn

from chimera_runtime import auxiliary_loss
from chimera_runtime.errors import BadModel
from chimera_runtime.stage.stage import Stage
from chimera_runtime.stage.stage_output import SendOutput
from chimera_runtime.values.boundary import Boundary, Traits
from chimera_runtime.values.losses import Tally
from chimera_runtime.values.nested import ONE_TENSOR
from tests.unit.runtime.staged import (
    CAN,
    CANNOT,
    MICROS,
    ONE,
    ROWS,
    WIDTH,
    assert_close,
    data,
    groups,
    linear,
    loss_output,
    rows,
    run,
    stage,
    tuple_of,
)


@pytest.mark.parametrize("recomputed", [set(), {0, 1, 2, 3}])
@pytest.mark.parametrize("traits", [CAN, CANNOT])
def test_the_first_stage_takes_batches_and_the_last_gives_losses(traits: Traits, recomputed: set[int]) -> None:
    """A stage that is both; the batches are dicts, and several of them a tuple."""

    class Reading(nn.Linear):
        def forward(self, batch: Any) -> torch.Tensor:
            return super().forward(batch["x"])

    torch.manual_seed(0)
    module = Reading(WIDTH, WIDTH)
    one = stage(module, 0, None, loss_output(), traits, recomputed)
    batches, targets = [{"x": x} for x in data(1)], data(3)
    one.forward(0, batches[0], targets[0])
    one.forward((1, 2, 3), tuple(batches[1:]), tuple(targets[1:]))
    for micro in range(MICROS):
        one.backward(micro)
    losses = [(module(b) - t).square().mean() for b, t in zip(batches, targets, strict=True)]
    mean = torch.stack(losses).mean()
    tally = one.take_loss(0)
    assert tally.total == pytest.approx(sum(loss.item() for loss in losses), rel=1e-6)
    assert tally.count == MICROS
    assert one.take_loss(0) == Tally()
    expected = torch.autograd.grad(mean, list(module.parameters()))
    assert_close([p.grad for p in module.parameters()], list(expected))
    for hands_on in (one.outputs, one.input_gradients):
        with pytest.raises(KeyError):
            hands_on(0)


def test_a_stage_in_the_middle_passes_the_loss_by() -> None:
    one = stage(linear())
    one.forward(0, rows(data(1), 0))
    assert one.take_loss(0) == Tally()


# Several tensors, of which some have no gradient.

PAIR = Boundary(
    tuple_of(3),
    ((ROWS, WIDTH), (ROWS,), (ROWS, WIDTH)),
    (torch.float32, torch.int64, torch.float32),
    (True, False, True),
    (True, False, False),
)


class Picking(nn.Module):
    """Uses the first tensor, and the third where ``uses``; hands all three on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.uses = False

    def forward(self, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        assert [t.requires_grad for t in tensors] == [True, False, True]
        x, index, spare = tensors
        y = self.linear(x) + (spare if self.uses else 0)
        return y, index, y * 2


def picking(recomputed: set[int] | None = None) -> Stage:
    torch.manual_seed(0)
    return stage(Picking(), 1, PAIR, SendOutput(1, PAIR), recomputed=recomputed)


def triple(seed: int) -> tuple[torch.Tensor, ...]:
    x, spare, *_ = data(seed)
    return x, torch.arange(ROWS), spare


@pytest.mark.parametrize("recomputed", [None, {0}])
def test_gradients_come_back_of_what_is_used_alone(recomputed: set[int] | None) -> None:
    one = picking(recomputed)
    one.module.linear.weight.data.copy_(torch.eye(WIDTH))  # type: ignore[union-attr,operator]
    one.forward(0, triple(1))
    outputs = one.outputs(0)
    assert [t.dtype for t in outputs] == [torch.float32, torch.int64, torch.float32]
    one.backward(0, (torch.full((ROWS, WIDTH), 3.0),))
    (gradient,) = one.input_gradients(0)
    assert torch.equal(gradient, torch.full((ROWS, WIDTH), 3.0))


def test_an_input_that_is_used_now_and_was_not_at_first_is_an_error_of_the_model() -> None:
    one = picking()
    one.module.uses = True  # type: ignore[assignment]
    one.forward(0, triple(1))
    with pytest.raises(BadModel, match="stage 1 uses a tensor that it receives and did not use for the first"):
        one.backward(0, (torch.ones(ROWS, WIDTH),))


def test_an_input_that_is_not_used_now_and_was_at_first_gets_a_gradient_of_zeros() -> None:
    class Skipping(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(x, requires_grad=True) * 1

    one = stage(Skipping())
    one.forward(0, rows(data(1), 0))
    one.backward(0, rows(data(2), 0))
    assert torch.equal(one.input_gradients(0)[0], torch.zeros(ROWS, WIDTH))


def test_a_stage_whose_results_need_no_gradient_has_nothing_to_run_back() -> None:
    flat = Boundary(ONE_TENSOR, ((ROWS, WIDTH),), (torch.float32,), (False,), (False,))
    one = stage(nn.Identity(), 1, flat, SendOutput(1, flat))
    one.forward(0, rows(data(1), 0))
    one.backward(0)
    assert one.input_gradients(0) == ()


# Auxiliary losses.


class Balanced(nn.Module):
    """Two auxiliary losses, of which the output does not depend on one, and its parameter on nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.spare = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))
        self.name = "balance"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        auxiliary_loss(self.name, y.square().mean())
        auxiliary_loss(self.name, y.mean())
        auxiliary_loss("spare", (self.spare * x).sum())
        return y


@pytest.mark.parametrize("recomputed", [set(), {0, 1, 2, 3}])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 2)])
def test_auxiliary_losses_count_once_and_flow_back_with_the_share_of_the_loss(
    recomputed: set[int], sizes: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    module = Balanced()
    traits = Traits((), "has auxiliary losses", (), ("balance", "spare"))
    one = stage(module, output=SendOutput(1, ONE, 0.25), traits=traits, recomputed=recomputed)
    one.scale_loss(8.0)
    _, back = run(one, groups(*sizes), groups(1, 1, 1, 1))
    made = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    inputs = [x.clone().requires_grad_() for x in data(1)]
    outputs = [module.linear(x) for x in inputs]
    balance = sum((y.square().mean() + y.mean() for y in outputs), torch.zeros(()))
    spare = sum(((module.spare * x).sum() for x in inputs), torch.zeros(()))
    expected = torch.autograd.grad(
        (*outputs, balance, spare),
        (*module.parameters(), *inputs),
        (*data(2), torch.tensor(2.0), torch.tensor(2.0)),
    )
    assert_close([*made, *back], list(expected))
    tally = one.take_loss(0)
    assert (tally.total, tally.count) == (0.0, 0.0)
    assert tally.auxiliary == pytest.approx({"balance": balance.item(), "spare": spare.item()}, rel=1e-6)
    assert one.take_loss(0) == Tally()


def test_an_auxiliary_loss_that_comes_late_is_an_error_of_the_model() -> None:
    one = stage(Balanced(), traits=Traits((), "has auxiliary losses", (), ("spare",)))
    with pytest.raises(BadModel, match="stage 1 has the auxiliary loss balance for micro-batch 3, and had it not"):
        one.forward(3, rows(data(1), 3))


def test_auxiliary_losses_flow_back_where_nothing_else_does() -> None:
    """No later stage uses what the stage hands on."""
    flat = Boundary(ONE_TENSOR, ((ROWS, WIDTH),), (torch.float32,), (True,), (False,))
    module = Balanced()
    one = stage(module, output=SendOutput(1, flat, 0.25), traits=Traits((), "", (), ("balance", "spare")))
    one.forward(0, rows(data(1), 0))
    one.backward(0)
    assert one.input_gradients(0)[0].abs().sum() > 0
    assert_close([module.spare.grad], [data(1)[0].sum(0) * 0.25])
