"""Updates of a schedule with a flush: an update ends before the next one begins, and the caller's optimizer steps."""

from collections.abc import Callable, Mapping

import torch

from chimera_runtime.data.feed import Feed
from chimera_runtime.errors.update import scaler_with_wider_sums
from chimera_runtime.lane.lane import Lane
from chimera_runtime.ranks.agreement import SCALE
from chimera_runtime.stage.stage import Stage
from chimera_runtime.update.accumulation import Accumulation
from chimera_runtime.update.outcome import Outcome, Outcomes
from chimera_runtime.values.losses import added


class FlushedUpdates:
    """The `Updates` of a schedule with a flush: a call of `run_update` runs a whole update.

    Parameters
    ----------
    script
        The function ``update`` of this rank's script.
    device
        The device of the scale of a GradScaler.
    sums_wider
        Whether gradients are summed in another dtype than that of the weights, into ``main_grad``.
    """

    def __init__(
        self,
        *,
        script: Callable[[Lane], None],
        lane: Lane,
        stages: Mapping[int, Stage],
        feed: Feed,
        outcomes: Outcomes,
        accumulation: Accumulation,
        device: torch.device,
        sums_wider: bool,
    ) -> None:
        self._script = script
        self._lane = lane
        self._stages = stages
        self._feed = feed
        self._outcomes = outcomes
        self._accumulation = accumulation
        self._device = device
        self._sums_wider = sums_wider
        self.started = 0
        self.terms: dict[str, float] = {}

    def prepare(self, accumulate: bool, scaler: torch.amp.GradScaler | None) -> None:
        """Clears all gradients, after copying them if the update is to ``accumulate``, and sets the scale of the loss.

        Raises `Misuse` if gradients are there without ``accumulate``, or if there are a scaler and wider sums.
        """
        if scaler is not None and self._sums_wider:
            raise scaler_with_wider_sums()
        self._accumulation.begin(accumulate)
        scale = self._scale_of(scaler)
        self.terms = {"accumulate": accumulate, SCALE: scale}
        for stage in self._stages.values():
            for group in stage.groups:
                group.gradient_sum.clear()
            stage.scale_loss(scale)

    def run_update(self) -> Outcome:
        """Runs a whole update and returns its outcome; ``.grad`` is then the gradient of the mini-batch's loss."""
        update = self.started
        # The script makes all calls of the schedule, and returns when the gradients are summed over the replicas.
        self._lane.begin(update)
        self._script(self._lane)
        # Losses that were computed here go to the other ranks while this one steps and begins the next update.
        losses = added(stage.take_loss(update) for stage in self._stages.values())
        outcome = self._outcomes.launch(update, losses)
        self._feed.drop(update)
        self._accumulation.end(outcome)
        self.started += 1
        return outcome

    def finish(self) -> None:
        """Does nothing: no update is under way."""

    def take_outcomes(self) -> list[Outcome]:
        """An empty list: `run_update` has returned every outcome."""
        return []

    def count_from(self, updates: int) -> None:
        """Sets the number of updates before the next one, as a checkpoint has it; random numbers follow from it."""
        self.started = updates
        for stage in self._stages.values():
            stage.count_from(updates)

    def _scale_of(self, scaler: torch.amp.GradScaler | None) -> float:
        """The factor by which a scaler multiplies the loss; asking a new scaler for it initializes the scaler."""
        if scaler is None:
            return 1.0
        return float(scaler.scale(torch.ones((), device=self._device)))
