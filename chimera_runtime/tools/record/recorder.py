"""``--trace``: file of a rank with the begin and the end of each operation of its lane.

DIR/rank_<r>.jsonl is a line about the run, lines of operations, and a line about the end; docs/howto/trace.md
Until the end it is called rank_<r>.jsonl.part.
"""

import argparse
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from time import monotonic_ns
from typing import IO, Any

import torch

from chimera_runtime.errors import tools as mistakes
from chimera_runtime.lane.lane import LaneComponents
from chimera_runtime.lane.profiler_ranges import ProgramLine, wrapped
from chimera_runtime.ranks.agreement import ControlGroup
from chimera_runtime.ranks.world import World
from chimera_runtime.stage.stage import Stage
from chimera_runtime.tools.open.stdio import locked, unwritable_errors, write_atomically

# The clocks by which ``--trace`` times calls, and how far the clocks of two ranks are apart.
#
# On a GPU the clock is made of events in the CUDA stream in which the rank computes. A call only puts work into the
# stream, so the host's clock would measure how long that took. An event before and one after each call give the times
# at which the GPU began and ended the work, or was held up by a wait for a message.
#
# Ranks are compared because the monotonic clocks of two machines have nothing to do with each other.

_NANOSECONDS = 10**6
"""Nanoseconds in a millisecond."""


class HostClock:
    """Clock of operations on the CPU: the host's, in nanoseconds. ``now`` returns a time, which `read` converts; a
    recorder keeps at most ``most`` operations until then.
    """

    now: Callable[[], int] = staticmethod(monotonic_ns)
    most = 2**16

    def read(self, times: list[int]) -> list[int]:
        """Converts times to nanoseconds. Call it with the times in their order."""
        return times


class EventClock(HostClock):
    """Clock of operations on a GPU: ``now`` returns the number of an event behind all work in the stream; `read` finds
    its time.
    """

    most = 2**12

    def __init__(self, new_event: Callable[[], torch.cuda.Event], clock: Callable[[], int] = monotonic_ns) -> None:
        self._new_event = new_event
        self._lock = threading.Lock()
        self._base = new_event()
        self._base.synchronize()
        self._at_base = clock()
        self._events: list[Any] = []
        self._first = 0
        self.now = self._mark

    def _mark(self) -> int:
        with self._lock:
            self._events.append(self._new_event())
            return self._first + len(self._events) - 1

    def read(self, times: list[int]) -> list[int]:
        """Converts times to nanoseconds, like `HostClock`; then forgets the events."""
        with self._lock:
            events, first = self._events, self._first
            self._events, self._first = [], first + len(events)
        if not events:
            return [self._at_base for _ in times]
        events[-1].synchronize()
        # torch has such times with 24 bits, so they are measured from an event that is not far back.
        passed = [self._base.elapsed_time(event) for event in events]
        nanoseconds = [self._at_base + round(elapsed * _NANOSECONDS) for elapsed in passed]
        before, self._base, self._at_base = self._at_base, events[-1], nanoseconds[-1]
        return [nanoseconds[time - first] if time >= first else before for time in times]


def clock_of(device: torch.device) -> HostClock:
    """Makes the clock for operations on a device. The clock for a GPU has not been tried on a GPU."""

    def new_event() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event

    return EventClock(new_event) if device.type == "cuda" else HostClock()


ROUNDS = 16


@dataclass(frozen=True)
class OffsetEstimate:
    """Rank 0's clock minus this rank's clock at the time ``at``, in nanoseconds, true to ``uncertainty``."""

    at: int
    offset: int
    uncertainty: int


