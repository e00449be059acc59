"""When an update that overlaps with others is over on a rank, and what is told of it."""

import gc
import weakref
from typing import Any

import pytest

from support.progress import Overlapping


class Told:
    """Stands in for the progress: the losses of the updates that are over."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def end(self, loss: float) -> None:
        self.losses.append(loss)


class Stage:
    """Steps, and knows the losses of its updates."""

    def __init__(self, losses: list[float]) -> None:
        self.updates = 0
        self.losses = losses
        self.on_step: Any = None

    def take_loss(self, update: int) -> float:
        return self.losses[update]

    def step(self) -> None:
        self.updates += 1
        self.on_step(self)


def watched(*stages: Stage) -> Told:
    told = Told()
    overlapping = Overlapping(told, len(stages))  # type: ignore[arg-type]
    for stage in stages:
        stage.on_step = overlapping.stepped
    return told


def test_an_update_is_over_when_every_stage_has_stepped() -> None:
    early, late = Stage([0.0, 0.0, 0.0]), Stage([1.5, 2.5, 3.5])
    told = watched(early, late)
    early.step()
    early.step()
    assert told.losses == []
    late.step()
    assert told.losses == [1.5]
    late.step()
    late.step()
    assert told.losses == [1.5, 2.5]
    early.step()
    assert told.losses == [1.5, 2.5, 3.5]


@pytest.fixture
def no_collection() -> Any:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
def test_stages_go_as_soon_as_nobody_holds_them() -> None:
    """They hold communicators, whose threads must not outlive the ranks' last meeting."""
    stage = Stage([1.0])
    watched(stage)
    stage.step()
    held = weakref.ref(stage)
    del stage
    assert held() is None
