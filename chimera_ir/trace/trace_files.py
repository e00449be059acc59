"""Reader of a directory that ``train.py --trace`` wrote; times are converted to the clock of rank 0."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from hashlib import sha256
from itertools import islice, pairwise
from pathlib import Path
from reprlib import repr as brief
from typing import Any, NamedTuple, TypeVar, assert_never

from chimera_ir.diagnostics.model import Rejected
from chimera_ir.ir import ops
from chimera_ir.ir.kinds import COSTED, RECOMPUTATION
from chimera_ir.ir.levels import Header, Program
from chimera_ir.ir.streams import ProgramStream, view_of
from chimera_ir.ir.text.printer import absolute, group_name, line, message_text, numbered_line
from chimera_ir.ir.text.reader import parse
from chimera_ir.picture.looks import shown_micro
from chimera_ir.plural import counted
from chimera_ir.source import Source, contents
from chimera_ir.verify.verify import verify_program

# Fields of what a rank has recorded, which may be damaged: each check raises a ValueError that says what is wrong.

_T = TypeVar("_T")

LONGEST = 2**63 - 1
"""The largest number in a file: nanoseconds of a clock, 292 years."""


def of_type(kind: type[_T], noun: str, value: object) -> _T:
    """The value, if it is of a type; ``noun`` names the type in the error."""
    if not isinstance(value, kind):
        raise ValueError(f"{brief(value)} is not {noun}")
    return value


def whole(value: Any, least: int = 0) -> int:
    """The value, if it is a whole number from ``least`` on."""
    if type(value) is not int or not least <= value <= LONGEST:
        raise ValueError(f"{brief(value)} is not a whole number from {least} to {LONGEST}")
    return value


def word(value: Any, allowed: Sequence[str] = ()) -> str:
    """The value, if it is a text and, unless ``allowed`` is empty, one of these."""
    if not isinstance(value, str) or (allowed and value not in allowed):
        raise ValueError(f"{brief(value)} is not {' or '.join(allowed) or 'a text'}")
    return value


# Spans: what a rank did from one time to another, recorded or predicted.


class Activity(StrEnum):
    """Activity that takes a rank's time and computes nothing."""

    RECV = "wait for a message"
    SEND = "wait for a send"
    SUM = "wait for a sum"
    MOVE = "wait for the host"
    STEP = "step"
    POST = "posting"
    LOAD = "loading data"
    BETWEEN = "between operations"
    FLUSH = "flush"


BUSY = tuple(kind.noun for kind in COSTED.values())
"""Activities that compute: the nouns of the kinds of operations."""


@dataclass(frozen=True, slots=True)
class Load:
    """Loading of a micro-batch's inputs or targets. It takes time, although no line of the program stands for it."""

    text: str


class LaneSpan(NamedTuple):
    """An operation of a rank, from ``start`` to ``end`` in nanoseconds; ``update`` is the update that it belongs to."""

    operation: ops.Instruction | Load
    update: int
    start: int
    end: int


Lane = tuple[LaneSpan, ...]
"""Spans of a rank in order; no two overlap."""


class UpdateWindow(NamedTuple):
    """The time that one update takes on one lane: from ``start`` to ``end``, in nanoseconds."""

    start: int
    end: int


def activity(operation: ops.Instruction | Load) -> str:
    """Activity of a rank in an operation: the noun of its kind if it computes (`BUSY`), else an `Activity`."""
    match operation:
        case ops.Compute() | ops.Pair():
            return operation.kind.noun
        case ops.WaitRecv():
            return Activity.RECV
        case ops.WaitSend():
            return Activity.SEND
        case ops.WaitAllReduce():
            return Activity.SUM
        case ops.WaitMove():
            return Activity.MOVE
        case ops.Step() | ops.Stash() | ops.Drop():
            return Activity.STEP
        case ops.Send() | ops.Recv() | ops.AllReduce():
            return Activity.POST
        case Load():
            return Activity.LOAD
        case _:
            assert_never(operation)


def cause(header: Header, operation: ops.Instruction | Load) -> str:
    """Cause of a wait: the message or sum that it waits for; empty for other operations."""
    match operation:
        case ops.WaitRecv():
            return f"messages from worker {awaited_worker(header, operation)}"
        case ops.WaitSend():
            return f"sends to worker {awaited_worker(header, operation)}"
        case ops.WaitAllReduce(group=group):
            return f"the sum of {group_name(group, header)}"
        case ops.WaitMove(kind, stage=stage):
            return f"the {kind.noun} of stage {header.stage_name(stage)}"
        case (
            ops.Compute()
            | ops.Pair()
            | ops.Send()
            | ops.Recv()
            | ops.AllReduce()
            | ops.Step()
            | ops.Stash()
            | ops.Drop()
            | Load()
        ):
            return ""
        case _:
            assert_never(operation)


def awaited_worker(header: Header, operation: ops.Instruction) -> int:
    """Returns the worker at the other end of the message that an instruction waits for; -1 for any other one."""
    if not isinstance(operation, ops.WaitRecv | ops.WaitSend):
        return -1
    message = operation.message
    stage = message.source if isinstance(operation, ops.WaitRecv) else message.target
    return int(header.worker(shown_micro(header, message.micros[0]), stage))


