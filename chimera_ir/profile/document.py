"""TOML files as tables that are read entry by entry; errors are collected with their places and raised at the end."""

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date, datetime, time
from decimal import Decimal
from fractions import Fraction
from functools import cached_property
from typing import Any

from chimera_ir.diagnostics.catalogue import profiles as say
from chimera_ir.diagnostics.model import Diagnostic, Rejected, closest
from chimera_ir.profile.quantity import POSITIVE, Dimension, split
from chimera_ir.source import Source, Span

# The places of keys and values in a valid TOML text; `tomllib` gives only the values.

Path = tuple[str | int, ...]
"""The way to a value from the top: names of tables and entries, and indices of elements."""

_SPACE = re.compile(r"(?:[\s,]|#[^\n]*)*")
_NAME = re.compile(r"""[ \t]*("(?:\\.|[^"\\\n])*"|'[^'\n]*'|[A-Za-z0-9_-]+)[ \t]*""")
_SCALAR = re.compile(
    r'''"""(?s:\\.|[^\\])*?"{3,5}|\'\'\'(?s:.)*?'{3,5}|"(?:\\.|[^"\\\n])*"|'[^'\n]*'|[^\s,\[\]{}#"'](?:[^,\]}#\n]*[^\s,\]}#])?'''
)


class TomlPlaces:
    """The places of a valid text: the key, or the heading of the table, and the value of every entry."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._keys: dict[Path, Span] = {}
        self._values: dict[Path, Span] = {}
        self._elements: dict[Path, int] = {}
        with suppress(RecursionError):
            self._document()

    def key(self, path: Path) -> Span:
        """The place of an entry's key or, if it has none of its own, of its table's key or heading."""
        while path and path not in self._keys:
            path = path[:-1]
        return self._keys.get(path, Span(0, 0))

    def value(self, path: Path) -> Span:
        """The place of an entry's value or, for a table with a heading, of the heading."""
        return self._values.get(path) or self.key(path)

    def _document(self) -> None:
        table: Path = ()
        at = self._skip(0)
        while at < len(self._text):
            if self._text[at] == "[":
                table, at = self._heading(at)
            else:
                at = self._entry(at, table)
            at = self._skip(at)

    def _heading(self, start: int) -> tuple[Path, int]:
        repeated = self._text.startswith("[[", start)
        names, at = self._names(start + 1 + repeated)
        end = at + 1 + repeated
        path: Path = ()
        for name in names[:-1]:
            path = self._newest((*path, name))
            self._keys.setdefault(path, Span(start, end))
        path = (*path, names[-1])
        if repeated:
            self._elements[path] = self._elements.get(path, -1) + 1
        path = self._newest(path)
        self._keys[path] = Span(start, end)
        return path, end

    def _newest(self, path: Path) -> Path:
        """The path of the newest element if ``path`` is that of an array of tables, else ``path`` itself."""
        return (*path, self._elements[path]) if path in self._elements else path

    def _entry(self, start: int, table: Path) -> int:
        names, at = self._names(start)
        path = (*table, *names)
        self._keys[path] = Span(start, start + len(self._text[start:at].rstrip()))
        return self._value(self._skip(at + 1), path)

    def _names(self, at: int) -> tuple[list[str], int]:
        names = []
        while token := _NAME.match(self._text, at):
            names.append(str(tomllib.loads(f"it = {token[1]}")["it"]) if token[1][0] in "\"'" else token[1])
            at = token.end()
            if not self._text.startswith(".", at):
                break
            at += 1
        return names, at

    def _value(self, start: int, path: Path) -> int:
        if self._text[start] in "[{":
            end = self._members(start, path)
        else:
            token = _SCALAR.match(self._text, start)
            end = token.end() if token else start + 1
        self._values[path] = Span(start, end)
        return end

    def _members(self, start: int, path: Path) -> int:
        """Records the elements of an array or the entries of a table in braces; returns the offset behind it."""
        at, number = self._skip(start + 1), 0
        while self._text[at] not in "]}":
            if self._text[start] == "[":
                self._keys[(*path, number)] = Span(at, at + 1)
                at = self._value(at, (*path, number))
            else:
                at = self._entry(at, path)
            at, number = self._skip(at), number + 1
        return at + 1

    def _skip(self, at: int) -> int:
        space = _SPACE.match(self._text, at)
        return space.end() if space else at


# Warnings in the comments of a measured file: chimera profile writes them for figures that are too uncertain.
#
#     # warning: stage 0 of 2: too noisy to use: after 30 rounds the median may be off by more than 5 %: step 7.6 %
#
# People who correct the figure by hand remove the line.

WARNING = "warning: "
"""The beginning of a warning, after the sign of a comment."""

SHOWN = 3
"""The most warnings that are shown to people; files and JSON have all."""

_LINE = re.compile(rf"^# {WARNING}(.+?)\r?$", re.M)


def warnings(source: Source) -> tuple[str, ...]:
    """The warnings in a file, each with the name of the file in front."""
    return tuple(f"{source.name}: {line[1]}" for line in _LINE.finditer(source.text))


