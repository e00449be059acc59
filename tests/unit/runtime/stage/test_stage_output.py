"""The output of a stage: roots that keep no memory, gradients that average, losses by update."""

import gc
import random
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from chimera_runtime import auxiliary_loss
from chimera_runtime.errors import BadModel
from chimera_runtime.program.kept_bytes import share
from chimera_runtime.program.numbering import Numbering
from chimera_runtime.ranks.messages import from_host
from chimera_runtime.stage import engine
from chimera_runtime.stage.saved_tensors import Footprint, SavedTensors, footprint_of_slices
from chimera_runtime.stage.stage_output import (
    Auxiliary,
    LossOutput,
    SendOutput,
    SendToSeveral,
    SideNumbers,
    collecting,
    roots_of,
)
from chimera_runtime.values.boundary import Boundary
from chimera_runtime.values.losses import Tally
from chimera_runtime.values.nested import ONE_TENSOR
from tests.unit.runtime.staged import tuple_of

PAIR = Boundary(tuple_of(2), ((2,), (2,)), (torch.float64, torch.float64), (True, True), (True, False))


def squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def loss_output(loss: Callable[[Any, Any], Any] = squares, counted: bool = False) -> LossOutput:
    return LossOutput(loss, 0.25, Numbering(0, 0, passes=2, cycle=2), counted)


def test_a_result_is_handed_on_and_its_backward_begins_at_an_edge() -> None:
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
    del results
    gc.collect()
    assert [storage() for storage in held] == [None, None]
    engine.run(roots, [torch.ones(2, dtype=torch.float64)])
    assert x.grad is not None


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
    assert not loss_output().counted


def test_counts_come_back_with_the_gradients() -> None:
    stage_output = SendOutput(0, replace(PAIR, counted=True))
    gradient, count = torch.ones(2), torch.tensor([3.0])
    (received,) = stage_output.gradients((), (gradient, count))
    assert received.data_ptr() == gradient.data_ptr()
    assert stage_output.counts(0, (gradient, count)) == (count,)
    assert not SendOutput(0, PAIR).counted


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("readers", [(1, 2), (1, 2, 4)])
def test_gradients_of_several_readers_are_added_in_their_order(counted: bool, readers: tuple[int, ...]) -> None:
    both = replace(PAIR, differentiable=(True, True), counted=counted)
    stage_output = SendToSeveral(0, both, readers=readers)
    counts = (torch.tensor([3.0]),) if counted else ()
    messages = [(torch.tensor([0.1]) * 3**r, torch.tensor([1e8 * (-1) ** r]), *counts) for r in readers]
    received = tuple(tensor for message in messages for tensor in message)
    before = [tensor.clone() for tensor in received]
    first, second = messages[0][0] + messages[1][0], messages[0][1] + messages[1][1]
    for message in messages[2:]:
        first, second = first + message[0], second + message[1]
    assert [*map(torch.Tensor.tolist, stage_output.gradients((), received))] == [first.tolist(), second.tolist()]
    assert all(map(torch.equal, received, before)), "receive buffers stay as they are"
    assert stage_output.counts(0, received) == (counts or received[-1:])


def test_one_of_several_losses_counts_the_micro_batches_and_each_is_reported() -> None:
    first, last = (replace(loss_output(), name=name, counts_items=name == "head") for name in ("text", "head"))
    for stage_output in (first, last):
        stage_output.finish((0,), torch.tensor([3.0]), (torch.tensor([1.0]),))
        stage_output.finish((1,), torch.tensor([2.0]), (torch.tensor([1.0]),))
    tally = first.take_loss(0) + last.take_loss(0)
    assert (tally.mean, tally.report_means) == (5.0, {"text": 2.5, "head": 2.5})


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


# Auxiliary losses are heard where a forward is listened to, and nowhere else.


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


def heard(*losses: tuple[str, torch.Tensor]) -> Auxiliary:
    auxiliary = Auxiliary()
    auxiliary.extend(losses)
    return auxiliary


def test_what_a_stage_adds_is_added_up_by_update_and_name_once() -> None:
    losses = SideNumbers(from_host, ("a", "b"))
    for micro, update in enumerate((0, 0, 1)):
        value = torch.tensor(micro + 1.0, requires_grad=True)
        losses.add(1, micro, update, heard(("a", value), ("b", value * 2), ("a", value)))
    losses.add(1, 3, 1, heard())
    assert losses.take(0) == Tally(auxiliary={"a": 6.0, "b": 6.0})
    assert losses.take(1) == Tally(auxiliary={"a": 6.0, "b": 6.0})
    assert losses.take(1) == Tally()


def test_one_that_comes_late_is_an_error() -> None:
    losses = SideNumbers(from_host, ("a",))
    with pytest.raises(BadModel, match="stage 1 has the auxiliary loss b for micro-batch 4, and had it not for the"):
        losses.add(1, 4, 0, heard(("a", torch.ones(())), ("b", torch.ones(()))))


# Memory that is saved for a backward: every piece counts once, weights never, and for as long as it is kept.

ROWS, WIDTH = 3, 4
TENSOR = ROWS * WIDTH * 4


def test_weights_are_left_out_and_memory_counts_once() -> None:
    """A linear layer saves its input and a view of its weight; the tanh its result, which the next layer saves too."""
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    saved = SavedTensors(module.parameters)
    x = torch.ones(ROWS, WIDTH)
    with saved.counting():
        y = module(x)
    found = saved.footprint((x,), (y,), None)
    assert found == Footprint(2 * TENSOR, TENSOR, TENSOR, TENSOR, 0, 0)


