"""``--trace``: file of a rank with the begin and the end of each operation of its lane.

DIR/rank_<r>.jsonl is a line about the run, lines of operations, and a line about the end; docs/howto/trace.md
Until the end it is called rank_<r>.jsonl.part.
"""

import argparse
import json
import os
import threading
from array import array
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

from chimera_runtime.errors import Misuse
from chimera_runtime.errors import tools as mistakes
from chimera_runtime.program.job import Job
from chimera_runtime.program.numbering import Micros
from chimera_runtime.program.operations import OPERATIONS, PAIRED
from chimera_runtime.program.weight_groups import Group, group_text
from chimera_runtime.ranks.control_group import ControlGroup
from chimera_runtime.ranks.world import World
from chimera_runtime.tools.open.files import write_atomically
from chimera_runtime.tools.record import clocks
from chimera_runtime.tools.record.event_clock import clock_of

FORMAT = "chimera trace"
VERSION = 1
MARKER = ".chimera-trace"
PROGRAM = "schedule.sir"

LOAD_INPUT, LOAD_TARGET, SEND, RECV, WAIT_SEND, WAIT_RECV, ALL_REDUCE, WAIT_ALL_REDUCE, STEP, STASH, DROP = range(11)
_VERBS = (
    *("load input", "load target", "send", "recv", "wait send", "wait recv"),
    *("all_reduce", "wait all_reduce", "step", "stash", "drop", *OPERATIONS, PAIRED),
)
VERB_OF = {letter: _VERBS.index(letter) for letter in (*OPERATIONS, PAIRED)}
"""The verb of an operation, by the letter of its kind."""

_FIELDS = 5


def prepare(control_group: ControlGroup, directory: Path, scripts: Path) -> None:
    """Makes the directory and puts the program there; removes traces of an earlier run. Every rank calls it.

    Raises `Misuse` if it cannot be written, or has files that ``--trace`` did not write.
    """
    try:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            _empty(directory)
            write_atomically(directory / PROGRAM, (scripts / PROGRAM).read_bytes())
    except OSError as error:
        raise mistakes.directory_cannot_be_written("--trace", error.filename or directory, error.strerror) from error
    control_group.barrier("for the directory of the trace")


