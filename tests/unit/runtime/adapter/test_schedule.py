"""`CompiledSchedule` on one rank: modes, dimensions and forms of batches, and what is refused."""

import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate

import chimera_ir
from chimera_runtime import CompiledSchedule, Misuse, stages_of, whole
from chimera_runtime.ranks.world import World
from tests.graphs import Edge, plan
from tests.unit.runtime.one_rank import WIDTH, B, N, batch

SLICED = """scheme sliced
pipe down { stages s in 0..1 on s
  micros m in 0..1
  slices q in 0..2
  F(m, s, q) @ q
  B(m, s, q) @ 3 - q }
"""


def layer(*more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *more).double()


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().sum()


X, Y = batch(1)


@pytest.fixture
def make(opened: Callable[..., Any], interleaved: Path) -> Callable[..., CompiledSchedule]:
    return lambda stages=None, loss_fn=loss, **options: opened(
        CompiledSchedule, interleaved, stages or {0: layer(), 1: layer()}, loss_fn, **options
    )


def test_stages_of_a_rank_are_those_that_it_makes(interleaved: Path) -> None:
    assert stages_of(interleaved, 0) == (0, 1)
    assert stages_of(interleaved, 1) == ()


def test_an_evaluation_leaves_modules_in_the_mode_of_their_owner(make: Callable[..., CompiledSchedule]) -> None:
    norm = nn.BatchNorm1d(WIDTH)
    schedule = make({0: layer(norm), 1: layer()})
    schedule.eval(X)
    assert norm.num_batches_tracked == N, "as in torch, in training mode"
    norm.eval()
    schedule.eval(X)
    assert norm.num_batches_tracked == N
    schedule.step(X, target=X)
    assert not norm.training


def test_batches_are_cut_and_merged_along_other_dimensions(make: Callable[..., CompiledSchedule]) -> None:
    class Turned(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.T

    stages = {0: Turned(), 1: nn.Sequential(layer(), Turned())}
    options = {"args_chunk_spec": (TensorChunkSpec(1),), "output_merge_spec": TensorChunkSpec(1)}
    schedule = make(stages, lambda output, target: loss(output.T, target), **options)
    output = schedule.step(X.T.contiguous(), target=Y)
    torch.testing.assert_close(output.T, stages[1][0](X), rtol=1e-12, atol=1e-14)


def test_stages_that_begin_equal_are_remarked_upon(
    make: Callable[..., CompiledSchedule], capsys: pytest.CaptureFixture[str]
) -> None:
    first = layer()
    schedule = make({0: first, 1: deepcopy(first)})
    schedule.step(X, target=Y)
    said = capsys.readouterr().err
    assert "0.weight of stage 0 and module.0.weight of stage 1 begin with equal values" in said
    assert schedule.pipeline.remarks == (said.rstrip(),)


def test_without_a_loss_a_step_runs_forwards_alone(make: Callable[..., CompiledSchedule]) -> None:
    first, last = layer(), layer()
    schedule = make({0: first, 1: last}, None)
    torch.testing.assert_close(schedule.step(X), last(first(X)), rtol=1e-12, atol=1e-14)
    assert all(p.grad is None for p in first.parameters())


def test_modules_may_be_replaced_and_filled_before_the_first_step(make: Callable[..., CompiledSchedule]) -> None:
    with torch.device("meta"):
        stages = [PipelineStage(layer(), number, 2, torch.device("cpu")) for number in range(2)]
    schedule = make(stages)
    with pytest.raises(Misuse, match=r"there is no pipeline before the first step\(\)"):
        _ = schedule.pipeline
    for stage in stages:
        stage.submod = stage.submod.to_empty(device="cpu")
        for parameter in stage.submod.parameters():
            nn.init.ones_(parameter)
    schedule.step(X, target=Y)
    names = [name for name, _ in schedule.pipeline.named_parameters()]
    assert names == [f"stages.{s}.0.{name}" for s in range(2) for name in ("weight", "bias")]
    assert all(p.grad is not None for stage in stages for p in stage.submod.parameters())


CALLS = {
    "holds stage 0: give": {"target": Y},
    "holds the last stage: give": {"args": (X,)},
    "either positional inputs, which is cut into micro-batches, or arg_mbs": {"args": (X,), "arg_mbs": [(X,)] * N},
    "length of kwarg_mbs is 1, and must be the number of micro-batches, 4": {
        "kwarg_mbs": [{}],
        "args": (X,),
        "target": Y,
    },
    "of which there must be 4: it gives 3": {"args": (X[:3],), "target": Y},
}


@pytest.mark.parametrize("message", CALLS)
def test_a_batch_that_does_not_fit_is_refused(make: Callable[..., CompiledSchedule], message: str) -> None:
    call = dict(CALLS[message])
    with pytest.raises(Misuse, match=message):
        make().step(*call.pop("args", ()), **call)


class Bordered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = layer(), list[Any]()

    def forward(self, x: torch.Tensor, mask: torch.Tensor, borders: Any) -> torch.Tensor:
        self.seen.append((mask, borders))
        return self.linear(x) * mask


@pytest.mark.parametrize("rows", [1, N, B * N, B * N + 1])
def test_a_keyword_argument_that_is_whole_goes_to_every_micro_batch(
    make: Callable[..., CompiledSchedule], rows: int
) -> None:
    stages, borders = {0: Bordered(), 1: Bordered()}, {"at": [torch.arange(rows), torch.tensor(1)]}
    schedule = make(stages)
    for run in (schedule.step, schedule.eval):
        output = run(X, target=Y, mask=X, **{whole("borders"): borders})
        expected = stages[1].linear(stages[0].linear(X) * X) * X
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-14)
    assert {len(seen["at"][0]) for stage in stages.values() for _, seen in stage.seen} == {rows}
    assert "passed" in schedule.check(X, target=Y, mask=X, **{whole("borders"): borders})


