"""Progress of a run: losses and times of each update, gathered on rank 0 while the next updates run."""

import argparse
import json
import math
import os
import stat
import sys
import threading
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from chimera_runtime.blame import UserCode
from chimera_runtime.data.mini_batch import ItemLoading, Triple
from chimera_runtime.errors import MISUSED, Misuse, NotFinite, PeerLost, Unwritable
from chimera_runtime.errors import tools as mistakes
from chimera_runtime.evaluate.evaluation import EvaluationLoss
from chimera_runtime.model.model import ModelFile
from chimera_runtime.pipeline import Pipeline
from chimera_runtime.program.job import Job, Place
from chimera_runtime.ranks.messages import unrecorded
from chimera_runtime.ranks.world import World
from chimera_runtime.tools.open.stdio import is_terminal, locked, show_line, write_atomically, write_line
from chimera_runtime.update.updates import NOTHING_CLEARED, Clearings, Outcome, Outcomes
from chimera_runtime.values import files
from chimera_runtime.values.losses import Tally
from chimera_runtime.values.nested import generators_kept

# ``--metrics``: file of losses and times, which rank 0 writes while updates end.

_NAMES = (b"loss", b"step_seconds", b"cpu_seconds")
_PAUSE = 1.0
_SHARE = 100
"""The file is written again after ``_PAUSE`` seconds at the earliest, and ``_SHARE`` times the time of the last write.
"""


class Metrics:
    """Writes the file of ``--metrics``: a JSON object with three lists, each with a number for every update.

    They are those of `add`. A number that is not finite is null. The file is complete at every moment: it is written
    under another name and renamed. Nothing is formatted twice, and writing takes at most a hundredth of the time,
    however long the run. A file that is not a regular one, such as a pipe, is written once, by `close`.

    Raises `Unwritable` if the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._given = path
        self._lock = threading.Lock()
        self._columns = [bytearray() for _ in _NAMES]
        self._count = self._saved = 0
        self._due = 0.0
        try:
            self._once = path.exists() and not path.is_file()
            self._path = path if self._once else Path(os.path.realpath(path))
            if path.is_dir() or (path.exists() and not os.access(path, os.W_OK)):
                path.open("ab").close()
            if not self._once:
                self._save()
        except OSError as error:
            raise mistakes.file_cannot_be_written(option="--metrics", path=path, why=error.strerror) from error

    def add(self, loss: float | None, step_seconds: float, cpu_seconds: float) -> None:
        """Adds the numbers of an update, and writes the file now and then; if that fails, it is tried again later."""
        numbers = (loss, step_seconds, cpu_seconds)
        with self._lock:
            for column, number in zip(self._columns, numbers, strict=True):
                shown = json.dumps(number if number is not None and math.isfinite(number) else None)
                column += f"{', ' if self._count else ''}{shown}".encode()
            self._count += 1
        if time.monotonic() >= self._due and not self._once:
            with suppress(OSError):
                self._save()

    def close(self) -> None:
        """Writes the numbers that are not yet in the file. Raises `Unwritable` if the file cannot be written."""
        try:
            self._save()
        except OSError as error:
            raise mistakes.metrics_are_incomplete(self._given, error.strerror, self._saved, self._count) from error

    def keep(self) -> None:
        """Writes as `close` does, without its errors; called when the run ends early.

        It does nothing for a pipe, which may have no reader and block.
        """
        if not self._once:
            with suppress(Unwritable):
                self.close()

    def _save(self) -> None:
        with self._lock:
            start = time.monotonic()
            lists = [b"".join((b'"', name, b'": [', c, b"]")) for name, c in zip(_NAMES, self._columns, strict=True)]
            write = self._path.write_bytes if self._once else partial(write_atomically, self._path)
            write(b"{" + b", ".join(lists) + b"}\n")
            self._saved = self._count
            end = time.monotonic()
            self._due = end + max(_PAUSE, _SHARE * (end - start))


# ``--tensorboard DIR``: the numbers of the log as curves of TensorBoard.

_FLUSHED_EVERY = 10
"""Seconds between writes to the disk."""


class TensorBoard:
    """Adds scalars to a directory by ``torch.utils.tensorboard``, in the background.

    Raises `Misuse` if the package tensorboard, which torch uses, is not installed. Raises `Unwritable` if the directory
    cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise mistakes.package_is_missing(error=f"{error}") from error
        self._directory = directory
        with self._refusing():
            self._writer: Any = SummaryWriter(str(directory), flush_secs=_FLUSHED_EVERY)

    def add(self, facts: Mapping[str, Any]) -> None:
        """Adds each number in a line of the log as a scalar. Raises `Unwritable` if a number cannot be written."""
        with self._refusing():
            for tag, number in scalars(facts):
                self._writer.add_scalar(tag, number, facts["update"])

    def keep(self) -> None:
        """Writes and ends as `close` does, without its errors; called when the run ends early."""
        with suppress(Unwritable):
            self.close()

    def close(self) -> None:
        """Writes the numbers that are still in memory, and ends; errors as in `add`."""
        with self._refusing():
            self._writer.close()

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise mistakes.file_cannot_be_written(
                option="--tensorboard", path=self._directory, why=error.strerror
            ) from error


