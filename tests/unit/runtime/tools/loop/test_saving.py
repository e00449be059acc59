"""--save, --resume, --load, --export and a SIGTERM in a loop of train.py: when is saved, and what is said."""

from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from chimera_runtime.checkpoint.storage import whole
from chimera_runtime.errors import BadCheckpoint, Misuse
from chimera_runtime.pipeline import Pipeline
from chimera_runtime.ranks.world import World
from chimera_runtime.tools.loop.saving import Saving, Terminated
from tests.unit.runtime.kept import B, Count, N, adam, pipeline


@dataclass
class Ended:
    """The outcome of an update."""

    is_last: bool


@pytest.fixture
def make(alone: World, one_worker: Path) -> Iterator[Callable[..., tuple[Saving, Pipeline, list[str]]]]:
    """Makes what the options ask for, over a pipeline of its own, with what it says."""
    pipes = []

    def saving(
        loader: Any = None, optimizers: Any = None, termination: str | None = "SIGTERM", **given: Any
    ) -> tuple[Saving, Pipeline, list[str]]:
        nothing = dict.fromkeys(("save", "save_every", "resume", "load", "export"))
        options = Namespace(**{**nothing, "keep": 3, "steps": 10, "check_only": False} | given)
        pipe = pipeline(one_worker)
        pipes.append(pipe)
        said: list[str] = []
        stepping = [adam(pipe)] if optimizers is None else optimizers
        saving = Saving(
            options, pipe, stepping, [], {"data": loader or Count()}, said.append, lambda: termination, lambda *_: None
        )
        return saving, pipe, said

    yield saving
    for pipe in pipes:
        pipe.close()


def train(pipe: Pipeline, updates: int) -> None:
    pipe.load_state_dict({**pipe.state_dict(), "update": {"0": (pipe.updates + updates,)}})


# When it is time.


def test_it_is_time_every_so_many_updates_but_not_at_the_end(make: Callable[..., Any], tmp_path: Path) -> None:
    """The end saves all anyway."""
    saving, pipe, _ = make(save=tmp_path, save_every=2, steps=6)
    due = []
    for _ in range(6):
        train(pipe, 1)
        due.append(saving.is_due(Ended(False)))
    assert due == [False, True, False, True, False, False]
    assert not saving.is_over
    never, pipe, _ = make(save=tmp_path)
    train(pipe, 2)
    assert not never.is_due(Ended(False))


@pytest.mark.parametrize("first", [0, 2], ids=["with a flush", "while a stream fills"])
def test_training_is_over_an_update_after_the_one_in_which_a_rank_asked(
    make: Callable[..., Any], tmp_path: Path, first: int
) -> None:
    """The newest outcome is not read: that would wait."""
    saving, _, _ = make(save=tmp_path)

    class Newest:
        @property
        def is_last(self) -> bool:
            raise AssertionError("it was waited for")

    seen = []
    for outcome in (*[None] * first, Ended(False), Ended(True)):
        saving.is_due(outcome)
        seen.append(saving.is_over)
    saving.is_due(Newest())
    assert [*seen, saving.is_over] == [False] * (first + 2) + [True]


# All of it.


def test_a_run_saves_once_at_its_end_exports_and_the_next_goes_on(make: Callable[..., Any], tmp_path: Path) -> None:
    saved, file = tmp_path / "saved", tmp_path / "model.pt"
    used, there = Count(), Count()
    saving, pipe, said = make(used, save=saved, resume=saved, export=file)
    saving.begin()
    train(pipe, 3)
    used.numbers[0] = 7
    saving.save()
    saving._checkpoints.wait()
    written = (saved / "update-00000003").stat().st_ino
    saving.end()
    assert said == [f"--resume {saved}: no checkpoint there yet; the training begins", f"exported to {file}"]
    assert [path.name for path in whole(saved)] == ["update-00000003"]
    assert (saved / "update-00000003").stat().st_ino == written, "it was there already"

    again, resumed, said = make(there, save=saved, resume=saved)
    again.begin()
    assert there.numbers == [7]
    assert said == [f"resumed from {saved / 'update-00000003'}, after update 3, item {3 * B * N}"]
    again.end()
    assert (saved / "update-00000003").stat().st_ino == written
    assert all(map(torch.equal, resumed.parameters(), pipe.parameters()))


