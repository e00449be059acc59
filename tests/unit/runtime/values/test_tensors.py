"""Parts of messages, seeds, and the bits of tensors."""

import copy
import hashlib
import random
import sys
from contextlib import suppress

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chimera_runtime.values.nested import (
    all_generators_kept,
    digest,
    draw_seed,
    generators_kept,
    has_drawn,
    join,
    part,
    plain,
    seed_all,
    seed_torch,
    states_beside_torch,
)


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


def test_generators_are_kept_also_where_an_error_is_raised() -> None:
    seed_torch(4)
    expected = torch.rand(2)
    seed_torch(4)
    with suppress(KeyError), generators_kept():
        seed_torch(5)
        raise KeyError
    assert torch.equal(torch.rand(2), expected)


def test_every_generator_goes_on_where_it_was() -> None:
    def draw() -> tuple[float, float, float]:
        return torch.rand(()).item(), random.random(), numpy.random.rand()

    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)
    expected = draw()
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)
    with all_generators_kept():
        seed_all(2)
        assert draw() != expected
    assert draw() == expected


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
    first, second = all_generators_kept(), all_generators_kept()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
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
        draws.append((torch.rand(()).item(), random.random(), numpy.random.rand()))
    assert draws[0] == draws[1]
    assert not {*draws[0]} & {*draws[2]}