def scalars(facts: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yields the numbers in a line of the log, each with its tag.

    The tag of a report is ``reports/accuracy``. The tag of a learning rate is ``learning_rates/0`` for stage 0, and
    ``learning_rates/0/1`` if its optimizer has several groups of parameters. A loss that is not a finite number is a
    point as well, which TensorBoard marks.
    """
    for name, value in facts.items():
        if isinstance(value, Mapping):
            for stages, rates in value.items():
                if not isinstance(rates, list):
                    yield f"{name}/{stages}", math.nan if rates is None else rates
                    continue
                for group, rate in enumerate(rates):
                    yield f"{name}/{stages}{f'/{group}' if len(rates) > 1 else ''}", rate
        elif name != "update" and value is not None:
            yield name, value


# ``--torch-profile DIR``: records a few updates by torch.profiler, with a range for each line of the program.

BEFORE = 1
"""Updates of a run that are left out: in the first one torch makes its caches."""

RECORDED = 3


MARKER = ".chimera-profile"


def prepare(store: Any, directory: Path) -> None:
    """Makes the directory. Raises `Misuse` if that fails, or another run records there."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if os.environ.get("LOCAL_RANK", "0") == "0" and not locked(directory / MARKER, store):
            raise mistakes.directory_cannot_be_written(
                option="--torch-profile", path=directory, why=mistakes.DIRECTORY_IS_OF_ANOTHER_RUN
            )
    except OSError as error:
        raise mistakes.directory_cannot_be_written(
            option="--torch-profile", path=directory, why=error.strerror
        ) from None


def torch_profile(directory: Path, rank: int, updates: int) -> torch.profiler.profile:
    """Makes a profiler that records the updates of a run from the second to the fourth; call ``step`` after each.

    Run the updates within the profiler as a context, which writes ``rank_<r>.json``, a Chrome trace for Perfetto or
    chrome://tracing.

    Raises `Misuse` if the run has fewer than two updates.
    """
    if updates <= BEFORE:
        raise mistakes.updates_are_too_few_to_profile(updates=updates)
    file = directory / f"rank_{rank}.json"
    return torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=0, warmup=BEFORE, active=RECORDED, repeat=1),
        on_trace_ready=lambda profile: profile.export_chrome_trace(str(file)),
    )


# ``--eval-every K``: mean loss over the held-out items of ``validation``, every K updates and at the end.

_COUNTING = UserCode("the length of validation()", MISUSED)
_EPOCH = -1
"""Epoch of the random numbers for held-out items; the training has none of this number."""


class Validation:
    """Evaluates the held-out items, each once; copy c of W has items c, c + W, ..

    Without ``--eval-every`` it is never due.

    Raises `Misuse` if the model file has no ``validation``, or ``validation`` does not return a map-style dataset with
    an item.
    """

    def __init__(self, model: ModelFile, options: argparse.Namespace, job: Job, place: Place) -> None:
        self._every: int | None = options.eval_every
        self._updates: int = options.steps
        self._size: int = options.micro_batch_size
        self._round = self._size * job.evaluated
        self._items: Sequence[int] = ()
        if self._every is None:
            return
        if model.validation is None:
            raise mistakes.validation_is_missing(file=f"{model.file}")
        dataset = model.held_out()
        with _COUNTING:
            is_map = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
            length = len(dataset) if is_map else 0
        if not length:
            raise Misuse(mistakes.VALIDATION_IS_NOT_MAP_STYLE)
        self._items = range(place.copy, length, place.copies)
        self._loading = ItemLoading(dataset, options.seed, model.collate, "validation()")

    def is_due(self, updates: int) -> bool:
        """Whether to evaluate after ``updates`` updates; the same on every rank."""
        return self._every is not None and (updates % self._every == 0 or updates == self._updates)

    def loss(self, pipe: Pipeline) -> EvaluationLoss:
        """Mean loss with the current weights; every rank calls it. Errors as of `Pipeline.evaluate`."""
        return pipe.evaluate(self._batches())

    def _batches(self) -> Iterator[Any]:
        """Yields the held-out items in rounds of an evaluation; items that fill no whole round come last, as one batch.

        Of a round a rank loads only the micro-batches that it needs; the last batch is loaded by all ranks.
        """
        whole = len(self._items) // self._round * self._round
        for start in range(0, whole, self._round):
            yield lambda micro, start=start: self._load(start + micro * self._size, self._size)
        if rest := len(self._items) - whole:
            with generators_kept():
                last = self._load(whole, rest)
            yield last

    def _load(self, start: int, count: int) -> Triple:
        items = self._items[start : start + count]
        return self._loading.collated(self._loading.items(_EPOCH, items), _EPOCH, start, items)


# ``--log-file``: a line of JSON for each update, written as soon as the update is over on all ranks.


class Log:
    """Appends lines to a file, each with one write: the file has whole lines, however the run ends.

    Raises `Unwritable` if the file cannot be opened, or another run appends to it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise mistakes.file_cannot_be_written(option="--log-file", path=path, why=error.strerror) from error
        with suppress(OSError):  # a file system without locks refuses nobody
            if stat.S_ISREG(os.fstat(self._file).st_mode) and not files.lock(self._file):
                os.close(self._file)
                raise mistakes.file_cannot_be_written(
                    option="--log-file", path=path, why=mistakes.LOG_IS_OF_ANOTHER_RUN
                )

    def add(self, content: dict[str, Any]) -> None:
        """Writes a line, with null for a number that is not finite. Raises `Unwritable` if it cannot be written."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in content.items()}
        try:
            os.write(self._file, json.dumps(finite).encode() + b"\n")
        except OSError as error:
            raise mistakes.file_cannot_be_written(option="--log-file", path=self._path, why=error.strerror) from error

    def close(self) -> None:
        """Closes the file; each line was written when it was added."""
        os.close(self._file)


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
            raise mistakes.loss_is_not_finite(update=self._count, loss=loss)

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
