"""Reads the directory that ``train.py --trace`` wrote: every rank's file, on the clock of rank 0."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from chimera_ir.diagnostics.model import Rejected
from chimera_ir.ir.levels import Program
from chimera_ir.ir.text.parser import parse
from chimera_ir.source import Source, contents

FORMAT = "chimera trace"
VERSION = 1
PROGRAM = "schedule.sir"


class BadTrace(Exception):
    """The directory does not hold a trace that can be read; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class About:
    """The run, as every rank tells it; ``rehearse`` are the seconds of F and B, where compute was a sleep."""

    scheme: str
    program: str
    copies: int
    layout: str
    backend: str
    updates: int
    micro_batch_size: int
    rehearse: tuple[float, float] | None


class Offset(NamedTuple):
    """What is added to a rank's clock to have that of rank 0, at a time of the rank's clock; in nanoseconds."""

    at: int
    offset: int
    uncertainty: int


class Recorded(NamedTuple):
    """An operation of a rank as it is written: in nanoseconds since the first of all ranks, on the clock of rank 0."""

    update: int
    text: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank's file; ``ended`` says how the run ended early, nothing if it did not."""

    rank: int
    worker: int
    copy: int
    clock: tuple[Offset, ...]
    operations: tuple[Recorded, ...]
    ended: str | None


@dataclass(frozen=True, slots=True)
class Trace:
    """All ranks, in order."""

    about: About
    program: Program
    ranks: tuple[Rank, ...]


def read(directory: Path) -> Trace:
    """The trace in a directory.

    Raises
    ------
    BadTrace
        If files are missing, cut off or of another format, or do not belong together.
    """
    text = _text(directory / PROGRAM)
    paths = _files(directory)
    found = [_rank(path) for path in paths]
    about = found[0][0]
    for path, (other, _) in zip(paths, found, strict=True):
        if other != about:
            raise BadTrace(f"{path}: is of another run than {paths[0].name}; trace every run into its own directory")
    if sha256(text.encode()).hexdigest() != about.program:
        raise BadTrace(f"{directory / PROGRAM}: is not the program that was traced; trace the run again")
    program = _program(directory / PROGRAM, text)
    ranks = [rank for _, rank in found]
    expected = about.copies * program.header.workers
    for path, rank in zip(paths, ranks, strict=True):
        _belongs(path, rank, about, program.header.workers)
    missing = sorted(set(range(expected)) - {rank.rank for rank in ranks})
    if missing:
        raise BadTrace(
            f"{directory}: the file{'s' if len(missing) > 1 else ''} of {_listed(missing)} of {expected} ranks "
            f"{'are' if len(missing) > 1 else 'is'} missing{_parts(directory, missing)}"
        )
    return Trace(about, program, _on_one_clock(ranks))


def _belongs(path: Path, rank: Rank, about: About, workers: int) -> None:
    """Whether a file is that of its rank, and the rank where the layout puts it."""
    place = divmod(rank.rank, workers) if about.layout == "pipeline" else divmod(rank.rank, about.copies)[::-1]
    if path.name != f"rank_{rank.rank}.jsonl" or place != (rank.copy, rank.worker) or rank.copy >= about.copies:
        raise BadTrace(
            f"{path}: says that it is of rank {rank.rank}, worker {rank.worker} of copy {rank.copy}, which this run "
            "does not have under this name; copy the files again"
        )


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
        raise BadTrace(f"{directory}: has no rank_<r>.jsonl{_parts(directory, [])}")
    return [path for _, path in sorted(numbered)]


_NAME = re.compile(r"rank_([0-9]{1,9})\.jsonl")


def _parts(directory: Path, missing: list[int]) -> str:
    """What to say of files that were never finished."""
    names = [f"rank_{rank}.jsonl.part" for rank in missing] or ["rank_*.jsonl.part"]
    if any(any(directory.glob(name)) for name in names):
        return "; what is called .part belongs to a rank that still runs or was killed"
    return "; ranks on other machines have written theirs there: copy all into one directory" if missing else ""


