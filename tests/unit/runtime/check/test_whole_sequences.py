"""Stages on slices of sequences beside the same stages on whole sequences."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from chimera_runtime.check.reference import Reference
from chimera_runtime.check.side_by_side import compare_slices as compare
from chimera_runtime.errors import CheckFailed
from tests.unit.runtime.carrying import WIDTH, Joining, Listing, Recurring
from tests.unit.runtime.models import CPU, model

SLICES, LENGTH = 3, 6


class Acausal(Listing):
    def attend(self, x: torch.Tensor, start: int, carry: Any) -> tuple[torch.Tensor, Any]:
        return x + x.mean(1, keepdim=True), super().attend(x, start, carry)[1]


class Forgetting(Joining):
    def attend(self, x: torch.Tensor, start: int, carry: Any) -> tuple[torch.Tensor, Any]:
        y, (keys, values) = super().attend(x, start, carry)
        return y, (keys[:, -1:], values[:, -1:])


class Detaching(Recurring):
    def attend(self, x: torch.Tensor, start: int, carry: Any) -> tuple[torch.Tensor, Any]:
        y, left = super().attend(x, start, carry)
        return y, tuple(tensor.detach() for tensor in left)


class Restarting(nn.Module):
    """Counts positions from 0 in each slice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.arange(x.size(1))[:, None]


def sliced(*kinds: Callable[[], nn.Module], counted: bool = True) -> Reference:
    def loss(output: torch.Tensor, target: torch.Tensor) -> Any:
        total = (output - target).square().sum()
        return (total, output.size(1)) if counted else total / output.numel()

    def items() -> list[tuple[torch.Tensor, torch.Tensor]]:
        x = torch.randn(2, 2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return [(item, 2 * item) for item in x.flatten(0, 1)]

    def build(stage: int, _stages: int) -> nn.Module:
        return kinds[stage]().double()

    return Reference(model(build, loss, items), len(kinds), 2, 2, SLICES, 1, 0, CPU, slices=SLICES)


@pytest.mark.parametrize("counted", [False, True])
def test_causal_stages_agree_with_themselves(counted: bool) -> None:
    agreement = compare(sliced(Listing, Joining, Recurring, counted=counted))
    assert max(agreement.loss, agreement.gradients) < agreement.bound == 1e-12
    assert f"{agreement}".startswith("3 slices: loss off from that of whole sequences by ")


@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        ((Listing, Acausal, Listing), "slice 0 of the outputs of stage 1 differs by .* stage 1 is not causal"),
        ((Listing, Forgetting, Listing), "slice 1 of the outputs of stage 1 differs by .* carry of stage 1 lacks"),
        ((Restarting, Listing), "slice 1 of the outputs of stage 0 differs by .* does not count positions from start"),
        ((Listing, Acausal), "the loss differs by "),
        ((Joining, Detaching), "outputs are those of whole sequences, and the gradients of stage [01] differ by "),
    ],
)
def test_a_stage_that_cannot_run_in_slices_is_named(kinds: tuple[Callable[[], nn.Module], ...], said: str) -> None:
    with pytest.raises(CheckFailed, match=said):
        compare(sliced(*kinds))
