"""A stage that several stages feed and that feeds several, also where some of these lack a micro-batch."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from chimera_runtime.errors import BadModel
from chimera_runtime.stage.stage import Stage
from chimera_runtime.stage.stage_output import SendOutput, SendToSeveral
from chimera_runtime.values.boundary import Boundary, FeedingBoundary, Gap, joined_boundary
from tests.unit.runtime.staged import ONE, ROWS, WIDTH, stage

FEEDS = [FeedingBoundary(0, "", ONE, True), FeedingBoundary(1, "waves", ONE, True)]


class Adding(nn.Module):
    """Multiplies what it gets by 2 and by 3, and adds them up."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor | None, waves: torch.Tensor | None = None) -> torch.Tensor:
        return self.scale * sum(factor * value for factor, value in ((2, x), (3, waves)) if value is not None)


def before(*lacking: int, feeds: Sequence[FeedingBoundary] = FEEDS) -> Boundary | None:
    return joined_boundary(feeds, lacking)


def full(value: float) -> torch.Tensor:
    return torch.full((ROWS, WIDTH), value)


def made(*gaps: tuple[int, set[int]]) -> Stage:
    """Stage 2, which stages 0 and 1 feed, and which feeds stages 3 and 4; the gaps are by micro-batch."""
    of_micros = {micro: Gap(before(*lacking), frozenset(lacking)) for micro, lacking in gaps}
    return stage(Adding(), 2, before(), SendToSeveral(2, ONE, readers=(3, 4)), gaps=of_micros)


def test_every_reader_takes_the_outputs_and_gets_its_own_gradients_back() -> None:
    one = made()
    one.forward(0, (full(1.0), full(10.0)))
    for reader in (3, 4):
        (output,) = one.outputs(0, reader)
        assert torch.equal(output, full(32.0))
    one.backward(0, (full(1.0), full(2.0)))
    for feeding, expected in ((0, 6.0), (1, 9.0)):
        (gradient,) = one.input_gradients(0, feeding)
        assert torch.equal(gradient, full(expected))
    assert not one._made
    assert one.module.scale.grad == pytest.approx(3 * 32 * ROWS * WIDTH)


def test_of_several_micro_batches_each_reader_takes_all() -> None:
    one = made()
    one.forward((0, 1), (full(1.0).repeat(2, 1), full(10.0).repeat(2, 1)))
    assert [one.outputs((0, 1), reader)[0].shape for reader in (3, 4)] == [(2 * ROWS, WIDTH)] * 2
    one.backward((0, 1), (full(1.0).repeat(2, 1), full(2.0).repeat(2, 1)))
    assert torch.equal(one.input_gradients((0, 1), 1)[0], full(9.0).repeat(2, 1))


def test_a_reader_that_writes_the_outputs_is_an_error_before_the_next_one_reads_them() -> None:
    one = made()
    one.forward(0, (full(1.0), full(10.0)))
    one.outputs(0, 3)[0].add_(1.0)
    with pytest.raises(BadModel, match="stage 2"):
        one.outputs(0, 4)


def test_what_a_group_does_not_have_is_none_and_waits_for_nobody() -> None:
    one = made((1, {1, 4}), (2, {0, 1}))
    one.forward(1, (full(1.0),))
    assert torch.equal(one.outputs(1, 3)[0], full(2.0))
    one.backward(1, (full(1.0),))
    assert torch.equal(one.input_gradients(1, 0)[0], full(2.0))
    assert not one._made, "nothing is kept for stages that do not have the micro-batch"
    one.forward(0, (full(1.0), full(10.0)))
    assert torch.equal(one.outputs(0, 4)[0], full(32.0))


def test_a_single_feed_that_lacks_a_micro_batch_gets_nothing_back() -> None:
    feeds = [FeedingBoundary(0, "", ONE, True)]
    gap = Gap(before(0, feeds=feeds), frozenset({0}))

    class Own(Adding):
        def forward(self, x: torch.Tensor | None, waves: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(full(1.0) if x is None else x)

    one = stage(Own(), 1, before(feeds=feeds), SendOutput(1, ONE), gaps={1: gap})
    for micro, received in ((0, (full(5.0),)), (1, ())):
        one.forward(micro, received)
        assert torch.equal(one.outputs(micro)[0], full(2.0 if micro else 10.0))
        one.backward(micro, (full(1.0),))
    assert torch.equal(one.input_gradients(0)[0], full(2.0))
    assert not one._made


def test_an_output_without_its_trained_inputs_ends_the_gradients_that_come_back() -> None:
    """A frozen stage behind a trained one, which lacks a micro-batch: the next stage sends gradients all the same."""
    feeds = [FeedingBoundary(0, "", ONE, True)]
    gap = Gap(before(0, feeds=feeds), frozenset({0}))

    class Frozen(nn.Module):
        def forward(self, x: torch.Tensor | None) -> torch.Tensor:
            return full(1.0) if x is None else 2 * x

    one = stage(Frozen(), 1, before(feeds=feeds), SendOutput(1, ONE, gaps=True), gaps={1: gap})
    one.forward(1, ())
    assert torch.equal(one.outputs(1)[0], full(1.0))
    one.backward(1, (full(1.0),))
    assert not one._made