def _listed(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"rank{'s' if len(numbers) > 1 else ''} {shown}{' ..' if len(numbers) > 8 else ''}"


def _program(path: Path, text: str) -> Program:
    try:
        level = parse(Source(str(path), text))
    except Rejected as error:
        raise BadTrace(f"{path}: is not a program that can be read ({error})") from error
    if not isinstance(level, Program):
        raise BadTrace(f"{path}: is not at the level of programs")
    return level


def _rank(path: Path) -> tuple[About, Rank]:
    lines = _lines(path)
    first: Mapping[str, Any] = next(lines, {})
    last: Mapping[str, Any] = {}
    if first.get("format") != FORMAT:
        raise BadTrace(f"{path}: does not begin like a trace of train.py --trace")
    if first.get("version") != VERSION:
        raise BadTrace(f"{path}: is of version {first.get('version')!r} of the format; this command reads {VERSION}")
    operations: list[Recorded] = []
    try:
        for line in lines:
            if last:
                raise BadTrace(f"{path}: goes on after its end")
            if "ended" in line:
                last = line
            else:
                operations += [_operation(each) for each in line["operations"]]
        if not last:
            raise BadTrace(f"{path}: is cut off: its last line is missing; copy it again, or trace the run again")
        about, ended = _about(first), last["ended"]
        clock = tuple(_offset(each["clock"]) for each in (first, last) if each["clock"] is not None)
        rank = Rank(
            _whole(first["rank"]), _whole(first["worker"]), _whole(first["copy"]), clock, tuple(operations), ended
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BadTrace(f"{path}: lacks or garbles what a trace has ({type(error).__name__}: {error})") from error
    return about, rank


def _lines(path: Path) -> Iterator[Mapping[str, Any]]:
    for number, line in enumerate(_text(path).splitlines(), 1):
        try:
            content = json.loads(line)
        except ValueError as error:
            raise BadTrace(f"{path}:{number}: is cut off or damaged; copy it again, or trace the run again") from error
        if not isinstance(content, dict):
            raise BadTrace(f"{path}:{number}: is not a line of a trace")
        yield content


def _about(line: Mapping[str, Any]) -> About:
    rehearse = line["rehearse"]
    return About(
        scheme=str(line["scheme"]),
        program=str(line["program"]),
        copies=_whole(line["copies"]),
        layout=str(line["layout"]),
        backend=str(line["backend"]),
        updates=_whole(line["updates"]),
        micro_batch_size=_whole(line["micro_batch_size"]),
        rehearse=None if rehearse is None else (float(rehearse["F"]), float(rehearse["B"])),
    )


def _operation(line: Any) -> Recorded:
    update, text, start, end = line
    if not isinstance(text, str) or _whole(end) < _whole(start):
        raise ValueError(f"{line!r} is not an operation")
    return Recorded(_whole(update), text, start, end)


def _offset(line: Mapping[str, Any]) -> Offset:
    return Offset(_whole(line["at"]), _whole(line["offset"]), _whole(line["uncertainty"]))


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r} is not a whole number")
    return value


def _on_one_clock(ranks: list[Rank]) -> tuple[Rank, ...]:
    moved = [
        [
            each._replace(start=aligned(rank.clock, each.start), end=aligned(rank.clock, each.end))
            for each in rank.operations
        ]
        for rank in ranks
    ]
    origin = min((lane[0].start for lane in moved if lane), default=0)
    return tuple(
        Rank(
            *(rank.rank, rank.worker, rank.copy, rank.clock),
            tuple(each._replace(start=each.start - origin, end=each.end - origin) for each in lane),
            rank.ended,
        )
        for rank, lane in sorted(zip(ranks, moved, strict=True), key=lambda pair: pair[0].rank)
    )


def aligned(clock: tuple[Offset, ...], time: int) -> int:
    """A time of a rank's clock on that of rank 0.

    The offset is taken to change evenly between its two measurements. One that nothing tells from 0 is 0: the ranks of
    one machine share its clock, and a measurement would only blur that.
    """
    if all(abs(each.offset) <= each.uncertainty for each in clock):
        return time
    first, last = clock[0], clock[-1]
    if last.at == first.at:
        return time + first.offset
    return time + first.offset + (last.offset - first.offset) * (time - first.at) // (last.at - first.at)
