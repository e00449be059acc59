"""`Updates`, with a flush or without one.

With a flush an update ends before the next one begins, and the caller's optimizer steps. In a stream, which has none,
several are under way, and stages step inside the schedule.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from chimera_runtime.data.feed import Feed
from chimera_runtime.errors import Misuse
from chimera_runtime.errors import update as mistakes
from chimera_runtime.errors.update import SCALER_WITH_WIDER_SUMS
from chimera_runtime.lane.lane import Lane
from chimera_runtime.lane.stream_lane import Driver
from chimera_runtime.program.job import Job
from chimera_runtime.ranks.agreement import SCALE
from chimera_runtime.ranks.gathering import averaged_in_mesh
from chimera_runtime.stage.stage import Stage
from chimera_runtime.start.lane_components import driver_of
from chimera_runtime.start.rank_context import RankContext
from chimera_runtime.update.accumulation import Accumulation
from chimera_runtime.update.outcome import Outcome, Outcomes
from chimera_runtime.update.stage_optimizer import Hook, Named, StepHooks
from chimera_runtime.values.losses import added


class LossScale(Protocol):
    """A factor of the loss: a GradScaler of torch, or any other object with a method like its ``scale``."""

    def scale(self, outputs: torch.Tensor) -> torch.Tensor:
        """Returns a tensor multiplied by the factor."""


@dataclass(kw_only=True)
class Updates(ABC):
    """The updates of a schedule on this rank: `FlushedUpdates` or `StreamedUpdates`.

    A call of `Pipeline.step` calls `prepare` and `run_update` once each. All ranks make the same calls in the same
    order. ``started`` is the number of updates that have been started, and so the number of the next one. ``terms``
    has, as numbers by name, the arguments of the newest `prepare` that must be equal on all ranks.
    """

    stages: Mapping[int, Stage]
    feed: Feed
    outcomes: Outcomes
    started: int = 0
    terms: Mapping[str, float] = field(default_factory=dict)

    @abstractmethod
    def prepare(self, accumulate: bool, scaler: LossScale | None) -> None:
        """Prepares gradients and the scale of the loss for an update. Raises `Misuse` if an argument does not fit."""

    @abstractmethod
    def run_update(self) -> Outcome | None:
        """Runs one more update, on the mini-batch in the feed; returns the outcome of the newest complete one."""

    @abstractmethod
    def finish(self) -> None:
        """Completes the updates that are under way."""

    @property
    def are_complete(self) -> bool:
        """Whether no update is under way."""
        return True

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


@dataclass(kw_only=True)
class FlushedUpdates(Updates):
    """The `Updates` of a schedule with a flush: a call of `run_update` runs a whole update.

    ``script`` is the function ``update`` of this rank's script, ``lane`` its argument. A GradScaler has its scale on
    ``device``. ``sums_wider`` says that gradients are summed in another dtype than that of the weights, into
    ``main_grad``.
    """

    script: Callable[[Lane], None]
    lane: Lane
    accumulation: Accumulation
    device: torch.device
    sums_wider: bool

    def prepare(self, accumulate: bool, scaler: LossScale | None) -> None:
        """Clears all gradients, after copying them if the update is to ``accumulate``, and sets the scale of the loss.

        Raises `Misuse` if gradients are there without ``accumulate``, or if there are a scaler and wider sums.
        """
        if scaler is not None and self.sums_wider:
            raise Misuse(SCALER_WITH_WIDER_SUMS)
        # The scale that a scaler has is the factor by which it multiplies; a new one is initialized by the call.
        scale = 1.0 if scaler is None else float(scaler.scale(torch.ones((), device=self.device)))
        self.accumulation.begin(accumulate, scale)
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
        outcome = self.outcomes.launch(update, losses, self.accumulation.clearings())
        self.feed.drop(update)
        self.accumulation.end(outcome)
        self.started += 1
        return outcome

    def finish(self) -> None:
        """Does nothing: no update is under way."""


def step_hooks_of(
    job: Job, optimizer: Callable[[Named], Any] | None, before: Hook | None, after: Hook | None
) -> StepHooks | None:
    """Returns the user's functions for steps inside the schedule; None if the schedule has a flush and no such steps.

    Raises `Misuse` if the optimizer is missing, or a function is given that would never be called.
    """
    if job.period:
        if optimizer is None:
            raise mistakes.optimizer_is_missing(job.name)
        return StepHooks(optimizer, before, after)
    if (optimizer, before, after) != (None, None, None):
        raise mistakes.optimizer_would_not_be_called(job.name)
    return None


@dataclass(kw_only=True)
class StreamedUpdates(Updates):
    """The `Updates` of a stream: a call of `run_update` starts an update, and may complete an earlier one.

    The sum of an update's losses is launched in the call in which the last rank completes the update, which all ranks
    know from the schedule. So all ranks launch the sums in the same order, and a sum waits for no later call.
    """

    job: Job
    driver: Driver
    _completed: int = 0
    _dropped: int = 0  # updates whose mini-batches the feed no longer holds
    _finished: list[Outcome] = field(default_factory=list)

    def prepare(self, accumulate: bool, scaler: LossScale | None) -> None:
        """Raises `Misuse` if gradients are to be accumulated or scaled, or the user cleared one during an update."""
        if accumulate:
            raise mistakes.accumulation_without_flush(self.job.name)
        if scaler is not None:
            raise mistakes.scaler_without_flush(self.job.name)
        for number, stage in self.stages.items():
            if (disturbed := _disturbed(stage)) is not None:
                raise mistakes.gradient_was_taken_away(number, disturbed)

    def run_update(self) -> Outcome | None:
        """Starts one more update; returns the outcome of the update that this call completes, if there is one."""
        # Mini-batches of earlier updates are still read: the loop must not have changed them since.
        self.feed.require_unwritten_batches()
        self.started += 1
        # The driver runs the turns of the script that need no later update of any rank.
        self.driver.add_update()
        self._drop_mini_batches()
        # After ``lag`` further updates an update is complete on every rank.
        return self._complete() if self.started - self._completed > self.job.lag else None

    def finish(self) -> None:
        """Completes the updates under way. The next update starts with empty pipelines, on the newest weights."""
        self.feed.require_unwritten_batches()
        self.driver.drain()
        self._drop_mini_batches()
        while self._completed < self.started:
            self._finished.append(self._complete())
        self.driver.begin(self.started)

    @property
    def are_complete(self) -> bool:
        """Whether no update is under way."""
        return self._completed == self.started

    def take_outcomes(self) -> list[Outcome]:
        """Returns the outcomes of the updates that `finish` has completed since the last call."""
        outcomes, self._finished = self._finished, []
        return outcomes

    def count_from(self, updates: int) -> None:
        """Sets the number of updates before the next one, as in `Updates`."""
        super().count_from(updates)
        self._completed = self._dropped = updates
        self.driver.begin(updates)

    def _complete(self) -> Outcome:
        """Launches the sum of the losses of the oldest update under way, and returns its outcome."""
        update = self._completed
        self._completed += 1
        return self.outcomes.launch(update, added(stage.take_loss(update) for stage in self.stages.values()))

    def _drop_mini_batches(self) -> None:
        """Drops the mini-batches of the updates for which every stage of this rank has stepped."""
        stepped = min((stage.updates for stage in self.stages.values()), default=self.started)
        for update in range(self._dropped, stepped):
            self.feed.drop(update)
        self._dropped = stepped
        self.feed.note_versions()


def updates_of(
    context: RankContext,
    lane: Lane,
    stages: Mapping[int, Stage],
    feed: Feed,
    *,
    outcomes: Outcomes,
    parameters: Mapping[str, torch.nn.Parameter],
    items: int,
    sum_dtype: torch.dtype | None,
) -> Updates:
    """Makes the updates of a rank from its stages and its lane; ``items`` and ``sum_dtype`` are as in `Pipeline`."""
    world = context.world
    if world.job.period:
        driver = driver_of(context, lane)
        return StreamedUpdates(job=world.job, driver=driver, stages=stages, feed=feed, outcomes=outcomes)
    mean_in_mesh = partial(averaged_in_mesh, world.control_group, device=world.device)
    return FlushedUpdates(
        script=context.script.update,
        lane=lane,
        stages=stages,
        feed=feed,
        outcomes=outcomes,
        accumulation=Accumulation(parameters, items, mean_in_mesh if context.probed.expected_count else None),
        device=world.device,
        sums_wider=sum_dtype is not None,
    )


def _disturbed(stage: Stage) -> str | None:
    """The name of a parameter of a stage whose ``grad`` the user replaced or cleared during an update, or None."""
    disturbed = {group.gradient_sum.disturbed for group in stage.groups}
    return next((name for name, parameter in stage.module.named_parameters() if parameter in disturbed), None)
