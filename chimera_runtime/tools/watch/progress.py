"""Progress of a run: losses and times of each update, gathered on rank 0 while the next updates run."""

import argparse
import json
import math
import os
import stat
import sys
import threading
import time
from abc import ABC, abstractmethod
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
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
from chimera_runtime.tools.open.stdio import (
    is_terminal,
    locked,
    show_line,
    unwritable_errors,
    write_atomically,
    write_line,
)
from chimera_runtime.update.updates import NOTHING_CLEARED, Clearings, Outcome, Outcomes
from chimera_runtime.values import files
from chimera_runtime.values.losses import Tally
from chimera_runtime.values.nested import generators_kept

# Sinks: the outputs to which rank 0 adds the facts of each update.


class Sink(ABC):
    """Output of an option such as ``--log-file``. Raises `Unwritable` if ``path`` cannot be written."""

    def __init__(self, option: str, path: Path) -> None:
        self._given = path
        self._unwritable_errors = partial(unwritable_errors, option, path)

    @abstractmethod
    def add(self, facts: Mapping[str, Any], cpu_seconds: float | None) -> None:
        """Adds the facts of an update, or of an evaluation after it, which has no ``cpu_seconds``."""

    def keep(self) -> None:
        """Writes what is in memory, without an error; called when the run ends early."""
        with suppress(Unwritable):
            self.close()

    @abstractmethod
    def close(self) -> None:
        """Writes what is in memory, and ends. Raises `Unwritable` if that fails."""


_NAMES = ("loss", "step_seconds", "cpu_seconds")
_PAUSE = 1.0
_SHARE = 100
"""The file is written again after ``_PAUSE`` seconds at the earliest, and ``_SHARE`` times the time of the last write.
"""


class Metrics(Sink):
    """The file of ``--metrics``: a JSON object with three lists, each with a number for every update.

    A number that is not finite is null. The file is complete at every moment: it is written under another name and
    renamed. Nothing is formatted twice, and writing takes at most a hundredth of the time, however long the run. A file
    that is not a regular one, such as a pipe, is written once, by `close`.
    """

    def __init__(self, path: Path) -> None:
        super().__init__("--metrics", path)
        self._lock = threading.Lock()
        self._columns: list[list[str]] = [[] for _ in _NAMES]
        self._saved = 0
        self._due = 0.0
        with self._unwritable_errors():
            self._once = path.exists() and not path.is_file()
            self._path = path if self._once else Path(os.path.realpath(path))
            if path.is_dir() or (path.exists() and not os.access(path, os.W_OK)):
                path.open("ab").close()
            if not self._once:
                self._save()

    def add(self, facts: Mapping[str, Any], cpu_seconds: float | None) -> None:
        """Adds the numbers of an update, and writes the file now and then; if that fails, it is tried again later."""
        if cpu_seconds is None:
            return
        with self._lock:
            for column, number in zip(self._columns, (facts["loss"], facts["seconds"], cpu_seconds), strict=True):
                column.append(json.dumps(number if number is not None and math.isfinite(number) else None))
        if time.monotonic() >= self._due and not self._once:
            with suppress(OSError):
                self._save()

    def keep(self) -> None:
        """Writes as `close` does, without its errors; a pipe is left out, which may have no reader and block."""
        if not self._once:
            super().keep()

    def close(self) -> None:
        """Writes the numbers that are not yet in the file. Raises `Unwritable` if the file cannot be written."""
        try:
            self._save()
        except OSError as error:
            updates = len(self._columns[0])
            raise mistakes.metrics_are_incomplete(self._given, error.strerror, self._saved, updates) from error

    def _save(self) -> None:
        with self._lock:
            start = time.monotonic()
            lists = [f'"{name}": [{", ".join(c)}]' for name, c in zip(_NAMES, self._columns, strict=True)]
            write = self._path.write_bytes if self._once else partial(write_atomically, self._path)
            write(f"{{{', '.join(lists)}}}\n".encode())
            self._saved = len(self._columns[0])
            end = time.monotonic()
            self._due = end + max(_PAUSE, _SHARE * (end - start))


