"""Updates of a schedule with a flush, on stages that note what is asked of them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from chimera_runtime.errors import Misuse
from chimera_runtime.update.updates import FlushedUpdates
from chimera_runtime.values.losses import Tally


class Noting:
    """Notes each call with its arguments, as of whichever object it stands for."""

    def __init__(self, notes: list[Any], name: str, result: Any = None) -> None:
        self._notes = notes
        self._name = name
        self._result = result

    def __getattr__(self, method: str) -> Any:
        def called(*arguments: Any) -> Any:
            self._notes.append((self._name, method, *arguments))
            return self._result

        return called


def made(notes: list[Any], sums_wider: bool = False) -> FlushedUpdates:
    """Two stages that share a weight group, whose losses of an update are 1 and 10."""
    tie = SimpleNamespace(gradient_sum=Noting(notes, "tie"))
    stages: dict[int, Any] = {
        number: SimpleNamespace(
            groups=(SimpleNamespace(gradient_sum=Noting(notes, f"stage {number}")), tie),
            scale_loss=lambda scale, number=number: notes.append(("scale", number, scale)),
            take_loss=lambda update, number=number: Tally(10.0**number, 1.0),
        )
        for number in range(2)
    }
    others: dict[str, Any] = {name: Noting(notes, name) for name in ("lane", "feed", "accumulation")}
    return FlushedUpdates(
        script=Noting(notes, "script").update,
        stages=stages,
        outcomes=Noting(notes, "outcomes", result="outcome"),  # type: ignore[arg-type]
        device=torch.device("cpu"),
        sums_wider=sums_wider,
        **others,
    )


def test_an_update_runs_the_script_and_lets_its_mini_batch_go() -> None:
    notes: list[Any] = []
    updates = made(notes)
    for update in range(2):
        assert updates.started == update
        notes.clear()
        assert updates.run_update() == "outcome"
        names = [note[:3] for note in notes]
        assert names[0] == ("lane", "begin", update)
        assert names[1][:2] == ("script", "update")
        assert ("feed", "drop", update) in names
        assert ("outcomes", "launch", update, Tally(11.0, 2.0), None) in notes
        assert names[-1] == ("accumulation", "end", "outcome")


def test_gradients_are_cleared_and_the_loss_is_scaled_on_every_stage() -> None:
    notes: list[Any] = []
    made(notes).prepare(False, None)
    assert notes[0] == ("accumulation", "begin", False, 1.0)
    assert {note for note in notes if note[0] == "scale"} == {("scale", 0, 1.0), ("scale", 1, 1.0)}
    assert {note[0] for note in notes if note[-1] == "clear"} == {"stage 0", "stage 1", "tie"}
    notes.clear()
    made(notes).prepare(True, torch.amp.GradScaler("cpu", init_scale=8.0))
    assert notes[0] == ("accumulation", "begin", True, 8.0)
    assert ("scale", 0, 8.0) in notes


def test_what_a_scaler_would_not_unscale_is_refused() -> None:
    notes: list[Any] = []
    with pytest.raises(Misuse, match="a GradScaler unscales grad, not main_grad"):
        made(notes, sums_wider=True).prepare(False, torch.amp.GradScaler("cpu"))
    assert notes == []


def test_nothing_is_ever_under_way() -> None:
    notes: list[Any] = []
    updates = made(notes)
    updates.run_update()
    notes.clear()
    updates.finish()
    assert updates.take_outcomes() == []
    assert notes == []
