"""The argument of a stage's module, and the gradients for the stage before."""

import pytest
import torch

from chimera_runtime.errors import BadModel
from chimera_runtime.stage.stage_output import StageInput
from chimera_runtime.values.boundary import Boundary
from tests.unit.runtime.staged import tuple_of

FLOATS, WHOLE = torch.float32, torch.int64
TWO = Boundary(tuple_of(3), ((2,), (2,), (2,)), (FLOATS, FLOATS, WHOLE), (True, True, False), (True, False, False))


def received_tensors() -> tuple[torch.Tensor, ...]:
    return torch.ones(2), torch.ones(2), torch.ones(2, dtype=WHOLE)


def test_the_first_stage_is_called_on_what_was_loaded_and_hands_nothing_back() -> None:
    first = StageInput(0, None)
    batch = {"words": torch.ones(2)}
    assert first.argument(batch) == ((), batch)
    assert first.take_gradients((), (torch.ones(1),)) == ()


def test_leaves_are_the_tensors_received_and_require_gradients_where_the_stage_before_recorded_them() -> None:
    received = received_tensors()
    leaves, argument = StageInput(1, TWO).argument(received)
    assert argument == leaves
    assert [leaf.requires_grad for leaf in leaves] == [True, True, False]
    assert [leaf.data_ptr() for leaf in leaves] == [tensor.data_ptr() for tensor in received]


def test_gradients_come_back_for_what_the_first_micro_batch_used_and_zeros_where_there_are_none() -> None:
    stage_input = StageInput(1, TWO)
    leaves, _ = stage_input.argument(received_tensors())
    count = torch.ones(1)
    zeros, counted = stage_input.take_gradients(leaves, (count,))
    assert zeros.tolist() == [0, 0]
    assert counted is not count
    assert counted.item() == 1
    (leaves[0] * 3).sum().backward()
    assert stage_input.take_gradients(leaves, ())[0].tolist() == [3, 3]
    leaves[1].sum().backward()
    with pytest.raises(BadModel, match="uses a tensor that it receives and did not use for the first micro-batch"):
        stage_input.take_gradients(leaves, ())


def test_a_gradient_that_was_handed_back_is_kept_by_nothing_else() -> None:
    stage_input = StageInput(1, TWO)
    leaves, _ = stage_input.argument(received_tensors())
    (leaves[0] * 3).sum().backward()
    stage_input.take_gradients(leaves, ())
    assert leaves[0].grad is None


def test_a_gradient_for_what_the_stage_before_recorded_no_graph_for_is_for_nobody() -> None:
    """A stage may call requires_grad_() on what it gets, as it may in one process."""
    frozen = Boundary(tuple_of(1), ((2,),), (FLOATS,), (False,), (False,))
    stage_input = StageInput(1, frozen)
    leaves, _ = stage_input.argument((torch.ones(2),))
    (leaves[0].requires_grad_() * 3).sum().backward()
    assert stage_input.take_gradients(leaves, ()) == ()
    assert leaves[0].grad is None


def test_a_gradient_in_memory_that_anything_else_holds_is_copied() -> None:
    """A receive buffer, or what a function of the model's own writes again in its next backward."""
    stage_input, memory = StageInput(1, TWO), torch.full((4,), 7.0)
    leaves, _ = stage_input.argument(received_tensors())
    leaves[0].grad = memory[:2]
    (gradient,) = stage_input.take_gradients(leaves, ())
    memory.zero_()
    assert gradient.tolist() == [7, 7]


def test_a_gradient_in_memory_of_its_own_is_handed_back_as_it_is() -> None:
    stage_input = StageInput(1, TWO)
    leaves, _ = stage_input.argument(received_tensors())
    (leaves[0] * 3).sum().backward()
    assert leaves[0].grad is not None
    place = leaves[0].grad.data_ptr()
    assert stage_input.take_gradients(leaves, ())[0].data_ptr() == place
