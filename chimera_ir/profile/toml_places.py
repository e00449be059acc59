"""The places of keys and values in a valid TOML text; `tomllib` gives only the values."""

import re
import tomllib
from contextlib import suppress

from chimera_ir.source import Span

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