def shown(lines: Sequence[str]) -> Iterator[str]:
    """Yields the first SHOWN warnings, and a line with the number of further ones."""
    yield from lines[:SHOWN]
    rest = len(lines) - SHOWN
    if rest > 0:
        yield f"{rest} more such {'line is' if rest == 1 else 'lines are'} in the files"


MAX_TEXT, MAX_LINE = 4 * 2**20, 10_000
"""The most characters of a file and of a line: parsing names and numbers takes more than linear time."""

MOST = 10**6
"""The largest integer in a file: workers, stages, items."""

_PLACE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")
_LONG_NUMBER = re.compile(r"[0-9][0-9_]{4000,}")
"""A number of more than 4,300 digits, which `tomllib` refuses without a place."""

_UNQUOTED = re.compile(
    r"""^[ \t]*([\w-]+)[ \t]*=[ \t]*([+-]?[0-9][0-9.]*(?:e-?[0-9]+)?[ \t]*[A-Za-zµ%][A-Za-z/]*)[ \t]*(?:\#.*)?\r?$""",
    re.M | re.X,
)


def load(source: Source) -> "Table":
    """The table at the top of a file. Raises `Rejected` as `entries` does."""
    return Table(Document(source), (), entries(source), "the file")


def entries(source: Source) -> dict[str, Any]:
    """The entries of a file, by name; raises `Rejected` if the text is not TOML, or too large."""
    text = source.text
    if len(text) > MAX_TEXT:
        raise Rejected([say.FileTooLarge(Span(0, 1), MAX_TEXT)])
    long = re.search(rf"^[^\n]{{{MAX_LINE}}}", text, re.M)
    if long:
        raise Rejected([say.LineTooLong(Span(long.start(), long.start() + 1), MAX_LINE)])
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise Rejected([say.NestedTooDeeply(Span(0, 1), MAX_TEXT)]) from error
    except ValueError as error:
        raise Rejected(_syntax(source, str(error))) from error


def _syntax(source: Source, message: str) -> Iterator[Diagnostic]:
    unquoted = [
        say.QuotesForgotten(Span(*entry.span(2)), entry[1], entry[2].strip())
        for entry in _UNQUOTED.finditer(source.text)
    ]
    if unquoted:
        yield from unquoted
        return
    place = _PLACE.search(message)
    what = (message[: place.start()] if place else message.partition(":")[0]).rstrip(".")
    at = _offset(source, place)
    yield say.NotToml(Span(at, at + 1), what[:1].lower() + what[1:])


def _offset(source: Source, place: re.Match[str] | None) -> int:
    if place is None:
        number = _LONG_NUMBER.search(source.text)
        return number.start() if number else 0
    return source.offset(int(place[1]), int(place[2])) if place[1] else len(source.text.rstrip())


@dataclass
class Document:
    """A file that is being read, with the errors so far."""

    source: Source
    diagnostics: list[Diagnostic] = field(default_factory=list)

    @cached_property
    def places(self) -> TomlPlaces:
        """The places of all entries, computed only for errors."""
        return TomlPlaces(self.source.text)

    def settle(self) -> None:
        """Raises `Rejected` with all errors, if there are any; called at the end of the reading."""
        if self.diagnostics:
            raise Rejected(self.diagnostics)