def estimate(ask: Callable[[], int], clock: Callable[[], int], rounds: int = ROUNDS) -> OffsetEstimate:
    """Estimates the offset of the clock that ``ask`` asks, as NTP does: from the shortest of ``rounds`` exchanges. It
    was read in the middle of that, which is wrong by half of the exchange at most.
    """
    answers = []
    for _ in range(rounds):
        sent = clock()
        theirs = ask()
        answers.append((clock() - sent, sent, theirs))
    length, sent, theirs = min(answers)
    middle = sent + length // 2
    return OffsetEstimate(middle, theirs - middle, length - length // 2)


def compare(control_group: ControlGroup) -> OffsetEstimate:
    """Measures the offset to rank 0, which answers one rank after the other; every rank calls it. Raises `PeerLost` if
    another rank does not answer in time.
    """
    token = torch.zeros(1, dtype=torch.int64)
    if control_group.place.rank == 0:
        for rank in control_group.place.ranks[1:]:
            for _ in range(ROUNDS):
                control_group.recv(token, rank, "for a question about the time")
                control_group.send(torch.tensor([time.monotonic_ns()]), rank, "an answer about the time")
        return OffsetEstimate(time.monotonic_ns(), 0, 0)

    def ask() -> int:
        control_group.send(token, 0, "a question about the time")
        control_group.recv(token, 0, "for an answer about the time")
        return int(token.item())

    return estimate(ask, time.monotonic_ns)


FORMAT = "chimera trace"
VERSION = 1
MARKER = ".chimera-trace"
PROGRAM = "schedule.sir"


def prepare(control_group: ControlGroup, directory: Path, scripts: Path) -> None:
    """Makes the directory and puts the program there; removes an earlier trace. Every rank calls it. Raises `Misuse` if
    it cannot be written, has other files, or another run records there.
    """
    try:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            _empty(directory, control_group)
            write_atomically(directory / PROGRAM, (scripts / PROGRAM).read_bytes())
    except OSError as error:
        raise mistakes.directory_cannot_be_written(
            option="--trace", path=error.filename or directory, why=error.strerror
        ) from error
    control_group.barrier("for the directory of the trace")


def _empty(directory: Path, control_group: ControlGroup) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    foreign = any(not path.name.startswith(f".{MARKER}.") for path in directory.iterdir())
    if foreign and not (directory / MARKER).is_file():
        raise mistakes.path_is_yours(option="--trace", path=directory, other="directory")
    if not locked(directory / MARKER, control_group.store):
        raise mistakes.directory_cannot_be_written(
            option="--trace", path=directory, why=mistakes.DIRECTORY_IS_OF_ANOTHER_RUN
        )
    for pattern in ("rank_*.jsonl", "rank_*.jsonl.part"):
        for path in directory.glob(pattern):
            path.unlink(missing_ok=True)


class Recorder:
    """Records of this rank's operations with their times, in nanoseconds of its monotonic clock."""

    def __init__(self, world: World, options: argparse.Namespace, stages: Iterable[Stage] = ()) -> None:
        self._world, self._stages = world, tuple(stages)
        directory: Path = options.trace
        self._path = directory / f"rank_{world.place.rank}.jsonl"
        self._part = self._path.with_name(f"{self._path.name}.part")
        self._records: list[tuple[int, str, int, int]] = []  # update, text, begin and end of each operation
        self._writing = threading.Lock()
        self._directory = directory
        self._over = False
        self._first = 0
        self._clock = clock_of(world.device)
        offset = compare(self._world.control_group)
        with self._refusing():
            self._file: IO[str] = self._part.open("w", encoding="utf-8")
            self._line(_about(world, options) | {"clock": asdict(offset)})

    def begin(self, update: int) -> None:
        """Counts micro-batches from the first one of an update."""
        self._first = update

    def timed(self, method: Callable[..., Any], line: Callable[..., ProgramLine]) -> Callable[..., Any]:
        """Returns a function that calls ``method`` and records the call with its times; ``line`` returns the line that
        it runs.
        """

        def timed(*arguments: Any, **keywords: Any) -> Any:
            update, text = self._noted(line(*arguments, *keywords.values()))
            start = self._clock.now()
            result = method(*arguments, **keywords)
            self._records.append((update, text, start, self._clock.now()))
            return result

        return timed

    def _noted(self, line: ProgramLine) -> tuple[int, str]:
        """Returns the update of a line of the program, and the line in short: with its first micro-batch alone."""
        if not line.micros:
            return line.update, f"{line}"
        update, micro = self._first + line.micros[0] // self._world.job.passes, f"m{line.micros[0]}"
        text = " ".join(filter(None, (line.verb, micro, line.place)))
        return update, text if line.also is None else f"{text} & {self._noted(line.also)[1]}"

    def spill(self) -> None:
        """Writes the records to the file if there are many; call it where a pause delays others least. Raises `Misuse`
        if it fails.
        """
        if len(self._records) >= self._clock.most:
            with self._refusing():
                self._flush()

    def close(self) -> None:
        """Completes the file after a run that ended well, and gives it its name. Errors as in `spill`."""
        offset = compare(self._world.control_group)
        with self._refusing():
            self._end(None, offset)

    def abandon(self, message: str) -> None:
        """Completes the file after a run that ended early, with its message, if that is possible."""
        with suppress(OSError, ValueError):
            self._end(message.split("\n", 1)[0], None)

    def _end(self, message: str | None, offset: OffsetEstimate | None) -> None:
        if self._over:
            return
        self._over = True
        self._flush()
        at = {} if message is None else {"at": time.monotonic_ns()}
        memory = {"memory": used} if (used := dict(self._used())) else {}
        self._line({"ended": message, "clock": None if offset is None else asdict(offset)} | at | memory)
        self._file.close()
        self._part.replace(self._path)

    def _used(self) -> Iterator[tuple[str, int]]:
        if self._world.job.moving:
            yield "host", self._world.host_link.peak
        for stage in self._stages:
            if stage.carries.peak:
                yield f"carries s{stage.number}", stage.carries.peak

    def _flush(self) -> None:
        with self._writing:
            records, self._records = self._records, []
            times = self._clock.read([start for *_, start, _ in records] + [end for *_, end in records])
            rows = zip(records, times, times[len(records) :], strict=False)
            self._line({"operations": [[update, text, start, end] for (update, text, *_), start, end in rows]})

    def _line(self, content: dict[str, Any]) -> None:
        self._file.write(json.dumps(content, separators=(",", ":")) + "\n")
        self._file.flush()

    def _refusing(self) -> AbstractContextManager[None]:
        return unwritable_errors("--trace", self._directory, mistakes.directory_cannot_be_written)


def _about(world: World, options: argparse.Namespace) -> dict[str, Any]:
    place = world.place
    return {
        "format": FORMAT,
        "version": VERSION,
        "scheme": world.job.name,
        "program": sha256((options.trace / PROGRAM).read_bytes()).hexdigest(),
        "rank": place.rank,
        "worker": place.worker,
        "copy": place.copy,
        "copies": place.copies,
        "layout": place.layout,
        "backend": world.backend,
        "updates": options.steps,
        "micro_batch_size": options.micro_batch_size,
        "rehearse": options.rehearse or None,
        "sharded_optimizer": options.shard_optimizer,
    }


# ``--trace``: wrappers of the parts of a lane, which record the begin and the end of each call.
#
# On a GPU calls only put work into a CUDA stream; the times are then those of events in the stream (`event_clock`).


def traced(parts: LaneComponents, recorder: Recorder) -> LaneComponents:
    """Wraps the components of a lane to record every call."""

    def load(kind: str) -> Callable[..., ProgramLine]:
        return lambda _update, micro, *_stage: ProgramLine(kind, (micro,), "")

    return wrapped(parts, recorder.timed, recorder.begin)._replace(
        load_input=recorder.timed(parts.load_input, load("load input")),
        load_target=recorder.timed(parts.load_target, load("load target")),
    )
