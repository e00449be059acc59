"""Losses and times of each update, gathered on rank 0 while the next ones run."""

import math
import sys
import threading
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from chimera_runtime.errors import Misuse, NotFinite, PeerLost, Unwritable
from chimera_runtime.program.job import Job
from chimera_runtime.ranks.messages import unrecorded
from chimera_runtime.ranks.world import World
from chimera_runtime.tools.open.stdio import is_terminal, show_line, write_line
from chimera_runtime.tools.watch.log import Log
from chimera_runtime.tools.watch.metrics import Metrics
from chimera_runtime.tools.watch.tensorboard import TensorBoard
from chimera_runtime.update.outcome import Outcome, Outcomes
from chimera_runtime.values.losses import Tally


@dataclass(frozen=True)
class Sinks:
    """Where rank 0 puts what it learns of updates, beside its lines; ``items`` are those of an update, over all copies.

    With ``stop_on_nan`` a loss that is no finite number is an error. At the peak of all devices an update would take
    ``peak_seconds``, if that is known.
    """

    metrics: Metrics | None = None
    log: Log | None = None
    items: int = 0
    stop_on_nan: bool = False
    board: TensorBoard | None = None
    peak_seconds: float | None = None


_NO_SINKS = Sinks()

_RECENT = 0.1
"""What the newest update counts in the duration of one, by which the remaining time is judged."""

_SHOWN_EVERY = 0.1
"""Seconds: an eye sees no more lines than that."""

_SUMMED = 16
"""Of so many updates that overlap one has a sum of its loss over the ranks."""

_UNSUMMED = array("d")
"""What the others have in place of it."""

Floats = tuple[float, ...]


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
        self._terminal = is_terminal(sys.stdout)
        self._line: str | None = None
        self._shown = -math.inf
        self._duration: float | None = None
        self._group = world.control_group.group
        self._updates = updates
        self._rehearsal = rehearsal
        self._apart = rehearsal and not world.job.period
        self._first = world.place.rank == 0
        job = world.job
        self._together = gathered_together(job)
        self._ended = before
        self._marks: deque[tuple[float, float]] = deque()
        self._facts: list[tuple[float, ...]] = []
        self._telling = threading.Lock()
        self._pending: deque[tuple[dist.Work, list[torch.Tensor] | None, torch.Tensor]] = deque()
        self._start = 0.0
        self._cpu = 0.0
        self._before = 0.0
        self._count = before

    def begin(self) -> None:
        """An update begins now, or all of those that overlap; in a rehearsal at the same moment everywhere."""
        if self._rehearsal:
            self._world.control_group.barrier("for the step to begin")
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
        work = unrecorded(dist.gather, facts, room, dst=0, group=self._group, async_op=True)
        assert work is not None
        self._pending.append((work, room, facts))
        with self._telling:
            self._tell_gathered()

    def _tell_gathered(self) -> None:
        while self._pending and self._pending[0][0].is_completed():
            self._read(*self._pending.popleft())

    def keep(self) -> None:
        """As `finish`, as far as all ranks have said it; for another thread, when this rank is about to end."""
        if not self._telling.acquire(timeout=1):
            return
        try:
            with suppress(PeerLost, NotFinite):
                self._tell_gathered()
        finally:
            self._telling.release()

    def finish(self) -> None:
        """Waits for what is still under way; there may have been fewer updates than planned."""
        if self._facts:
            self._gather()
        with self._telling:
            while self._pending:
                self._read(*self._pending.popleft())
        if self._line is not None:
            self.write_line(self._line)

    def evaluated(self, held_out: float) -> None:
        """The updates so far have been judged on held-out items; the time that this took is none of an update's.

        Every rank calls it, and has no update under way.
        """
        self.finish()
        self._before, self._cpu = time.time(), time.process_time()
        if not self._first:
            return
        for sink in (self._sinks.log, self._sinks.board):
            if sink is not None:
                sink.add({"update": self._count, "held_out": held_out})
        self.write_line(f"step {self._number}  held out {held_out:.6f}")

    def _read(self, work: dist.Work, room: list[torch.Tensor] | None, _: torch.Tensor) -> None:
        self._world.control_group.settle(work, "for the losses and times of a step")
        if room is None:
            self._details.clear()
            return
        for update in zip(*(facts.tolist() for facts in room), strict=True):
            self._tell(*zip(*update, strict=True))

    def _tell(self, starts: Floats, ends: Floats, cpu: Floats, *tallies: Floats) -> None:
        """One update, by its facts: each is a number of every rank.

        Raises
        ------
        NotFinite
            If its loss is no finite number, and that was asked for.
        """
        end = max(ends)
        seconds = end - (min(starts) if self._apart else self._before)
        loss = None if self._rehearsal else Tally.of(map(sum, tallies)).mean
        self._before = end
        details, sinks = self._details.popleft(), self._sinks
        if sinks.metrics is not None:
            sinks.metrics.add(loss, seconds, max(cpu))
        self._count += 1
        speed = sinks.items / seconds if seconds else math.inf
        facts = {"update": self._count, "loss": loss, **details, "seconds": seconds, "items_per_second": speed}
        if sinks.peak_seconds is not None and seconds:
            facts["share_of_peak"] = sinks.peak_seconds / seconds
        for sink in (sinks.log, sinks.board):
            if sink is not None:
                sink.add(facts)
        self._duration = seconds if self._duration is None else (1 - _RECENT) * self._duration + _RECENT * seconds
        self._print(loss, seconds, facts.get("share_of_peak"))
        if sinks.stop_on_nan and loss is not None and not math.isfinite(loss):
            raise NotFinite(f"--stop-on-nan: the loss of update {self._count} is {loss}")

    @property
    def _number(self) -> str:
        return f"{self._count:>{len(str(self._updates))}}/{self._updates}"

    def _print(self, loss: float | None, seconds: float, share: float | None) -> None:
        """On a terminal the line takes the place of the one before, elsewhere it comes below that."""
        assert self._duration is not None
        parts = [f"step {self._number}", *([] if loss is None else [f"loss {loss:.6f}"]), f"{seconds:.3f} s"]
        if seconds:
            parts.append(f"{self._sinks.items / seconds:.4g} items/s")
        if share is not None:
            parts.append(f"{100 * share:.3g}% of peak")
        if self._count < self._updates:
            parts.append(f"{in_hours((self._updates - self._count) * self._duration)} left")
        self._line = "  ".join(parts)
        if not self._terminal:
            self.write_line(self._line)
        elif time.monotonic() - self._shown >= _SHOWN_EVERY:
            self._shown = time.monotonic()
            self._put(show_line, self._line)

    def write_line(self, line: str) -> None:
        """A line that stays, also on a terminal; one that cannot be written is told of by `close`."""
        self._put(write_line, line)
        self._line = None

    def _put(self, put: Callable[[str], None], line: str) -> None:
        """What cannot be written is no reason to stop training."""
        if self._silenced is None:
            try:
                put(line)
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
        if self._sinks.board is not None:
            self._sinks.board.close()
        if self._silenced is not None:
            raise self._silenced


def in_hours(seconds: float) -> str:
    """A duration as in ``0:07``, ``12:30`` or ``3:07:00``: minutes and seconds, hours before them if there are any."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


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
        return PartialOutcome(update, tally, self._control_group, self._counted, self._names, _UNSUMMED, None)
