"""Batches in tuples, lists and dicts: taken apart, put together, moved."""

import pickle
from typing import Any, NamedTuple

import pytest
import torch

from chimera_runtime.nested import ONE_TENSOR, form_of, is_rows, joined, leaves, parts, taken_apart, to_device


class Pair(NamedTuple):
    left: Any
    right: Any


def batch(*rows: float) -> dict[str, Any]:
    """Every kind of structure, its tensors with some rows."""
    column = torch.tensor(rows)
    return {
        "tensor": column,
        "tuple": (column + 1, [column + 2]),
        "pair": Pair(column.reshape(-1, 1), {"inner": -column}),
        "name": "untouched",
    }


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, tuple | list):
        for mine, theirs in zip(found, expected, strict=True):
            assert_same(mine, theirs)
    else:
        assert found == expected


def test_leaves_are_what_lies_inside_in_order() -> None:
    assert [leaf if isinstance(leaf, str) else leaf.flatten().tolist() for leaf in leaves(batch(1.0))] == [
        *([1.0], [2.0], [3.0], [1.0], [-1.0]),
        "untouched",
    ]
    assert list(leaves(5)) == [5]
    assert list(leaves(())) == []


def test_parts_and_joined_undo_one_another() -> None:
    first, second = batch(1.0, 2.0), batch(3.0, 4.0)
    whole = batch(1.0, 2.0, 3.0, 4.0)
    assert_same(joined([first, second]), whole)
    for mine, theirs in zip(parts(whole, 2), (first, second), strict=True):
        assert_same(mine, theirs)


def test_one_value_is_joined_to_itself() -> None:
    value = object()
    assert joined([value]) is value


@pytest.mark.parametrize(
    ("value", "so"),
    [
        (torch.ones(2), True),
        ((torch.ones(2), {"a": [torch.ones(2, 3)]}), True),
        (torch.ones(()), False),
        ((torch.ones(2), torch.ones(())), False),
        ((torch.ones(2), "text"), False),
        ((torch.ones(2), None), True),
        ({"a": 5}, False),
    ],
)
def test_rows_are_tensors_with_a_dimension_0(value: Any, so: bool) -> None:
    assert is_rows(value) == so


def test_only_tensors_move_and_structures_stay_what_they_are() -> None:
    """The meta device stands in for a GPU."""
    moved = to_device(batch(1.0), torch.device("meta"))
    assert_same(to_device(batch(1.0), torch.device("cpu")), batch(1.0))
    assert isinstance(moved["pair"], Pair)
    assert [leaf if isinstance(leaf, str) else leaf.device.type for leaf in leaves(moved)] == ["meta"] * 5 + [
        "untouched"
    ]


# Taken apart and filled again.


def test_a_value_is_its_tensors_and_its_form() -> None:
    value = {"x": torch.ones(2), "pair": Pair(None, [torch.zeros(3)]), "heads": 4}
    tensors, form = taken_apart(value)
    assert [len(tensor) for tensor in tensors] == [2, 3]
    assert_same(form.filled(tensors), value)
    assert str(form) == "{'x': tensor, 'pair': Pair(left=None, right=[tensor]), 'heads': 4}"


def test_a_tensor_alone_is_taken_apart_without_looking_inside() -> None:
    tensor = torch.ones(2)
    tensors, form = taken_apart(tensor)
    assert tensors == (tensor,)
    assert form is ONE_TENSOR
    assert form.filled(tensors) is tensor


@pytest.mark.parametrize("other", [{"x": 1, "n": 4}, {"x": ..., "n": 5}, {"y": ..., "n": 4}, [...], ..., (...,)])
def test_forms_differ_by_structure_and_by_constants(other: Any) -> None:
    form = form_of({"x": ..., "n": 4})
    assert form == taken_apart({"x": torch.ones(3), "n": 4})[1]
    assert form != form_of(other)


@pytest.mark.parametrize("value", [..., (..., None), {"a": [..., 2], "b": Pair(..., "text")}])
def test_a_form_can_be_told_to_another_rank(value: Any) -> None:
    form = form_of(value)
    told = pickle.loads(pickle.dumps(form))
    assert told == form
    assert (told is ONE_TENSOR) == (value is ...)
