"""Auxiliary losses are heard where a forward is listened to, and nowhere else."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from chimera_runtime import auxiliary_loss
from chimera_runtime.errors import BadModel
from chimera_runtime.ranks.messages import from_host
from chimera_runtime.stage.stage_output import AuxiliaryLosses, collecting, roots_of
from chimera_runtime.values.losses import Tally


def test_losses_are_heard_in_order_within_the_innermost_forward() -> None:
    one, two = torch.tensor(1.0, requires_grad=True), torch.tensor([2.0])
    with collecting() as outer:
        auxiliary_loss("a", one)
        with collecting() as inner:
            auxiliary_loss("a", two)
        auxiliary_loss("b", two)
    assert outer == [("a", one), ("b", two)]
    assert inner == [("a", two)]
    assert roots_of(outer) == (one,)


def test_outside_of_a_pipeline_nothing_happens() -> None:
    auxiliary_loss("a", torch.tensor(1.0))
    with collecting() as heard, ThreadPoolExecutor(1) as pool:
        pool.submit(auxiliary_loss, "a", torch.tensor(1.0)).result()
    assert heard == []


def test_what_a_checkpoint_runs_again_in_a_backward_is_not_added_again() -> None:
    """A backward may even run within the forward of another micro-batch, as in a pair."""

    def part(x: torch.Tensor) -> torch.Tensor:
        auxiliary_loss("a", x.sum())
        return x.sin().sin()

    x = torch.ones((), requires_grad=True)
    with collecting() as first:
        y: torch.Tensor = checkpoint(part, x, use_reentrant=False)
    with collecting() as second:
        y.backward()  # type: ignore[no-untyped-call]
        auxiliary_loss("b", x)
    assert ([name for name, _ in first], [name for name, _ in second]) == (["a"], ["b"])


def test_one_that_would_have_no_gradient_is_an_error() -> None:
    """The first run of a reentrant checkpoint is such a place."""

    def part(x: torch.Tensor) -> torch.Tensor:
        auxiliary_loss("a", x.sum())
        return x.sin()

    x = torch.ones((), requires_grad=True)
    with (
        collecting(),
        pytest.raises(BadModel, match=r"the auxiliary loss a would have no gradient.*use_reentrant=False"),
    ):
        checkpoint(part, x, use_reentrant=True)
    checkpoint(part, x, use_reentrant=True)


def test_after_an_error_nobody_listens() -> None:
    with pytest.raises(ValueError, match="no"), collecting() as heard:
        raise ValueError("no")
    auxiliary_loss("a", torch.tensor(1.0))
    assert heard == []


@pytest.mark.parametrize("value", [1.0, torch.ones(2), None])
def test_an_auxiliary_loss_is_a_tensor_of_one_number(value: object) -> None:
    with pytest.raises(TypeError, match="the auxiliary loss a is to be a tensor of one number"):
        auxiliary_loss("a", value)  # type: ignore[arg-type]


def test_what_a_stage_adds_is_added_up_by_update_and_name_once() -> None:
    losses = AuxiliaryLosses(1, ("a", "b"), from_host)
    for micro, update in enumerate((0, 0, 1)):
        value = torch.tensor(micro + 1.0, requires_grad=True)
        losses.add(micro, update, [("a", value), ("b", value * 2), ("a", value)])
    losses.add(3, 1, [])
    assert losses.take(0) == Tally(auxiliary={"a": 6.0, "b": 6.0})
    assert losses.take(1) == Tally(auxiliary={"a": 6.0, "b": 6.0})
    assert losses.take(1) == Tally()


def test_one_that_comes_late_is_an_error() -> None:
    losses = AuxiliaryLosses(1, ("a",), from_host)
    with pytest.raises(BadModel, match="stage 1 has the auxiliary loss b for micro-batch 4, and had it not for the"):
        losses.add(4, 0, [("a", torch.ones(())), ("b", torch.ones(()))])
