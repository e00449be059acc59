"""A pipeline under --autocast computes what one process computes with torch.autocast around forward and loss."""

import copy
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import chimera_ir
from chimera_runtime.model.model import Layers, ModelFile
from chimera_runtime.pipeline import Pipeline
from chimera_runtime.ranks.world import World
from chimera_runtime.tools.loop.saving import under_autocast
from chimera_runtime.values.boundary import accepted
from tests.unit.runtime.kept import WIDTH, B, N, mini_batch
from tests.unit.runtime.models import model


class Block(nn.Module):
    """Notes in which dtype it has computed, in the order of its forwards; it takes a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, *, shift: float = 0.0) -> torch.Tensor:
        result: torch.Tensor = self.linear(x)
        self.dtypes.append(result.dtype)
        return result.tanh() + shift


def judged(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A product as well, so that its dtype says where the loss runs."""
    return (output @ output.t()).square().mean() + (output - target).square().mean()


def under(of_model: ModelFile) -> Any:
    return under_autocast(of_model, "cpu", torch.bfloat16)


def test_a_stage_and_the_loss_run_under_autocast_and_their_weights_stay_as_they_are() -> None:
    of_model = under(model(lambda *_: Block(), judged))
    module = of_model.build_stage(0, 1)
    output = module(torch.ones(2, WIDTH))
    assert (output.dtype, module.linear.weight.dtype) == (torch.bfloat16, torch.float32)
    assert of_model.loss(torch.ones(2, WIDTH), torch.ones(2, WIDTH)).dtype is torch.float32
    x = torch.sin(torch.arange(2.0 * WIDTH)).reshape(2, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(of_model.loss(x, x), judged(x, x))
    assert not torch.equal(of_model.loss(x, x), judged(x, x))
    assert of_model.autocast is torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


def test_on_a_gpu_it_is_the_autocast_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[Any] = []

    def autocast(*arguments: Any) -> Any:
        entered.append(arguments)
        return nullcontext()

    monkeypatch.setattr(torch, "autocast", autocast)
    of_model = under_autocast(model(lambda *_: Block(), judged), "cuda", torch.bfloat16)
    x = of_model.build_stage(0, 1)(torch.ones(2, WIDTH))
    of_model.loss(x, x)
    assert entered == [("cuda", torch.bfloat16)] * 2


def test_a_module_is_otherwise_the_same() -> None:
    module = under(model(lambda *_: Block())).build_stage(0, 1)
    assert isinstance(module, Block)
    assert (type(module).__name__, type(module).__qualname__, type(module).__module__) == ("Block", "Block", __name__)
    assert [name for name, _ in module.named_parameters()] == ["linear.weight", "linear.bias"]
    assert accepted(module, ["shift", "other"]) == ("shift",)
    assert inspect.signature(module.forward) == inspect.signature(Block().forward)


def test_a_copy_of_a_module_runs_with_its_own_weights_under_autocast_too() -> None:
    module = under(model(lambda *_: Block())).build_stage(0, 1)
    twin = copy.deepcopy(module)
    nn.init.zeros_(twin.linear.weight)
    nn.init.zeros_(twin.linear.bias)
    assert twin(torch.ones(2, WIDTH)).abs().max() == 0
    assert twin.dtypes[-1] is torch.bfloat16


def compiled(*_: int) -> Any:
    return torch.compile(Block(), backend="eager")


def with_a_forward_of_its_own(*_: int) -> Block:
    module = Block()
    module.forward = Block.forward.__get__(module)  # type: ignore[method-assign]
    return module


@pytest.mark.parametrize("build", [compiled, with_a_forward_of_its_own])
def test_what_has_a_forward_in_another_place_runs_under_autocast(build: Callable[..., Any]) -> None:
    module = under(model(build)).build_stage(0, 1)
    assert module(torch.ones(2, WIDTH)).dtype is torch.bfloat16


def test_layers_run_each_under_autocast() -> None:
    layered = replace(model(), build_stage=Layers([Block, Block]), reference=Block)
    of_model = under(layered)
    assert [make()(torch.ones(2, WIDTH)).dtype for make in of_model.build_stage.layers] == [torch.bfloat16] * 2
    assert of_model.reference()(torch.ones(2, WIDTH)).dtype is torch.bfloat16
    assert of_model.build_stage.ranges(2) == [range(1), range(1, 2)]


def test_what_is_no_module_is_left_to_whoever_looks_at_it() -> None:
    assert under(model(lambda *_: 3)).build_stage(0, 1) == 3  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_losses_and_messages_are_those_of_one_process(alone: World, tmp_path: Path, recompute: bool) -> None:
    """Two stages; where they recompute, the second forward runs within the backward, and all the same under it."""
    options = chimera_ir.Options(recompute=recompute)
    chimera_ir.compile("interleaved", options=options, P=1, v=2, N=N).write(tmp_path / "out")
    of_model = under(model(lambda *_: Block(), judged))
    x, y = (tensor.float() for tensor in mini_batch(0))
    with Pipeline(tmp_path / "out", of_model.build_stage, of_model.loss, (x[:B], y[:B])) as pipe:
        (boundary,) = pipe._context.probed.boundaries
        assert boundary.dtypes == (torch.bfloat16,)
        stages: list[Any] = [copy.deepcopy(module) for module in pipe.stages.values()]
        outcome = pipe.step((x, y))
        assert outcome is not None
        held_out = pipe.evaluate([(x, y)])
        gradients = [parameter.grad for parameter in pipe.parameters()]
        seen = [dtype for module in pipe.stages.values() for dtype in module.dtypes]  # type: ignore[union-attr]
    assert {*seen} == {torch.bfloat16}

    losses = []
    for micro in range(N):
        with torch.autocast("cpu", torch.bfloat16):
            value = x[micro * B : (micro + 1) * B]
            for stage in stages:
                value = Block.forward(stage, value)
            losses.append(judged(value, y[micro * B : (micro + 1) * B]))
        (losses[-1] / N).backward()
    assert outcome.loss == pytest.approx(sum(loss.item() for loss in losses) / N, rel=1e-6)
    assert held_out == pytest.approx(outcome.loss, rel=1e-6)
    expected = [parameter.grad for stage in stages for parameter in stage.parameters()]
    for mine, theirs in zip(gradients, expected, strict=True):
        assert mine is not None
        assert mine.dtype is torch.float32
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)
