"""The output of a stage: roots that keep no memory, gradients that average, losses by update."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from chimera_runtime.errors import BadModel
from chimera_runtime.program.numbering import Numbering
from chimera_runtime.stage.stage_output import LossOutput, SendOutput
from chimera_runtime.values.boundary import Boundary
from chimera_runtime.values.losses import Tally
from chimera_runtime.values.nested import ONE_TENSOR
from tests.unit.runtime.staged import tuple_of

PAIR = Boundary(tuple_of(2), ((2,), (2,)), (torch.float64, torch.float64), (True, True), (True, False))


def squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def loss_output(loss: Callable[[Any, Any], Any] = squares, counted: bool = False) -> LossOutput:
    return LossOutput(loss, 0.25, Numbering(0, 0, passes=2, cycle=2), counted)


def test_a_result_is_handed_on_and_its_backward_begins_at_a_root_of_its_shape() -> None:
    x = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    stage_output = SendOutput(0, PAIR)
    results, (root,) = stage_output.finish((0,), (x * x, x + 1), ())
    assert [r.tolist() for r in results] == [[1, 4], [2, 3]]
    received = (torch.tensor([10.0, 100.0], dtype=torch.float64),)
    (gradient,) = stage_output.gradients((root,), received)
    assert gradient is not received[0]
    assert gradient.data_ptr() == received[0].data_ptr()
    torch.autograd.backward((root,), received)
    assert x.grad is not None
    assert x.grad.tolist() == [20, 400]


def test_a_root_keeps_nothing_of_its_result() -> None:
    """Once the result has been sent its memory is free, unless the backward needs it."""
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    results, roots = SendOutput(0, PAIR).finish((0,), (x + 1, x + 2), ())
    held = [weakref.ref(result.untyped_storage()) for result in results]
    assert roots[0].untyped_storage().nbytes() < results[0].untyped_storage().nbytes()
    places = {result.untyped_storage().data_ptr() for result in results}
    assert roots[0].untyped_storage().data_ptr() not in places
    del results
    gc.collect()
    assert [storage() for storage in held] == [None, None]


def test_a_single_tensor_is_a_message_of_one() -> None:
    one = Boundary(ONE_TENSOR, ((2,),), (torch.float64,), (False,), (False,))
    results, roots = SendOutput(0, one).finish((0,), torch.ones(2, dtype=torch.float64), ())
    assert [r.tolist() for r in results] == [[1, 1]]
    assert roots == ()


@pytest.mark.parametrize("returned", [torch.ones(3, dtype=torch.float64), None, [torch.ones(2)], ()])
def test_an_output_unlike_the_first_is_told_with_stage_and_micro_batch(returned: Any) -> None:
    with pytest.raises(BadModel, match=r"stage 3 returned for micro-batch 5: .*; return the same every time"):
        SendOutput(3, PAIR).finish((5, 6), returned, ())


def test_a_stage_that_hands_on_has_no_loss() -> None:
    assert SendOutput(0, PAIR).take_loss(0) == Tally()
    assert SendOutput(0, PAIR).after is PAIR
    assert loss_output().after is None


def test_losses_are_the_roots_and_their_gradient_is_the_share_of_a_micro_batch() -> None:
    x = torch.tensor([3.0], requires_grad=True)
    stage_output = loss_output()
    results, roots = stage_output.finish((0,), x, (torch.tensor([1.0]),))
    assert results == ()
    torch.autograd.backward(roots, stage_output.gradients(roots, ()))
    assert x.grad is not None
    assert x.grad.item() == 0.25 * 2 * (3 - 1)


def test_several_micro_batches_are_judged_one_by_one() -> None:
    """Each with its own target: the loss may be no mean over rows."""
    stage_output = loss_output(lambda output, target: (output.max() - target) ** 2)
    _, roots = stage_output.finish((0, 1), torch.tensor([1.0, 5.0, 2.0, 3.0], requires_grad=True), (0.0, 1.0))
    assert [root.item() for root in roots] == [25.0, 4.0]
    assert stage_output.take_loss(0) == Tally(29.0, 2)


@pytest.mark.parametrize("returned", [torch.ones(3), torch.ones(()), (torch.ones(2), 5), {"a": torch.ones(5)}])
def test_an_output_that_cannot_be_taken_apart_is_an_error_of_the_model(returned: Any) -> None:
    with pytest.raises(BadModel, match="the last stage returned for micro-batches 4, 5 together something that does"):
        loss_output().finish((4, 5), returned, (None, None))


def test_losses_are_summed_by_update_and_forgotten_when_they_are_taken() -> None:
    """A micro-batch that is judged again, because its forward runs again, counts once."""
    stage_output = loss_output()
    for micro, output in [(0, 1.0), (3, 7.0), (1, 2.0), (2, 0.0), (0, 1.0)]:
        stage_output.finish((micro,), torch.tensor([output]), (torch.tensor([0.0]),))
    assert [stage_output.take_loss(update) for update in (0, 1, 0)] == [Tally(5.0, 2), Tally(49.0, 2), Tally()]


def test_a_loss_without_gradient_has_no_root() -> None:
    stage_output = loss_output()
    assert stage_output.finish((0,), torch.tensor([2.0]), (torch.tensor([0.0]),)) == ((), ())
    assert stage_output.take_loss(0) == Tally(4.0, 1)


# A sum and a count.


def summed(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A sum over the items whose target is not negative, and their count."""
    counted = target >= 0
    return ((output - target).square() * counted).sum(), counted.sum()


