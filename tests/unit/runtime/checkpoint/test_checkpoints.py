"""`Checkpoints` on one rank: what is saved is what there was then, errors name it, and old formats are read."""

import json
import resource
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import load, save
from torch.optim.swa_utils import AveragedModel

from chimera_runtime.blame import ModelError
from chimera_runtime.checkpoint import checkpoints as saving
from chimera_runtime.checkpoint import storage
from chimera_runtime.checkpoint.checkpoints import Checkpoints
from chimera_runtime.checkpoint.storage import Lock, Writer
from chimera_runtime.errors import BadCheckpoint, Misuse, PeerLost
from chimera_runtime.pipeline import Pipeline
from chimera_runtime.ranks.world import World
from tests.unit.runtime.format_1 import lean
from tests.unit.runtime.kept import UPDATES, WIDTH, B, Count, Loop, N, adam, compiled, mini_batch, pipeline

FORMAT_1 = Path(__file__).resolve().parents[3] / "data" / "checkpoint-format-1"


Opened = Callable[..., Any]


def saved(*arguments: Any, updates: int = 0, **options: Any) -> Loop:
    """A loop that has saved at its end."""
    loop = Loop(*arguments, **options)
    loop.train(updates)
    loop.checkpoints.save()
    loop.close()
    return loop


def rated(pipe: Pipeline) -> torch.optim.Optimizer:
    """The learning rate is a tensor, which the scheduler changes in place."""
    return torch.optim.Adam(pipe.parameters(), lr=torch.tensor(0.05), foreach=False)


