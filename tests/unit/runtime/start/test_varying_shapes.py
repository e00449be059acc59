"""Updates of several shapes, on one rank that holds both stages; on real ranks they are trained end to end."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from chimera_runtime.data.feed import Feed
from chimera_runtime.errors import BadModel, Misuse
from chimera_runtime.program.numbering import Numbering, Round
from chimera_runtime.ranks.messages import Names
from chimera_runtime.ranks.world import World
from chimera_runtime.stage.gradient_sums import GradientSum
from chimera_runtime.stage.saved_tensors import Footprint, SavedTensors, footprint_of_slices, memory_of
from chimera_runtime.stage.stage import Stage
from chimera_runtime.stage.stage_output import SendOutput
from chimera_runtime.stage.weight_versions import Unstepped
from chimera_runtime.start import assemble, probe
from chimera_runtime.start.assemble import RankContext
from chimera_runtime.start.stage_probe import StageProbe
from chimera_runtime.start.varying_shapes import ShapeList, VaryingShapes
from chimera_runtime.values.boundary import Boundary, Traits, slice_arguments
from chimera_runtime.values.nested import ONE_TENSOR, mapped
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


def varying(world: World, script: Any = None) -> tuple[VaryingShapes, Feed, dict[int, Stage]]:
    """A stage that hands on its input, with receive buffers as if it came from elsewhere."""
    used = model(lambda *_: Counting())
    feed = Feed(world.job, B)
    x, y = batch(LONGEST)
    feed.put(0, lambda _: (x[:B], y[:B]))
    built = assemble.modules(world, used, 0)
    findings = probe.probe_stages(world, used, feed, built, seed=0, measures=False)
    number = world.job.micro_batches
    known = replace(facts(0, 1, inputs=(1, 2), gradients=(1,)), inputs=((0, number),), targets=((0, number),))
    setting = RankContext(world, script, known, used, findings, 0, feed)
    stages = assemble.assemble(setting, built, None)
    program: Any = SimpleNamespace(job=world.job, ranks=(known,), script=lambda _worker: script)
    one = SimpleNamespace(job=replace(world.job, micro_batches=1), ranks=(replace(known, inputs=((0, 1),)),))
    program.programs = {number: program, 1: one}
    program.updates = lambda _worker: {number: script.update}
    return VaryingShapes(world, feed, built, stages, findings, program), feed, stages


@pytest.fixture(name="made")
def _made(alone: World) -> Any:
    with worlds(alone, alone_job(stages=2)) as (world,):
        yield varying(world)


def shapes(stages: dict[int, Stage], micro: int = 0) -> list[Any]:
    """Those of the messages about a micro-batch, or two from it on, into each slot."""
    (inputs,), (gradients,) = stages[1].inputs, stages[0].gradients
    together = [micro, (micro, micro + 1)]
    return [[tuple(t.shape) for t in inputs.vacant(slot, micros)] for slot, micros in enumerate(together)] + [
        [tuple(t.shape) for t in gradients.vacant(0, micro)]
    ]


def fit(lengths: VaryingShapes, feed: Feed, update: int, numbers: Sequence[int] = (2,)) -> ShapeList:
    """Agrees on the shapes of an update of some rounds, and fits the stages to the first."""
    starts = [sum(numbers[:place]) for place in range(len(numbers))]
    rounds = [Round(number, start) for number, start in zip(numbers, starts, strict=True)]
    agreed = lengths.agree(feed, update, [rounds])
    lengths.begin(agreed)
    lengths.begin_round(rounds[0])
    return agreed


def test_buffers_follow_the_shapes_and_each_shape_is_found_out_once(made: Any) -> None:
    lengths, feed, stages = made
    (slots,) = stages[1].inputs
    memory = slots[1][0].data_ptr()
    FORWARDS.clear()
    before = [buffer.clone() for buffer in stages[0].module.buffers()]
    for length, found in ((LONGEST, 0), (3, 1), (3, 1), (LONGEST, 1), (2, 2), (3, 2)):
        feed.put(7, batch(length))
        state = torch.get_rng_state()
        fit(lengths, feed, 7)
        assert shapes(stages) == [[(B, length)], [(2 * B, length)], [(B, length)]]
        assert len(FORWARDS) == found
        assert torch.equal(state, torch.get_rng_state())
    assert stages[1].inputs[0] is slots, "links hold the list"
    assert slots[1][0].data_ptr() == memory
    assert all(map(torch.equal, before, stages[0].module.buffers()))


@pytest.mark.parametrize("form", ["list", "function"])
def test_micro_batches_have_their_own_shapes_in_messages(made: Any, form: str) -> None:
    lengths, feed, stages = made
    calls: list[int] = []

    def load(micro: int) -> Any:
        calls.append(micro)
        return pairs[micro]

    for sizes, found in (([(B, 3), (1, 4)], 2), ([(1, 4), (B, 3)], 0), ([(B, 2), (B, 2)], 1), ([(1, 2), (B, 2)], 1)):
        pairs = [(torch.ones(size), torch.ones(size)) for size in sizes]
        FORWARDS.clear()
        calls.clear()
        if form == "list":
            feed.put_micro_batches(7, pairs)
        else:
            feed.put(7, load)
        fit(lengths, feed, 7)
        assert len(FORWARDS) == found
        for micro, size in enumerate(sizes):
            assert [each[0] for each in shapes(stages, micro)[::2]] == [size, size]
            assert feed.input(7, micro).shape == size
        assert calls == ([] if form == "list" else [0, 1]), "a function is called once for each micro-batch"


def test_the_last_micro_batch_of_one_piece_may_have_fewer_items(made: Any) -> None:
    lengths, feed, stages = made
    x = rows(3)[: 2 * B - 1]
    feed.put(7, (x, x))
    agreed = fit(lengths, feed, 7)
    assert [key.sizes for key in agreed.keys] == [(1 + B, 1 + B, 4), (B, B, 4)]
    assert [shapes(stages, micro)[0] for micro in (0, 1)] == [[(B, 3)], [(B - 1, 3)]]
    assert torch.equal(torch.cat([feed.input(7, 0), feed.target(7, 1)]), x)
    with pytest.raises(
        Misuse, match=r"dimension 0 of the input is 2, of shape \(2, 3\), and a step takes B\*N = 2\*2 = 4"
    ):
        feed.put(7, (x[:B], x[:B]))


def test_each_round_has_its_own_shapes(alone: World) -> None:
    with worlds(alone, alone_job(stages=2, numbers=((1, ""),))) as (world,):
        lengths, feed, stages = varying(world)
        pairs = [(torch.ones(B, length), torch.ones(B, length)) for length in (3, 4, 2)]
        feed.put_micro_batches(7, pairs)
        agreed = fit(lengths, feed, 7, (2, 1))
        assert [key.sizes[-1] - 1 for key in agreed.keys] == [3, 4, 2]
        assert [shapes(stages, micro)[0] for micro in (0, 1)] == [[(B, 3)], [(B, 4)]]
        lengths.begin_round(Round(1, 2))
        assert shapes(stages)[0] == [(B, 2)]


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (rows(LONGEST + 1), r"a tensor of micro-batch 0 is \(2, 6\), and the example's is \(2, 5\): make"),
        (rows(2, 2), r"a tensor of micro-batch 0 is \(2, 2, 2\), and the example's is \(2, 5\)"),
        ([rows(2)] * 2, "micro-batch 0 has other tensors than the example: 2 and not 1"),
    ],
)
@pytest.mark.parametrize("is_in_one_piece", [True, False])
def test_what_is_larger_than_the_example_is_refused(made: Any, inputs: Any, words: str, is_in_one_piece: bool) -> None:
    lengths, feed, _ = made
    if is_in_one_piece:
        feed.put(1, (inputs, rows()))
    else:
        feed.put(1, lambda _: (mapped(inputs, lambda tensor: tensor[:B]), rows()[:B]))
    with pytest.raises(Misuse, match=words):
        lengths.agree(feed, 1)


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        ((torch.ones(0, 3), torch.ones(0)), "micro-batch 1 has no items: give fewer"),
        ((torch.ones(1, 3), torch.ones(2)), r"micro-batch 1: .* the input is 1, .*others of its tensors have 2 items"),
        ((torch.ones(1, 3), torch.ones(3)), r"micro-batch 1: .*, and was B = 2 in the example"),
    ],
)
def test_items_of_a_micro_batch_that_do_not_fit_are_refused(made: Any, pair: Any, words: str) -> None:
    lengths, feed, _ = made
    feed.put_micro_batches(1, [(torch.ones(B, 3), torch.ones(B)), pair])
    with pytest.raises(Misuse, match=words):
        lengths.agree(feed, 1)


def test_micro_batches_of_one_operation_have_one_shape(alone: World) -> None:
    def update(lane: Any) -> None:
        lane.stage(0).forward(0, lane.input(0))
        lane.stage(0).pair(((1, 2), lane.input((1, 2))), lane.stage(1), ((0, 3), ()))

    grouped = alone_job(stages=2, micro_batches=4, grouped=(0,))
    with worlds(alone, grouped) as (world,):
        script: Any = SimpleNamespace(update=update, evaluate=lambda lane: lane.stage(0).forward((0, 1)))
        lengths, feed, _ = varying(world, script)
        for sizes, micros in (((3, 4, 4, 3), ()), ((3, 4, 3, 3), (1, 2)), ((4, 3, 3, 3), (0, 3))):
            feed.put_micro_batches(1, [(torch.ones(B, length), torch.ones(B)) for length in sizes])
            refusal = pytest.raises(Misuse, match="two has micro-batches {} and {} in one".format(*micros or "mn"))
            with refusal if micros else nullcontext():
                lengths.agree(feed, 1)
        load = lambda micro, number: (torch.ones(B, 3 + micro), None, {})[number]  # noqa: E731
        with pytest.raises(Misuse, match="micro-batches 0 and 1 in one operation"):
            lengths.agree_in_copy((B, B, 0, 0), load, is_in_one_piece=False)
        lengths.agree_in_copy((B, 0, 0, 0), load, is_in_one_piece=False)


def test_a_stage_that_hands_on_more_for_less_is_an_error_of_the_model(made: Any) -> None:
    lengths, feed, stages = made
    stages[0].module.grows = True
    feed.put(1, batch(3))
    with pytest.raises(BadModel, match=r"stage 0 returned for shapes .*: a tensor \(2, 27\)"):
        fit(lengths, feed, 1)


def test_without_a_flush_all_updates_are_alike(alone: World) -> None:
    streaming = alone_job(stages=2, period=2, reads=(((0, 2),),) * 2)
    findings: Any = None
    with worlds(alone, streaming) as (world,), pytest.raises(Misuse, match=r"two has no flush: .* leave out varying="):
        VaryingShapes(world, Feed(world.job, B), {}, {}, findings, findings)


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