def test_an_input_that_is_handed_on_stays_on_the_device_once() -> None:
    """The product saves both factors: one is the input, and the stage returns it as well; the other is a result."""
    x = torch.ones(ROWS, WIDTH)
    saved = SavedTensors(list)
    with saved.counting():
        y = torch.ones(ROWS, WIDTH, requires_grad=True).tanh()
        z = y * x
    found = saved.footprint((x,), (z, y, x.view(-1)), None)
    assert (found.activations, found.saved_results, found.made_results) == (2 * TENSOR, 2 * TENSOR, TENSOR)
    for is_fed in (False, True):
        assert found.resident(is_fed) == found.activations_with_inputs(is_fed) == 2 * TENSOR


def test_what_a_backward_has_used_is_no_longer_saved() -> None:
    saved = SavedTensors(list)
    with saved.counting():
        y = torch.ones(ROWS, WIDTH, requires_grad=True).tanh()
        assert sum(saved.sizes.values()) == TENSOR
        y.sum().backward()
    assert saved.sizes == {}


def test_a_graph_that_nobody_runs_backward_goes_with_its_result() -> None:
    saved = SavedTensors(list)
    with saved.counting():
        y = torch.ones(ROWS, WIDTH, requires_grad=True).tanh()
        z = y * y
    assert saved.sizes
    del y, z
    assert saved.sizes == {}


def test_gradients_are_those_of_tensors_that_nobody_watches() -> None:
    gradients = []
    for watched in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), nn.Dropout(0.5))
        saved = SavedTensors(module.parameters)
        if watched:
            with saved.counting():
                result = module(torch.ones(ROWS, WIDTH))
        else:
            result = module(torch.ones(ROWS, WIDTH))
        result.sum().backward()
        gradients.append([p.grad for p in module.parameters()])
    assert all(map(torch.equal, *gradients))


def test_a_carry_is_counted_apart_and_what_passes_on_only_once() -> None:
    """The weight gradient keeps the input; the carry is a view of the queries, keys and values, kept as a whole."""
    project = nn.Linear(WIDTH, 3 * WIDTH)
    earlier = torch.ones(ROWS, WIDTH, requires_grad=True)
    saved = SavedTensors(project.parameters)
    x = torch.ones(ROWS, WIDTH, requires_grad=True)
    with saved.counting():
        queries, *now = project(x).chunk(3, 1)
        y = queries * earlier + now[0] * now[1]
    footprint = saved.footprint((x,), (y,), None, before=(earlier,), left=(earlier, *now))
    assert (footprint.activations, footprint.carry, footprint.carry_gradients) == (TENSOR, 3 * TENSOR, 3 * TENSOR)


def test_an_input_or_a_result_that_is_left_as_the_carry_counts_once() -> None:
    """The product saves the input and a result; the stage leaves both as its carry, and returns the result."""
    x = torch.ones(ROWS, WIDTH, requires_grad=True)
    saved = SavedTensors(list)
    with saved.counting():
        y = x.exp()
        z = y * x
    found = saved.footprint((x,), (y, z), None, left=(x, y))
    assert (found.activations, found.saved_inputs, found.carry) == (TENSOR, TENSOR, TENSOR)
    assert found.activations_with_inputs(is_fed=True) == found.resident(is_fed=True) == TENSOR
    # The next slice gets the same tensors as its carry, and one of them as its input: nothing new is kept.
    again = saved.footprint((x,), (y,), None, before=(x, y), left=(x, y))
    assert (again.activations, again.carry) == (0, 0)
    assert again.resident(is_fed=True) <= again.activations_with_inputs(is_fed=True)


def test_slices_count_as_the_largest_mean_of_the_first_ones() -> None:
    """As many as are kept at any time are the first slices of their micro-batches."""
    growing = [Footprint(a, 1, 1, 2, 1, 3, released=a, operands=a, carry=a, carry_gradients=a) for a in (10, 20, 40)]
    assert footprint_of_slices(growing) == Footprint(
        24, 1, 1, 2, 1, 3, released=10, operands=40, carry=24, carry_gradients=40
    )
    assert footprint_of_slices(growing[::-1]).activations == 40
    # Of lengths 1, 1, 2 a whole is 4: 10 and 30 and 70 bytes by 4/1, 4/2 and 4/4, and the gradients by their makers.
    unequal = footprint_of_slices([*growing[:2], replace(growing[2], carry_gradients=0)], (1, 1, 2))
    assert (unequal.activations, unequal.operands, unequal.released) == (70, 80, 40)
    assert unequal.carry_gradients == max(10 * 4, 20 * 4 // 2)
    assert footprint_of_slices(growing[:1]) == growing[0]


def test_no_first_slices_of_unequal_length_keep_more_than_their_share_counts() -> None:
    rng = random.Random(3)
    for _ in range(100):
        lengths = [rng.randint(1, 9) for _ in range(rng.randint(2, 5))]
        sizes = [(rng.randint(0, 99), rng.randint(0, 99)) for _ in lengths]
        counted = footprint_of_slices([Footprint(a, 1, 1, 1, 1, 1, carry=c) for a, c in sizes], lengths)
        for count in range(1, len(lengths) + 1):
            units, whole = sum(lengths[:count]), sum(lengths)
            assert sum(a for a, _ in sizes[:count]) <= share(units, counted.activations, whole)
            assert sum(c for _, c in sizes[:count]) <= share(units, counted.carry, whole)