@pytest.mark.full
@pytest.mark.parametrize("borders", [torch.zeros(B * N + 1), torch.zeros(N), torch.zeros(1, B * N), torch.tensor(1.0)])
def test_a_tensor_that_has_not_the_rows_of_the_batch_is_refused(
    make: Callable[..., CompiledSchedule], borders: torch.Tensor
) -> None:
    """Torch would cut nine in 3, 2, 2 and 2. A chunk spec of the script's own decides instead."""
    schedule, stages = make({0: Bordered(), 1: Bordered()}), {0: Bordered(), 1: Bordered()}
    words = rf"borders\['at'\]\[1\] is a tensor of shape {re.escape(str(tuple(borders.shape)))}, .*whole\("
    for trained in (False, True):
        if trained:
            schedule.step(X, target=Y, mask=X, borders={"at": [X, X]})
        with pytest.raises(Misuse, match=words):
            schedule.step(X, target=Y, mask=X, borders={"at": [X, borders]})
    spec = {"mask": TensorChunkSpec(0), "borders": _Replicate}
    make(stages, kwargs_chunk_spec=spec).step(X, target=Y, mask=X, borders=borders)
    assert stages[1].seen[0][1] is borders


def test_a_list_that_has_the_rows_of_the_batch_by_chance_gets_a_remark(make: Callable[..., CompiledSchedule]) -> None:
    rising = torch.arange(B * N)
    for borders, remarked in ((rising, True), (rising.flip(0), False), (rising.double(), False)):
        schedule = make({0: Bordered(), 1: Bordered()})
        schedule.step(X, target=Y, mask=X, borders={"at": borders})
        remarks = [remark for remark in schedule.pipeline.remarks if remark.startswith("borders has whole numbers")]
        assert len(remarks) == remarked


def test_a_step_without_gradients_is_refused(make: Callable[..., CompiledSchedule]) -> None:
    with torch.no_grad(), pytest.raises(Misuse, match=r"call eval\(\) under torch.no_grad"):
        make().step(X, target=Y)


def test_stages_that_do_not_fit_are_refused(make: Callable[..., CompiledSchedule]) -> None:
    with pytest.raises(Misuse, match="that rank 0 holds in this schedule are 0, 1, and those given to it: 1"):
        make({1: layer()})
    with pytest.raises(Misuse, match=r"num_stages of a PipelineStage is 3, and of interleaved\(.*\) it is 2"):
        make(PipelineStage(layer(), 0, 3, torch.device("cpu")))
    own = SimpleNamespace(num_stages=2, stage_index=0, dw_builder=print, group=None, device=None)
    with pytest.raises(Misuse, match="leave dw_builder out"):
        make([own])


def test_schedules_that_do_not_fit_are_refused(alone: World, tmp_path: Path) -> None:
    chimera_ir.compile("dapple", D=2, N=2).write(tmp_path / "two")
    with pytest.raises(Misuse, match=r"workers of dapple\(.*\): 2; ranks of the process group: 1"):
        CompiledSchedule(tmp_path / "two", {0: layer()})
    chimera_ir.compile("pipedream_2bw", D=2, N=2).write(tmp_path / "stream")
    with pytest.raises(Misuse, match="has no flush, so its stages step inside the schedule"):
        CompiledSchedule(tmp_path / "stream", {0: layer()})
    (tmp_path / "sliced.chim").write_text(SLICED)
    chimera_ir.compile(tmp_path / "sliced.chim").write(tmp_path / "sliced")
    with pytest.raises(Misuse, match="has slices, whose stages return a carry next to their output"):
        CompiledSchedule(tmp_path / "sliced", {0: layer()})
    (tmp_path / "graph.sir").write_text(plan({"text": 1, "head": 1, "other": 1}, [Edge(0, 1), Edge(0, 2)], 2))
    chimera_ir.compile(tmp_path / "graph.sir").write(tmp_path / "graph")
    with pytest.raises(Misuse, match="are no chain, and in torch's interface each stage feeds the next one"):
        CompiledSchedule(tmp_path / "graph", {0: layer()})


def test_a_check_compares_copies_of_the_modules_in_one_process(make: Callable[..., CompiledSchedule]) -> None:
    """In the mode and with the weights that they have; before the first step as well."""
    norm = nn.BatchNorm1d(WIDTH).double().eval()
    schedule = make({0: layer(norm), 1: layer()}, lambda output, target, gain: loss(output, target) * gain)
    for _ in range(2):
        assert schedule.check(X, target=Y, loss_kwargs={"gain": 2.0}).startswith("check: passed")
        schedule.step(X, target=Y, loss_kwargs={"gain": 2.0})
    assert not norm.training


def test_a_check_that_cannot_be_made_says_why(make: Callable[..., CompiledSchedule]) -> None:
    class Local(nn.Linear):
        pass

    with pytest.raises(Misuse, match=r"the module of stage 1 cannot be copied to rank 0.*so that they can be pickled"):
        make({0: layer(), 1: layer(Local(WIDTH, WIDTH))}).check(X, target=Y)
    with pytest.raises(Misuse, match="give the schedule its loss_fn"):
        make(loss_fn=None).check(X, target=Y)
