"""Two forwards are compared bit by bit, or by a sample with a tolerance; every dtype and layout."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from chimera_runtime.errors import BadModel
from chimera_runtime.ranks.messages import Numbers, Reader, from_host
from chimera_runtime.stage import recomputation
from chimera_runtime.stage.module_state import StateSnapshot
from chimera_runtime.stage.recomputation import (
    ForwardArguments,
    ForwardDigest,
    RecomputedForwards,
    SavedInput,
    digest,
    in_some,
    parts,
    whole,
)
from chimera_runtime.values.boundary import NO_CARRY

DTYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn),
    *(torch.complex64, torch.complex128, torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool),
]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def comparing(dtype: torch.dtype = torch.float32, read: Reader = from_host) -> RecomputedForwards:
    return RecomputedForwards(2, nn.Linear(1, 1, dtype=dtype), in_some, (), read)


def first_run(digest: ForwardDigest, micro_batches: int = 1) -> SavedInput:
    arguments = ForwardArguments(0, (), {}, NO_CARRY, leaves_carry=False)
    return SavedInput(arguments, None, [], StateSnapshot(), micro_batches, digest)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_digest_sees_one_bit_and_the_order(dtype: torch.dtype) -> None:
    one = (torch.arange(60) % 7).reshape(3, 4, 5).to(dtype)
    assert digest(one) == digest(one.clone())
    changed = one.clone()
    changed.view(torch.uint8).view(-1)[-1] ^= 1
    assert digest(one) != digest(changed)
    assert digest(one) != digest(one.flip(0).contiguous())
    assert digest(one.transpose(0, 2)) == digest(one.clone().transpose(0, 2))
    assert digest(one[:, ::2]) == digest(one[:, ::2].contiguous())


def test_a_digest_of_many_numbers_is_taken_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recomputation, "_BLOCK", 7)
    one = torch.rand(50)
    swapped = torch.cat([one[7:14], one[:7], one[14:]])
    assert digest(one) == digest(one.clone())
    assert digest(one) != digest(swapped)
    assert digest(torch.empty(0)) == digest(torch.empty(0))


def test_zeros_of_two_signs_are_two_things_and_what_is_no_number_is_itself() -> None:
    assert digest(torch.zeros(2)) != digest(-torch.zeros(2))
    assert digest(torch.full((2,), torch.nan)) == digest(torch.full((2,), torch.nan))


def test_a_difference_names_stage_micro_batch_and_update_and_what_to_do() -> None:
    one = torch.rand(3, 4)
    first = first_run(whole([one]))
    comparing().compare(5, 1, first, lambda: [one.clone()])
    for other in ([one + 1], [one[:2]], [one.double()], [one, one]):
        with pytest.raises(BadModel) as refused:
            comparing().compare(5, 1, first, other.copy)
        assert "stage 2 gives something else for micro-batch 1 of update 6 when its forward" in str(refused.value)
        assert "use_deterministic_algorithms" in str(refused.value)


@pytest.mark.parametrize(
    ("dtype", "rounding", "influence"),
    [
        (torch.float64, 1e-8, 1e-4),
        (torch.float32, 1e-4, 0.1),
        (torch.bfloat16, 1e-2, 0.2),
        (torch.complex64, 1e-4, 0.1),
    ],
)
def test_samples_may_differ_by_rounding_alone(dtype: torch.dtype, rounding: float, influence: float) -> None:
    one = torch.rand(6, 400).to(dtype)
    first = [*parts([one, torch.arange(6)], 2)]
    assert len(first) == 2
    alone = one[3:] * (1 + rounding)
    comparing(dtype).compare(0, 1, first_run(first[1], 2), lambda: [alone, torch.arange(3)])
    for of in (2, 4):
        with pytest.raises(BadModel) as refused:
            comparing(dtype).compare(0, 1, first_run(first[1], of), lambda: [one[3:] + influence, torch.arange(3)])
        assert f"alone than together with {of - 1} other{'s' if of > 2 else ''}" in str(refused.value)


def test_a_coarse_weight_makes_the_tolerance_coarse() -> None:
    one = torch.rand(4, 4)
    first = first_run(next(parts([one], 2)), 2)
    comparing(torch.bfloat16).compare(0, 0, first, lambda: [one[:2] * 1.02])
    with pytest.raises(BadModel):
        comparing().compare(0, 0, first, lambda: [one[:2] * 1.02])


def test_what_has_no_values_is_not_compared() -> None:
    nothing = torch.rand(4, 4, device="meta")
    comparing().compare(0, 0, first_run(whole([nothing])), lambda: [nothing])
    comparing().compare(0, 0, first_run(next(parts([nothing], 2)), 2), lambda: [nothing[:2]])


def test_of_a_device_the_comparisons_are_read_at_the_end_of_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host reads nothing before."""
    read: list[str] = []

    class Elsewhere(torch.Tensor):
        @property
        def device(self) -> torch.device:  # type: ignore[override]
            return torch.device("cuda")

    def begin(_update: int, tensors: Sequence[torch.Tensor]) -> Numbers:
        def numbers() -> list[float]:
            read.append("read")
            return [float(tensor) for tensor in tensors]

        return numbers

    of = comparing(read=begin)
    first, second = (ForwardDigest([], [torch.tensor([n]).as_subclass(Elsewhere)]) for n in (1, 2))
    monkeypatch.setattr(recomputation, "whole", lambda _tensors: second)
    of.compare(3, 0, first_run(first), list)
    of.check(2)
    assert read == []
    with pytest.raises(BadModel, match="of update 4"):
        of.check(3)
    of.check(3)
    assert read == ["read"]


def test_the_first_updates_and_every_hundredth_are_compared() -> None:
    assert [update for update in range(301) if in_some(update)] == [0, 1, 2, 100, 200, 300]
