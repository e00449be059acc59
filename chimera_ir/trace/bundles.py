"""Places where the ranks of a run without ``--trace`` stopped, from the zip file that ``train.py --bundle`` wrote.

rank_2.json: line 41 of rank_2.py, m = 3      the lane of worker 2: wait recv m2 s3->s2

Each rank has recorded the line of its script and the counters of its loops. The scripts of the same program, run as
they are proven, say which instruction that is.
"""

import json
import re
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import chain, takewhile
from pathlib import Path
from typing import NamedTuple

from chimera_ir.escapes import visible_lines
from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import Instruction
from chimera_ir.ir.turns import served_update, shifted
from chimera_ir.plural import counted
from chimera_ir.predict.events import Events
from chimera_ir.source import contents
from chimera_ir.trace.match import ahead
from chimera_ir.trace.trace_files import (
    LONGEST,
    LOST,
    PROGRAM,
    BadTrace,
    Lane,
    Trace,
    awaited_worker,
    of_type,
    place_of,
    whole,
    word,
    words,
)
from chimera_ir.verify.scripts import CallPlace, call_places
from chimera_ir.verify.verify import ProvenScripts, Verified

# Places where the ranks of a run that ended early stopped: behind the last operation that each has recorded.


@dataclass(frozen=True, slots=True)
class StoppedRank:
    """The place where a rank stopped.

    ``line`` is the line of the program, empty if the rank has left no record or had done everything. ``event`` is the
    number, on the page, of the event of this line or of the next that has one in the update; else -1. ``begun`` is
    False if the rank stopped before ``line`` and not in it. ``awaited`` is the worker at the other end of its message,
    or -1. ``seconds`` is how long it had been there, 0 if that is not known; ``message`` is how it ended.
    """

    rank: int
    worker: int
    event: int
    line: str
    update: int
    begun: bool
    awaited: int
    seconds: float
    message: str


class Stopped(NamedTuple):
    """The end of a run that ended early, in the last update that any worker of copy 0 began; its recorded ``lanes``."""

    update: int
    lanes: Sequence[Lane]
    ranks: list[StoppedRank]


def stopped(trace: Trace, lanes: Sequence[Lane], events: Events) -> Stopped:
    """The places where the ranks of a run stopped; ``events`` are those of the schedule on the page."""
    of_copy = [lane for rank, lane in zip(trace.ranks, lanes, strict=True) if rank.copy == 0]
    ranks = [_stop(trace, lane, events, number) for number, lane in enumerate(lanes)]
    return Stopped(_last_update(of_copy), of_copy, ranks)


def _last_update(lanes: Sequence[Lane]) -> int:
    return max((span.update for lane in lanes for span in lane[-1:]), default=0)


def _stop(trace: Trace, lane: Lane, events: Events, number: int) -> StoppedRank:
    rank = trace.ranks[number]
    rest = ahead(trace, rank, lane)
    following = next(rest, None)
    ended = visible_lines(rank.ended or "")
    if following is None or not rank.is_recorded:
        return StoppedRank(rank.rank, rank.worker, -1, "", _last_update([lane]), False, -1, 0.0, ended)
    update, instruction = following
    waited = 0.0 if rank.ended_at is None or not lane else (rank.ended_at - lane[-1].end) / 1e9
    of_update = (later for _, later in takewhile(lambda entry: entry[0] == update, rest))
    return StoppedRank(
        rank=rank.rank,
        worker=rank.worker,
        event=event_at(events, rank.worker, chain([instruction], of_update)),
        line=words(instruction, trace.header),
        update=update,
        begun=any(span.update == update for span in reversed(lane)),
        awaited=awaited_worker(trace.header, instruction),
        seconds=max(waited, 0.0),
        message=ended,
    )


def event_at(events: Events, worker: int, instructions: Iterable[Instruction]) -> int:
    """The number of the event of the first of ``instructions`` that has one on the lane of ``worker``, or -1.

    Events are numbered lane by lane, as on a page.
    """
    before = sum(map(len, events.lanes[:worker]))
    places = {
        events.nodes[event].instruction: place for place, event in enumerate(events.lanes[worker][1:], before + 1)
    }
    return next((places[instruction] for instruction in instructions if instruction in places), -1)


FORMAT = "chimera stop"
VERSION = 1

LARGEST = 2**26
"""Bytes of the largest bundle, and of the largest program in one, unpacked."""

LARGEST_RECORD, LARGEST_RECORDS = 2**18, 2**25
"""Bytes of the largest record of a rank, and of the records of all ranks together, unpacked."""

MOST_FILES = 2**17
"""The most files in a bundle."""

_MEMBER = b"PK\1\2"
"""The bytes with which the entry of a file begins, in the list of files of a zip file."""

