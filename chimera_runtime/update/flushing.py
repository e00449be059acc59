"""What `Pipeline` does where there is a flush: an update ends before the next one begins, and its caller steps."""

from collections.abc import Mapping

import torch

from chimera_runtime.data.feed import Feed
from chimera_runtime.errors import Misuse
from chimera_runtime.lane.lane import Lane
from chimera_runtime.ranks.agreement import SCALE
from chimera_runtime.stage.stage import Stage
from chimera_runtime.start.rank_context import Setting
from chimera_runtime.update.accumulation import Accumulation
from chimera_runtime.update.outcome import Outcome, Outcomes
from chimera_runtime.values.losses import added


class Flushing:
    """The updates of a schedule with a flush on a rank; it has the methods of `Streaming`.

    Attributes
    ----------
    given
        How many updates there have been.
    terms
        What all ranks have given the newest step alike.

    Parameters
    ----------
    sums_wider
        Whether gradients are summed in a dtype of their own, and lie in ``main_grad``.
    """

    def __init__(
        self,
        setting: Setting,
        lane: Lane,
        stages: Mapping[int, Stage],
        feed: Feed,
        outcomes: Outcomes,
        accumulation: Accumulation,
        sums_wider: bool,
    ) -> None:
        self._setting = setting
        self._lane = lane
        self._stages = stages
        self._feed = feed
        self._outcomes = outcomes
        self._accumulation = accumulation
        self._sums_wider = sums_wider
        self.given = 0
        self.terms: dict[str, float] = {}

    def begin(self, accumulate: bool, scaler: torch.amp.GradScaler | None) -> None:
        """Readies gradients and the scale of the loss for an update.

        Raises
        ------
        Misuse
            If gradients are there and are not to be kept, or ``main_grad`` would have to be unscaled.
        """
        if scaler is not None and self._sums_wider:
            raise Misuse("a GradScaler unscales grad, not main_grad: scale for fp16, or sum in a wider dtype, not both")
        self._accumulation.begin(accumulate)
        scale = self._scale_of(scaler)
        self.terms = {"accumulate": accumulate, SCALE: scale}
        for stage in self._stages.values():
            for group in stage.groups:
                group.clear_gradients()
            stage.scale_loss(scale)

    def give(self) -> Outcome:
        """An update from its first forward to its sums, on the mini-batch that the feed has."""
        update = self.given
        self._lane.begin(update)
        self._setting.script.update(self._lane)
        tally = added(stage.take_loss(update) for stage in self._stages.values())
        outcome = self._outcomes.launch(update, tally)
        self._feed.drop(update)
        self._accumulation.end(outcome)
        self.given += 1
        return outcome

    def finish(self) -> None:
        """Nothing is ever under way."""

    def untold(self) -> list[Outcome]:
        """None: `give` has returned all outcomes."""
        return []

    def count_from(self, updates: int) -> None:
        """From now on it is as if there had been so many updates."""
        self.given = updates
        for stage in self._stages.values():
            stage.count_from(updates)

    def _scale_of(self, scaler: torch.amp.GradScaler | None) -> float:
        """What a scaler multiplies a loss by; one that has not done so yet is made ready by that."""
        if scaler is None:
            return 1.0
        return float(scaler.scale(torch.ones((), device=self._setting.world.device)))
