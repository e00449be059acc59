"""Updates of a schedule with a flush: an update ends before the next one begins, and the caller's optimizer steps."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from chimera_runtime.errors import Misuse
from chimera_runtime.errors.update import SCALER_WITH_WIDER_SUMS
from chimera_runtime.lane.lane import Lane
from chimera_runtime.ranks.agreement import SCALE
from chimera_runtime.update.accumulation import Accumulation
from chimera_runtime.update.outcome import Outcome
from chimera_runtime.update.update_interface import Updates
from chimera_runtime.values.losses import added


@dataclass(kw_only=True)
class FlushedUpdates(Updates):
    """The `Updates` of a schedule with a flush: a call of `run_update` runs a whole update.

    ``script`` is the function ``update`` of this rank's script; the scale of a GradScaler is on ``device``.
    ``sums_wider`` says that gradients are summed in another dtype than that of the weights, into ``main_grad``.
    """

    script: Callable[[Lane], None]
    lane: Lane
    accumulation: Accumulation
    device: torch.device
    sums_wider: bool

    def prepare(self, accumulate: bool, scaler: torch.amp.GradScaler | None) -> None:
        """Clears all gradients, after copying them if the update is to ``accumulate``, and sets the scale of the loss.

        Raises `Misuse` if gradients are there without ``accumulate``, or if there are a scaler and wider sums.
        """
        if scaler is not None and self.sums_wider:
            raise Misuse(SCALER_WITH_WIDER_SUMS)
        self.accumulation.begin(accumulate)
        # The scale that a scaler has is the factor by which it multiplies; a new one is initialized by the call.
        scale = 1.0 if scaler is None else float(scaler.scale(torch.ones((), device=self.device)))
        self.terms = {"accumulate": accumulate, SCALE: scale}
        for stage in self.stages.values():
            for group in stage.groups:
                group.gradient_sum.clear()
            stage.scale_loss(scale)

    def run_update(self) -> Outcome:
        """Runs a whole update and returns its outcome; ``.grad`` is then the gradient of the mini-batch's loss."""
        update = self.started
        # The script makes all calls of the schedule, and returns when the gradients are summed over the replicas.
        self.lane.begin(update)
        self.script(self.lane)
        # Losses that were computed here go to the other ranks while this one steps and begins the next update.
        losses = added(stage.take_loss(update) for stage in self.stages.values())
        outcome = self.outcomes.launch(update, losses)
        self.feed.drop(update)
        self.accumulation.end(outcome)
        self.started += 1
        return outcome

    def finish(self) -> None:
        """Does nothing: no update is under way."""
