"""Forwards alone: micro-batches of any size, groups of them, endings, modes and versions."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from chimera_runtime.data.evaluation_batches import EvaluationBatch
from chimera_runtime.errors import BadModel, Misuse
from chimera_runtime.evaluate import evaluation
from chimera_runtime.evaluate.evaluation import Evaluation, LossTotal, OutputStore, _CurrentRound, evaluating
from chimera_runtime.lane import Lane
from chimera_runtime.program.rank_facts import EvaluationFacts, Route
from chimera_runtime.ranks.world import World
from chimera_runtime.stage.weight_versions import Versions, Weights, masters
from chimera_runtime.start import assemble
from chimera_runtime.values.boundary import Boundary
from chimera_runtime.values.nested import ONE_TENSOR
from tests.unit.runtime.models import Layer, facts, item, loss, model, setting
from tests.unit.runtime.thread_ranks import alone_job, worlds

DOUBLE = torch.float64


def rows_of(value: torch.Tensor) -> list[float]:
    return [float(number) for number in value.flatten()]


def batch(items: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = zip(*(item(number) for number in range(items)), strict=True)
    return torch.stack(inputs), torch.stack(targets)


# What becomes of what a stage returns.


def test_a_micro_batch_counts_by_its_items() -> None:
    losses = LossTotal(lambda output, target: (output - target).mean())
    losses(0, 3, torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3))
    losses(1, 1, torch.tensor([10.0]), torch.zeros(1))
    assert (losses.total.item(), losses.count, losses.items) == (16.0, 4, 4)


def test_sums_and_counts_are_added_as_they_are() -> None:
    losses = LossTotal(lambda output, target: ((output - target).sum(), target.count_nonzero()))
    for micro, target in enumerate(([0.0, 1.0], [2.0, 3.0], [0.0, 0.0])):
        losses(micro, 2, torch.tensor([3.0, 3.0]), torch.tensor(target))
    assert (losses.total.item(), losses.count) == (12.0, 3.0)


def test_outputs_are_kept_in_memory_of_their_own() -> None:
    slot, computed = torch.zeros(4), torch.ones(4)
    store = OutputStore()
    store(1, 2, {"x": (slot[2:], computed)}, None)
    store(0, 2, [slot[:2]], None)
    slot.fill_(7.0)
    computed.fill_(7.0)
    outputs = store.take()
    assert outputs[1]["x"][0].tolist() == outputs[0][0].tolist() == [0.0, 0.0]
    assert outputs[1]["x"][1].tolist() == [1.0] * 4
    assert store.take() == {}


@torch.no_grad()
def test_what_is_handed_on_is_as_in_training_but_for_its_items() -> None:
    current = _CurrentRound([Boundary(ONE_TENSOR, ((4, 5),), (DOUBLE,), (True,), (True,))], whole=2)
    current.round = EvaluationBatch((2, 1, 2), lambda _micro: (None, None, {}))
    assert current.sent(0, 0, torch.zeros(4, 5, dtype=DOUBLE))[0].shape == (4, 5)
    assert current.sent(0, 1, torch.zeros(2, 5, dtype=DOUBLE))[0].shape == (2, 5)
    with pytest.raises(BadModel, match=r"stage 0 returned for micro-batch 2 of an evaluation: tensor 0 is \(4, 4\)"):
        current.sent(0, 2, torch.zeros(4, 4, dtype=DOUBLE))


# A rank that holds both stages.


def pairs(lane: Lane) -> None:
    first, last = lane.stage(0), lane.stage(1)
    for micros in ((0, 1), (2, 3)):
        first.forward(micros, lane.input(micros))
        last.forward(micros, first.outputs(micros), lane.target(micros))


def singly(lane: Lane) -> None:
    first, last = lane.stage(0), lane.stage(1)
    for micro in range(4):
        first.forward(micro, lane.input(micro))
        last.forward(micro, first.outputs(micro), lane.target(micro))


@contextmanager
def evaluation_of(
    alone: World, last: Any, script: Any = singly, size: int = 3, micro_batches: int = 4, **changed: Any
) -> Iterator[tuple[Evaluation, dict[int, nn.Module]]]:
    """An evaluation by a script on a rank that holds both stages, and its modules."""
    with worlds(alone, alone_job(micro_batches=micro_batches, evaluated=micro_batches)) as (world,):
        made, built = setting(world, options=f"--micro-batch-size {size}", **changed)
        made.script.evaluate = script  # type: ignore[method-assign]
        yield Evaluation(made, assemble.assemble(made, built, made.model.steps), size, {1: last}), built


def evaluate(of_kind: Evaluation, items: int) -> None:
    for of in of_kind.evaluation_batches(batch(items)):
        of_kind.run(of)


@pytest.mark.parametrize("script", [pairs, singly])
@pytest.mark.parametrize("items", [12, 11, 7, 1])
def test_it_is_the_loss_and_the_outputs_of_one_process(alone: World, script: Any, items: int) -> None:
    losses, store = LossTotal(model().judge), OutputStore()
    for last in (losses, store):
        with evaluation_of(alone, last, script) as (of_kind, built):
            evaluate(of_kind, items)
    inputs, targets = batch(items)
    with torch.no_grad():
        expected = built[1](built[0](inputs))
    assert losses.count == items
    assert losses.total.item() / items == pytest.approx(float(loss(expected, targets)), rel=1e-13)
    outputs = store.take()
    assert rows_of(torch.cat([outputs[micro] for micro in sorted(outputs)])) == pytest.approx(rows_of(expected))


def test_no_message_is_about_what_is_not_there_and_a_short_one_is_short(
    alone: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two ranks, which receives both micro-batches into a slot for two, and then one."""
    posted: list[tuple[str, Any]] = []

    class Peer:
        def irecv(self, buffers: Any, _tag: int) -> Any:
            posted.append(("recv", tuple(buffers[0].shape)))
            for buffer in buffers:
                buffer.fill_(1.0)
            return SimpleNamespace(wait=lambda: None, tensors=buffers)

    def script(lane: Lane) -> None:
        link, stage = lane.incoming(0, 1, worker=0), lane.stage(1)
        for micros in ((0, 1), 2):
            link.irecv(micros, into=0)
            link.wait(micros)
            stage.forward(micros, link.take(micros), lane.target(micros))

    known = facts(0, 1, evaluation=EvaluationFacts({1: ((2,),)}, (Route(0, 1, 0),), ()))
    monkeypatch.setattr(World, "peer", lambda *_: Peer())
    losses = LossTotal(loss)
    with evaluation_of(alone, losses, script, micro_batches=3, of=known) as (of_kind, _):
        for items in (9, 8, 4, 2):
            evaluate(of_kind, items)
    assert posted == [
        *(("recv", shape) for shape in ((6, 2), (3, 2))),
        *(("recv", shape) for shape in ((6, 2), (2, 2))),
        ("recv", (4, 2)),
        ("recv", (2, 2)),
    ]
    assert losses.count == 9 + 8 + 4 + 2


