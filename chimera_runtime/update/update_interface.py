"""`Updates`: what the updates of a schedule with a flush, and those of a stream, have in common."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from chimera_runtime.data.feed import Feed
from chimera_runtime.stage.stage import Stage
from chimera_runtime.update.outcome import Outcome, Outcomes


@dataclass(kw_only=True)
class Updates(ABC):
    """The updates of a schedule on this rank: `FlushedUpdates` or `StreamedUpdates`.

    A call of `Pipeline.step` is one `prepare` and one `run_update`. All ranks make the same calls in the same order.
    ``started`` updates have been started, which is also the number of the next update. ``terms`` has the arguments of
    the newest call of `prepare` that must be equal on all ranks, by name, as numbers.
    """

    stages: Mapping[int, Stage]
    feed: Feed
    outcomes: Outcomes
    started: int = 0
    terms: Mapping[str, float] = field(default_factory=dict)

    @abstractmethod
    def prepare(self, accumulate: bool, scaler: torch.amp.GradScaler | None) -> None:
        """Prepares gradients and the scale of the loss for an update. Raises `Misuse` if an argument does not fit."""

    @abstractmethod
    def run_update(self) -> Outcome | None:
        """Runs one more update, on the mini-batch in the feed.

        Returns the outcome of the newest complete update, or None while there is none.
        """

    @abstractmethod
    def finish(self) -> None:
        """Completes the updates that are under way."""

    def take_outcomes(self) -> list[Outcome]:
        """Returns the outcomes of the updates that `finish` has completed since the last call."""
        return []

    def count_from(self, updates: int) -> None:
        """Sets the number of updates before the next one, as a checkpoint has it; random numbers follow from it.

        Call it only while no update is under way.
        """
        self.started = updates
        for stage in self.stages.values():
            stage.count_from(updates)
