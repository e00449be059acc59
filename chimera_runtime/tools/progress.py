"""Losses and times of each update, gathered on rank 0 while the next ones run."""

import math
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from chimera_runtime.errors import Misuse
from chimera_runtime.losses import Tally
from chimera_runtime.outcome import Outcome, Outcomes
from chimera_runtime.program import Job
from chimera_runtime.tools.log import Log
from chimera_runtime.tools.metrics import Metrics
from chimera_runtime.tools.streams import Unwritable, say
from chimera_runtime.world import World


class NotFinite(Exception):
    """The loss of an update is no finite number."""


@dataclass(frozen=True)
class Sinks:
    """Where rank 0 puts what it learns of updates, beside its lines; ``items`` are those of an update, over all copies.

    With ``stop_on_nan`` a loss that is no finite number is an error.
    """

    metrics: Metrics | None = None
    log: Log | None = None
    items: int = 0
    stop_on_nan: bool = False


_NO_SINKS = Sinks()


_SUMMED = 16
"""Of so many updates that overlap one has a sum of its loss over the ranks."""

_UNSUMMED = torch.empty(0)
"""What the others have in place of it."""


def gathered_together(job: Job) -> int:
    """Of how many updates the losses are gathered at once: of those that a worker has a part in at any time."""
    return max(1, job.workers // job.micro_batches) if job.period else 1


class Progress:
    """What rank 0 prints and writes; on every rank, what it contributes.

    Nothing in the loop waits for a number: a gather that is complete is read at the end of a later update. Updates that
    overlap begin together, and each lasts from the end of the one before. Of those a worker has a part in several at
    any time, so as many are gathered together: with an update for each micro-batch, a gather for each would take longer
    than all messages. Their losses are told later than they end, so `mark` notes when that was.

    Parameters
    ----------
    before
        How many of the updates there have been already.
    """

    def __init__(self, world: World, updates: int, rehearsal: bool, sinks: Sinks = _NO_SINKS, before: int = 0) -> None:
        self._world = world
        self._sinks = sinks
        self._details: deque[dict[str, Any]] = deque()
        self._silenced: Unwritable | None = None
        self._group = world.chat
        self._updates = updates
        self._rehearsal = rehearsal
        self._apart = rehearsal and not world.job.period
        self._first = world.place.rank == 0
        job = world.job
        self._together = gathered_together(job)
        self._ended = before
        self._marks: deque[tuple[float, float]] = deque()
        self._facts: list[tuple[float, ...]] = []
        self._pending: deque[tuple[dist.Work, list[torch.Tensor] | None, torch.Tensor]] = deque()
        self._start = 0.0
        self._cpu = 0.0
        self._before = 0.0
        self._count = before

    def begin(self) -> None:
        """An update begins now, or all of those that overlap; in a rehearsal at the same moment everywhere."""
        if self._rehearsal:
            self._world.meet("for the step to begin")
        self._cpu = time.process_time()
        self._start = time.time()
        self._before = self._before or self._start

    def mark(self) -> None:
        """An update is over on this rank, the first for which `end` has not been called and this neither."""
        self._marks.append((time.time(), time.process_time()))

    def end(self, tally: Tally, **details: Any) -> None:
        """An update is over on this rank, now or since `mark`; the rank has computed a part of its losses.

        The details go to the log, those that are not None.
        """
        end, cpu = self._marks.popleft() if self._marks else (time.time(), time.process_time())
        self._details.append({name: value for name, value in details.items() if value is not None})
        self._facts.append((self._start, end, cpu - self._cpu, *tally.numbers()))
        self._cpu = cpu
        self._ended += 1
        if len(self._facts) == self._together or self._ended == self._updates:
            self._gather()

    def _gather(self) -> None:
        facts, self._facts = torch.tensor(self._facts, dtype=torch.float64), []
        room = [torch.empty_like(facts) for _ in self._world.place.ranks] if self._first else None
        work = dist.gather(facts, room, dst=0, group=self._group, async_op=True)
        assert work is not None
        self._pending.append((work, room, facts))
        while self._pending and self._pending[0][0].is_completed():
            self._read(*self._pending.popleft())

    def finish(self) -> None:
        """Waits for what is still under way; there may have been fewer updates than planned."""
        if self._facts:
            self._gather()
        while self._pending:
            self._read(*self._pending.popleft())

    def _read(self, work: dist.Work, room: list[torch.Tensor] | None, _: torch.Tensor) -> None:
        self._world.settle(work, "for the losses and times of a step")
        if room is None:
            self._details.clear()
            return
        for update in torch.stack(room, dim=1):
            self._tell(*update.unbind(dim=1))

    def _tell(self, starts: torch.Tensor, ends: torch.Tensor, cpu: torch.Tensor, *tallies: torch.Tensor) -> None:
        """One update, of which every rank says the same facts.

        Raises
        ------
        NotFinite
            If its loss is no finite number, and that was asked for.
        """
        end = float(ends.max())
        seconds = end - (float(starts.min()) if self._apart else self._before)
        loss = None if self._rehearsal else Tally.of(float(numbers.sum()) for numbers in tallies).mean
        self._before = end
        details, sinks = self._details.popleft(), self._sinks
        if sinks.metrics is not None:
            sinks.metrics.add(loss, seconds, float(cpu.max()))
        self._count += 1
        if sinks.log is not None:
            speed = sinks.items / seconds if seconds else math.inf
            sinks.log.add(
                {"update": self._count, "loss": loss, **details, "seconds": seconds, "items_per_second": speed}
            )
        self._print(loss, seconds)
        if sinks.stop_on_nan and loss is not None and not math.isfinite(loss):
            raise NotFinite(f"--stop-on-nan: the loss of update {self._count} is {loss}")

    def _print(self, loss: float | None, seconds: float) -> None:
        """A line that cannot be written is no reason to stop training."""
        number = f"{self._count:>{len(str(self._updates))}}/{self._updates}"
        if self._silenced is None:
            try:
                say(f"step {number}{'' if loss is None else f'  loss {loss:.6f}'}  {seconds:.3f} s")
            except Unwritable as error:
                self._silenced = error

    def close(self) -> None:
        """Nothing more is to come.

        Raises
        ------
        Unwritable
            If not everything could be written.
        """
        if self._sinks.metrics is not None:
            self._sinks.metrics.close()
        if self._sinks.log is not None:
            self._sinks.log.close()
        if self._silenced is not None:
            raise self._silenced


class UpdateEnds:
    """Marks the end of each update that overlaps with others: when every stage of this rank has made its step for it.

    It holds no stage, and a stage may hold it: a cycle of references would keep the communicators, and their threads,
    until the interpreter ends.
    """

    def __init__(self, progress: Progress, stages: int) -> None:
        self._progress = progress
        self._stages = stages
        self._steps: Counter[int] = Counter()

    def stepped(self, stage: Any) -> None:
        """To be called after each step of each `Stage`."""
        update = stage.updates - 1
        self._steps[update] += 1
        if self._steps[update] == self._stages:
            del self._steps[update]
            self._progress.mark()


class PartialOutcome(Outcome):
    """An outcome that knows what this rank has computed, and nothing of other ranks."""

    @property
    def is_last(self) -> bool:
        """Not known: a later outcome says it."""
        return False

    def settle(self) -> None:
        """Raises Misuse: there is no sum."""
        raise Misuse(
            "the loss of an update is gathered on rank 0 by the progress of train.py, which writes it to --metrics and "
            "--log-file: to read outcome.loss leave out hooks="
        )


class PartialOutcomes(Outcomes):
    """Outcomes for a `Progress`, which gathers the losses of several updates at once; a sum for each would cost more.

    One of 16 updates has a sum, by which ranks hear that they are to stop. Parameters as of `Outcomes`.
    """

    def launch(self, update: int, tally: Tally) -> Outcome:
        """The outcome of an update on this rank; of most nothing is sent."""
        if (update + 1) % _SUMMED == 0:
            return super().launch(update, tally)
        return PartialOutcome(update, tally, self._world, self._counted, self._names, _UNSUMMED, None)
