"""`Updates`: the interface of the updates of a schedule, with a flush or without one."""

from collections.abc import Mapping
from functools import partial
from typing import Protocol

import torch

from chimera_runtime.data.feed import Feed
from chimera_runtime.lane.lane import Lane
from chimera_runtime.ranks.gathering import averaged_in_mesh
from chimera_runtime.stage.stage import Stage
from chimera_runtime.start.lane_components import driver_of
from chimera_runtime.start.rank_context import RankContext
from chimera_runtime.update.accumulation import Accumulation
from chimera_runtime.update.flushed_updates import FlushedUpdates
from chimera_runtime.update.outcome import Outcome, Outcomes
from chimera_runtime.update.streamed_updates import StreamedUpdates


class Updates(Protocol):
    """The updates of a schedule on this rank: `FlushedUpdates` or `StreamedUpdates`.

    A call of `Pipeline.step` is one `prepare` and one `run_update`. All ranks make the same calls in the same order.
    """

    @property
    def started(self) -> int:
        """Number of updates that have been started, which is also the number of the next update."""

    @property
    def terms(self) -> Mapping[str, float]:
        """Arguments of the newest call of `prepare` that must be equal on all ranks, by name, as numbers."""

    def prepare(self, accumulate: bool, scaler: torch.amp.GradScaler | None) -> None:
        """Prepares gradients and the scale of the loss for an update. Raises `Misuse` if an argument does not fit."""

    def run_update(self) -> Outcome | None:
        """Runs one more update, on the mini-batch in the feed.

        Returns the outcome of the newest complete update, or None while there is none.
        """

    def finish(self) -> None:
        """Completes the updates that are under way."""

    def take_outcomes(self) -> list[Outcome]:
        """Returns the outcomes of the updates that `finish` has completed since the last call."""

    def count_from(self, updates: int) -> None:
        """Sets the number of updates before the next one, as a checkpoint has it. No update may be under way."""


def updates_of(
    context: RankContext,
    lane: Lane,
    stages: Mapping[int, Stage],
    feed: Feed,
    *,
    outcomes: Outcomes,
    parameters: Mapping[str, torch.nn.Parameter],
    sum_dtype: torch.dtype | None,
) -> Updates:
    """Makes the updates of a rank from its stages and its lane; ``sum_dtype`` is as in `Pipeline`."""
    world = context.world
    if world.job.period:
        return StreamedUpdates(world.job, driver_of(context, lane), stages, feed, outcomes=outcomes)
    mean_in_mesh = partial(averaged_in_mesh, world.control_group, device=world.device)
    return FlushedUpdates(
        script=context.script.update,
        lane=lane,
        stages=stages,
        feed=feed,
        outcomes=outcomes,
        accumulation=Accumulation(parameters, mean_in_mesh if context.probed.expected_count else None),
        device=world.device,
        sums_wider=sum_dtype is not None,
    )
