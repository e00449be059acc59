"""What stages hand to one another: buffers for it, and what differs from it."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from chimera_runtime.values.boundary import Boundary
from chimera_runtime.values.nested import ONE_TENSOR, taken_apart
from tests.unit.runtime.staged import tuple_of

CPU = torch.device("cpu")
PAIR = Boundary(
    form=tuple_of(2),
    shapes=((2, 3), (2,)),
    dtypes=(torch.float32, torch.int64),
    recorded=(True, False),
    differentiable=(True, False),
)


def outputs(rows: int = 2) -> list[Any]:
    return [torch.ones(rows, 3, requires_grad=True), torch.ones(rows, dtype=torch.int64)]


def test_a_message_of_several_micro_batches_has_their_rows_one_after_another() -> None:
    assert [tuple(t.shape) for t in PAIR.buffers(CPU)] == [(2, 3), (2,)]
    assert [tuple(t.shape) for t in PAIR.buffers(CPU, 3)] == [(6, 3), (6,)]
    assert [t.dtype for t in PAIR.buffers(CPU, 3)] == [torch.float32, torch.int64]


def test_a_tensor_without_dimensions_has_room_for_one_micro_batch() -> None:
    scalar = Boundary(ONE_TENSOR, ((),), (torch.float32,), (True,), (True,))
    assert scalar.shape(0, 1) == ()


def test_gradients_come_back_of_the_differentiable_tensors_alone() -> None:
    assert [tuple(t.shape) for t in PAIR.gradient_buffers(CPU, 2)] == [(4, 3)]


@pytest.mark.parametrize("micros", [1, 2])
def test_tensors_as_at_start_match(micros: int) -> None:
    assert PAIR.mismatch(tuple(outputs(2 * micros)), PAIR.form, micros) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors[:1], "1 tensor instead of 2"),
        (lambda tensors: [tensors[0][:1], tensors[1]], "tensor 0 is (1, 3) torch.float32 and was (2, 3) torch.float32"),
        (lambda tensors: [tensors[0], tensors[1].int()], "tensor 1 is (2,) torch.int32 and was (2,) torch.int64 for"),
        (lambda tensors: [tensors[0].detach(), tensors[1]], "tensor 0 requires a gradient for one micro-batch and"),
        (lambda tensors: [tensors[0], None], "1 tensor instead of 2"),
        (lambda tensors: [[tensors[0]], tensors[1]], "([tensor], tensor) and was (tensor, tensor) for the first"),
        (lambda tensors: [*tensors, None], "(tensor, tensor, None) and was (tensor, tensor) for the first micro-batch"),
    ],
)
def test_what_differs_is_named(change: Any, words: str) -> None:
    mismatch = PAIR.mismatch(*taken_apart(tuple(change(outputs()))), 1)
    assert mismatch is not None
    assert mismatch.startswith(words)


def test_gradients_do_not_count_where_none_are_recorded() -> None:
    """As in the first of two forwards."""
    with torch.no_grad():
        assert PAIR.mismatch(tuple(tensor.detach() for tensor in outputs()), PAIR.form, 1) is None


def test_a_smaller_message_takes_the_first_part_of_the_memory() -> None:
    wide = Boundary(tuple_of(2), ((2, 4), (2,)), (torch.float32,) * 2, (True, True), (True, True), counted=True)
    small = replace(wide, shapes=((2, 3), (2,)))
    memory = wide.gradient_buffers(CPU, 2)
    views = small.gradient_views(memory, 2)
    assert [tuple(t.shape) for t in views] == [(4, 3), (4,), (2,)]
    assert all(t.is_contiguous() and t.data_ptr() == m.data_ptr() for t, m in zip(views, memory, strict=True))
    assert [tuple(t.shape) for t in small.views(wide.buffers(CPU), 1)] == [(2, 3), (2,)]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ((torch.ones(2, 2), torch.ones(2, dtype=torch.int64)), None),
        ((torch.ones(1, 6), torch.ones(1, dtype=torch.int64)), None),
        ((torch.ones(2, 4), torch.ones(2, dtype=torch.int64)), "a tensor (2, 4) torch.float32, and (2, 3)"),
        ((torch.ones(2, 3), torch.ones(2)), "a tensor (2,) torch.float32, and (2,) torch.int64 for the example"),
        ([torch.ones(2, 3), torch.ones(2)], "[tensor, tensor], and (tensor, tensor) for the example"),
    ],
)
def test_what_does_not_fit_into_the_memory_is_named(value: Any, words: str | None) -> None:
    excess = PAIR.excess(*taken_apart(value))
    assert excess is None if words is None else excess is not None and excess.startswith(words)


def test_slices_of_unequal_lengths_have_shapes_of_their_own_in_buffers_for_the_largest() -> None:
    first = Boundary(tuple_of(1), ((2, 1, 3),), (torch.float32,), (True,), (True,), counted=True)
    other = replace(first, shapes=((2, 4, 3),))
    boundary = first.with_slices([other])
    assert boundary is not None
    memory, back = boundary.buffers(CPU), boundary.gradient_buffers(CPU)
    assert [tuple(t.shape) for t in memory] == [(2, 4, 3)]
    for micro, shape in ((0, (2, 1, 3)), (1, (2, 4, 3)), (2, (2, 1, 3)), (5, (2, 4, 3))):
        assert boundary.at(micro).shapes == (shape,)
        (view,), (gradient, _) = boundary.views(memory, 1, micro), boundary.gradient_views(back, 1, micro)
        assert (tuple(view.shape), tuple(gradient.shape), view.data_ptr()) == (shape, shape, memory[0].data_ptr())
    assert first.with_slices([replace(other, dtypes=(torch.float64,))]) is None
    assert first.at(3) is first
