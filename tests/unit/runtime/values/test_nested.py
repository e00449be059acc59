"""Batches in tuples, lists and dicts: taken apart, put together, moved."""

import copy
import hashlib
import pickle
import random
import sys
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from itertools import accumulate
from typing import Any, NamedTuple

import numpy
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils import _pytree as pytree

from chimera_runtime.check.reference import items_of_slices
from chimera_runtime.errors import BadModel, Misuse
from chimera_runtime.values.nested import (
    ONE_TENSOR,
    all_generators_kept,
    digest,
    draw_seed,
    form_of,
    generators_kept,
    has_drawn,
    is_on,
    is_rows,
    join,
    joined,
    leaves,
    obstacle,
    part,
    parts,
    plain,
    require_here,
    require_sendable,
    seed_all,
    seed_torch,
    slice_bounds,
    states_beside_torch,
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


@pytest.mark.parametrize("tensors", [0, 1, 3])
def test_a_tuple_of_tensors_needs_no_pytree_and_is_taken_apart_as_by_one(tensors: int) -> None:
    value = tuple(torch.full((2,), float(place)) for place in range(tensors))
    taken, form = taken_apart(value)
    assert taken == value
    assert form.filled(value) == value
    tree: Any = pytree.tree_structure(value)
    assert form.tree == tree
    if tensors:
        assert form is taken_apart(value)[1] is pickle.loads(pickle.dumps(form)) is form_of((...,) * tensors)


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


# Parts of messages, seeds, and the bits of tensors.


def message(micros: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of two tensors, the first with two rows a micro-batch, the second with one."""
    return torch.arange(2.0 * micros * 3).reshape(-1, 3), torch.arange(micros)


@given(st.integers(1, 6), st.data())
def test_a_part_is_the_rows_of_its_micro_batches_in_place(micros: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, micros - 1))
    stop = data.draw(st.integers(start + 1, micros))
    whole = message(micros)
    rows, numbers = part(whole, start, stop, micros)
    assert torch.equal(rows, whole[0][2 * start : 2 * stop])
    assert numbers.tolist() == [*range(start, stop)]
    assert rows.untyped_storage().data_ptr() == whole[0].untyped_storage().data_ptr()


def test_parts_that_are_joined_are_the_message() -> None:
    whole = message(3)
    again = join([part(whole, micro, micro + 1, 3) for micro in range(3)])
    assert all(map(torch.equal, again, whole))


def test_messages_without_tensors_stay_so() -> None:
    assert part((), 0, 1, 2) == ()
    assert join([(), ()]) == ()


def test_a_seed_is_the_documented_hash_and_of_63_bits() -> None:
    bits = int.from_bytes(hashlib.blake2b(b"forward/1/22/3", digest_size=8).digest(), "big")
    assert draw_seed("forward", 1, 22, 3) == bits // 2 < 2**63
    assert draw_seed("forward", 12, 2, 3) != draw_seed("forward", 1, 22, 3)


def test_seeding_is_that_of_torch() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    seed_torch(5)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1 + 2j, 3j]).conj(),
        torch._neg_view(torch.tensor([1.0, -2.0])),
        torch.arange(6).reshape(2, 3).t(),
        torch.ones(1).expand(4),
        torch.ones(3),
    ],
)
def test_a_plain_tensor_has_the_same_values_in_one_piece(tensor: torch.Tensor) -> None:
    made = plain(tensor)
    assert torch.equal(made, tensor)
    assert made.is_contiguous()
    assert not made.is_conj()
    assert not made.is_neg()
    assert made.untyped_storage().nbytes() == made.numel() * made.element_size()


def test_a_digest_is_of_the_bits() -> None:
    one = torch.tensor([1.0, 0.0])
    assert digest([one]) == digest([one.clone()])
    assert digest([one]) != digest([torch.tensor([1.0, -0.0])])
    assert digest([one]) != digest([one, None]) != digest([None, one])
    strided = torch.stack([one, torch.ones(2)], dim=1)[:, 0]
    assert digest([strided]) == digest([one])


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), numpy.random.rand()


@pytest.mark.parametrize(
    ("kept", "seeded", "drawn"), [(generators_kept, seed_torch, 1), (all_generators_kept, seed_all, 3)]
)
def test_generators_go_on_where_they_were_also_after_an_error(kept: Any, seeded: Any, drawn: int) -> None:
    """Of torch, or all of them."""
    seed_all(1)
    expected = draw()[:drawn]
    seed_all(1)
    with suppress(KeyError), kept():
        seeded(2)
        assert draw()[:drawn] != expected
        raise KeyError
    assert draw()[:drawn] == expected


@pytest.mark.parametrize("held_back", [False, True])
def test_numpy_goes_on_where_it_was_also_within_a_pair_of_normal_numbers(held_back: bool) -> None:
    numpy.random.seed(1)
    if held_back:
        numpy.random.randn()
    expected = copy.deepcopy(numpy.random.mtrand._rand).randn(3)
    with all_generators_kept():
        seed_all(2)
        inside = numpy.random.randn()
        with all_generators_kept():
            seed_all(3)
            numpy.random.randn()
        assert [inside, numpy.random.randn()] == numpy.random.RandomState(2).randn(2).tolist()
    assert numpy.array_equal(numpy.random.randn(3), expected)


def test_numpy_keeps_bits_of_another_kind() -> None:
    before = numpy.random.get_bit_generator()
    try:
        numpy.random.set_bit_generator(numpy.random.PCG64(1))
        with all_generators_kept():
            seed_all(2)
            drawn = numpy.random.rand()
            seed_all(2)
            assert numpy.random.rand() == drawn
        assert numpy.random.rand() == numpy.random.RandomState(numpy.random.PCG64(1)).rand()
    finally:
        numpy.random.set_bit_generator(before)


def test_numpy_keeps_its_bits_also_where_threads_end_in_another_order_than_they_began() -> None:
    """Another thread may be drawing from these: they must not be let go, nor another's be left."""
    before = numpy.random.get_bit_generator()
    contexts = all_generators_kept(), all_generators_kept()
    for context in contexts:
        context.__enter__()
    for context in contexts:
        context.__exit__(None, None, None)
    assert numpy.random.get_bit_generator() is before


def test_whether_somebody_has_drawn_is_seen_of_python_and_numpy() -> None:
    for draw, is_seen in ((random.random, True), (numpy.random.randn, True), (lambda: torch.rand(()), False)):
        with all_generators_kept():
            states = states_beside_torch()
            assert not has_drawn(states)
            draw()  # type: ignore[operator]
            assert has_drawn(states) == is_seen


def test_generators_are_kept_without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "numpy")
    state = random.getstate()
    with all_generators_kept():
        seed_all(2)
    assert random.getstate() == state


def test_a_seed_decides_what_every_generator_draws() -> None:
    draws = []
    for seed in (2**62 + 1, 2**62 + 1, 2**62):
        seed_all(seed)
        draws.append(draw())
    assert draws[0] == draws[1]
    assert not {*draws[0]} & {*draws[2]}


# What a stage must not hand on, and which dtypes go where: gloo sends bytes, NCCL numbers that it knows.


CPU = torch.device("cpu")


def refused(output: torch.Tensor, backend: str = "gloo") -> str:
    with pytest.raises(Misuse) as error:
        require_sendable(3, [torch.zeros(1), output], backend)
    return str(error.value)


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint16, torch.uint32, torch.uint64])
def test_what_nccl_does_not_know_is_refused_there_alone(dtype: torch.dtype) -> None:
    output = torch.zeros(2, dtype=dtype)
    require_sendable(3, [output], "gloo")
    assert refused(output, "nccl").startswith(
        f"stage 3 returned a tensor of {dtype}, which the backend nccl cannot send: return it in another dtype"
    )


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
        *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2),
    ],
)
def test_what_nccl_knows_passes_and_complex_numbers_as_pairs(dtype: torch.dtype) -> None:
    require_sendable(3, [torch.zeros(2, dtype=dtype)], "nccl")


