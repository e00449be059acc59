"""A stage that several stages feed, and that feeds several: what each of these takes, and gets back."""

import pytest
import torch
from torch import nn

from chimera_runtime.errors import BadModel
from chimera_runtime.program.absence import Absence
from chimera_runtime.program.job import Feed
from chimera_runtime.stage.stage import Stage
from chimera_runtime.stage.stage_output import SendToSeveral
from chimera_runtime.values.boundary import FeedingBoundary, joined_boundary
from tests.unit.runtime.staged import ONE, ROWS, WIDTH, stage
from tests.unit.runtime.thread_ranks import job


class Adding(nn.Module):
    """Multiplies what it gets by 2 and by 3, and adds them up."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, waves: torch.Tensor) -> torch.Tensor:
        return self.scale * (2 * x + 3 * waves)


def full(value: float) -> torch.Tensor:
    return torch.full((ROWS, WIDTH), value)


def made(*, backs: bool = True) -> Stage:
    """Stage 2, which stages 0 and 1 feed, and which feeds stages 3 and 4; stage 0 has a backward if it ``backs``."""
    feeds = [FeedingBoundary(0, "", ONE, backs), FeedingBoundary(1, "waves", ONE, True)]
    return stage(Adding(), 2, joined_boundary(feeds), SendToSeveral(2, ONE, readers=(3, 4)))


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


def test_readers_take_parts_of_what_several_micro_batches_have_made() -> None:
    one, (first, second) = made(), (torch.randn(2, 2 * ROWS, WIDTH, generator=torch.Generator().manual_seed(0)))
    one.forward((0, 1), (first, second))
    whole = 2 * first + 3 * second
    assert [torch.equal(one.outputs(m, 3)[0], whole[m * ROWS : (m + 1) * ROWS]) for m in (1, 0)] == [True, True]
    assert torch.equal(one.outputs((0, 1), 4)[0], whole)
    one.backward((0, 1), (first, second))
    assert all(torch.equal(one.input_gradients(m, 0)[0], 2 * (first + second)[m * ROWS :][:ROWS]) for m in (0, 1))
    assert torch.equal(one.input_gradients((0, 1), 1)[0], 3 * (first + second))
    assert not one._made
    assert not one._taken


def test_a_part_of_outputs_that_were_written_is_an_error() -> None:
    one = made()
    one.forward((0, 1), (full(1.0).repeat(2, 1), full(10.0).repeat(2, 1)))
    one.outputs(0, 3)[0].add_(1.0)
    with pytest.raises(BadModel, match="stage 2"):
        one.outputs(1, 3)


def test_gradients_go_back_to_the_stages_that_have_a_backward_alone() -> None:
    one = made(backs=False)
    one.forward(0, (full(1.0), full(10.0)))
    one.backward(0, (full(1.0), full(2.0)))
    assert torch.equal(one.input_gradients(0)[0], full(9.0))
    assert {reader for _, _, reader in one._made} == {3, 4}, "of the outputs, which nobody has taken"


def test_a_reader_that_writes_the_outputs_is_an_error_before_the_next_one_reads_them() -> None:
    one = made()
    one.forward(0, (full(1.0), full(10.0)))
    one.outputs(0, 3)[0].add_(1.0)
    with pytest.raises(BadModel, match="stage 2"):
        one.outputs(0, 4)


class AddingSome(Adding):
    def forward(self, x: torch.Tensor | None, waves: torch.Tensor | None) -> torch.Tensor:
        given = [factor * value for factor, value in ((2, x), (3, waves)) if value is not None]
        return self.scale * sum(given, full(1.0))


@pytest.mark.parametrize("recomputed", [set(), {0, 1, 2}])
def test_of_a_micro_batch_without_a_feeding_stage_its_argument_is_none_and_no_gradient_goes_there(
    recomputed: set[int],
) -> None:
    feeds = [FeedingBoundary(0, "", ONE, True), FeedingBoundary(1, "waves", ONE, True)]
    graph = job(
        stages=5,
        micro_batches=3,
        placement=((0,) * 5,),
        feeds=(Feed(0, 2), Feed(1, 2), Feed(2, 3), Feed(2, 4)),
        named=tuple((f"g{number}", number, number + 1) for number in range(5)),
        absent=(("g0", ((1, 3),)), ("g1", ((2, 3),)), ("g4", ((1, 2),))),
    )
    output = SendToSeveral(2, ONE, readers=(3, 4))
    one = stage(AddingSome(), 2, joined_boundary(feeds), output, recomputed=recomputed, absence=Absence(graph))
    for micro, inputs, expected in ((0, (full(1.0), full(10.0)), 33.0), (1, (full(10.0),), 31.0), (2, (), 1.0)):
        one.forward(micro, inputs)
        for reader in (3, 4) if micro != 1 else (3,):
            assert torch.equal(one.outputs(micro, reader)[0], full(expected))
    one.backward(0, (full(1.0), full(2.0)))
    assert [one.input_gradients(0, feeding)[0][0, 0] for feeding in (0, 1)] == [6, 9]
    one.backward(1, (full(1.0),))
    assert torch.equal(one.input_gradients(1, 1)[0], full(3.0))
    assert one.input_gradients(1, 0) == ()
    assert not one._made