@pytest.mark.full
@pytest.mark.parametrize("optimizer", [adam, rated])
@pytest.mark.parametrize("at", [0, 2])
def test_training_goes_on_bitwise_from_what_there_was_when_it_was_saved(
    opened: Opened, one_worker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: Any, at: int
) -> None:
    """Training goes on while nothing is written yet: nothing of that is in the checkpoint. Also before any update."""
    may_write = threading.Event()
    original = Writer.write_data

    def later(writer: Writer, plan: Any, planner: Any) -> Any:
        assert may_write.wait(30)
        return original(writer, plan, planner)

    monkeypatch.setattr(Writer, "write_data", later)
    loop = Loop(one_worker, tmp_path, optimizer=optimizer)
    losses = loop.train(at)
    loop.checkpoints.save()
    losses += loop.train(UPDATES)
    may_write.set()
    loop.close()

    again = opened(Loop, one_worker, tmp_path, optimizer=optimizer)
    resumed = again.resume()
    assert (resumed.path.name, resumed.update, resumed.items) == (f"update-{at:08d}", at, at * B * N)
    assert again.count.numbers == [at]
    assert again.train(UPDATES) == losses[at:]
    for (name, mine), theirs in zip(again.pipe.named_parameters(), loop.pipe.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    assert again.checkpoints.items == UPDATES * B * N


def test_items_are_added_up_over_jobs_whose_mini_batches_differ(
    opened: Opened, one_worker: Path, tmp_path: Path
) -> None:
    saved(one_worker, tmp_path / "saved", updates=3)
    halved = opened(Loop, compiled(tmp_path / "out", N // 2), tmp_path / "saved")
    resumed = halved.resume()
    assert resumed.items == 3 * B * N
    assert resumed.remarks[0].startswith("buffers are those of the first replica of each stage: the checkpoint is of")
    assert halved.pipe.updates == 3
    halved.pipe.items_used += 2 * halved.pipe.items
    assert halved.checkpoints.items == 3 * B * N + 2 * B * N // 2


def test_a_save_that_failed_is_named_by_its_update_and_the_next_one_may_succeed(
    alone: World, one_worker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_path: Path, _text: str) -> None:
        raise OSError(28, "No space left on device")

    loop = Loop(one_worker, tmp_path)
    loop.train(1)
    with monkeypatch.context() as patch:
        patch.setattr(storage, "_write", full)
        loop.checkpoints.save()
        loop.train(2)
        with pytest.raises(BadCheckpoint) as refused:
            loop.checkpoints.wait()
    assert str(refused.value) == (
        f"the checkpoint after update 1 in {tmp_path} was not written: rank 0: No space left on device; those before "
        "it are whole"
    )
    assert storage.whole(tmp_path) == []
    loop.checkpoints.save()
    loop.close()
    assert [path.name for path in storage.whole(tmp_path)] == ["update-00000002"]
    Lock(tmp_path).release()


@contextmanager
def files_of_at_most(count: int) -> Iterator[None]:
    """No file of this process can get more bytes, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("limit", [0, 300])
def test_a_disk_that_is_full_leaves_the_checkpoints_before(
    alone: World, one_worker: Path, tmp_path: Path, limit: int
) -> None:
    """Tensors cannot be written, in whole or in part."""
    loop = Loop(one_worker, tmp_path)
    loop.train(1)
    loop.save()
    loop.train(2)
    with files_of_at_most(limit):
        loop.checkpoints.save()
        with pytest.raises(BadCheckpoint, match=r"the checkpoint after update 2 in .* was not written: rank 0: .*"):
            loop.checkpoints.wait()
    assert [path.name for path in storage.whole(tmp_path)] == ["update-00000001"]
    assert (loop.resume().update, loop.pipe.updates) == (1, 1)
    loop.train(3)
    loop.checkpoints.save()
    loop.close()
    assert [path.name for path in storage.whole(tmp_path)] == ["update-00000001", "update-00000003"]


def test_a_save_that_takes_too_long_or_misses_a_rank_is_an_error(
    alone: World, one_worker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(one_worker, tmp_path, timeout=0.01)
    futures: list[Future[None]] = [Future(), Future()]
    futures[1].set_exception(RuntimeError("Connection closed by peer\nat some place"))
    monkeypatch.setattr(saving, "async_save", lambda *_, **__: futures.pop(0))
    loop.checkpoints.save()
    with pytest.raises(BadCheckpoint, match=r"after update 0 in .* is not written after 0.01 s; those before it are"):
        loop.checkpoints.wait()
    loop.checkpoints.save()
    with pytest.raises(PeerLost, match=r"Connection closed by peer$"):
        loop.checkpoints.wait()
    loop.close()


def fused(pipe: Pipeline) -> torch.optim.Optimizer:
    return torch.optim.AdamW(pipe.parameters(), lr=0.0, fused=True)


def sharded(pipe: Pipeline) -> torch.optim.Optimizer:
    return pipe.sharded_optimizer(lambda named: torch.optim.SGD([p for _, p in named], lr=0.0))


@pytest.mark.parametrize("optimizer", [adam, rated, fused, sharded])
def test_a_save_between_a_step_and_that_of_the_optimizer_is_refused_and_can_be_made_up_for(
    alone: World, one_worker: Path, tmp_path: Path, optimizer: Any
) -> None:
    """A resumed run would lack an update. What was stepped with may be there, and what is not finite."""
    loop = Loop(one_worker, tmp_path, optimizer=optimizer)
    loop.train(1)
    loop.pipe.step(mini_batch(1))
    with pytest.raises(Misuse, match="the gradients of update 2 are there and no optimizer has stepped with them"):
        loop.checkpoints.save()
    loop.optimizer.step()
    loop.checkpoints.save()
    loop.optimizer.zero_grad()
    loop.pipe.step(mini_batch(2))
    next(loop.pipe.parameters()).grad.mul_(float("inf"))  # type: ignore[union-attr]
    loop.checkpoints.save()
    loop.close()
    assert [path.name for path in storage.whole(tmp_path)] == ["update-00000002", "update-00000003"]


def test_what_is_no_checkpoint_of_ours_or_of_a_later_format_is_refused(
    alone: World, one_worker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(one_worker, tmp_path / "saved")
    monkeypatch.setattr("chimera_runtime.checkpoint.content.FORMAT", 99)
    loop.save()
    with pytest.raises(
        BadCheckpoint, match=r"update-00000000 has format 99, and this version .* reads the formats 1 and 2"
    ):
        loop.checkpoints.resume()
    save({"tensor": torch.ones(1)}, storage_writer=Writer(tmp_path / "foreign", 4, 1))
    with pytest.raises(BadCheckpoint, match=r"update-00000004 cannot be resumed from: it is not one that a"):
        loop.checkpoints.resume(tmp_path / "foreign")
    with pytest.raises(Misuse, match=r"keep=0: at least one checkpoint stays"):
        Checkpoints(tmp_path, loop.pipe, keep=0)
    loop.close()


def test_a_checkpoint_of_format_1_is_read_and_training_goes_on_with_the_losses_of_then(
    opened: Opened, tmp_path: Path
) -> None:
    """`python -m tests.unit.runtime.format_1` has written it. Its schedule is compiled anew: only buffers care."""
    expected = json.loads((FORMAT_1 / "losses.json").read_text())
    loop = opened(Loop, compiled(tmp_path / "out"), FORMAT_1, lean)
    resumed = loop.resume()
    assert (resumed.update, resumed.items, loop.count.numbers) == (2, 2 * B * N, [2])
    assert loop.scheduler.last_epoch == 2
    assert loop.train(UPDATES) == pytest.approx(expected, rel=1e-12)
    assert len(expected) == UPDATES - 2


def test_a_damaged_or_missing_file_of_an_index_is_one_message(opened: Opened, one_worker: Path, tmp_path: Path) -> None:
    """Checkpoint that cannot be read, though it is as it was written."""
    loop = opened(Loop, one_worker, tmp_path)
    loop.save()
    path = tmp_path / "update-00000000"
    (path / ".metadata").write_bytes(b"what")
    hashes = json.loads((path / ".hashes.json").read_text())
    hashes[".metadata"] = storage._hash(path / ".metadata")
    (path / ".hashes.json").write_text(json.dumps(hashes))
    with pytest.raises(BadCheckpoint, match=r"update-00000000 cannot be resumed from: rank 0: UnpicklingError: "):
        loop.checkpoints.resume()


# State other than weights and buffers goes on bitwise, or is refused by name before anything is loaded.
#
# Of modules, optimizers and other objects, and of averages of the weights.


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


def test_what_modules_have_in_their_state_dict_goes_on_bitwise(
    opened: Opened, one_worker: Path, tmp_path: Path
) -> None:
    """State comes from get_extra_state, a hook or an override; parameters are those that were saved."""
    loop = Loop(one_worker, tmp_path, scaled)
    loop.train(2)
    loop.checkpoints.save()
    losses = loop.train(UPDATES)
    loop.close()
    again = opened(Loop, one_worker, tmp_path, scaled)
    assert again.resume().remarks == ()
    assert again.train(UPDATES) == losses


def test_what_a_module_would_have_taken_is_missed_and_what_it_does_not_take_is_named(
    opened: Opened, one_worker: Path, tmp_path: Path
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
    loop = opened(Loop, one_worker, tmp_path / "late", lambda *_: Late().double())
    with pytest.raises(
        BadCheckpoint, match=r"it has the buffer stages.0.late, which this model has not \(yet\): regist"
    ):
        loop.checkpoints.resume()

    class Marked(nn.Linear):
        def get_extra_state(self) -> Any:
            return 1

    loop = opened(Loop, one_worker, tmp_path / "marked", lambda *_: Marked(WIDTH, WIDTH).double())
    loop.save()
    with pytest.raises(BadCheckpoint, match=r'stage 0 does not take what it .*: .* Unexpected key.*: "_extra_state"'):
        loop.checkpoints.resume()


class Step:
    """A state that cannot be pickled, or that raises an error."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> Any:
        return self._state()

    def load_state_dict(self, state: Any) -> None:
        raise KeyError(state["missing"])


def test_an_object_that_cannot_say_or_take_its_state_is_named(opened: Opened, one_worker: Path, tmp_path: Path) -> None:
    loop = opened(Loop, one_worker, tmp_path / "one", shared={"lock": Step(threading.Lock)})
    with pytest.raises(Misuse, match=r"shared\['lock'\] cannot be saved: TypeError: cannot pickle"):
        loop.checkpoints.save()
    loop = opened(Loop, one_worker, tmp_path / "two", of_copy={"step": Step(dict)})
    loop.save()
    with pytest.raises(ModelError, match=r"load_state_dict\(\) of of_copy\['step'\]: .*KeyError: 'missing'"):
        loop.checkpoints.resume()
    loop = opened(Loop, one_worker, tmp_path / "three", of_rank={"step": Step(lambda: {}["gone"])})
    with pytest.raises(ModelError, match=r"state_dict\(\) of of_rank\['step'\]: .*KeyError: 'gone'"):
        loop.checkpoints.save()


def test_types_are_those_that_were_saved_and_what_is_given_no_place_is_remarked(
    opened: Opened, one_worker: Path, tmp_path: Path
) -> None:
    counted = Count()
    counted.numbers = [Counter([3, 3])]  # type: ignore[list-item]
    saved(one_worker, tmp_path, shared={"count": counted, "more": Count()}, of_rank={"mine": Count()})
    taking = Count()
    again = opened(Loop, one_worker, tmp_path, shared={"count": taking})
    assert again.resume().remarks == (
        "the checkpoint has of_rank['mine'], shared['more'], and Checkpoints was given no such object",
    )
    assert [*taking.numbers[0].elements()] == [3, 3]  # type: ignore[attr-defined]


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
    opened: Opened, one_worker: Path, tmp_path: Path, optimizer: Any, words: str
) -> None:
    loop = saved(one_worker, tmp_path, updates=1)
    again = opened(Loop, one_worker, tmp_path, optimizer=optimizer)
    before = [parameter.detach().clone() for parameter in again.pipe.parameters()]
    with pytest.raises(BadCheckpoint, match=words):
        again.checkpoints.resume()
    assert all(torch.equal(*pair) for pair in zip(before, again.pipe.parameters(), strict=True))
    state = again.pipe.state_dict()
    load(state, checkpoint_id=tmp_path / "update-00000001")
    again.pipe.load_state_dict(state)
    assert again.pipe.updates == 1
    assert all(torch.equal(*pair) for pair in zip(loop.pipe.parameters(), again.pipe.parameters(), strict=True))


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
