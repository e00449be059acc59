"""Reader of a directory that ``train.py --trace`` wrote; times are converted to the clock of rank 0."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from itertools import islice, pairwise
from pathlib import Path
from reprlib import repr as brief
from typing import Any, NamedTuple

from chimera_ir.diagnostics.model import Rejected
from chimera_ir.ir.kinds import COSTED, RECOMPUTATION
from chimera_ir.ir.levels import Header, Program
from chimera_ir.ir.streams import ProgramStream, view_of
from chimera_ir.ir.text.reader import parse
from chimera_ir.plural import counted
from chimera_ir.source import Source, contents
from chimera_ir.trace.fields import LONGEST, of_type, whole, word
from chimera_ir.verify.verify import verify_program

FORMAT = "chimera trace"
VERSION = 1
PROGRAM = "schedule.sir"

_NAMED = 8
"""The most ranks that a message about missing files names."""

LOST = 4096
"""The most ranks without a file that a trace of a run that ended early may have."""


class BadTrace(Exception):
    """Raised if a trace cannot be read or compared with its program; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class RunInfo:
    """Description of the run, the same in every rank's file.

    ``program`` is the digest of the program's text. In a rehearsal, ``rehearse`` has the seconds of sleep of each kind
    of operation, by its letter; otherwise it is None. ``sharded_optimizer`` says whether the replicas of a stage
    divided the optimizer's state among them; old traces do not say, which counts as no.
    """

    scheme: str
    program: str
    copies: int
    layout: str
    backend: str
    updates: int
    micro_batch_size: int
    rehearse: Mapping[str, float] | None
    sharded_optimizer: bool = False


class ClockOffset(NamedTuple):
    """Nanoseconds to add to a rank's clock to get rank 0's, measured when the rank's clock showed ``at``."""

    at: int
    offset: int
    uncertainty: int