class Log(Sink):
    """Appends a line of JSON for each update to the file of ``--log-file``: whole lines, however the run ends.

    Raises `Unwritable` also if another run appends to the file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__("--log-file", path)
        with self._unwritable_errors():
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        with suppress(OSError):  # a file system without locks refuses nobody
            if stat.S_ISREG(os.fstat(self._file).st_mode) and not files.lock(self._file):
                os.close(self._file)
                raise mistakes.file_cannot_be_written(
                    option="--log-file", path=path, why=mistakes.LOG_IS_OF_ANOTHER_RUN
                )

    def add(self, facts: Mapping[str, Any], cpu_seconds: float | None = None) -> None:
        """Writes a line, at once and with null for a number that is not finite."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in facts.items()}
        with self._unwritable_errors():
            os.write(self._file, json.dumps(finite).encode() + b"\n")

    def keep(self) -> None:
        """Does nothing: each line is written at once."""

    def close(self) -> None:
        """Closes the file; each line was written when it was added."""
        os.close(self._file)


_FLUSHED_EVERY = 10
"""Seconds between writes to the disk."""


class TensorBoard(Sink):
    """The numbers of the log as curves in the directory of ``--tensorboard``, written in the background.

    Raises `Misuse` if the package tensorboard, which torch uses, is not installed.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__("--tensorboard", directory)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise mistakes.package_is_missing(error=f"{error}") from error
        with self._unwritable_errors():
            self._writer: Any = SummaryWriter(str(directory), flush_secs=_FLUSHED_EVERY)

    def add(self, facts: Mapping[str, Any], cpu_seconds: float | None = None) -> None:
        """Adds each number in a line of the log as a scalar."""
        with self._unwritable_errors():
            for tag, number in scalars(facts):
                self._writer.add_scalar(tag, number, facts["update"])

    def close(self) -> None:
        """Writes the numbers that are still in memory, and ends."""
        with self._unwritable_errors():
            self._writer.close()


def scalars(facts: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yields the numbers in a line of the log with their tags, as ``reports/accuracy``, ``learning_rates/0`` for stage
    0, or ``learning_rates/0/1`` for one of several groups of parameters. A loss that is not finite is a point as well.
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
    with unwritable_errors("--torch-profile", directory, mistakes.directory_cannot_be_written):
        directory.mkdir(parents=True, exist_ok=True)
        if os.environ.get("LOCAL_RANK", "0") == "0" and not locked(directory / MARKER, store):
            raise mistakes.directory_cannot_be_written(
                option="--torch-profile", path=directory, why=mistakes.DIRECTORY_IS_OF_ANOTHER_RUN
            )


def torch_profile(directory: Path, rank: int, updates: int) -> torch.profiler.profile:
    """Makes a profiler that records the second to the fourth update of a run; call ``step`` after each. Its context
    writes ``rank_<r>.json``, a Chrome trace for Perfetto or chrome://tracing. Raises `Misuse` if the run has fewer than
    two updates.
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
    """Evaluates the held-out items, each once; copy c of W has items c, c + W, .. Without ``--eval-every`` it is never
    due.

    Raises `Misuse` if ``validation`` of the model file is missing, or returns no map-style dataset with an item.
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
        """Yields the held-out items in rounds of an evaluation, loaded by micro-batch; items that fill no whole round
        come last, as one batch that all ranks load.
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


@dataclass(frozen=True)
class Sinks:
    """The sinks of rank 0, and facts of every update: its ``items``, and seconds at the peak of all devices, if known.
    If ``stop_on_nan``, a loss that is not finite is an error.
    """

    sinks: Sequence[Sink] = ()
    items: int = 0
    stop_on_nan: bool = False
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


