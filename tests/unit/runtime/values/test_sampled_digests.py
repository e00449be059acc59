"""Samples of data: another mini-batch has another digest, the same one has the same wherever it lies in memory."""

from typing import Any

import pytest
import torch

from chimera_runtime.values.fingerprint import sampled


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


SHAPES = [(1,), (7,), (4, 3), (64, 33), (3, 5, 7), (2, 3, 64, 64), (5000,), (4, 1, 1)]


@pytest.mark.parametrize("shape", SHAPES)
def test_copies_have_the_same_digest_and_other_tensors_another(shape: tuple[int, ...]) -> None:
    assert sampled(numbers(*shape)) == sampled(numbers(*shape))
    assert sampled(numbers(*shape)) != sampled(numbers(*shape, seed=1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_dtype_and_shape_count(dtype: torch.dtype) -> None:
    tensor = numbers(8, 9, dtype=dtype)
    assert len({sampled(tensor), sampled(tensor.view(9, 8)), sampled(numbers(8, 9, dtype=torch.float32))}) == 3


def views() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The same view into memory whose other parts differ."""
    made = {}
    for name, cut in {
        "columns": lambda t: t[:, :-1],
        "every second row": lambda t: t[::2],
        "transposed": lambda t: t[:, :40].T,
        "expanded": lambda t: t[:, 3:4].expand(-1, 90),
        "a later row": lambda t: t[7],
        "of three dimensions": lambda t: t.view(20, 5, 10)[:, 1:3, ::3],
    }.items():
        first, other = numbers(20, 50), numbers(20, 50, seed=1)
        cut(other).copy_(cut(first)) if name != "expanded" else other[:, 3].copy_(first[:, 3])
        made[name] = cut(first), cut(other)
    return made


@pytest.mark.parametrize("name", views())
def test_only_what_a_view_shows_counts(name: str) -> None:
    first, other = views()[name]
    assert torch.equal(first, other)
    assert sampled(first) == sampled(other)
    other.copy_(other + 1) if name != "expanded" else other[:, :1].add_(1)
    assert sampled(first) != sampled(other)


def test_rows_of_a_mini_batch_are_those_of_the_micro_batch_alone() -> None:
    whole = numbers(12, 300)
    assert sampled(whole, 4, 4) == sampled(whole[4:8].clone())
    assert sampled(whole, 4, 4) != sampled(whole, 8, 4)


def test_structures_count_by_their_leaves_and_none_by_nothing() -> None:
    a, b = numbers(4), numbers(4, seed=1)
    values: list[Any] = [(a, b), (b, a), {"x": a}, [a, 3], [a, 4], (a, "text"), (a, object())]
    assert len({sampled(value) for value in values}) == len(values)
    assert sampled((a, None)) == sampled(a)
    assert sampled(None) is sampled((None, {})) is None


def test_what_has_no_bytes_to_look_at_counts_by_its_shape() -> None:
    meta = torch.empty(3, 4, device="meta")
    assert sampled(meta) == sampled(torch.empty(3, 4, device="meta")) != sampled(torch.empty(4, 3, device="meta"))
    assert sampled(torch.empty(0, 3)) == sampled(torch.empty(0, 3))
    assert sampled(torch.eye(3).to_sparse()) is not None
