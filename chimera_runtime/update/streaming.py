"""What `Pipeline` does where there is no flush: updates are given one by one, and completed some updates later."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from chimera_runtime.data.feed import Feed
from chimera_runtime.errors import Misuse
from chimera_runtime.lane.lane import Lane
from chimera_runtime.program.job import Job
from chimera_runtime.stage.stage import Stage
from chimera_runtime.start.rank_context import Setting
from chimera_runtime.update.outcome import Outcome, Outcomes
from chimera_runtime.update.stage_optimizer import Hook, Named, StepHooks
from chimera_runtime.values.losses import added


def hooks_of(
    job: Job, optimizer: Callable[[Named], Any] | None, before: Hook | None, after: Hook | None
) -> StepHooks | None:
    """How the stages of a program step in its schedule; None where it has a flush, and they do not.

    Raises
    ------
    Misuse
        If an optimizer is missing, or something is given that nothing would call.
    """
    if job.period:
        if optimizer is None:
            raise Misuse(
                f"{job.name} has no flush, so each stage steps inside the schedule: give Pipeline optimizer=, a "
                "function that makes an optimizer of a stage's [(name, parameter), ..]"
            )
        return StepHooks(optimizer, before, after)
    if (optimizer, before, after) != (None, None, None):
        raise Misuse(
            f"{job.name} has a flush, so nothing steps inside the schedule: leave out optimizer=, before_step= and "
            "after_step=, and call the step() of an optimizer of your own after each step of the pipeline"
        )
    return None


class Streaming:
    """The updates of a stream that are under way on a rank.

    All ranks give and drain at the same points. The sum of an update's loss is launched at the step at which every
    rank has completed the update, which all know beforehand: so the sums are in the same order everywhere, and reading
    one waits for no later step of another rank.

    Attributes
    ----------
    given
        How many updates have been given.
    """

    def __init__(
        self, setting: Setting, lane: Lane, stages: Mapping[int, Stage], feed: Feed, outcomes: Outcomes
    ) -> None:
        self._job = setting.world.job
        self._driver = setting.driver(lane)
        self._stages = stages
        self._feed = feed
        self._outcomes = outcomes
        self.given = 0
        self._completed = 0
        self._fed = 0
        self._untold: list[Outcome] = []

    def begin(self, accumulate: bool, scaler: torch.amp.GradScaler | None) -> None:
        """Refuses what a step of a stream cannot do.

        Raises
        ------
        Misuse
            If gradients are to be kept or scaled, or those under way have been cleared.
        """
        if accumulate:
            raise Misuse(
                f"the stages of {self._job.name} step inside the schedule, so accumulate=True would come too late: "
                "compile the scheme with more micro-batches to an update"
            )
        if scaler is not None:
            raise Misuse(
                f"the stages of {self._job.name} step inside the schedule: when one finds infinite gradients, others "
                "have made the step already; train in bfloat16, which needs no scaler"
            )
        for number, stage in self._stages.items():
            if stage.disturbed is not None:
                raise Misuse(
                    f"the gradient of stages.{number}.{stage.disturbed} was taken away while its update is under way: "
                    "leave out zero_grad(), the stages of a stream clear their gradients themselves"
                )

    def give(self) -> Outcome | None:
        """One more update, whose mini-batch the feed has: the newest that is complete then, if there is one."""
        self._feed.require_unwritten_batches()
        self.given += 1
        self._driver.add_update()
        self._forget()
        return self._complete() if self.given - self._completed > self._job.lag else None

    def finish(self) -> None:
        """Completes the updates under way; a new run begins on the newest weights, which the parameters then show."""
        self._feed.require_unwritten_batches()
        self._driver.drain()
        self._forget()
        while self._completed < self.given:
            self._untold.append(self._complete())
        self._driver.begin(self.given)

    def count_from(self, updates: int) -> None:
        """From now on it is as if there had been so many updates; nothing is under way."""
        self.given = self._completed = self._fed = updates
        for stage in self._stages.values():
            stage.count_from(updates)
        self._driver.begin(updates)

    def untold(self) -> list[Outcome]:
        """The outcomes of what has been finished, once."""
        outcomes, self._untold = self._untold, []
        return outcomes

    def _complete(self) -> Outcome:
        update = self._completed
        self._completed += 1
        return self._outcomes.launch(update, added(stage.take_loss(update) for stage in self._stages.values()))

    def _forget(self) -> None:
        """Lets the mini-batches go of the updates for which every stage of this rank has stepped."""
        stepped = min((stage.updates for stage in self._stages.values()), default=self.given)
        for update in range(self._fed, stepped):
            self._feed.drop(update)
        self._fed = stepped
        self._feed.note_versions()
