"""Updates of several shapes, on one rank that holds both stages; on real ranks they are trained end to end."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from chimera_runtime.data.feed import Feed
from chimera_runtime.errors import BadModel, Misuse
from chimera_runtime.program.job import Feed as Edge
from chimera_runtime.program.numbering import Numbering
from chimera_runtime.ranks.messages import Names
from chimera_runtime.ranks.world import World
from chimera_runtime.stage.gradient_sums import GradientSum
from chimera_runtime.stage.saved_tensors import Footprint, SavedTensors, footprint_of_slices, memory_of
from chimera_runtime.stage.stage import Stage
from chimera_runtime.stage.stage_output import SendOutput
from chimera_runtime.stage.weight_versions import Unstepped
from chimera_runtime.start import assemble, probe
from chimera_runtime.start.assemble import RankContext
from chimera_runtime.start.probe import VaryingShapes
from chimera_runtime.start.stage_probe import StageProbe
from chimera_runtime.values.boundary import Boundary, Traits, slice_arguments
from chimera_runtime.values.nested import ONE_TENSOR
from tests.unit.runtime.carrying import CARRYING, WIDTH
from tests.unit.runtime.models import facts, model
from tests.unit.runtime.thread_ranks import alone_job, worlds

B, LONGEST = 2, 5

FORWARDS: list[int] = []
"""The sizes of the forwards of `Counting`."""


class Counting(nn.Module):
    """Notes its forwards, and has statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.grows = nn.BatchNorm1d(1), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        FORWARDS.append(len(x))
        x = self.norm(x[:, None, :])[:, 0]
        return torch.cat([x] * 9, 1) if self.grows else x


def batch(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return rows(length), rows(length)


def rows(*sizes: int) -> torch.Tensor:
    """The items of two micro-batches."""
    return torch.rand(2 * B, *sizes, generator=torch.Generator().manual_seed(0))


@pytest.fixture(name="made")
def _made(alone: World) -> Any:
    """A stage that hands on its input, with receive buffers as if it came from elsewhere."""
    with worlds(alone, alone_job(stages=2)) as (world,):
        used = model(lambda *_: Counting())
        feed = Feed(world.job, B)
        x, y = batch(LONGEST)
        feed.put(0, lambda _: (x[:B], y[:B]))
        built = assemble.modules(world, used, 0)
        findings = probe.probe_stages(world, used, feed, built, seed=0, measures=False)
        script: Any = None
        known = facts(0, 1, inputs=(1, 2), gradients=(1,))
        setting = RankContext(world, script, known, used, findings, 0, feed)
        stages = assemble.assemble(setting, built, None)
        yield VaryingShapes(world, feed, built, stages, findings), feed, stages


def shapes(stages: dict[int, Stage]) -> list[Any]:
    return [[tuple(t.shape) for slot in slots for t in slot] for (slots,) in (stages[1].inputs, stages[0].gradients)]


def test_buffers_follow_the_shapes_and_each_shape_is_found_out_once(made: Any) -> None:
    lengths, feed, stages = made
    (slots,) = stages[1].inputs
    memory = slots[1][0].data_ptr()
    FORWARDS.clear()
    before = [buffer.clone() for buffer in stages[0].module.buffers()]
    for length, found in ((LONGEST, 0), (3, 1), (3, 1), (LONGEST, 1), (2, 2), (3, 2)):
        feed.put(7, batch(length))
        lengths.check(7)
        state = torch.get_rng_state()
        lengths.begin(7)
        assert shapes(stages) == [[(B, length), (2 * B, length)], [(B, length)]]
        assert len(FORWARDS) == found
        assert torch.equal(state, torch.get_rng_state())
    assert stages[1].inputs[0] is slots, "links hold the list"
    assert slots[1][0].data_ptr() == memory
    assert all(map(torch.equal, before, stages[0].module.buffers()))


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (rows(LONGEST + 1), r"a tensor of a micro-batch is \(2, 6\), and the example's is \(2, 5\): make"),
        (rows(2, 2), r"a tensor of a micro-batch is \(2, 2, 2\), and the example's is \(2, 5\)"),
        ([rows(2)] * 2, "a micro-batch has other tensors than the example: 2 and not 1"),
    ],
)
def test_what_is_larger_than_the_example_is_refused(made: Any, inputs: Any, words: str) -> None:
    lengths, feed, _ = made
    feed.put(1, (inputs, rows()))
    with pytest.raises(Misuse, match=words):
        lengths.check(1)


