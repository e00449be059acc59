"""Progress of a run: losses and times of each update, gathered on rank 0 while the next updates run."""

import math
import sys
import threading
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from chimera_runtime.errors import Misuse, NotFinite, PeerLost, Unwritable
from chimera_runtime.errors import tools as mistakes
from chimera_runtime.evaluate.evaluation import EvaluationLoss
from chimera_runtime.program.job import Job
from chimera_runtime.ranks.messages import unrecorded
from chimera_runtime.ranks.world import World
from chimera_runtime.tools.open.stdio import is_terminal, show_line, write_line
from chimera_runtime.tools.watch.log import Log
from chimera_runtime.tools.watch.metrics import Metrics
from chimera_runtime.tools.watch.tensorboard import TensorBoard
from chimera_runtime.update.outcome import NOTHING_CLEARED, Clearings, Outcome, Outcomes
from chimera_runtime.values.losses import Tally


@dataclass(frozen=True)
class Sinks:
    """Files to which rank 0 writes the facts of updates, and what is known of every update beforehand.

    ``items`` is the number of items of an update, in all copies. ``stop_on_nan`` says that a loss which is not a finite
    number is an error. ``peak_seconds`` is how long an update would take at the peak of all devices; None if not known.
    """

    metrics: Metrics | None = None
    log: Log | None = None
    items: int = 0
    stop_on_nan: bool = False
    board: TensorBoard | None = None
    peak_seconds: float | None = None


_NO_SINKS = Sinks()

_RECENT = 0.1
"""Weight of the newest update in the mean duration of an update, which gives the remaining time."""

_SHOWN_EVERY = 0.1
"""Seconds between lines on a terminal; faster ones could not be read."""

_SUMMED = 16
"""One in this number of overlapping updates has a sum of its loss over the ranks."""

_UNSUMMED = array("d")
"""Placeholder for the sum in all other updates."""

Floats = tuple[float, ...]


