"""The contents of a page, from the levels of a compilation."""

import gzip
import json
import re
import sys
from array import array
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from operator import sub
from pathlib import Path, PurePath
from typing import Any, Protocol, cast
from zlib import ZLIB_RUNTIME_VERSION

from chimera_ir.cost.durations import Durations
from chimera_ir.cost.report import Figures, Report, heading
from chimera_ir.escapes import visible_lines
from chimera_ir.ir.kinds import RECOMPUTATION
from chimera_ir.ir.levels import Header, Program
from chimera_ir.page import event_tables
from chimera_ir.page.event_tables import Lengths
from chimera_ir.page.tables import (
    Facts,
    MemoryInBytes,
    OperationRow,
    PageDocument,
    ScheduleTables,
    matches,
    name_of,
    program_text,
    rows,
    script_texts,
    source_text,
    tables_of_memory,
    tables_of_operations,
)
from chimera_ir.picture.chart import filled
from chimera_ir.picture.svg import Inlined, policy_source
from chimera_ir.predict import screen
from chimera_ir.predict.events import Events, events_of
from chimera_ir.predict.prediction import Forecast, Prediction, Summary
from chimera_ir.predict.setting import Charges, Setting, operations_alone
from chimera_ir.request import Request
from chimera_ir.source import keep, kept, templates
from chimera_ir.verify.verify import ProvenScripts, Verified

_UNBROKEN = 1 << 16
"""A width at which no note is broken into lines."""


class _Levels(Protocol):
    """The levels of a compilation that its page shows; the opponent is the schedule that the report compares with."""

    @property
    def request(self) -> Request: ...
    @property
    def verified(self) -> Verified: ...
    @property
    def program_text(self) -> str: ...
    @property
    def scripts(self) -> ProvenScripts: ...
    @property
    def report(self) -> Report: ...
    @property
    def prediction(self) -> Prediction | None: ...
    @property
    def forecast(self) -> Forecast | None: ...
    @property
    def summary(self) -> Summary: ...
    @property
    def opponent(self) -> "_Levels": ...
    @property
    def left_out(self) -> str: ...


def document(levels: _Levels) -> PageDocument:
    """The contents of the page of a compilation."""
    shown, compared = ShownSchedule.of(levels), levels.request.opposes
    schedules = [shown, *([_compared(levels.opponent.verified, levels)] if compared else [])]
    tables = [schedule.tables() for schedule in schedules]
    if compared:
        names = _distinct_names(tables, levels)
        tables = [replace(table, name=name) for table, name in zip(tables, names, strict=True)]
    return PageDocument(
        title=f"{name_of(shown.header)}{levels.left_out and ', '}{levels.left_out}",
        notes=list(_notes(levels)),
        schedules=tables,
        matches=matches(*(schedule.rows for schedule in schedules)) if compared else None,
        matched_by=matches(*(schedule.rows for schedule in reversed(schedules))) if compared else None,
        texts=[
            source_text(levels.request.source, shown.rows),
            program_text(levels.program_text, levels.verified, shown.rows),
            *script_texts(levels.scripts, shown.program, shown.rows),
        ],
    )


def _distinct_names(tables: Sequence[ScheduleTables], levels: _Levels) -> list[str]:
    """Names for two schedules: equal ones get "found" and "before", or the ends of the paths of their files."""
    names = [table.name for table in tables]
    if len({*names}) > 1:
        return names
    if levels.request.against is None:
        return [f"{name} ({order})" for name, order in zip(names, ("found", "before"), strict=True)]
    sources = levels.request.source.name, levels.opponent.request.source.name
    paths = [PurePath(source).parts for source in sources]
    for length in range(1, 1 + max(map(len, paths))):
        ends = ["/".join(path[-length:]) for path in paths]
        if len({*ends}) > 1:
            return [f"{name} ({end})" for name, end in zip(names, ends, strict=True)]
    return [f"{name} ({place})" for name, place in zip(names, ("first", "second"), strict=True)]


