"""Packs the document of a page into compressed bytes: texts as JSON, columns as binary, which a page reads whole.

Uncompressed, these are the length of the JSON in bytes, the JSON, then the columns. The JSON begins at byte 4, the
columns at the first multiple of 8 after the JSON; each column begins at a multiple of 8. Numbers are little-endian.

In the JSON an object stands for a column: ``at`` is the offset of its first byte among the columns, ``length`` how many
numbers it has, ``type`` one of ``i1``, ``i2``, ``i4`` (integers of 1, 2 or 4 bytes) and ``f8``. With ``sums`` the
stored numbers are differences, which take fewer bytes: a number of the column is the sum of all stored ones up to its
place.
"""

import gzip
import json
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from operator import sub
from typing import Any

from chimera_ir.escapes import visible_lines

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
        """The fields of a dataclass by name; a column is replaced by an object that says where its numbers are."""
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
    """Returns the narrowest type for a column, the numbers to store, and whether these are differences.

    Differences are stored if they take fewer bytes than the numbers.
    """
    try:
        integers: array[int] = array("i", numbers)  # type: ignore[arg-type]
    except (TypeError, OverflowError):  # not all are integers of four bytes
        kind, code = _FLOATS
        return kind, array(code, numbers), False
    kind, stored = _narrowed(integers)
    if stored.itemsize > 1 and max(stored) - min(stored) <= _largest("i4"):
        other, steps = _narrowed([*map(sub, integers, [0, *integers[:-1]])])
        if steps.itemsize < stored.itemsize:
            return other, steps, True
    return kind, stored, False


def _narrowed(integers: Sequence[int]) -> "tuple[str, array[int]]":
    """The name of the narrowest type that holds all integers, and the integers as an array of it."""
    least, most = min(integers), max(integers)
    kind = next(kind for kind in _INTEGERS if -least <= _largest(kind) + 1 and most <= _largest(kind))
    return kind, array(_INTEGERS[kind], integers)


def _largest(kind: str) -> int:
    return int(2 ** (8 * int(kind[1:]) - 1) - 1)


def _padding(length: int) -> bytes:
    """The zero bytes from ``length`` up to the next multiple of the alignment."""
    return bytes(-length % _ALIGNMENT)