_IDLE = "in no update"
_NAME = re.compile(r"rank_([0-9]{1,9})\.json")


class RankStop(NamedTuple):
    """Record of where a rank stopped.

    ``place`` is its place in its script, None outside of updates; the script counts updates from ``update`` on.
    ``text`` is the line of the script. ``peers`` are the ranks that it waited for, for ``seconds`` if that is not 0.
    """

    rank: int
    copies: int
    layout: str
    update: int
    place: CallPlace | None
    text: str
    peers: Sequence[int]
    seconds: float
    message: str


@dataclass(frozen=True, slots=True)
class Bundle:
    """The text of the program of a run, and what its ranks recorded, in order."""

    path: Path
    text: str
    ranks: tuple[RankStop, ...]


def read_bundle(path: Path) -> Bundle:
    """Reads the zip file of ``--bundle``; raises `BadTrace` if it is another file, damaged, or of different runs.

    Whatever its files unpack to, and whatever it says of their sizes, reading it takes memory within the limits above.
    """
    try:
        data = contents(path, LARGEST)
        if data.count(_MEMBER) > MOST_FILES:
            raise BadTrace(f"{path}: has more than {MOST_FILES:,} files; {_NOT_OURS}")
        with zipfile.ZipFile(BytesIO(data)) as archive:
            names = {info.filename: info for info in archive.infolist()}
            if PROGRAM not in names:
                raise BadTrace(f"{path}: has no {PROGRAM}; name the file that train.py --bundle wrote, or a trace")
            text = _text(path, archive, PROGRAM, LARGEST)
            numbered = sorted((int(name[1]), name[0]) for name in map(_NAME.fullmatch, names) if name)
            ranks, left = list[RankStop](), LARGEST_RECORDS
            for number, name in numbered:
                record = _text(path, archive, name, min(LARGEST_RECORD, left))
                left -= len(record)
                ranks.append(_rank(f"{path}: {name}", number, record))
    except OSError as error:
        raise BadTrace(f"{path}: {error.strerror or _DAMAGED}") from error
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError, ValueError) as error:
        raise BadTrace(f"{path}: {_DAMAGED}") from error
    if not ranks:
        raise BadTrace(
            f"{path}: has no rank_<r>.json: no rank had begun to train, or an earlier version wrote it; rank_<r>.txt "
            "in it say what each rank did"
        )
    if len({(rank.copies, rank.layout) for rank in ranks}) > 1:
        raise BadTrace(f"{path}: has the ranks of different runs; start again with another --bundle FILE")
    return Bundle(path, text, tuple(ranks))


_NOT_OURS = "name what train.py --bundle wrote"
_DAMAGED = f"is no zip file, or a damaged one; {_NOT_OURS}"


def _text(path: Path, archive: zipfile.ZipFile, name: str, most: int) -> str:
    """Unpacks a file of at most ``most`` bytes; the header, which may say anything, is not asked for its size."""
    if archive.getinfo(name).compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise BadTrace(f"{path}: {_DAMAGED}")
    with archive.open(name) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise BadTrace(f"{path}: {name} unpacks to more than any that a run writes; {_NOT_OURS}")
    return data.decode("utf-8")


def _rank(name: str, number: int, text: str) -> RankStop:
    try:
        content = of_type(dict, "an object", json.loads(text))
        if (content.get("format"), content.get("version")) != (FORMAT, VERSION):
            raise BadTrace(f"{name}: is of another version of the format; this command reads {FORMAT} {VERSION}")
        if whole(content["rank"]) != number:
            raise ValueError("it is of another rank")
        seconds = content["seconds"]
        return RankStop(
            rank=number,
            copies=whole(content["copies"], 1),
            layout=word(content["layout"], ("pipeline", "replica")),
            update=0 if content["update"] is None else whole(content["update"]),
            place=None
            if content["line"] is None
            else CallPlace(
                whole(content["line"], 1),
                {name: whole(n, -LONGEST) for name, n in of_type(dict, "an object", content["counters"]).items()},
            ),
            text=word(content["text"]),
            peers=[whole(peer) for peer in of_type(list, "a list", content["waits_for"])],
            seconds=float(seconds) if type(seconds) in (int, float) and 0 <= seconds <= LONGEST / 1e9 else 0.0,
            message=word(content["message"]),
        )
    except (KeyError, ValueError, RecursionError) as error:
        raise BadTrace(f"{name}: garbles what a rank records: {error}; copy the file again") from error


