"""Checkpoints in loops of one's own on four ranks, a case each; what must hold is asserted on every rank.

torchrun --nproc-per-node=4 checkpoints.py CASE FOLDER DIRECTORY ..
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from chimera_runtime import BadCheckpoint, Checkpoints, Layers, Misuse, Pipeline
from chimera_runtime.blame import ModelError
from chimera_runtime.optimizer.sharding import ShardedOptimizer

SIZE, WIDTH, UPDATES, AT, LAYERS = 2, 4, 5, 3, 5

Named = list[tuple[str, nn.Parameter]]


class Layer(nn.Module):
    """Has parameters, dropout unless that is 0, and buffers that the forward changes."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.inner, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(dropout)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(torch.tanh(self.norm(self.inner(x))))


def model(layers: int = LAYERS, dropout: float = 0.0) -> Layers:
    return Layers([partial(Layer, dropout)] * layers)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def mini_batch(pipe: Pipeline) -> tuple[torch.Tensor, torch.Tensor]:
    """That of this copy; the items of all copies are the same under every schedule."""
    generator = torch.Generator().manual_seed(pipe.updates)
    x, y = torch.randn(2, pipe.items, WIDTH, generator=generator, dtype=torch.float64)
    mine = slice(pipe.copy * pipe.items // pipe.copies, (pipe.copy + 1) * pipe.items // pipe.copies)
    return x[mine], y[mine]


def adam(named: Named, kind: Any = torch.optim.AdamW) -> torch.optim.Optimizer:
    """Groups with different rates: they are to be restored apart."""
    optimizer: torch.optim.Optimizer = kind(
        [
            {"params": [p for n, p in named if n.endswith("weight") == weights], "lr": 0.05 / (1 + weights)}
            for weights in (True, False)
        ]
    )
    return optimizer


class Loop:
    """A pipeline with AdamW and a schedule of learning rates; where there is no flush, the schedule is left out."""

    optimizer: torch.optim.Optimizer | None

    def __init__(
        self,
        directory: str,
        folder: Path,
        layers: Layers,
        sharded: bool = False,
        layout: str = "pipeline",
        kind: Any = torch.optim.AdamW,
        **options: Any,
    ) -> None:
        example: Any = tuple(torch.randn(2, SIZE, WIDTH, dtype=torch.float64))
        streams = "2bw" in directory
        self.pipe = Pipeline(directory, layers, loss, example, layout=layout, optimizer=adam if streams else None)
        if streams:
            self.optimizer = None
        elif sharded:
            self.optimizer = self.pipe.sharded_optimizer(adam)
        else:
            self.optimizer = adam([*self.pipe.named_parameters()], kind)
        self.schedulers = (
            [] if self.optimizer is None else [torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, UPDATES)]
        )
        optimizers = [] if self.optimizer is None else [self.optimizer]
        self.checkpoints = Checkpoints(folder, self.pipe, optimizers, schedulers=self.schedulers, **options)

    def train(self, last: int, save_at: tuple[int, ...] = ()) -> list[float]:
        """The losses of the updates up to ``last``."""
        outcomes = []
        while self.pipe.updates < last:
            outcomes.append(self.pipe.step(mini_batch(self.pipe)))
            if self.optimizer is not None:
                self.pipe.clip_grad_norm_(1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.schedulers[0].step()
            if self.pipe.updates in save_at:
                self.checkpoints.save()
                outcomes += self.pipe.drain()
        outcomes += self.pipe.drain()
        return [outcome.loss for outcome in outcomes if outcome is not None]

    def close(self) -> None:
        self.checkpoints.close()
        self.pipe.close()
        dist.barrier()


def assert_equal(mine: Pipeline, theirs: Pipeline) -> None:
    for (name, tensor), (_, other) in zip(mine.named_parameters(), theirs.named_parameters(), strict=True):
        assert torch.equal(tensor, other), name
    for stage, module in mine.stages.items():
        for (name, tensor), other in zip(module.named_buffers(), theirs.stages[stage].buffers(), strict=True):
            assert torch.equal(tensor, other), name


def exact(folder: Path, *directories: str) -> None:
    """A run that resumes has bitwise the losses, weights and buffers of one that saved there and went on."""
    for directory in directories:
        saved = folder / Path(directory).name
        whole = Loop(directory, saved, model(dropout=0.2), keep=2)
        assert whole.checkpoints.resume() is None
        expected = whole.train(UPDATES, save_at=(1, 2, AT))
        whole.close()
        assert sorted(path.name for path in saved.glob("update-*")) == ["update-00000002", "update-00000003"]
        again = Loop(directory, saved, model(dropout=0.2))
        resumed = again.checkpoints.resume()
        assert (resumed.update, resumed.items, resumed.remarks) == (AT, AT * again.pipe.items, ())
        assert again.train(UPDATES) == expected[AT:], directory
        assert_equal(again.pipe, whole.pipe)
        again.close()


def elsewhere(folder: Path, *directories: str) -> None:
    """A run goes on under every other schedule, number of stages and of copies: the same but for rounding."""
    first, *others = directories
    whole = Loop(first, folder, model())
    expected = whole.train(UPDATES, save_at=(AT,))
    whole.close()
    for other in others:
        again = Loop(other, folder, model())
        resumed = again.checkpoints.resume()
        assert "buffers are those of the first replica" in resumed.remarks[0]
        for mine, theirs in zip(again.train(UPDATES), expected[AT:], strict=True):
            assert abs(mine - theirs) <= 1e-12 * abs(theirs), (other, mine, theirs)
        again.close()


def kept(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the state that is not one number."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return sum(value.nbytes for value in values if value.numel() > 1)


def sharded(folder: Path, *directories: str) -> None:
    """Replicas that share the state train to the last bit like others, keep a share, and each reads the others'."""
    first, other = directories
    whole = Loop(first, folder / "whole", model())
    expected = whole.train(UPDATES, save_at=(AT,))
    shared = Loop(first, folder / "shared", model(), sharded=True)
    assert isinstance(shared.optimizer, ShardedOptimizer)
    assert whole.optimizer is not None
    assert shared.train(UPDATES, save_at=(AT,)) == expected
    assert_equal(shared.pipe, whole.pipe)
    replicas = len(whole.pipe.job.holders[0])
    assert (replicas, kept(shared.optimizer.of_shards) * replicas) == (2, kept(whole.optimizer))
    whole.close()
    shared.close()
    for directory, source, shards in [
        (first, "whole", True),
        (first, "shared", True),
        (other, "shared", False),
        (other, "shared", True),
    ]:
        again = Loop(directory, folder / "none", model(), sharded=shards)
        assert again.checkpoints.resume(folder / source) is not None
        for mine, theirs in zip(again.train(UPDATES), expected[AT:], strict=True):
            assert abs(mine - theirs) <= (0 if directory == first else 1e-12 * abs(theirs)), (directory, source, shards)
        if directory == first:
            assert_equal(again.pipe, whole.pipe)
        again.close()
    small = Loop(first, folder / "none", model(layers=4), sharded=True)
    refused(lambda: small.checkpoints.resume(folder / "shared"), "layers.4.inner.bias, which this model has not")


def refused(call: Callable[[], Any], *words: str, kinds: tuple[type[Exception], ...] = (BadCheckpoint,)) -> None:
    """On every rank, with one message, and at once."""
    begun = time.monotonic()
    with pytest.raises(kinds) as caught:
        call()
    assert time.monotonic() < begun + 30
    assert all(word in str(caught.value) for word in words), str(caught.value)


def mistakes(folder: Path, directory: str) -> None:
    """What cannot be saved or resumed is one message on all ranks, and what was saved before is as it was."""
    good = Loop(directory, folder / "good", model())
    good.train(2, save_at=(1, 2))
    newest = folder / "good" / "update-00000002"
    second = Checkpoints(folder / "good", good.pipe, good.optimizer or ())
    good.checkpoints.wait()
    refused(second.save, "another job saves its checkpoints")
    good.close()

    small = Loop(directory, folder / "good", model(layers=4))
    refused(small.checkpoints.resume, "layers.4.inner.bias, which this model has not")
    large = Loop(directory, folder / "good", model(layers=6))
    refused(large.checkpoints.resume, "has no parameter layers.", "(but layers.", "beside it there is update-00000001")

    again = Loop(directory, folder / "good", model())
    assert again.checkpoints.resume(folder / "good" / "update-00000001") is not None
    refused(again.checkpoints.save, "update-00000002, which would count as newer")

    shard = sorted(newest.glob("*.distcp"))[-1]
    content = shard.read_bytes()
    dist.barrier()
    for spoiled, words in ((content[:-9] + b"?" + content[-8:], "not as it was written"), (None, "No such file")):
        if dist.get_rank() == 0:
            shard.unlink() if spoiled is None else shard.write_bytes(spoiled)
        dist.barrier()
        refused(again.checkpoints.resume, shard.name, words, "update-00000001")

    if dist.get_rank() == 0:
        (folder / "file").write_text("")
    dist.barrier()
    refused(Checkpoints(folder / "file", again.pipe, again.optimizer or ()).save, "cannot be saved", "exists")


class Statistics(nn.Module):
    """Batch normalisation, and numbers in its state_dict that differ from replica to replica."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.largest = nn.BatchNorm1d(WIDTH).double(), 0.0

    def get_extra_state(self) -> float:
        return self.largest

    def set_extra_state(self, state: float) -> None:
        self.largest = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.largest = max(self.largest, float(x.detach().abs().max()))
        return torch.tanh(self.norm(x))


def replicas(folder: Path, *directories: str) -> None:
    """Each worker of each copy has what its replica saved, in whatever layout; elsewhere all have the first one's."""
    two, four = directories
    layers = Layers([Statistics] * 4)

    def held(loop: Loop) -> dict[tuple[int, int, str], Any]:
        pipe = loop.pipe
        values = {
            (pipe.copy, pipe.worker, name): value.tolist() if isinstance(value, torch.Tensor) else value
            for module in pipe.stages.values()
            for name, value in module.state_dict().items()
            if "running" in name or "extra" in name
        }
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, values)
        return {key: value for of_rank in everyone for key, value in of_rank.items()}

    first = Loop(two, folder, layers)
    first.train(2, save_at=(2,))
    expected = held(first)
    first.close()
    again = Loop(two, folder, layers, layout="replica")
    resumed = again.checkpoints.resume()
    assert resumed.remarks == ()
    assert held(again) == expected
    again.close()
    elsewhere = Loop(four, folder, layers)
    resumed = elsewhere.checkpoints.resume()
    assert resumed
    assert "buffers are those of the first replica" in resumed.remarks[0]
    for (_, _, name), value in held(elsewhere).items():
        assert value == expected[0, min(w for c, w, n in expected if c == 0 and n == name), name]
    elsewhere.close()


class Part:
    """A state that only one rank has, or cannot say or take."""

    def __init__(self, is_wrong: Callable[[int], bool] = lambda _: False, state: Any = None) -> None:
        self.is_wrong, self.state = is_wrong, state

    def state_dict(self) -> dict[str, Any]:
        if self.is_wrong(dist.get_rank()):
            raise RuntimeError("no state to be had")
        return {"value": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.is_wrong(dist.get_rank()):
            raise RuntimeError("no state to be taken")
        self.state = state["value"]


def one_rank(folder: Path, directory: str) -> None:
    """What is wrong on one rank alone is refused at once on all ranks, with what that one says."""
    last = dist.get_rank() == 3
    good = Loop(directory, folder / "good", model(), shared={"part": Part(state=1)}, of_rank={"own": Part(state=last)})
    good.train(1, save_at=(1,))
    good.close()
    fails = Part(lambda rank: rank == 3)
    bare = Loop(directory, folder / "none", model())
    for given, words in (
        ({"shared": {"part": fails}}, ("state_dict() of shared['part']", "RuntimeError: no state to be had")),
        ({"of_copy": {"part": fails}}, ("state_dict() of of_copy['part']", "RuntimeError: no state to be had")),
        ({"shared": {"part": Part(state=last)}}, ("shared['part'] is not the same on rank 0 and on rank 3", "value")),
        ({"shared": {"part": Part(state=lambda: 1)}}, ("shared['part'] cannot be saved",)),
        ({"shared": {"part": Part()} if last else {}}, ("shared= has 'part' on rank 3, and not on rank 0",)),
    ):
        checkpoints = Checkpoints(folder / "none", bare.pipe, bare.optimizer or (), **given)
        refused(checkpoints.save, *words, kinds=(BadCheckpoint, Misuse, ModelError))
        checkpoints.close()

    for given, words in (
        ({"shared": {"part": fails}}, ("load_state_dict() of shared['part']", "RuntimeError: no state to be taken")),
        ({"shared": {"more": Part()} if last else {}}, ("it has no state of more",)),
        ({"of_rank": {"own": fails}}, ("load_state_dict() of of_rank['own']",)),
    ):
        checkpoints = Checkpoints(folder / "good", bare.pipe, bare.optimizer or (), schedulers=bare.schedulers, **given)
        refused(checkpoints.resume, *words, kinds=(BadCheckpoint, ModelError))
        checkpoints.close()
    bare.close()

    loop = Loop(directory, folder / "good", model(), of_rank={"own": Part()})
    resumed = loop.checkpoints.resume()
    assert "shared['part']" in resumed.remarks[0]
    assert loop.checkpoints._content._objects.of_rank["own"].state_dict() == {"value": last}
    state = loop.pipe.state_dict()
    if last:
        del state["model"][next(iter(state["model"]))]
    refused(lambda: loop.pipe.load_state_dict(state), "the state has no layers.")
    refused(lambda: loop.pipe.load_weights(folder / ("none.pt" if last else "model.pt")), "No such file")
    loop.close()

    layers = [partial(Layer, 0.0)] * (LAYERS + 1)
    uneven = Loop(directory, folder / "good", Layers(layers, split=[0, 2, 3, 4]))
    refused(uneven.checkpoints.resume, f"has no parameter layers.{LAYERS}.")
    uneven.close()
    other = Loop(directory, folder / "good", model(), kind=torch.optim.SGD if last else torch.optim.AdamW)
    refused(other.checkpoints.resume, "was stepped by AdamW and is stepped by SGD here")
    other.close()


def files(folder: Path, *directories: str) -> None:
    """One file with the model's own names, which every other schedule reads."""
    chimera, dapple = (Loop(directory, folder / "none", model()) for directory in directories)
    chimera.train(2)
    for name in ("model.pt", "model.safetensors"):
        chimera.pipe.export_weights(folder / name)
        assert dapple.pipe.load_weights(folder / name) == []
        held = dict(chimera.pipe.named_parameters())
        for parameter, tensor in dapple.pipe.named_parameters():
            assert parameter not in held or torch.equal(tensor, held[parameter])
        with torch.no_grad():
            for tensor in dapple.pipe.parameters():
                tensor.zero_()
    alone = nn.ModuleDict({"layers": nn.ModuleList(Layer(0.0) for _ in range(LAYERS))})
    alone.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    refused(lambda: dapple.pipe.load_weights(folder / "none.pt"), "none.pt", "No such file")
    small = Loop(directories[1], folder / "none", model(layers=4))
    assert "layers.4.inner.bias" in small.pipe.load_weights(folder / "model.pt")
    large = Loop(directories[1], folder / "none", model(layers=6))
    refused(lambda: large.pipe.load_weights(folder / "model.pt"), "no parameter layers.", "the nearest is")
    if dist.get_rank() == 0:
        (folder / "wrong.pt").write_text("what")
        (folder / "wrong.safetensors").write_text("what")
    dist.barrier()
    refused(lambda: large.pipe.load_weights(folder / "wrong.pt"), "no state dict")
    refused(lambda: large.pipe.load_weights(folder / "wrong.safetensors"), "no file of safetensors")
    refused(lambda: large.pipe.export_weights(folder / "absent" / "model.pt"), "cannot be written")


def main() -> None:
    dist.init_process_group("gloo")
    case, folder, *directories = sys.argv[1:]
    cases = (exact, elsewhere, sharded, mistakes, files, replicas, one_rank)
    {function.__name__: function for function in cases}[case](Path(folder), *directories)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