@pytest.mark.parametrize("backend", ["gloo", "nccl", "strict"])
def test_a_sparse_tensor_is_no_message(backend: str) -> None:
    assert "stage 3 returned a tensor of layout torch.sparse_coo" in refused(torch.eye(2).to_sparse(), backend)


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation")
def test_a_quantised_tensor_is_no_message() -> None:
    output: Any = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    assert refused(output).startswith("stage 3 returned a quantised tensor, of torch.qint8, which is no message")


def test_a_tensor_elsewhere_is_refused_with_both_devices() -> None:
    require_here(3, [torch.zeros(2)], CPU)
    with pytest.raises(Misuse, match="stage 3 returned a tensor on meta, and its rank computes on cpu: make what"):
        require_here(3, [torch.zeros(2), torch.zeros(2, device="meta")], CPU)


def test_the_cpu_is_one_device_and_a_gpu_one_of_several() -> None:
    on_cpu = torch.zeros(1, device="cpu:0")
    assert is_on(on_cpu, CPU)
    assert not is_on(on_cpu, torch.device("cuda", 0))
    with torch._subclasses.fake_tensor.FakeTensorMode():
        on_gpu = torch.zeros(1, device="cuda:1")
    assert [is_on(on_gpu, torch.device(name)) for name in ("cuda:1", "cuda", "cuda:0", "cpu")] == [
        *(True, True, False, False)
    ]


# Bounds of slices: at the nearest items, and those that the check cuts by, which computes them by itself.


@pytest.mark.parametrize(
    ("length", "lengths", "sizes"),
    [
        (2048, (640, 512, 448, 448), [640, 512, 448, 448]),
        (1024, (640, 512, 448, 448), [320, 256, 224, 224]),
        (3, (1, 1, 98), [1, 1, 1]),
        (10, (1, 1, 1), [3, 4, 3]),
    ],
)
def test_sequences_are_cut_in_proportion_to_the_lengths(
    length: int, lengths: tuple[int, ...], sizes: list[int]
) -> None:
    assert [end - start for start, end in slice_bounds(length, lengths)] == sizes


def test_every_slice_has_an_item_and_no_boundary_is_further_than_needed() -> None:
    rng = random.Random(5)
    for _ in range(300):
        lengths = [rng.choice([1, 2, 3, 50]) for _ in range(rng.randint(1, 6))]
        length = rng.randint(len(lengths), 40)
        bounds = slice_bounds(length, lengths)
        assert [start for start, _ in bounds] == [0, *(end for _, end in bounds[:-1])]
        assert bounds[-1][1] == length
        assert all(start < end for start, end in bounds)
        assert [end - start for start, end in bounds] == items_of_slices(length, lengths)
        exact = [Fraction(length * until, sum(lengths)) for until in accumulate(lengths)]
        roomy = length * min(lengths) >= 2 * sum(lengths)
        assert not roomy or all(abs(end - e) <= Fraction(1, 2) for (_, end), e in zip(bounds, exact, strict=True))
