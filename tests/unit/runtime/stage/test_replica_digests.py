"""Digests of weights: any change of a bit shows."""

import pytest
import torch
from torch import nn

from chimera_runtime.ranks.messages import from_host
from chimera_runtime.stage.gradient_sums import Replicas, bits, is_due


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def number(weights: list[torch.Tensor]) -> int:
    """The number of a group with these weights, which ranks compare."""
    replicas = Replicas({(0,): weights}, dict.fromkeys(weights, "a weight"), from_host)
    return replicas.begin()[0,]()[0]


def test_weights_are_compared_often_at_first_and_then_now_and_then() -> None:
    assert [update for update in range(500) if is_due(update)] == [
        *(1, 2, 4, 8, 16, 32, 64, 100, 128, 200, 256, 300, 400),
    ]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex128]
)
def test_a_bit_changes_the_digest_and_a_copy_does_not(dtype: torch.dtype) -> None:
    weights = [torch.randn(5, 7).to(dtype), torch.ones(3).to(dtype)]
    others = [weight.clone() for weight in weights]
    assert number(weights) == number(others) < 2**20
    assert bits(weights[1]) == bits(others[1]) < 2**20
    others[1].view(torch.uint8)[0] ^= 1
    assert number(weights) != number(others)
    assert bits(weights[1]) != bits(others[1])


def test_parameters_count_in_their_order_and_whatever_their_memory_is_like() -> None:
    first, other = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(4, 6))
    assert number([first, other]) != number([other, first])
    assert bits(first) == bits(first.detach().t().contiguous().t())
    assert bits(torch.zeros(0)) == 0


def test_groups_without_parameters_have_no_digest() -> None:
    weight = torch.ones(2)
    replicas = Replicas({(0,): [weight], (1,): []}, {weight: "weight"}, from_host)
    assert list(replicas.begin()) == list(replicas.begin([(0,), (1,)])) == [(0,)]
    number, text = replicas.begin()[0,]()
    assert text() == {"a digest of weight": f"{number:x}"}