class Table:
    """A table of a file, whose entries are read one by one; `close` reports the entries that were never read.

    A wrong or missing entry adds an error to the document, and the method returns a harmless value in its place. An
    entry with a default may be missing. ``example`` is a correct entry and ``where`` a name of the table, for errors.
    """

    def __init__(self, document: Document, path: Path, entries: Mapping[str, Any], where: str) -> None:
        self.document = document
        self.path = path
        self.where = where
        self._entries = entries
        self._known: list[str] = []
        self._withdrawn: list[str] = []

    def has(self, name: str) -> bool:
        """Whether the table has an entry ``name``."""
        return name in self._entries

    def place(self, name: str) -> Span:
        """The place of an entry's value."""
        return self.document.places.value((*self.path, name))

    def key(self, name: str) -> Span:
        """The place of an entry's name, or of its heading."""
        return self.document.places.key((*self.path, name))

    def withdrawn(self, name: str) -> bool:
        """Whether the table has an entry that only older files have.

        `close` does not report such an entry; the caller has to.
        """
        self._withdrawn.append(name)
        return self.has(name)

    def report(self, diagnostic: Diagnostic) -> None:
        """Collects an error of the file; all are shown together when it has been read."""
        self.document.diagnostics.append(diagnostic)

    def heading(self) -> Span:
        """The place of the table's heading."""
        return self.document.places.key(self.path)

    def close(self) -> None:
        """Adds an error for each entry that was never read."""
        for name in self._entries:
            if name not in (*self._known, *self._withdrawn):
                known = ", ".join(f"`{entry}`" for entry in self._known)
                self.report(say.UnknownEntry(self.key(name), self.where, name, closest(name, self._known), known))

    def text(self, name: str, default: str | None, example: str) -> str:
        """The text of an entry."""
        text: str | None = self._value(name, default is not None, example, (str,), "a text")
        return (default or "") if text is None else text

    def integer(self, name: str, default: int | None, example: str) -> int:
        """The integer of an entry, at least 1, without a unit."""
        value: int | None = self._value(name, default is not None, example, (int,), "an integer")
        if value is None:
            return default or 1
        if not 1 <= value <= MOST:
            self.report(say.BeyondLimits(self.place(name), name, example, "1", f"{MOST:,}"))
            return 1
        return value

    def flag(self, name: str, example: str) -> bool:
        """The truth value of an entry; false if the entry is missing."""
        return bool(self._value(name, True, example, (bool,), "true or false"))

    def number(self, name: str, least: float, most: float, example: str) -> float:
        """The number of an entry, from ``least`` to ``most``, without a unit."""
        value: float | None = self._value(name, False, example, (int, float), "a number")
        if value is None:
            return 1.0
        if not least <= value <= most:
            self.report(say.BeyondLimits(self.place(name), name, example, f"{least:,.10g}", f"{most:,.10g}"))
            return 1.0
        return float(value)

    def quantity(
        self,
        name: str,
        dimensions: Iterable[Dimension],
        default: Fraction | None = None,
        least: Fraction = POSITIVE,
        words: Mapping[str, Fraction] | None = None,
    ) -> tuple[Fraction, Dimension]:
        """Reads a number with a unit of one of ``dimensions``; returns it in its base unit, and the dimension.

        The number is at least ``least``. ``words`` are texts that may stand in place of a number, each with the number
        meant.
        """
        first, *others = dimensions
        example = f'{name} = "{first.example}"'
        value = self._value(name, default is not None, example, (str, int, float), "a number with a unit")
        stand_in = Fraction(1) if default is None else default, first
        if value is None:
            return stand_in
        if isinstance(value, str) and words and value in words:
            return words[value], first
        parts = split(str(Decimal(value)) if isinstance(value, int) else str(value))
        if parts is None:
            self.report(say.NotAQuantity(self.place(name), name, example))
            return stand_in
        number, unit = parts
        dimension = next((candidate for candidate in (first, *others) if unit in candidate.units), None)
        if dimension is None:
            self._unit(name, unit, str(value), (first, *others))
            return stand_in
        amount = number * dimension.units[unit]
        if not least <= amount <= dimension.most:
            self.report(say.QuantityBeyondLimits(self.place(name), name, example, *dimension.limits(least)))
            return stand_in[0], dimension
        return amount, dimension

    def table(self, name: str, example: str, where: str) -> "Table | None":
        """A table within this one; None if it is missing, which is an error unless ``example`` is empty."""
        value = self._value(name, not example, example or where, (dict,), "a table")
        return None if value is None else Table(self.document, (*self.path, name), value, where)

    def tables(self, name: str, example: str, where: str) -> "list[Table]":
        """The tables of an array of one or more; ``{}`` in ``where`` stands for their index. Empty after an error."""
        wanted = "a list of tables"
        elements = self._value(name, False, example, (list,), wanted)
        if elements is not None and not (elements and all(isinstance(element, dict) for element in elements)):
            self._wrong(name, elements, wanted, example)
            elements = None
        return [
            Table(self.document, (*self.path, name, number), element, where.format(number))
            for number, element in enumerate(elements or ())
        ]

    def _value(self, name: str, optional: bool, example: str, kinds: tuple[type, ...], wanted: str) -> Any:
        """The value of an entry; None if the entry is missing or, after an error, of none of the ``kinds``."""
        if name not in self._known:
            self._known.append(name)
        value = self._entries.get(name)
        if value is None and not optional:
            self.report(say.EntryMissing(self.heading(), self.where, name, example))
        elif value is not None and type(value) not in kinds:
            self._wrong(name, value, wanted, example)
            return None
        return value

    def _wrong(self, name: str, value: object, wanted: str, example: str) -> None:
        self.report(say.WrongKind(self.place(name), name, _KINDS[type(value)], wanted, example))

    def _unit(self, name: str, unit: str, value: str, dimensions: tuple[Dimension, ...]) -> None:
        noun = " or ".join(dimension.noun for dimension in dimensions)
        known = [unit for dimension in dimensions for unit in dimension.units]
        units, example = ", ".join(known), dimensions[0].example
        span = self.place(name)
        if not unit:
            self.report(say.UnitForgotten(span, name, value.strip(), noun, units, example))
            return
        self.report(say.UnknownUnit(span, name, unit, closest(unit, known), noun, units, example))


_KINDS: Mapping[type, str] = {
    bool: "true or false",
    str: "a text",
    dict: "a table",
    list: "a list",
    **dict.fromkeys((int, float), "a number"),
    **dict.fromkeys((date, datetime, time), "a date or a time"),
}