def words(operation: ops.Instruction | Load, header: Header) -> str:
    """An operation in the words of schedule.sir, with the slices of its header."""
    return operation.text if isinstance(operation, Load) else line(operation, header)


def recorded(instruction: ops.Instruction) -> Iterator[str]:
    """Yields the texts under which a rank records an instruction.

    A forward or a backward over several micro-batches, and a wait for a move, have a text for each micro-batch; ranks
    number slices through, as if each were a micro-batch.
    """
    counted = absolute(1)
    match instruction:
        case ops.Compute(kind, micros, stage):
            yield from (f"{kind.letter} m{micro} s{stage}" for micro in micros)
        case ops.WaitMove(kind, micros, stage):
            yield from (f"wait {kind.letter} m{micro} s{stage}" for micro in micros)
        case ops.Pair(forward, backward):
            yield " & ".join(next(recorded(single)) for single in (forward, backward))
        case ops.Send(message) | ops.Recv(message):
            verb = "send" if isinstance(instruction, ops.Send) else "recv"
            yield f"{verb} {message_text(_first(message), counted)}"
        case ops.WaitSend(message) | ops.WaitRecv(message):
            yield numbered_line(replace(instruction, message=_first(message)), counted)
        case ops.AllReduce() | ops.WaitAllReduce() | ops.Step():
            yield numbered_line(replace(instruction, version=None), counted)
        case ops.Stash() | ops.Drop():
            yield numbered_line(instruction, counted)
        case _:
            assert_never(instruction)


def _first(message: ops.Message) -> ops.Message:
    """A message with only the first of its micro-batches, which is how ranks record it."""
    return message._replace(micros=message.micros[:1])


def ends(lane: Iterable[LaneSpan]) -> dict[int, int]:
    """The time at which each update ends on a lane: the end of its last optimizer step there, if it has one."""
    ends: dict[int, int] = {}
    for span in lane:
        if isinstance(span.operation, ops.Step):
            ends[span.update] = max(span.end, ends.get(span.update, span.end))
    return ends


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

    ``program`` is the digest of the program's text. ``rehearse`` has the seconds of sleep of each kind of operation in
    a rehearsal; else None. Old traces have no ``sharded_optimizer``, which counts as no.
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
    ``is_recorded`` is False if the rank left no complete file. ``memory`` has the most bytes that the rank used, by
    purpose: ``host``, and ``carries s0`` for the carries of stage 0; old traces have none.
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
        """The header of the program; for a stream, that of the updates that are shown of it."""
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
        # Ranks that left no complete file.
        for number in islice(_missing(ranks, expected), LOST):
            copy, worker = place_of(number, about.layout, about.copies, program.header.workers)
            ranks.append(Rank(number, worker, copy, (), (), "left no record: it was killed", is_recorded=False))
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
    """The copy and the worker of a rank; in the layout ``pipeline`` the ranks of a copy have consecutive numbers."""
    if layout == "pipeline":
        return divmod(rank, workers)
    worker, copy = divmod(rank, copies)
    return copy, worker


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
    names = [f"rank_{rank}.jsonl.part" for rank in missing] or ["rank_*.jsonl.part"]
    if any(any(directory.glob(name)) for name in names):
        return "; what is called .part belongs to a rank that still runs or was killed"
    return "; ranks on other machines have written theirs there: copy all into one directory" if missing else ""


def _missing(ranks: Sequence[Rank], expected: int) -> Iterator[int]:
    present = {rank.rank for rank in ranks}
    return (rank for rank in range(expected) if rank not in present)


def _require_all(directory: Path, ranks: Sequence[Rank], expected: int) -> None:
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
    for number, row in enumerate(lines if lines[-1] else lines[:-1], 1):
        try:
            content = json.loads(row)
        except (ValueError, RecursionError) as error:
            raise BadTrace(f"{path}:{number}: is cut off or damaged; copy it again, or trace the run again") from error
        if not isinstance(content, dict):
            raise BadTrace(f"{path}:{number}: is not a row of a trace")
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
    """Raises `BadTrace` if a rehearsal lacks the seconds of a kind of operation; recomputations need none."""
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
    changed = (
        operation._replace(start=change(operation.start), end=change(operation.end)) for operation in rank.operations
    )
    return replace(rank, operations=tuple(changed), ended_at=None if rank.ended_at is None else change(rank.ended_at))


def aligned(clock: tuple[ClockOffset, ...], time: int) -> int:
    """The time on rank 0's clock for a time on a rank's ``clock``, whose offset changes evenly between measurements.

    An offset smaller than its uncertainty counts as 0: the ranks of one machine share its clock, and a measured offset
    would only add errors.
    """
    if all(abs(offset.offset) <= offset.uncertainty for offset in clock):
        return time
    first, last = clock[0], clock[-1]
    if last.at == first.at:
        return time + first.offset
    return time + first.offset + (last.offset - first.offset) * (time - first.at) // (last.at - first.at)