def _empty(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    foreign = any(not path.name.startswith(f".{MARKER}.") for path in directory.iterdir())
    if foreign and not (directory / MARKER).is_file():
        raise mistakes.path_is_yours("--trace", directory, "directory")
    write_atomically(directory / MARKER, b"written by train.py --trace\n")
    for pattern in ("rank_*.jsonl", "rank_*.jsonl.part"):
        for path in directory.glob(pattern):
            path.unlink(missing_ok=True)


class Recorder:
    """Records of this rank's operations with their times, in nanoseconds of its monotonic clock.

    ``now`` returns a time, or an event on a GPU. ``first`` is the update from which micro-batches are counted,
    ``groups`` the number of weight groups. A record is five integers; texts are made when the records are written.
    """

    def __init__(self, world: World, options: argparse.Namespace) -> None:
        self._world = world
        self._job: Job = world.job
        directory: Path = options.trace
        self._path = directory / f"rank_{world.place.rank}.jsonl"
        self._part = self._path.with_name(f"{self._path.name}.part")
        self._numbers = array("q")
        self._writing = threading.Lock()
        self._directory = directory
        self._over = False
        self.first = 0
        self.groups = len(self._job.groups)
        self._clock = clock_of(world.device)
        self.now = self._clock.now
        offset = clocks.compare(self._world.control_group)
        try:
            self._file: IO[str] = self._part.open("w", encoding="utf-8")
            self._line(_about(world, options) | {"clock": asdict(offset)})
        except OSError as error:
            raise self._refused(error) from error

    def note(self, verb: int, update: int, number: int, start: int) -> None:
        """Records an operation that began at ``start`` and ends now; ``number`` encodes its object, see ``_text``."""
        self._numbers.extend((verb, update, number, start, self.now()))

    def number_of(self, group: Group) -> int:
        """Number of a weight group; for that of a single stage, the number of the stage."""
        return self._job.groups.index(group)

    def update_of(self, micro: int) -> int:
        """Update of a micro-batch of the lane."""
        return self.first + micro // self._job.passes

    def ran(self, verb: int, micros: Micros, stage: int, start: int) -> None:
        """Records an operation of a stage on a micro-batch, or on several, of which it names the first."""
        micro = micros[0] if isinstance(micros, tuple) else micros
        self.note(verb, self.update_of(micro), micro * self._job.stages + stage, start)

    def ran_pair(self, forward: Micros, stage: int, backward: Micros, other: int, start: int) -> None:
        """Records a forward of a stage and a backward of a stage as one operation."""
        first, second = (micros[0] if isinstance(micros, tuple) else micros for micros in (forward, backward))
        stages = self._job.stages
        number = (first * stages + stage) * stages * self._job.passes + second * stages + other
        self.note(VERB_OF[PAIRED], self.update_of(first), number, start)

    def message(self, verb: int, tag: int, start: int) -> None:
        """Records that a message was posted, or waited for."""
        self.note(verb, self.update_of(tag // (2 * self._job.stages)), tag, start)

    def spill(self) -> None:
        """Writes the records if there are many; called where a pause delays others least.

        Raises `Misuse` if the file can no longer be written.
        """
        if len(self._numbers) < self._clock.most * _FIELDS:
            return
        try:
            self._flush()
        except OSError as error:
            raise self._refused(error) from error

    def close(self) -> None:
        """Completes the file after a run that ended well, and gives it its name. Errors as in `spill`."""
        offset = clocks.compare(self._world.control_group)
        try:
            self._end(None, offset)
        except OSError as error:
            raise self._refused(error) from error

    def abandon(self, message: str) -> None:
        """Completes the file after a run that ended early, with its message, if that is possible."""
        with suppress(OSError, ValueError):
            self._end(message.split("\n", 1)[0], None)

    def _end(self, message: str | None, offset: clocks.OffsetEstimate | None) -> None:
        if self._over:
            return
        self._over = True
        self._flush()
        self._line({"ended": message, "clock": None if offset is None else asdict(offset)})
        self._file.close()
        self._part.replace(self._path)

    def _flush(self) -> None:
        with self._writing:
            count = len(self._numbers) // _FIELDS * _FIELDS
            records, self._numbers = self._numbers, array("q")
            verbs, updates, numbers, starts, ends = (records[field:count:_FIELDS].tolist() for field in range(_FIELDS))
            times = self._clock.read([*starts, *ends])
            rows = zip(verbs, updates, numbers, times[: len(starts)], times[len(starts) :], strict=True)
            self._line({"operations": [[update, self._text(v, n), s, e] for v, update, n, s, e in rows]})

    def _line(self, content: dict[str, Any]) -> None:
        self._file.write(json.dumps(content, separators=(",", ":")) + "\n")
        self._file.flush()

    def _text(self, verb: int, number: int) -> str:
        """Text of an operation in schedule.sir."""
        name, stages, groups = _VERBS[verb], self._job.stages, self._job.groups
        match name:
            case "load input" | "load target":
                return f"{name} m{number}"
            case "send" | "recv" | "wait send" | "wait recv":
                return self._world.control_group.names.operation(name, number)
            case "all_reduce" | "wait all_reduce" | "step":
                return f"{name} {group_text(groups[number])}"
            case "stash" | "drop":
                return f"{name} {group_text(groups[number % len(groups)])} v{number // len(groups)}"
            case "pair":
                first, second = divmod(number, stages * self._job.passes)
                return f"{self._text(VERB_OF['F'], first)} & {self._text(VERB_OF['B'], second)}"
            case _:
                return f"{name} m{number // stages} s{number % stages}"

    def _refused(self, error: OSError) -> Misuse:
        return mistakes.directory_cannot_be_written("--trace", self._directory, error.strerror)


def _about(world: World, options: argparse.Namespace) -> dict[str, Any]:
    """Facts about the run, for the first line of the file."""
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