def test_a_run_that_is_over_already_says_so(make: Callable[..., Any], tmp_path: Path) -> None:
    saving, pipe, _ = make(save=tmp_path, steps=3)
    saving.begin()
    train(pipe, 3)
    saving.end()
    for steps, more in ((4, []), (3, ["nothing left to do: 3 of 3 updates are done (--steps)"])):
        again, _, said = make(resume=tmp_path, steps=steps)
        again.begin()
        again.end()
        assert said[1:] == more
    check, _, said = make(resume=tmp_path, steps=3, check_only=True)
    check.begin()
    check.end()
    assert len(said) == 1


def test_a_run_that_is_ended_saves_and_says_where_and_exports_nothing(make: Callable[..., Any], tmp_path: Path) -> None:
    saving, pipe, said = make(save=tmp_path / "saved", export=tmp_path / "model.pt")
    saving.begin()
    train(pipe, 2)
    saving.is_over = True
    with pytest.raises(Terminated) as ended:
        saving.end()
    assert str(ended.value) == f"SIGTERM: saved after update 2 in {tmp_path / 'saved'}, for --resume"
    assert [path.name for path in whole(tmp_path / "saved")] == ["update-00000002"]
    assert said == []
    assert not (tmp_path / "model.pt").exists()


def test_a_run_whose_model_file_asks_for_the_end_ends_as_any_other(make: Callable[..., Any], tmp_path: Path) -> None:
    saving, pipe, said = make(save=tmp_path / "saved", export=tmp_path / "model.pt", termination=None)
    saving.begin()
    train(pipe, 2)
    saving.is_over = True
    saving.end()
    assert [path.name for path in whole(tmp_path / "saved")] == ["update-00000002"]
    assert said == [f"exported to {tmp_path / 'model.pt'}"]


def test_a_check_alone_saves_nothing(make: Callable[..., Any], tmp_path: Path) -> None:
    saving, _, _ = make(save=tmp_path / "saved", check_only=True)
    saving.begin()
    saving.end()
    assert whole(tmp_path / "saved") == []


def test_weights_alone_are_loaded_and_the_training_begins_anew(make: Callable[..., Any], tmp_path: Path) -> None:
    weights = {name: torch.full_like(p, 0.25) for name, p in make()[1].named_parameters()}
    torch.save({**weights, "head.bias": torch.ones(1), "head.weight": torch.ones(1)}, tmp_path / "model.pt")
    saving, pipe, said = make(load=tmp_path / "model.pt")
    saving.begin()
    assert all(bool((p == 0.25).all()) for p in pipe.parameters())
    assert pipe.updates == 0
    assert said == [f"--load {tmp_path / 'model.pt'}: the model has no head.bias, head.weight"]
    saving.save()
    saving.end()
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


def test_what_cannot_be_is_said_before_the_first_update(make: Callable[..., Any], tmp_path: Path) -> None:
    for options, words in [
        ({"export": tmp_path / "none" / "model.pt"}, "there is no directory"),
        ({"load": tmp_path / "none.pt"}, "No such file"),
        ({"save": Path(__file__)}, "checkpoints cannot be saved in"),
    ]:
        saving, _, _ = make(**options)
        with pytest.raises(BadCheckpoint, match=words):
            saving.begin()
    with pytest.raises(Misuse, match=r"a Count cannot be saved: --save needs optimizers of torch.optim"):
        make(save=tmp_path, optimizers=[type("Count", (), {})()])