@dataclass(frozen=True)
class ShownSchedule:
    """A verified program as the page shows it, with the events of its replay and its figures.

    ``setting`` (the costs of its stages, and the cluster) and ``memory`` (its memory in bytes) come from a prediction;
    both are None without one. Of the baseline the memory is always None.
    """

    verified: Verified
    events: Events
    figures: Figures
    setting: Setting | None
    memory: MemoryInBytes | None

    @staticmethod
    def of(levels: _Levels) -> "ShownSchedule":
        """The schedule that was compiled, not the one that it is compared with."""
        verified, figures, prediction = levels.verified, levels.report, levels.prediction
        if prediction is None:
            charges = operations_alone(verified.program.header, figures.durations)
            return ShownSchedule(verified, events_of(verified.program, charges), figures, None, None)
        memory = MemoryInBytes(prediction.setting, prediction.memory, prediction.available)
        return ShownSchedule(verified, prediction.replay.events, figures, prediction.setting, memory)

    @property
    def program(self) -> Program:
        """The program; without a flush, as many of its updates as show all that ever happens."""
        return self.verified.program

    @property
    def header(self) -> Header:
        """The header of the program."""
        return self.program.header

    @cached_property
    def rows(self) -> Sequence[OperationRow]:
        """The rows of its operations."""
        return rows(parts.computes.lines for parts in self.program.parts)

    def tables(self) -> ScheduleTables:
        """All tables of the schedule; without a prediction operations alone take time."""
        header, figures, rows = self.header, self.figures, self.rows
        charges = _charges(header, figures.durations, self.setting)
        lengths = Lengths(charges)
        happening, of_rows = event_tables.tables(self.events, rows, charges, lengths)
        sliders = lengths.sliders()
        return ScheduleTables(
            name=name_of(header),
            workers=header.workers,
            unit=figures.durations.unit.value or "",
            updates=header.updates,
            sliders=sliders,
            **tables_of_operations(header, rows, of_rows)._asdict(),
            **happening._asdict(),
            memory=tables_of_memory(self.program, rows, figures, self.memory),
            facts=Facts(
                float(figures.makespan),
                float(figures.bubble_ratio),
                {letter: float(count) for letter, count in figures.counts.items()},
            ),
            remarks=[words for name, words in _REMARKS.items() if name in ("", *(slider.name for slider in sliders))],
        )


def _charges(header: Header, durations: Durations, setting: Setting | None) -> Charges:
    return operations_alone(header, durations) if setting is None else Charges(header, setting)


def _compared(opponent: Verified, levels: _Levels) -> ShownSchedule:
    forecast, like = levels.forecast, levels.verified.program.header
    setting = forecast.setting_of_baseline(opponent.program.header, like) if forecast else None
    charges = _charges(opponent.program.header, levels.report.baseline.durations, setting)
    return ShownSchedule(opponent, events_of(opponent.program, charges), levels.report.baseline, setting, None)


_REMARKS = {
    "": "The order of operations, and where sums are launched, stay as they were compiled.",
    RECOMPUTATION.letter: "What recomputation takes is a slider of its own; on the command line, --cost B= alone"
    " includes it, so give --cost recompute= as well.",
}
"""Remarks on what sliders do and do not change, keyed by the name of a slider.

A page has the remark on a slider if it has the slider; the remark with the key ``""`` stands on every page.
"""


def _notes(levels: _Levels) -> Iterator[str]:
    report, summary = levels.report, levels.summary
    if levels.left_out:
        yield f"Drawn and timed is a part: {levels.left_out}. chimera compile --html FILE draws all of it."
    _, sizes = heading(report).plain.split(": ", 1)
    yield from sizes.split("\n")
    shown = screen.show(report, summary, levels.prediction, _UNBROKEN, summary.speed.baseline)
    yield from (" ".join(answer.plain.split()) for answer in shown)


# The compressed bytes of a document: texts as JSON, columns as binary.
#
# Uncompressed, these are the length of the JSON in bytes, the JSON, then the columns. The JSON begins at byte 4, the
# columns at the first multiple of 8 after the JSON; each column begins at a multiple of 8. Numbers are little-endian.
#
# In the JSON an object stands for a column: ``at`` is the offset of its first byte among the columns, ``length`` how
# many numbers it has, ``type`` one of ``i1``, ``i2``, ``i4`` (integers of 1, 2 or 4 bytes) and ``f8``. With ``sums``
# the stored numbers are differences, which take fewer bytes: a number of the column is the sum of all stored ones up to
# its place.

_INTEGERS = {"i1": "b", "i2": "h", "i4": "i"}
"""The type code that Python's ``array`` has for each integer type of a column, the narrowest first."""

_FLOATS = "f8", "d"

_ALIGNMENT = 8


def packed(document: object) -> bytes:
    """Compresses a document of dataclasses; each field that is a sequence of numbers becomes a column."""
    columns = _PackedColumns()
    text = json.dumps(document, default=columns.encoded, ensure_ascii=False, separators=(",", ":"))
    data = text.encode()
    head = len(data).to_bytes(4, "little") + data
    return gzipped(b"".join((head, _padding(len(head)), *columns.parts)), level=6)


def gzipped(data: bytes, level: int = 9) -> bytes:
    """Compresses bytes; the header names no time, and no operating system, which each Python names differently."""
    compressed = gzip.compress(data, level, mtime=0)
    return b"%b\xff%b" % (compressed[:9], compressed[10:])


@dataclass(slots=True)
class _PackedColumns:
    """Collects the bytes of all columns: ``parts`` has them piece by piece, ``size`` is how many there are so far."""

    parts: list[bytes] = field(default_factory=list)
    size: int = 0

    def encoded(self, table: Any) -> dict[str, object]:
        values = {entry.name: getattr(table, entry.name) for entry in fields(table)}
        return {name: self._placed(value) if _is_column(value) else _shown(value) for name, value in values.items()}

    def _placed(self, numbers: Sequence[float]) -> dict[str, object]:
        kind, stored, sums = _narrowest(numbers)
        place = {"at": self.size, "length": len(stored), "type": kind, "sums": sums}
        if sys.byteorder == "big":
            stored.byteswap()
        data = stored.tobytes()
        self.parts += data, _padding(len(data))
        self.size += len(data) + len(_padding(len(data)))
        return place


