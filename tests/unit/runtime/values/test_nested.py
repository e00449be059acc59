"""Batches in tuples, lists and dicts: taken apart, put together, moved."""

import pickle
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils import _pytree as pytree

from chimera_runtime.errors import BadModel
from chimera_runtime.values.nested import (
    ONE_TENSOR,
    form_of,
    is_rows,
    joined,
    leaves,
    obstacle,
    parts,
    taken_apart,
    to_device,
)


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
    "others",
    [
        [{"x": torch.ones(2), "y": 1}],
        [{"x": torch.ones(2)}],
        [{"x": torch.ones(2), "y": 0}, {"x": torch.ones(2), "y": 0.5}],
        [{"x": None, "y": 0}],
    ],
)
def test_values_of_another_form_are_not_joined(others: list[Any]) -> None:
    with pytest.raises(BadModel, match="differ in structure, or in something that is not a tensor"):
        joined([{"x": torch.ones(2), "y": 0}, *others])


# What can be cut.


@dataclass
class Settings:
    mask: torch.Tensor


class Color(Enum):
    RED = 1


class Node:
    """A class that torch knows as a pytree."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows


pytree.register_pytree_node(Node, lambda node: ([node.rows], None), lambda rows, _: Node(*rows))


def block_mask(items: int) -> Any:
    """A BlockMask of flex attention, the same for all items if they are 1."""
    return create_block_mask(lambda _b, _h, q, k: q >= k, items, None, 128, 128, device="cpu")


def test_tensors_are_cut_and_what_is_the_same_for_all_items_is_handed_on() -> None:
    rows = torch.ones(4, 3)
    constants = [None, True, 2, 0.5, 1j, "text", b"text", Color.RED, torch.float32, np.float32(1), torch.tensor(2.0)]
    structures = [rows, [rows] * 4, Pair(rows, "text"), Node(rows), block_mask(1), ("a", "b"), (None,) * 4, rows.shape]
    for value in (*constants, *structures):
        assert obstacle((rows, {"more": value}), 4) is None, value


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (block_mask(4), "a BlockMask for 4 items"),
        (np.ones((4, 2)), "of type numpy.ndarray"),
        (["a", "b", "c", "d"], "a list of 4 entries, as many as there are items"),
        ((1, 2, 3, 4), "a tuple of 4 entries, as many as there are items"),
        ([{"name": "a"}] * 4, "a list of 4 entries"),
        ([torch.tensor(1.0)] * 4, "a list of 4 entries"),
        (Settings(torch.ones(4)), "test_nested.Settings"),
        (lambda _b, _h, q, k: q >= k, "of type function"),
        (torch.ones(4, 3).to_sparse(), "a sparse tensor"),
        (torch.nested.nested_tensor([torch.ones(2)] * 4, layout=torch.jagged), "a nested tensor"),
    ],
)
def test_what_may_have_a_part_for_each_item_and_cannot_be_cut_is_found(value: Any, kind: str) -> None:
    place, words = obstacle((torch.ones(4), {"more": [value]}), 4) or ("", "")
    assert place == "[1]['more'][0]"
    assert kind in words


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