def gathered_together(job: Job) -> int:
    """Number of updates whose losses are gathered in one message: as many as a worker works on at the same time."""
    return max(1, job.workers // job.micro_batches) if job.period else 1


class Progress:
    """Prints and writes the facts of updates on rank 0; on the other ranks, sends their part of the facts.

    Nothing in the loop waits for a number: a gather that is complete is read at the end of a later update.

    Updates that overlap count as begun together, and each lasts from the end of the update before. A worker works on
    several at the same time, and their facts are gathered in one message: if each micro-batch is an update, a gather
    for each would take longer than all messages. `end` is called some time after the end of such an update, so `mark`
    notes the time. ``before`` is the number of updates before this run.
    """

    def __init__(self, world: World, updates: int, rehearsal: bool, sinks: Sinks = _NO_SINKS, before: int = 0) -> None:
        self._world = world
        self._sinks = sinks
        self._details: deque[dict[str, Any]] = deque()
        self._failed: dict[Callable[..., None], Unwritable] = {}  # outputs that could not be written
        self._terminal = is_terminal(sys.stdout)
        self._line: str | None = None
        self._shown = -math.inf
        self._duration: float | None = None
        self._updates = updates
        self._rehearsal = rehearsal
        self._apart = rehearsal and not world.job.period
        self._first = world.place.rank == 0
        job = world.job
        self._together = gathered_together(job)
        self._ended = before
        self._marks: deque[tuple[float, float]] = deque()
        self._facts: list[tuple[float, ...]] = []
        self._reporting = threading.Lock()
        self._pending: deque[tuple[dist.Work, list[torch.Tensor] | None, torch.Tensor]] = deque()
        self._start = 0.0
        self._cpu = 0.0
        self._before = 0.0
        self._count = before

    def begin(self) -> None:
        """Begins an update, or all updates if they overlap; in a rehearsal at the same moment on all ranks."""
        if self._rehearsal:
            self._world.control_group.barrier("for the step to begin")
        self._cpu = time.process_time()
        self._start = time.time()
        self._before = self._before or self._start

    def mark(self) -> None:
        """Notes the time at which the next update has ended on this rank; a later `end` uses it."""
        self._marks.append((time.time(), time.process_time()))

    def end(self, tally: Tally, outcome: Outcome | None = None, **details: Any) -> None:
        """Adds the facts of an update that has ended on this rank, now or at the time of its `mark`.

        ``tally`` is this rank's part of the losses, ``outcome`` has what was reported. ``details`` go to the log,
        except for those that are None.
        """
        end, cpu = self._marks.popleft() if self._marks else (time.time(), time.process_time())
        details["reports"] = outcome
        self._details.append({name: value for name, value in details.items() if value is not None})
        self._facts.append((self._start, end, cpu - self._cpu, *tally.numbers()))
        self._cpu = cpu
        self._ended += 1
        if len(self._facts) == self._together or self._ended == self._updates:
            self._gather()

    def _gather(self) -> None:
        facts, self._facts = torch.tensor(self._facts, dtype=torch.float64), []
        room = [torch.empty_like(facts) for _ in self._world.place.ranks] if self._first else None
        work = unrecorded(dist.gather, facts, room, dst=0, group=self._world.control_group.group, async_op=True)
        assert work is not None
        self._pending.append((work, room, facts))
        with self._reporting:
            self._report_gathered()

    def _report_gathered(self) -> None:
        while self._pending and self._pending[0][0].is_completed():
            self._read(*self._pending.popleft())

    def keep(self) -> None:
        """Reports, without waiting, the updates that all ranks have ended; for another thread, before the end."""
        if not self._reporting.acquire(timeout=1):
            return
        try:
            with suppress(PeerLost, NotFinite):
                self._report_gathered()
        finally:
            self._reporting.release()

    def finish(self) -> None:
        """Waits for the facts of all updates so far, of which there may be fewer than planned, and reports them."""
        if self._facts:
            self._gather()
        with self._reporting:
            while self._pending:
                self._read(*self._pending.popleft())
        if self._line is not None:
            self.write_line(self._line)

    def evaluated(self, held_out: float) -> None:
        """Reports the loss on held-out items after the updates so far; no update's time includes the evaluation.

        Every rank calls it, and has no update under way.
        """
        self.finish()
        self._before, self._cpu = time.time(), time.process_time()
        if not self._first:
            return
        reports = finite(held_out.reports) if isinstance(held_out, EvaluationLoss) else {}
        of_reports = {"held_out_reports": reports} if reports else {}
        self._add({"update": self._count, "held_out": float(held_out), **of_reports})
        self.write_line("  ".join([f"step {self._number}", f"held out {held_out:.6f}", *in_words(reports)]))

    def _read(self, work: dist.Work, room: list[torch.Tensor] | None, _: torch.Tensor) -> None:
        self._world.control_group.settle(work, "for the losses and times of a step")
        if room is None:
            self._details.clear()
            return
        for update in zip(*(facts.tolist() for facts in room), strict=True):
            self._report(*zip(*update, strict=True))

    def _report(self, starts: Floats, ends: Floats, cpu: Floats, *tallies: Floats) -> None:
        """Reports one update; each argument has a number from every rank.

        They are when it started and ended, its seconds of processor time, and the numbers of a `Tally` of its losses.

        Raises `NotFinite` if the loss is not a finite number, with ``--stop-on-nan``.
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
        if (outcome := details.pop("reports", None)) is not None and (reports := finite(outcome.reports)):
            details["reports"] = reports
        facts = {"update": self._count, "loss": loss, **details, "seconds": seconds, "items_per_second": speed}
        if sinks.peak_seconds is not None and seconds:
            facts["share_of_peak"] = sinks.peak_seconds / seconds
        self._add(facts)
        self._duration = seconds if self._duration is None else (1 - _RECENT) * self._duration + _RECENT * seconds
        self._print(loss, seconds, facts.get("share_of_peak"), details.get("reports", {}))
        if sinks.stop_on_nan and loss is not None and not math.isfinite(loss):
            raise mistakes.loss_is_not_finite(self._count, loss)

    @property
    def _number(self) -> str:
        return f"{self._count:>{len(str(self._updates))}}/{self._updates}"

    def _print(
        self, loss: float | None, seconds: float, share: float | None, reports: Mapping[str, float | None]
    ) -> None:
        assert self._duration is not None
        losses = [] if loss is None else [f"loss {loss:.6f}"]
        parts = [f"step {self._number}", *losses, *in_words(reports), f"{seconds:.3f} s"]
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
        """Writes a line that stays, also on a terminal; if it cannot be written, `close` raises the error."""
        self._put(write_line, line)
        self._line = None

    def _add(self, facts: dict[str, Any]) -> None:
        for sink in (self._sinks.log, self._sinks.board):
            if sink is not None:
                self._put(sink.add, facts)

    def _put(self, put: Callable[..., None], *content: Any) -> None:
        """Calls ``put`` unless it has failed before; training continues after an error, which `close` raises."""
        if put not in self._failed:
            try:
                put(*content)
            except Unwritable as error:
                self._failed[put] = error

    def close(self) -> None:
        """Closes the files. Raises `Unwritable` if a file, or standard output, could not be written completely."""
        for sink in (self._sinks.metrics, self._sinks.log, self._sinks.board):
            if sink is not None:
                self._put(sink.close)
        for error in self._failed.values():
            raise error


def finite(reports: Mapping[str, float]) -> dict[str, float | None]:
    """Reported numbers, with None for one that is not finite."""
    return {name: value if math.isfinite(value) else None for name, value in reports.items()}


def in_words(reports: Mapping[str, float | None]) -> Iterator[str]:
    """Yields each report as text, such as ``accuracy 0.9375``."""
    return (f"{name} {math.nan if value is None else value:.4g}" for name, value in reports.items())


def in_hours(seconds: float) -> str:
    """Duration in minutes and seconds, or hours before them, as in ``0:07``, ``12:30`` or ``3:07:00``."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class UpdateEnds:
    """Marks the end of each update that overlaps with others, when all stages of this rank have stepped for it.

    Stages refer to this object, and it does not refer to them: a cycle of references would keep the communicators and
    their threads until the interpreter ends.
    """

    def __init__(self, progress: Progress, stages: int) -> None:
        self._progress = progress
        self._stages = stages
        self._steps: Counter[int] = Counter()

    def stepped(self, stage: Any) -> None:
        """Counts a step; called after each step of each `Stage`."""
        update = stage.updates - 1
        self._steps[update] += 1
        if self._steps[update] == self._stages:
            del self._steps[update]
            self._progress.mark()


class PartialOutcome(Outcome):
    """Outcome that has the losses of this rank alone, not their sum over the ranks."""

    @property
    def reports(self) -> dict[str, float]:
        """Returns nothing: only outcomes that have a sum know what other ranks report."""
        return {}

    @property
    def is_last(self) -> bool:
        """Returns False: a later outcome, which has a sum, shows the end."""
        return False

    def settle(self) -> None:
        """Raises `Misuse`: there is no sum over the ranks to wait for, as `Progress` gathers the losses."""
        raise Misuse(mistakes.LOSS_IS_GATHERED_ELSEWHERE)


class PartialOutcomes(Outcomes):
    """Makes outcomes without a sum over the ranks: a `Progress` gathers the losses of several updates at less cost.

    Every 16th update still has a sum, from which ranks learn that they must stop. Parameters are those of `Outcomes`.
    """

    def launch(self, update: int, tally: Tally, clearings: Clearings = NOTHING_CLEARED) -> Outcome:
        """Makes the outcome of an update on this rank; for most updates without a message."""
        if (update + 1) % _SUMMED == 0:
            return super().launch(update, tally, clearings)
        return PartialOutcome(update, tally, self.control_group, self.counted, self.names, _UNSUMMED, None)
