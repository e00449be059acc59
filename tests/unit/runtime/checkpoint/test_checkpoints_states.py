"""State other than weights and buffers goes on bitwise, or is refused by name before anything is loaded.

Of modules, optimizers and other objects, and of averages of the weights.
"""

import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import load
from torch.optim.swa_utils import AveragedModel

from chimera_runtime.blame import ModelError
from chimera_runtime.checkpoint.checkpoints import Checkpoints
from chimera_runtime.errors import BadCheckpoint, Misuse
from chimera_runtime.pipeline import Pipeline
from chimera_runtime.ranks.world import World
from tests.unit.runtime.kept import UPDATES, WIDTH, Count, Loop, adam, pipeline


class Scaled(nn.Module):
    """Keeps numbers that torch has in its state_dict: as extra state, by a hook, by an override; and a late buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.largest, self.calls, self.history = 1.0, 0, [torch.zeros(1)]
        self._register_state_dict_hook(lambda module, state, prefix, _: state.update({f"{prefix}calls": module.calls}))
        self._register_load_state_dict_pre_hook(self._take_calls)

    def _take_calls(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        self.calls = state.pop(f"{prefix}calls")

    def get_extra_state(self) -> Any:
        return {"largest": self.largest, "point": Point(self.largest)}

    def set_extra_state(self, state: Any) -> None:
        self.largest = state["largest"]
        assert state["point"] == Point(self.largest)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}half"] = self.linear.weight.detach().half()  # of which its weight is made again
        destination[f"{prefix}history"] = self.history[0]

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *others: Any) -> None:
        super()._load_from_state_dict(state, prefix, *others)
        for name in ("half", "history"):
            others[3].remove(f"{prefix}{name}") if f"{prefix}{name}" in others[3] else None
        with torch.no_grad():
            self.linear.weight.copy_(state[f"{prefix}half"])
        self.history = [state[f"{prefix}history"].clone()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.linear(x))
        if torch.is_grad_enabled():
            self.calls += 1
            self.largest = 0.9 * self.largest + 0.1 * float(y.detach().abs().max())
            self.history[0] += y.detach().mean().float()
        return torch.tanh(y / self.largest + self.calls % 3 + self.history[0])


@dataclass(frozen=True)
class Point:
    x: float


def scaled(_stage: int, _stages: int) -> nn.Module:
    return nn.Sequential(Scaled(), nn.Tanh()).double()


def test_what_modules_have_in_their_state_dict_goes_on_bitwise(alone: World, one_worker: Path, tmp_path: Path) -> None:
    """State comes from get_extra_state, a hook or an override; parameters are those that were saved."""
    loop = Loop(one_worker, tmp_path, scaled)
    loop.train(2)
    loop.checkpoints.save()
    losses = loop.train(UPDATES)
    loop.close()
    again = Loop(one_worker, tmp_path, scaled)
    resumed = again.checkpoints.resume()
    assert resumed is not None
    assert resumed.remarks == ()
    assert again.train(UPDATES) == losses
    again.close()


def test_what_a_module_would_have_taken_is_missed_and_what_it_does_not_take_is_named(
    alone: World, one_worker: Path, tmp_path: Path
) -> None:
    """A buffer that comes late, an entry that nothing takes, and what is there no longer."""

    class Late(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)
            self.mark = True

        def add(self) -> None:
            self.register_buffer("late", torch.ones(1))

    loop = Loop(one_worker, tmp_path / "late", lambda *_: Late().double())
    loop.pipe.stages[0].add()  # type: ignore[operator]
    loop.checkpoints.save()
    loop.close()
    loop = Loop(one_worker, tmp_path / "late", lambda *_: Late().double())
    with pytest.raises(
        BadCheckpoint, match=r"it has the buffer stages.0.late, which this model has not \(yet\): regist"
    ):
        loop.checkpoints.resume()
    loop.close()

    class Marked(nn.Linear):
        def get_extra_state(self) -> Any:
            return 1

    loop = Loop(one_worker, tmp_path / "marked", lambda *_: Marked(WIDTH, WIDTH).double())
    loop.checkpoints.save()
    loop.checkpoints.wait()
    with pytest.raises(BadCheckpoint, match=r'stage 0 does not take what it .*: .* Unexpected key.*: "_extra_state"'):
        loop.checkpoints.resume()
    loop.close()


class Step:
    """A state that cannot be pickled, or that raises an error."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> Any:
        return self._state()

    def load_state_dict(self, state: Any) -> None:
        raise KeyError(state["missing"])


def test_an_object_that_cannot_say_or_take_its_state_is_named(alone: World, one_worker: Path, tmp_path: Path) -> None:
    loop = Loop(one_worker, tmp_path / "one", shared={"lock": Step(threading.Lock)})
    with pytest.raises(Misuse, match=r"shared\['lock'\] cannot be saved: TypeError: cannot pickle"):
        loop.checkpoints.save()
    loop.close()
    loop = Loop(one_worker, tmp_path / "two", of_copy={"step": Step(dict)})
    loop.checkpoints.save()
    loop.checkpoints.wait()
    with pytest.raises(ModelError, match=r"load_state_dict\(\) of of_copy\['step'\]: .*KeyError: 'missing'"):
        loop.checkpoints.resume()
    loop.close()
    loop = Loop(one_worker, tmp_path / "three", of_rank={"step": Step(lambda: {}["gone"])})
    with pytest.raises(ModelError, match=r"state_dict\(\) of of_rank\['step'\]: .*KeyError: 'gone'"):
        loop.checkpoints.save()
    loop.close()