def _shown(value: Any) -> Any:
    """The value with escapes in its texts for characters that are obeyed instead of shown, in as many lines."""
    match value:
        case str():
            return visible_lines(value)
        case list() | tuple():
            return [*map(_shown, value)]
        case dict():
            return {_shown(key): _shown(entry) for key, entry in value.items()}
        case _:
            return value


def _is_column(value: object) -> bool:
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], int | float)


def _narrowest(numbers: Sequence[float]) -> "tuple[str, array[Any], bool]":
    """The narrowest type for a column, and its numbers or, if they take fewer bytes, their differences (True)."""
    try:
        data = array("i", numbers).tobytes()
    except (TypeError, OverflowError):  # not all are integers of four bytes
        kind, code = _FLOATS
        return kind, array(code, numbers), False
    # The column of a script has zeros for all workers but its own: the zeros at both ends are not looked at one by one.
    size = len(data) // len(numbers)
    end = -(-len(data.rstrip(b"\0")) // size)
    first = min(end, (len(data) - len(data.lstrip(b"\0"))) // size)
    inner, behind = cast("Sequence[int]", numbers[first:end]), len(numbers) - end
    least, most = min(inner, default=0), max(inner, default=0)
    kind = _holding(least, most)
    if kind != "i1" and max(most, 0) - min(least, 0) <= _largest("i4"):
        steps = [*map(sub, [*inner, 0] if behind else inner, [0, *inner])]
        other = _holding(min(steps), max(steps))
        if other < kind:
            return other, _padded(other, first, steps, behind and behind - 1), True
    return kind, _padded(kind, first, inner, behind), False


def _holding(least: int, most: int) -> str:
    """The narrowest type that holds integers from ``least`` to ``most``."""
    return next(kind for kind in _INTEGERS if -least <= _largest(kind) + 1 and most <= _largest(kind))


def _padded(kind: str, before: int, integers: Sequence[int], behind: int) -> "array[int]":
    """The integers as a column of a type, with zeros ``before`` and ``behind`` them."""
    zero = array(_INTEGERS[kind], [0])
    return zero * before + array(_INTEGERS[kind], integers) + zero * behind


def _largest(kind: str) -> int:
    return int(2 ** (8 * int(kind[1:]) - 1) - 1)


def _padding(length: int) -> bytes:
    """The zero bytes from ``length`` up to the next multiple of the alignment."""
    return bytes(-length % _ALIGNMENT)


# One HTML file: the document and the scripts are compressed, and a short first script, which is not, unpacks them. The
# content security policy has the hashes of scripts and style sheet, so the browser accepts no others.

_FIRST, _MAIN = "start.js", "main.js"
"""The module that a page begins with, and the one that it starts when all are unpacked."""

_IMPORT = re.compile(r'^import \{[^}]*\} from "\./([a-z_]+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?function|class|const|let)", re.MULTILINE)


def page(document: PageDocument) -> str:
    """The page of a document as HTML; every text of the document is in its compressed data, or escaped."""
    folder = templates() / "page"
    style = (folder / "page.css").read_text(encoding="utf-8")
    first, scripts = _script(folder, _FIRST), _script(folder, _MAIN)
    policy = {
        "default-src": "'none'",
        "script-src": f"{policy_source(first)} {policy_source(scripts)}",
        "style-src": policy_source(style),
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return filled(
        "page/page.html.j2",
        title=document.title,
        policy="; ".join(f"{directive} {source}" for directive, source in policy.items()),
        style=Inlined(style),
        first=Inlined(first),
        scripts=_compressed(folder / _MAIN, scripts),
        data=_in_base64(packed(document)),
    )


@cache
def _compressed(main: Path, scripts: str) -> Inlined:
    """The scripts of every page; what zlib makes of them is kept."""
    facts = f"zlib {ZLIB_RUNTIME_VERSION}\n{scripts}"
    data = kept(main, facts)
    if data is None:
        data = gzipped(scripts.encode())
        keep(main, facts, data)
    return _in_base64(data)


def _in_base64(data: bytes) -> Inlined:
    return Inlined(b64encode(data).decode())


@cache
def _script(folder: Path, main: str) -> str:
    """Joins ``main`` and all modules that it imports into one scope, each after those that it imports."""
    texts: dict[str, str] = {}

    def add(name: str) -> None:
        text = (folder / name).read_text(encoding="utf-8")
        for imported in _IMPORT.findall(text):
            if imported not in texts:
                add(imported)
        texts[name] = _EXPORT.sub("", _IMPORT.sub("", text))

    add(main)
    return "".join(texts.values())
