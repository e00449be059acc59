"""Stages on the meta device: nothing runs before weights are loaded, and then they are what other stages are."""

from pathlib import Path

import pytest
import torch
from torch import nn

from chimera_runtime.errors import BadCheckpoint, Misuse
from chimera_runtime.pipeline import Pipeline
from chimera_runtime.ranks.world import World
from chimera_runtime.values.mesh_tensors import give_memory, is_unfilled
from tests.unit.runtime.kept import Loop, compiled, mini_batch, pipeline, stage

CPU = torch.device("cpu")


def without_memory(number: int, stages: int) -> nn.Module:
    with torch.device("meta"):
        return stage(number, stages)


def test_what_has_two_names_stays_one_parameter_and_keeps_what_was_said_of_it() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    real = nn.Parameter(torch.ones(2), requires_grad=False)
    module[0].bias = real
    module[1].weight = module[0].weight
    weight = module[0].weight
    weight.decays = False
    give_memory(module, CPU, "model.py: stage 0")
    assert module[1].weight is module[0].weight is weight
    assert isinstance(weight, nn.Parameter)
    assert (weight.device, weight.requires_grad, weight.decays) == (CPU, True, False)
    assert module[0].bias is real
    assert float(real.sum()) == 2, "what had a value keeps it"
    assert (is_unfilled(weight), is_unfilled(real)) == (True, False)


def test_a_buffer_that_no_file_has_is_refused() -> None:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("angles", torch.arange(4.0), persistent=False)

    with torch.device("meta"):
        module = Rotary()
    with pytest.raises(Misuse, match=r"model.py: stage 1 has the buffer angles on the meta device, which no file of"):
        give_memory(module, CPU, "model.py: stage 1")


def fails_to_run(pipe: Pipeline, folder: Path) -> None:
    asked = (
        lambda: pipe.step(mini_batch(0)),
        lambda: pipe.evaluate([mini_batch(0)]),
        lambda: next(iter(pipe.predict([mini_batch(0)]))),
        lambda: pipe.export_weights(folder / "none.pt"),
    )
    for call in asked:
        with pytest.raises(Misuse, match=r"were built on the meta device and have no values: load a file"):
            call()
    assert not (folder / "none.pt").exists()


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_file_of_weights_fills_them(alone: World, one_worker: Path, tmp_path: Path, suffix: str) -> None:
    with pipeline(one_worker) as whole, pipeline(one_worker, without_memory) as pipe:
        fails_to_run(pipe, tmp_path)
        whole.export_weights(tmp_path / f"model.{suffix}")
        assert pipe.load_weights(tmp_path / f"model.{suffix}") == []
        mine, theirs = pipe.step(mini_batch(0)), whole.step(mini_batch(0))
        assert mine is not None
        assert theirs is not None
        assert mine.loss == theirs.loss
        for parameter, other in zip(pipe.parameters(), whole.parameters(), strict=True):
            assert torch.equal(parameter.grad, other.grad)


def test_a_file_without_buffers_is_not_enough(alone: World, one_worker: Path, tmp_path: Path) -> None:
    with pipeline(one_worker) as whole, pipeline(one_worker, without_memory) as pipe:
        torch.save({name: p.detach() for name, p in whole.named_parameters()}, tmp_path / "model.pt")
        pipe.load_weights(tmp_path / "model.pt")
        with pytest.raises(Misuse, match=r"stages.0.1.running_mean and 5 more of this rank were built on the meta"):
            pipe.step(mini_batch(0))
        torch.save({}, tmp_path / "empty.pt")
        with pytest.raises(BadCheckpoint, match="it has no parameter"):
            pipe.load_weights(tmp_path / "empty.pt")


def test_a_run_resumes_into_them_as_if_they_had_been_trained(alone: World, one_worker: Path, tmp_path: Path) -> None:
    loop = Loop(one_worker, tmp_path / "saved")
    loop.train(3)
    loop.checkpoints.save()
    loop.checkpoints.wait()
    after = loop.train(5)
    resumed = Loop(one_worker, tmp_path / "saved", without_memory)
    assert resumed.checkpoints.resume() is not None
    assert resumed.train(5) == after
    resumed.close()
    loop.close()


def test_the_end_of_a_tie_that_has_no_value_is_filled_with_the_other(alone: World, tmp_path: Path) -> None:
    directory = compiled(tmp_path / "out", 2, 0, 1)
    tied = [[(0, "0.weight"), (1, "0.weight")]]
    with pipeline(directory, tied=tied) as whole, pipeline(directory, without_memory, tied=tied) as pipe:
        whole.export_weights(tmp_path / "model.pt")
        pipe.load_weights(tmp_path / "model.pt")
        mine, theirs = pipe.step(mini_batch(0)), whole.step(mini_batch(0))
        assert mine is not None
        assert theirs is not None
        assert mine.loss == theirs.loss