class Transposed(Layer):
    """Hands on the items in dimension 1."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.t()) if self.last else super().forward(x).t()


def test_a_smaller_batch_is_refused_where_rows_are_not_items(alone: World) -> None:
    with evaluation_of(alone, LossTotal(loss), of_model=model(Transposed)) as (of_kind, _):
        evaluate(of_kind, 12)
        with pytest.raises(Misuse, match=r"smaller, 2 in place of 3, and what stage 0 hands on has no rows"):
            list(of_kind.evaluation_batches(batch(11)))


# What is as before.


def test_modes_are_as_before_whatever_happens() -> None:
    module = nn.Sequential(nn.Dropout(), nn.Sequential(nn.BatchNorm1d(3).eval(), nn.Linear(3, 3)))
    before = [each.training for each in module.modules()]
    with evaluating([module]):
        assert not any(each.training for each in module.modules())
        assert not torch.is_grad_enabled()
    assert [each.training for each in module.modules()] == before
    with pytest.raises(KeyError), evaluating([module.eval()]):
        raise KeyError
    assert not any(each.training for each in module.modules())
    assert torch.is_grad_enabled()


def test_a_module_that_minds_its_mode_is_told_of_both_changes() -> None:
    told: list[bool] = []

    class Minding(nn.Linear):
        def train(self, mode: bool = True) -> "Minding":
            told.append(mode)
            return super().train(mode)

    with evaluating([Minding(1, 1)]):
        pass
    assert told == [False, True]


def test_weights_show_their_newest_version() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    stepped = masters([parameter])
    versions = Versions([parameter], stepped, torch.optim.SGD(stepped, lr=1.0))
    versions.stash(0)
    parameter.grad = torch.ones(2)
    versions.step()
    versions.select(0)
    assert parameter.tolist() == [0.0, 0.0]
    versions.select_newest()
    assert parameter.tolist() == [-1.0, -1.0]
    Weights(None).select_newest()


def test_nothing_stays_of_a_stage_but_what_is_handed_on(alone: World) -> None:
    with evaluation_of(alone, LossTotal(loss), size=1) as (of_kind, built):
        evaluate(of_kind, 4)
        stages = [of_kind._lane.stage(number) for number in range(2)]
    assert all(isinstance(stage, evaluation.EvaluationStage) and not stage._outputs for stage in stages)
    assert all(p.grad is None for module in built.values() for p in module.parameters())