class RecordedOperation(NamedTuple):
    """A recorded operation: nanoseconds since the first operation of any rank, on the clock of rank 0."""

    update: int
    text: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Rank:
    """The content of a rank's file.

    ``ended`` says why the run ended early, None if it did not; ``ended_at`` is the time of that, if it is known.
    ``is_recorded`` is False if the run ended early and the rank left no complete file. ``memory`` has the most bytes
    that the rank used, by purpose: ``host``, and ``carries s0`` for the carries of stage 0; old traces have none.
    """

    rank: int
    worker: int
    copy: int
    clock: tuple[ClockOffset, ...]
    operations: tuple[RecordedOperation, ...]
    ended: str | None
    ended_at: int | None = None
    is_recorded: bool = True
    memory: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace: the facts of the run, the text of its program, the program itself, and all ranks in order."""

    about: RunInfo
    text: str
    program: Program | ProgramStream
    ranks: tuple[Rank, ...]

    @property
    def header(self) -> Header:
        """The header of the program; for a stream, the header of the updates that are shown of it."""
        return view_of(self.program).header

    @property
    def ended_early(self) -> bool:
        """Whether the run ended early."""
        return any(rank.ended is not None for rank in self.ranks)


def read(directory: Path) -> Trace:
    """Reads a trace; raises `BadTrace` if files are missing, cut off, of another format, or of different runs."""
    # Each file by itself; then whether they are of one run, of this program, in the right places and complete.
    text = _text(directory / PROGRAM)
    paths = _files(directory)
    files = [_rank(path) for path in paths]
    about = files[0][0]
    for path, (other, _) in zip(paths, files, strict=True):
        if other != about:
            raise BadTrace(f"{path}: is of another run than {paths[0].name}; trace every run into its own directory")
    if sha256(text.encode()).hexdigest() != about.program:
        raise BadTrace(f"{directory / PROGRAM}: is not the program that was traced; trace the run again")
    program = _program(directory / PROGRAM, text)
    _require_times(paths[0], about, view_of(program))
    ranks = [rank for _, rank in files]
    for path, rank in zip(paths, ranks, strict=True):
        _require_place(path, rank, about, program.header.workers)
    expected = about.copies * program.header.workers
    if any(rank.ended is not None for rank in ranks):
        ranks += [_unrecorded(rank, about, program.header.workers) for rank in islice(_missing(ranks, expected), LOST)]
    _require_all(directory, ranks, expected)
    if about.updates > max(1, *(len(rank.operations) for rank in ranks)) and all(rank.ended is None for rank in ranks):
        raise BadTrace(
            f"{directory}: is of {counted(about.updates, 'update')}, and no rank recorded as many; trace the run again"
        )
    return Trace(about, text, program, _on_one_clock(ranks))


def _require_place(path: Path, rank: Rank, about: RunInfo, workers: int) -> None:
    """Checks that a file has the name of its rank, and that the layout puts the rank where the file says."""
    place = place_of(rank.rank, about.layout, about.copies, workers)
    if path.name != f"rank_{rank.rank}.jsonl" or place != (rank.copy, rank.worker) or rank.copy >= about.copies:
        raise BadTrace(
            f"{path}: says that it is of rank {rank.rank}, worker {rank.worker} of copy {rank.copy}, which this run "
            "does not have under this name; copy the files again"
        )


def place_of(rank: int, layout: str, copies: int, workers: int) -> tuple[int, int]:
    """Returns the copy and the worker of a rank, in a run with ``copies`` copies of ``workers`` workers.

    In the layout ``pipeline`` the ranks of a copy have consecutive numbers, in the other layout the ranks of a worker.
    """
    if layout == "pipeline":
        return divmod(rank, workers)
    worker, copy = divmod(rank, copies)
    return copy, worker


def _unrecorded(rank: int, about: RunInfo, workers: int) -> Rank:
    """A rank of a run that ended early, which left no complete file: it was killed."""
    copy, worker = place_of(rank, about.layout, about.copies, workers)
    return Rank(rank, worker, copy, (), (), "left no record: it was killed", is_recorded=False)


def _text(path: Path) -> str:
    try:
        return contents(path).decode("utf-8")
    except FileNotFoundError:
        raise BadTrace(f"{path.parent}: has no {path.name}; name the directory that train.py --trace wrote") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadTrace(f"{path}: {getattr(error, 'strerror', None) or 'is not UTF-8 text'}") from error


def _files(directory: Path) -> list[Path]:
    numbered = [(int(name[1]), path) for path in directory.iterdir() if (name := _NAME.fullmatch(path.name))]
    if not numbered:
        raise BadTrace(f"{directory}: has no rank_<r>.jsonl{_hint(directory, [])}")
    return [path for _, path in sorted(numbered)]


_NAME = re.compile(r"rank_([0-9]{1,9})\.jsonl")


def _hint(directory: Path, missing: list[int]) -> str:
    """A hint on where the files of the ``missing`` ranks may be, or of all ranks if ``missing`` is empty."""
    names = [f"rank_{rank}.jsonl.part" for rank in missing] or ["rank_*.jsonl.part"]
    if any(any(directory.glob(name)) for name in names):
        return "; what is called .part belongs to a rank that still runs or was killed"
    return "; ranks on other machines have written theirs there: copy all into one directory" if missing else ""


def _missing(ranks: Sequence[Rank], expected: int) -> Iterator[int]:
    """Yields the numbers below ``expected`` of which there is no rank."""
    present = {rank.rank for rank in ranks}
    return (rank for rank in range(expected) if rank not in present)


def _require_all(directory: Path, ranks: Sequence[Rank], expected: int) -> None:
    """Raises `BadTrace` unless all ``expected`` ranks have a file; the message names the first ranks without one."""
    missing = list(islice(_missing(ranks, expected), _NAMED + 1))
    if missing:
        plural = "s" if len(missing) > 1 else ""
        named = ", ".join(map(str, missing[:_NAMED])) + (" .." if len(missing) > _NAMED else "")
        raise BadTrace(
            f"{directory}: the file{plural} of rank{plural} {named} of {counted(expected, 'rank')} "
            f"{'are' if plural else 'is'} missing{_hint(directory, missing)}"
        )


def _program(path: Path, text: str) -> Program | ProgramStream:
    try:
        level = parse(Source(str(path), text))
        if not isinstance(level, Program | ProgramStream):
            raise BadTrace(f"{path}: is not at the level of programs")
        verify_program(level)
        return level
    except Rejected as error:
        raise BadTrace(f"{path}: is not a program that chimera compile wrote ({error})") from error


def _rank(path: Path) -> tuple[RunInfo, Rank]:
    lines = _lines(path)
    first: Mapping[str, Any] = next(lines, {})
    last: Mapping[str, Any] = {}
    if first.get("format") != FORMAT:
        raise BadTrace(f"{path}: does not begin like a trace of train.py --trace")
    if first.get("version") != VERSION:
        raise BadTrace(
            f"{path}: is of version {brief(first.get('version'))} of the format; this command reads {VERSION}"
        )
    # Below the first line: blocks of operations, and a last line that says how the run ended.
    operations: list[RecordedOperation] = []
    try:
        for line in lines:
            if last:
                raise BadTrace(f"{path}: goes on after its end")
            if "ended" in line:
                last = line
            else:
                operations += map(_operation, of_type(list, "a list", line["operations"]))
        if not last:
            raise BadTrace(f"{path}: is cut off: its last line is missing; copy it again, or trace the run again")
        rank = Rank(
            rank=whole(first["rank"]),
            worker=whole(first["worker"]),
            copy=whole(first["copy"]),
            clock=_clock([_offset(line["clock"]) for line in (first, last) if line["clock"] is not None]),
            operations=tuple(operations),
            ended=None if last["ended"] is None else word(last["ended"]),
            ended_at=None if last.get("at") is None else whole(last["at"], -LONGEST),
            memory={
                word(name): whole(used) for name, used in of_type(dict, "an object", last.get("memory", {})).items()
            },
        )
        if any(later.start < earlier.end for earlier, later in pairwise(operations)):
            raise ValueError("an operation begins before the one ahead of it ends")
        return _about(first), rank
    except KeyError as error:
        raise BadTrace(f"{path}: lacks {error}, which a trace has; copy it again, or trace the run again") from error
    except ValueError as error:
        raise BadTrace(f"{path}: garbles what a trace has: {error}; copy it again, or trace the run again") from error


def _lines(path: Path) -> Iterator[Mapping[str, Any]]:
    lines = _text(path).split("\n")
    for number, line in enumerate(lines if lines[-1] else lines[:-1], 1):
        try:
            content = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadTrace(f"{path}:{number}: is cut off or damaged; copy it again, or trace the run again") from error
        if not isinstance(content, dict):
            raise BadTrace(f"{path}:{number}: is not a line of a trace")
        yield content


def _about(line: Mapping[str, Any]) -> RunInfo:
    sleep = None if line["rehearse"] is None else of_type(dict, "an object", line["rehearse"])
    seconds = None if sleep is None else {word(kind, [*COSTED]): _seconds(value) for kind, value in sleep.items()}
    return RunInfo(
        scheme=word(line["scheme"]),
        program=word(line["program"]),
        copies=whole(line["copies"], 1),
        layout=word(line["layout"], ("pipeline", "replica")),
        backend=word(line["backend"]),
        updates=whole(line["updates"], 1),
        micro_batch_size=whole(line["micro_batch_size"], 1),
        rehearse=seconds,
        sharded_optimizer=line.get("sharded_optimizer") is True,
    )


def _require_times(path: Path, about: RunInfo, program: Program) -> None:
    """Raises `BadTrace` if the trace of a rehearsal lacks the seconds of a kind of operation that the program has.

    Recomputations need none.
    """
    kinds = {operation.kind.letter for lane in program.parts for operation in lane.computes.lines}
    kinds.discard(RECOMPUTATION.letter)
    lacking = [] if about.rehearse is None else [kind for kind in COSTED if kind in kinds - about.rehearse.keys()]
    if lacking:
        raise BadTrace(f"{path}: lacks {lacking[0]!r}, which a trace has; trace the run again")


def _operation(value: Any) -> RecordedOperation:
    match value:
        case [update, str(text), start, end] if whole(start, -LONGEST) <= whole(end, -LONGEST):
            return RecordedOperation(whole(update), text, start, end)
        case _:
            raise ValueError(f"{brief(value)} is not an operation")


def _offset(value: Any) -> ClockOffset:
    line = of_type(dict, "an object", value)
    return ClockOffset(whole(line["at"], -LONGEST), whole(line["offset"], -LONGEST), whole(line["uncertainty"]))


def _clock(offsets: list[ClockOffset]) -> tuple[ClockOffset, ...]:
    """The offsets as a tuple; raises ValueError if a clock goes backwards between the first and the last one."""
    first, last = (offsets[0], offsets[-1]) if offsets else (ClockOffset(0, 0, 0),) * 2
    if last.at < first.at or last.at + last.offset < first.at + first.offset:
        raise ValueError("a clock goes backwards")
    return tuple(offsets)


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value <= LONGEST / 1e9:
        raise ValueError(f"{brief(value)} is not a number of seconds")
    return float(value)


def _on_one_clock(ranks: list[Rank]) -> tuple[Rank, ...]:
    """The ranks in order, with times on the clock of rank 0, from the first operation of any rank."""
    ranks = [_retimed(rank, partial(aligned, rank.clock)) for rank in sorted(ranks, key=lambda rank: rank.rank)]
    origin = min((rank.operations[0].start for rank in ranks if rank.operations), default=0)
    return tuple(_retimed(rank, lambda time: time - origin) for rank in ranks)


def _retimed(rank: Rank, change: Callable[[int], int]) -> Rank:
    """Returns a rank's file in which ``change`` has been applied to every time."""
    changed = (
        operation._replace(start=change(operation.start), end=change(operation.end)) for operation in rank.operations
    )
    return replace(rank, operations=tuple(changed), ended_at=None if rank.ended_at is None else change(rank.ended_at))


def aligned(clock: tuple[ClockOffset, ...], time: int) -> int:
    """The time on rank 0's clock for a time on a rank's clock, which has the offsets ``clock``.

    The offset is assumed to change evenly between its two measurements. An offset smaller than its uncertainty counts
    as 0: the ranks of one machine share its clock, and a measured offset would only add errors.
    """
    if all(abs(offset.offset) <= offset.uncertainty for offset in clock):
        return time
    first, last = clock[0], clock[-1]
    if last.at == first.at:
        return time + first.offset
    return time + first.offset + (last.offset - first.offset) * (time - first.at) // (last.at - first.at)