def test_a_count_is_known_at_the_backward_of_its_micro_batch_once() -> None:
    """The count is right although the forward runs again."""
    stage_output = loss_output(summed, counted=True)
    for micro, target in ((0, [1.0, -1.0]), (1, [-1.0, -1.0]), (0, [1.0, -1.0])):
        stage_output.finish((micro,), torch.tensor([3.0, 5.0]), (torch.tensor(target),))
    assert [[count.tolist() for count in stage_output.counts(micro, ())] for micro in (0, 1)] == [[[1.0]], [[0.0]]]
    with pytest.raises(KeyError):
        stage_output.counts(0, ())
    assert stage_output.take_loss(0) == Tally(4.0, 1.0)
    assert loss_output().counts(0, ()) == ()


def test_counts_come_back_with_the_gradients() -> None:
    stage_output = SendOutput(0, replace(PAIR, counted=True))
    gradient, count = torch.ones(2), torch.tensor([3.0])
    (received,) = stage_output.gradients((), (gradient, count))
    assert received.data_ptr() == gradient.data_ptr()
    assert stage_output.counts(0, (gradient, count)) == (count,)
    assert SendOutput(0, PAIR).counts(0, (gradient,)) == ()


@pytest.mark.parametrize("counted", [True, False])
def test_a_loss_that_is_a_mean_for_some_micro_batches_only_is_an_error_of_the_model(counted: bool) -> None:
    stage_output = loss_output(squares if counted else summed, counted)
    with pytest.raises(BadModel, match=r"loss returns \(sum, count\) for one micro-batch and a mean for another"):
        stage_output.finish((0,), torch.tensor([2.0]), (torch.tensor([0.0]),))


def test_an_update_whose_losses_have_no_graph_trains_nothing_and_is_refused() -> None:
    """One micro-batch without is as torch has it where nothing of it counts; where nothing is trained all may be so."""
    numbering = Numbering(0, 0, passes=2, cycle=2)
    output = torch.ones(2, requires_grad=True)
    target = torch.zeros(2)

    def tally(trains: bool, *losses: Any, counted: bool = False) -> Tally:
        stage_output = LossOutput(lambda loss, _target: loss, 0.25, numbering, counted, trains=trains)
        for micro, loss in enumerate(losses):
            stage_output.finish((micro,), loss, (target,))
        return stage_output.take_loss(0)

    value = squares(output, target)
    assert tally(True, value, value.detach()).total == 2.0
    assert tally(False, value.detach(), value.detach()).total == 2.0
    assert tally(True, (value.detach(), 0), (value.detach(), 0), counted=True).count == 0
    for losses, counted in (
        ((value.detach(), value.detach()), False),
        (((value.detach(), 3), (value.detach(), 0)), True),
    ):
        with pytest.raises(BadModel, match="loss returned tensors that need no gradient for all micro-batches"):
            tally(True, *losses, counted=counted)


def test_a_loss_that_is_run_again_for_its_backward_has_a_graph_then() -> None:
    stage_output = LossOutput(squares, 0.25, Numbering(0, 0, passes=1, cycle=1), trains=True)
    output = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        stage_output.finish((0,), output * 2, (torch.zeros(2),))
    stage_output.finish((0,), output * 2, (torch.zeros(2),))
    assert stage_output.take_loss(0).total == 4.0