class Progress:
    """Prints and writes the facts of updates on rank 0, where the other ranks send their part, after ``before``
    updates.

    Nothing in the loop waits for a number: a gather that is complete is read at the end of a later update. Updates that
    overlap count as begun together, and each lasts from the end of the one before to its `mark`; those that a worker
    works on at the same time are gathered in one message.
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
        self._together = max(1, world.job.workers // world.job.micro_batches) if world.job.period else 1
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
        """Adds the facts of an update that has ended on this rank, now or at the time of its `mark`: this rank's
        ``tally`` of losses, reports of ``outcome``, and ``details`` for the log, except for those that are None.
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
        """Reports the loss on held-out items after the updates so far; no update's time includes it. Every rank calls
        it, with no update under way.
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
        """Reports one update, with a number of each argument from every rank; ``tallies`` are the numbers of a `Tally`.
        Raises `NotFinite` if the loss is not finite, with ``--stop-on-nan``.
        """
        end = max(ends)
        seconds = end - (min(starts) if self._apart else self._before)
        loss = None if self._rehearsal else Tally.of(map(sum, tallies)).mean
        self._before = end
        details, sinks = self._details.popleft(), self._sinks
        self._count += 1
        speed = sinks.items / seconds if seconds else math.inf
        if (outcome := details.pop("reports", None)) is not None and (reports := finite(outcome.reports)):
            details["reports"] = reports
        facts = {"update": self._count, "loss": loss, **details, "seconds": seconds, "items_per_second": speed}
        if sinks.peak_seconds is not None and seconds:
            facts["share_of_peak"] = sinks.peak_seconds / seconds
        self._add(facts, max(cpu))
        self._print(facts)
        if sinks.stop_on_nan and loss is not None and not math.isfinite(loss):
            raise mistakes.loss_is_not_finite(update=self._count, loss=loss)

    @property
    def _number(self) -> str:
        return f"{self._count:>{len(str(self._updates))}}/{self._updates}"

    def _print(self, facts: Mapping[str, Any]) -> None:
        loss, seconds = facts["loss"], facts["seconds"]
        self._duration = seconds if self._duration is None else (1 - _RECENT) * self._duration + _RECENT * seconds
        losses = [] if loss is None else [f"loss {loss:.6f}"]
        parts = [f"step {self._number}", *losses, *in_words(facts.get("reports", {})), f"{seconds:.3f} s"]
        if seconds:
            parts.append(f"{facts['items_per_second']:.4g} items/s")
        if "share_of_peak" in facts:
            parts.append(f"{100 * facts['share_of_peak']:.3g}% of peak")
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

    def _add(self, facts: Mapping[str, Any], cpu_seconds: float | None = None) -> None:
        for sink in self._sinks.sinks:
            self._put(sink.add, facts, cpu_seconds)

    def _put(self, put: Callable[..., None], *content: Any) -> None:
        """Calls ``put`` unless it has failed before; training continues after an error, which `close` raises."""
        if put not in self._failed:
            try:
                put(*content)
            except Unwritable as error:
                self._failed[put] = error

    def close(self) -> None:
        """Closes the files. Raises `Unwritable` if a file, or standard output, could not be written completely."""
        for sink in self._sinks.sinks:
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
    """Marks the end of each update that overlaps with others, when all stages of this rank have stepped for it. Stages
    refer to this object, and not it to them: a cycle would keep the communicators and their threads.
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
        """Gives no reports: only outcomes that have a sum know what other ranks report."""
        return {}

    @property
    def is_last(self) -> bool:
        """False: a later outcome, which has a sum, shows the end."""
        return False

    def settle(self) -> None:
        """Raises `Misuse`: `Progress` gathers the losses."""
        raise Misuse(mistakes.LOSS_IS_GATHERED_ELSEWHERE)


class PartialOutcomes(Outcomes):
    """Makes outcomes without a sum over the ranks, at less cost, as a `Progress` gathers losses; every 16th has a sum,
    from which ranks learn that they must stop.
    """

    def launch(self, update: int, tally: Tally, clearings: Clearings = NOTHING_CLEARED) -> Outcome:
        """Makes the outcome of an update, mostly without a message."""
        if (update + 1) % _SUMMED == 0:
            return super().launch(update, tally, clearings)
        return PartialOutcome(update, tally, self.control_group, self.counted, self.names, _UNSUMMED, None)