def test_types_are_those_that_were_saved_and_what_is_given_no_place_is_remarked(
    alone: World, one_worker: Path, tmp_path: Path
) -> None:
    counted = Count()
    counted.numbers = [Counter([3, 3])]  # type: ignore[list-item]
    loop = Loop(one_worker, tmp_path, shared={"count": counted, "more": Count()}, of_rank={"mine": Count()})
    loop.checkpoints.save()
    loop.close()
    taking = Count()
    again = Loop(one_worker, tmp_path, shared={"count": taking})
    resumed = again.checkpoints.resume()
    assert resumed is not None
    assert resumed.remarks == (
        "the checkpoint has of_rank['mine'], shared['more'], and Checkpoints was given no such object",
    )
    assert [*taking.numbers[0].elements()] == [3, 3]  # type: ignore[attr-defined]
    again.close()


def sgd(pipe: Pipeline) -> torch.optim.Optimizer:
    return torch.optim.SGD(pipe.parameters(), lr=0.1)


def some(pipe: Pipeline) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in pipe.parameters() if p.ndim > 1], lr=0.05)


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (
            sgd,
            "stages.0.0.weight was stepped by AdamW and is stepped by SGD here, which gives their state another mean",
        ),
        (some, "it has the optimizer state of stages.0.0.bias, which no optimizer steps here: give one that parameter"),
    ],
)
def test_the_state_of_another_optimizer_is_not_taken_and_nothing_is_loaded(
    alone: World, one_worker: Path, tmp_path: Path, optimizer: Any, words: str
) -> None:
    loop = Loop(one_worker, tmp_path)
    loop.train(1)
    loop.checkpoints.save()
    loop.close()
    again = Loop(one_worker, tmp_path, optimizer=optimizer)
    before = [parameter.detach().clone() for parameter in again.pipe.parameters()]
    with pytest.raises(BadCheckpoint, match=words):
        again.checkpoints.resume()
    assert all(torch.equal(*pair) for pair in zip(before, again.pipe.parameters(), strict=True))
    state = again.pipe.state_dict()
    load(state, checkpoint_id=tmp_path / "update-00000001")
    again.pipe.load_state_dict(state)
    assert again.pipe.updates == 1
    assert all(torch.equal(*pair) for pair in zip(loop.pipe.parameters(), again.pipe.parameters(), strict=True))
    again.close()


def test_what_is_no_optimizer_of_torch_is_refused(alone: World, one_worker: Path, tmp_path: Path) -> None:
    with (
        pipeline(one_worker) as pipe,
        pytest.raises(Misuse, match=r"optimizers= has a Count, .*: of_rank= keeps any obj"),
    ):
        Checkpoints(tmp_path, pipe, Count())  # type: ignore[arg-type]


def test_averages_go_on_with_the_weights(alone: World, one_worker: Path, tmp_path: Path) -> None:
    """Tensors by name, in another dtype, and copies of stages with buffers of their own."""

    class Averaging(Loop):
        def __init__(self) -> None:
            super().__init__(one_worker, tmp_path)
            self.by_name = {name: p.detach().float() for name, p in self.pipe.named_parameters()}
            self.copies = {k: AveragedModel(module, use_buffers=True) for k, module in self.pipe.stages.items()}
            self.checkpoints.close()
            self.checkpoints = Checkpoints(
                tmp_path,
                self.pipe,
                self.optimizer,
                schedulers=self.scheduler,
                averages={"ema": self.by_name, "swa": self.copies},
            )

        def average(self, last: int) -> None:
            while self.pipe.updates < last:
                self.train(self.pipe.updates + 1)
                for name, parameter in self.pipe.named_parameters():
                    self.by_name[name].lerp_(parameter.detach().float(), 0.1)
                for number, module in self.pipe.stages.items():
                    self.copies[number].update_parameters(module)

        def values(self) -> list[torch.Tensor]:
            copies = (tensor for copy in self.copies.values() for tensor in copy.state_dict().values())
            return [*self.by_name.values(), *copies]

    whole = Averaging()
    whole.average(2)
    whole.checkpoints.save()
    whole.average(UPDATES)
    whole.close()
    again = Averaging()
    assert again.checkpoints.resume() is not None
    assert [int(copy.n_averaged) for copy in again.copies.values()] == [2, 2]
    again.average(UPDATES)
    assert all(torch.equal(*pair) for pair in zip(again.values(), whole.values(), strict=True))
    again.close()
    with pipeline(one_worker) as pipe:
        late = Checkpoints(tmp_path, pipe, adam(pipe), averages={"late": {"stages.0.0.bias": torch.ones(WIDTH)}})
        with pytest.raises(BadCheckpoint, match=r"it has no average 'late' of stages.0.0.bias: resume without it, and"):
            late.resume()
        late.close()