def test_a_stage_that_hands_on_more_for_less_is_an_error_of_the_model(made: Any) -> None:
    lengths, feed, stages = made
    stages[0].module.grows = True
    feed.put(1, batch(3))
    with pytest.raises(BadModel, match=r"stage 0 returned for shapes .*: a tensor \(2, 27\)"):
        lengths.begin(1)


def test_without_a_flush_all_updates_are_alike(alone: World) -> None:
    streaming = alone_job(stages=2, period=2, reads=(((0, 2),),) * 2)
    findings: Any = None
    with worlds(alone, streaming) as (world,), pytest.raises(Misuse, match=r"two has no flush: .* leave out varying="):
        VaryingShapes(world, Feed(world.job, B), {}, {}, findings)


def test_a_micro_batch_without_an_input_is_refused_and_named(alone: World) -> None:
    graph = alone_job(
        stages=3, named=(("image", 0, 1), ("sound", 1, 2), ("text", 2, 3)), feeds=(Edge(0, 2), Edge(1, 2))
    )
    findings: Any = SimpleNamespace(by_source=True, boundaries={})
    whole = {"image": rows(LONGEST)[:B], "sound": rows(3)[:B]}
    with worlds(alone, graph) as (world,):
        feed = Feed(world.job, B)
        feed.put_micro_batches(0, [(whole, None)] * 2)
        lengths = VaryingShapes(world, feed, {}, {}, findings)
        for micro, update in ((0, 1), (1, 2)):
            lacking = [whole, whole]
            lacking[micro] = {"sound": whole["sound"]}
            feed.put_micro_batches(update, [(inputs, None) for inputs in lacking])
            with pytest.raises(Misuse, match=f"micro-batch {micro} has no input for image, and with varying=True"):
                lengths.check(update)


# Probe of a stage that looks back: its footprints are what is kept of it in training, carries apart.

SLICES, SHAPE = 4, (2, 3, WIDTH)
BOUNDARY = Boundary(ONE_TENSOR, (SHAPE,), (torch.float32,), (True,), (True,))


def footprints(module: nn.Module, slices: int) -> list[Footprint]:
    """Bytes of each slice, as the probe has them."""
    probe = StageProbe(model(), 1, module, BOUNDARY, is_last=False)
    return [
        probed.footprint for probed in probe.slices(lambda _: ((torch.ones(SHAPE),), None, {}), slices, measures=True)
    ]


@pytest.mark.parametrize("kind", CARRYING)
@pytest.mark.parametrize("slices", [1, SLICES])
def test_what_slices_keep_is_what_was_probed(kind: Callable[[], nn.Module], slices: int) -> None:
    module = kind()
    stage = Stage(
        number=1,
        module=module,
        weights=Unstepped(),
        before=BOUNDARY,
        output=SendOutput(1, BOUNDARY),
        gradient_sum=GradientSum("s1", list(module.parameters()), None, (0,), Names(0, 0, 3, 1.0), lambda w: w.wait()),
        traits=Traits((), "", takes=slice_arguments(module)),
        numbering=Numbering(0, 0, slices, slices, slices=slices),
    )
    saved = SavedTensors(module.parameters)
    carries: dict[object, int] = {}
    of_slices = footprints(module, slices)
    with saved.counting():
        for n in range(slices):
            stage.forward(n, (torch.ones(SHAPE),))
            stage.outputs(n)
            carries |= memory_of([carry.tensors for carry in stage.carries._left.values()])
            kept = sum((saved.sizes | carries).values())
            assert kept == sum(f.activations + f.carry for f in of_slices[: n + 1])
            counted = footprint_of_slices(of_slices)
            assert kept <= (n + 1) * (counted.activations + counted.carry)