def stopped_ranks(bundle: Bundle, verified: Verified, scripts: ProvenScripts, events: Events) -> list[StoppedRank]:
    """The places where all ranks stopped, recorded or not; ``events`` are those of the schedule on the page.

    Raises `BadTrace` if the scripts are not those that the ranks ran, or a rank is not one of the run.
    """
    program, header = verified.program, verified.program.header
    first = bundle.ranks[0]
    count = first.copies * header.workers
    recorded = {rank.rank: rank for rank in bundle.ranks}
    if count - len(recorded) > LOST or max(recorded) >= count:
        workers = counted(header.workers, "worker")
        raise BadTrace(f"{bundle.path}: has a rank that no run on copies of {workers} has; copy the file again")
    places = call_places(program, scripts.by_worker)
    lanes = [_instructions(header, *lane) for lane in zip(program.lanes, places, strict=True)]
    lines = [script.text.split("\n") for script in scripts.by_worker]
    turns = [_turn(header, rank.place) for rank in bundle.ranks if rank.place is not None]
    before = max(0, max(turns, default=0) - header.updates // 2)

    def stop(number: int) -> StoppedRank:
        _, worker = place_of(number, first.layout, first.copies, header.workers)
        rank = recorded.get(number)
        if rank is None:
            return StoppedRank(number, worker, -1, "", -1, False, -1, 0.0, _silent(number, bundle.ranks))
        message = visible_lines(rank.message)
        if rank.place is not None and [rank.text] != [
            line.strip() for line in lines[worker][rank.place.line - 1 :][:1]
        ]:
            raise BadTrace(
                f"{bundle.path}: is of scripts that another version of chimera compile wrote; rank_{number}.txt in it "
                "says where the rank was"
            )
        inside = None if rank.place is None else _instruction_at(header, lanes[worker], rank.place, before)
        if inside is None:
            return StoppedRank(number, worker, -1, _IDLE, -1, False, -1, rank.seconds, message)
        event, awaited = event_at(events, worker, [inside.shown]), awaited_worker(header, inside.done)
        update = rank.update + inside.update
        line = words(inside.done, header)
        return StoppedRank(number, worker, event, line, update, True, awaited, rank.seconds, message)

    return [stop(number) for number in range(count)]


_Key = tuple[int, tuple[int, ...]]
"""The place of an instruction in a script: its line, and the counters of the loops around it.

In a stream, counters count from the turn, so that an instruction has the same place in every turn.
"""


class _LaneInstruction(NamedTuple):
    """The instruction that a rank was in, that which the page shows for it, and the update that it serves."""

    done: Instruction
    shown: Instruction
    update: int


def _instructions(
    header: Header, lane: Sequence[Instruction], places: Sequence[CallPlace]
) -> Mapping[_Key, Mapping[int, Instruction]]:
    """The instructions at each place in a script, by the first update of their turn; 0 with a flush."""
    instructions: dict[_Key, dict[int, Instruction]] = defaultdict(dict)
    for instruction, place in zip(lane, places, strict=True):
        instructions[_key(header, place)][_turn(header, place)] = instruction
    return instructions


def _instruction_at(
    header: Header, lane: Mapping[_Key, Mapping[int, Instruction]], place: CallPlace, before: int
) -> _LaneInstruction | None:
    """The instruction at a place, and the one that the page shows for it; None if the script has none there.

    Of a stream a page shows only some updates, of which the first stands for update ``before`` of the run. The shown
    instruction is of the turn nearest to the rank's.
    """
    of_turns = lane.get(_key(header, place))
    if of_turns is None:
        return None
    if not header.asynchronous:
        (instruction,) = of_turns.values()
        return _LaneInstruction(instruction, instruction, 0)
    turn = _turn(header, place)
    shown = turn if turn in of_turns and not before else min(of_turns, key=lambda other: abs(turn - before - other))
    done = shifted(of_turns[shown], (turn - shown) * header.per_update, turn - shown)
    return _LaneInstruction(done, of_turns[shown], served_update(header, done))


def _key(header: Header, place: CallPlace) -> _Key:
    if not header.asynchronous:
        return place.line, tuple(place.counters[name] for name in sorted(place.counters))
    inner = place.counters.get("n")
    return place.line, () if inner is None else (inner - _turn(header, place) * header.per_update,)


def _turn(header: Header, place: CallPlace) -> int:
    """The first update of the turn that a place is in, the argument of the script's function; 0 with a flush."""
    return place.counters.get("m" if header.per_update == 1 else "k", 0) if header.asynchronous else 0


def _silent(number: int, ranks: Sequence[RankStop]) -> str:
    waiting = [str(rank.rank) for rank in ranks if number in rank.peers and len(rank.peers) == 1]
    waits = f"; rank{'s' if len(waiting) > 1 else ''} {', '.join(waiting)} waited for it" if waiting else ""
    return f"left no record: it was stopped or killed, or its machine has a bundle of its own{waits}"
