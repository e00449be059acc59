"""Sums of gradients of a GPU by gloo: as without one, and what has to be known of them is read on the host."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from chimera_runtime.ranks.messages import Names, Staging, waiter
from chimera_runtime.ranks.world import World
from chimera_runtime.stage.gradient_sums import GradientSum, WideGradientSum
from chimera_runtime.values.losses import Count
from tests.unit.runtime.gpu_model import ModelGpu
from tests.unit.runtime.stage.test_gradient_sums import backward, parameter, summed
from tests.unit.runtime.thread_ranks import groups


@pytest.fixture
def members(alone: World) -> Iterator[Sequence[Any]]:
    with groups(2) as connected:
        yield connected


def staged(
    members: Sequence[Any], kind: Any, lazy: tuple[str, ...], *shapes: int, **options: Any
) -> tuple[list[list[nn.Parameter]], list[Any], list[ModelGpu]]:
    """Replicas as those of `replicas`, with sums that go through a staging."""
    parameters = [[parameter(*[1.0] * n) for n in shapes] for _ in members]
    gpus = [ModelGpu(lazy) for _ in members]
    sums = [
        kind("s1", own, group, (0, 1), Names(0, 0, 2, 20.0), waiter(20.0), staging=Staging(gpu), **options)
        for own, group, gpu in zip(parameters, members, gpus, strict=True)
    ]
    return parameters, sums, gpus


COPYING = (("outgoing",), ("incoming",), ("outgoing", "incoming"), ())
"""The streams that do nothing before they have to; here the CPU computes at once."""


@pytest.mark.parametrize("kind", [GradientSum, WideGradientSum])
@pytest.mark.parametrize("lazy", COPYING)
def test_sums_through_a_staging_are_those_without(members: Sequence[Any], kind: Any, lazy: tuple[str, ...]) -> None:
    """Three parameters: both ranks have a gradient for the first, one for the second, none for the third."""
    options = {"dtype": torch.float32} if kind is WideGradientSum else {}
    parameters, sums, gpus = staged(members, kind, lazy, 2, 1, 1, **options)
    for update in (1.0, 2.0):
        backward((parameters[0][0], update), (parameters[0][1], 3.0))
        backward((parameters[1][0], update))
        for of_rank in sums:
            of_rank.collect()
        summed(*sums)
        for both, first, none in parameters:
            assert torch.equal(both.grad, torch.full((2,), 2 * update))  # type: ignore[arg-type]
            assert torch.equal(first.grad, torch.tensor([3.0]))  # type: ignore[arg-type]
            assert none.grad is None
        for of_rank in sums:
            of_rank.clear()
    assert all(gpu.blocked["MainThread"] == 0 for gpu in gpus)


def test_what_an_update_counts_is_read_on_the_host(members: Sequence[Any]) -> None:
    """The sum has not come to the GPU when it is read."""
    gpus = [ModelGpu(("outgoing", "incoming"), ("wait", "computing")) for _ in members]
    counts = [Count(1, 8.0, torch.device("cpu")) for _ in members]
    weights = [parameter(1.0), parameter(1.0)]
    sums = [
        GradientSum("s1", [weight], group, (0, 1), Names(0, 0, 2, 20.0), waiter(20.0), None, count, Staging(gpu))
        for weight, group, count, gpu in zip(weights, members, counts, gpus, strict=True)
    ]
    backward((weights[0], 1.0))
    sums[0].collect()
    for of_rank, number in zip(sums, (2.0, 6.0), strict=True):
        of_rank.count((torch.full((1,), number, dtype=torch.float64),))
    summed(*sums)
    assert [count.tensor.item() for count in counts] == [2.0, 6.0]
    assert weights[0].grad == torch.tensor([8.0 / (2.0 + 6.0)])
    assert weights[1].grad is not None, "a rank has one, as the host knows"
