"""Fingerprints: equal content has equal ones, whatever its order or its identity, and other content has others."""

import os
import random
from collections import Counter, OrderedDict
from threading import Lock
from typing import Any

import numpy
import pytest
import torch

from chimera_runtime.values.fingerprint import fingerprint, shown
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
