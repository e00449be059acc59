"""Fingerprints: equal content has equal ones, whatever its order or its identity, and other content has others."""

import os
import random
from collections import Counter, OrderedDict
from threading import Lock
from typing import Any

import numpy
import pytest
import torch

from chimera_runtime.values.fingerprint import fingerprint, sampled, shown
from tests import forkserver
from tests.patience import PATIENCE


class Point:
    def __init__(self, x: Any) -> None:
        self.x = x


ONE = [1.0]

EQUAL = [
    ({"a": 1, "b": [2]}, {"b": [2], "a": 1}),
    ({"a": 1}, OrderedDict(a=1)),
    ({"x", "y", "z"}, {"z", "y", "x"}),
    ([ONE, ONE], [[1.0], [1.0]]),
    (torch.arange(6.0)[::2], torch.tensor([0.0, 2.0, 4.0])),
    (Point(torch.ones(2)), Point(torch.ones(2))),
    (float("nan"), float("nan")),
    (random.Random(3), random.Random(3)),
    (numpy.arange(3), numpy.arange(3)),
]

DIFFERENT: list[tuple[Any, Any]] = [
    ({"a": 1}, {"a": 2}),
    (1, True),
    ([1, 2], [2, 1]),
    (["ab", "c"], ["a", "bc"]),
    (torch.ones(4), torch.ones(2, 2)),
    (torch.ones(2), torch.ones(2, dtype=torch.float64)),
    (Point(1), Point(2)),
    (random.Random(3), random.Random(4)),
    (numpy.arange(3), numpy.arange(3) + 1),
    (len, repr),
    (torch.zeros(1000), torch.zeros(1000).index_fill(0, torch.tensor([500]), 1.0)),
    (0.0, -0.0),
]


@pytest.mark.parametrize(("one", "other"), EQUAL)
def test_equal_content_has_one_fingerprint(one: Any, other: Any) -> None:
    assert fingerprint(one) == fingerprint(other)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_other_content_has_another_one(one: Any, other: Any) -> None:
    assert fingerprint(one) != fingerprint(other)


@pytest.mark.full
def test_it_is_the_same_in_another_process() -> None:
    """Whose sets of texts have another order."""
    program = "from chimera_runtime.values.fingerprint import fingerprint; print(fingerprint(set('abcde')))"
    done = forkserver.run(("-c", program), os.environ, forkserver.ROOT, PATIENCE)
    assert done.stdout.strip() == fingerprint({"a", "b", "c", "d", "e"})


def test_what_contains_itself_ends_and_what_cannot_be_pickled_is_an_error() -> None:
    ring: list[Any] = [1]
    ring.append(ring)
    other: list[Any] = [1]
    other.append(other)
    assert fingerprint(ring) == fingerprint(other)
    with pytest.raises(TypeError, match="cannot pickle"):
        fingerprint({"lock": Lock()})


def test_what_is_short_is_shown() -> None:
    assert [shown(65536.0), shown("linear"), shown(None)] == ["65536.0", "'linear'", "None"]
    assert shown(Counter([3])).startswith("Counter ")
    assert shown(torch.ones(3)).startswith("Tensor ")
    assert len(shown("x" * 100)) < 20


# Samples of data: another mini-batch has another digest, the same one has the same wherever it lies in memory.


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
