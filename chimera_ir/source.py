"""The text that is compiled, places in it, and files that users name."""

import hashlib
import os
import re
import select
import stat
import sys
import time
from bisect import bisect_right
from contextlib import suppress
from dataclasses import dataclass, field
from errno import EISDIR
from functools import cached_property
from importlib.resources import files
from importlib.util import cache_from_source
from io import BytesIO
from os import strerror
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from lark import Lark

# Paths of grammars, templates and library schemes: inside an installed package, or next to it in a checkout.

_PACKAGE = Path(str(files("chimera_ir")))


def _folder(name: str) -> Path:
    installed = _PACKAGE / name
    return installed if installed.is_dir() else _PACKAGE.parent / name


def grammar(name: str) -> Path:
    """The file of a grammar, as in ``grammar("scheme.lark")``."""
    return _folder("grammar") / name


def templates() -> Path:
    """The folder of the templates of generated files."""
    return _folder("templates")


def mistakes() -> Path:
    """The folder of the texts with a mistake, each next to its message."""
    installed = _PACKAGE / "mistakes"
    return installed if installed.is_dir() else _PACKAGE.parent / "tests" / "errors"


def runtime() -> Path:
    """The folder of the package that generated ranks run on."""
    return _PACKAGE.parent / "chimera_runtime"


def schemes() -> Path:
    """The folder of the library schemes."""
    return _PACKAGE / "schemes"


LARGEST = 2**30
"""Bytes of the largest file that is read."""

ENDINGS = (".chim", ".sir", ".csv")
"""The endings of the names of texts: a scheme, an IR text, a schedule of torch.distributed.pipelining."""

PATIENCE = 2.0
"""Seconds to wait for the first byte of a pipe of the system, which may have nobody who writes to it."""

_PART = 2**20
_IR = re.compile(r"(?:\s|#.*+)*+(?:plan|schedule|program)\b")
_CSV = re.compile(r"[\s,]*+\(?[0-9]+(?:[FIBW]|UNSHARD|RECV)")


def contents(path: Path, most: int = LARGEST, *, pipes: bool = False) -> bytes:
    """The contents of a regular file of at most ``most`` bytes; with ``pipes`` also of a pipe such as ``<(command)``.

    Raises `OSError` if the file cannot be read, is not a regular one, or is larger, or if nobody writes to the pipe.
    """
    # A pipe without a writer: opening it must not wait, so that reading can give up.
    _refuse(path.stat(), pipes)
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        _refuse(os.fstat(handle), pipes)
        return _all(handle, most)
    finally:
        os.close(handle)


def _refuse(state: os.stat_result, pipes: bool) -> None:
    if stat.S_ISDIR(state.st_mode):
        raise IsADirectoryError(EISDIR, strerror(EISDIR))
    if not (stat.S_ISREG(state.st_mode) or (pipes and stat.S_ISFIFO(state.st_mode))):
        raise OSError(0, "it is no regular file")


def _all(handle: int, most: int) -> bytes:
    state, parts = os.fstat(handle), list[bytes]()
    size, written = 0, not stat.S_ISFIFO(state.st_mode)
    deadline = time.monotonic() + PATIENCE
    while max(size, state.st_size) <= most:
        try:
            part = os.read(handle, _PART)
        except BlockingIOError:
            written = True
            select.select([handle], [], [])
            continue
        if part:
            written = True
            size += len(part)
            parts.append(part)
        elif written:
            return b"".join(parts)
        elif time.monotonic() > deadline:
            raise OSError(0, "nobody writes to this pipe")
        else:
            time.sleep(0.01)
    raise OSError(0, f"it is larger than {most // 2**20:,} MiB")


class Span(NamedTuple):
    """Characters ``start`` to ``end`` (exclusive) of the text; in a turn, ``turn`` has what m and v stand for."""

    start: int
    end: int
    turn: tuple[int, ...] = ()


class Position(NamedTuple):
    """A line and a column, both counted from 1."""

    line: int
    column: int


@dataclass(frozen=True)
class Source:
    """A text with its ``name`` for the user; ``origin`` stands before the name if the text is no file of the user."""

    name: str
    text: str
    origin: str = field(default="", compare=False)

    @cached_property
    def is_ir(self) -> bool:
        """Whether the text is an IR text: by the ending of its name or, without one of `ENDINGS`, by its first word."""
        return self._ending == ".sir" or (not self._ending and _IR.match(self.text) is not None)

    @cached_property
    def is_csv(self) -> bool:
        """Whether the text is a CSV of torch: by the ending of its name or, without one of `ENDINGS`, by its cells."""
        return self._ending == ".csv" or (not self._ending and _CSV.match(self.text) is not None)

    @property
    def is_scheme(self) -> bool:
        """Whether the text is a scheme, and no level of operations."""
        return not (self.is_ir or self.is_csv)

    @property
    def _ending(self) -> str:
        ending = Path(self.name).suffix
        return ending if ending in ENDINGS else ""

    def place(self, offset: int) -> str:
        """The place of a character for the user: line and column and, of a schedule of torch, the row and the cell."""
        line, column = self.position(offset)
        if not self.is_csv:
            return f"{line}:{column}"
        return f"{line}:{column} (row {line}, cell {self.line(line).count(',', 0, column - 1) + 1})"

    @cached_property
    def _starts(self) -> list[int]:
        starts = [0]
        for line in self.text.split("\n"):
            starts.append(starts[-1] + len(line) + 1)
        return starts[:-1]

    def position(self, offset: int) -> Position:
        """The line and column of the character at ``offset``; the end of the text for an offset beyond it."""
        offset = min(max(offset, 0), len(self.text))
        line = bisect_right(self._starts, offset)
        return Position(line, offset - self._starts[line - 1] + 1)

    def offset(self, line: int, column: int) -> int:
        """The offset of a line and a column, both counted from 1; at most the end of the text."""
        start = self._starts[min(line, len(self._starts)) - 1]
        return min(start + column - 1, len(self.text))

    def line(self, number: int) -> str:
        """The text of line ``number``, counted from 1, without its line end."""
        start = self._starts[number - 1]
        end = self._starts[number] - 1 if number < len(self._starts) else len(self.text)
        return self.text[start:end].rstrip("\r")


# What takes long to compute from a file, kept in ``__pycache__`` beside it: code of templates, parsers of grammars, the
# scripts of pages. It is run, or unpickled, so nobody else may have written it.


def kept(source: Path, facts: str) -> bytes | None:
    """The result of `keep` for the file ``source``.

    None if the ``facts`` were others, if the result is damaged, or if a user other than the file's may write it.
    """
    with suppress(OSError):
        path = _kept_in(source)
        digest, _, result = path.read_bytes().partition(b"\n")
        if digest == _digest(facts, result) and _is_trusted(path.stat(), source.stat().st_uid):
            return result
    return None


def keep(source: Path, facts: str, result: bytes) -> None:
    """Keeps what was computed from the file ``source``; ``facts`` name all on which it depends, the text included."""
    if not sys.dont_write_bytecode:
        with suppress(OSError):
            path = _kept_in(source)
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(f".{os.getpid()}")
            part.touch(0o644, exist_ok=False)
            part.write_bytes(_digest(facts, result) + b"\n" + result)
            os.replace(part, path)


def _kept_in(source: Path) -> Path:
    return Path(cache_from_source(str(source))).with_suffix(".kept")


def _is_trusted(file: os.stat_result, owner: int) -> bool:
    """Whether a file belongs to this user or to ``owner``, and nobody else may write it."""
    return not hasattr(os, "getuid") or (file.st_uid in (os.getuid(), owner) and not file.st_mode & 0o022)


def _digest(facts: str, result: bytes) -> bytes:
    return hashlib.sha256(facts.encode() + result).hexdigest().encode()


def parser_of(name: str, more: str = "", **options: object) -> "Lark":
    """The parser of the grammar file ``name``, with the lines ``more`` added; ``options`` are those of lark.

    Its tables take longer to compute than most texts to parse, so they are kept. Options are compared by their repr,
    which must not contain an address.
    """
    import lark  # takes a while, and not every command parses

    source = grammar(name)
    text = source.read_text(encoding="utf-8") + more
    facts = repr((text, options, lark.__version__))
    if (known := kept(source, facts)) is not None:
        return lark.Lark.load(BytesIO(known))
    parser, tables = lark.Lark(text, parser="lalr", lexer="basic", **options), BytesIO()
    parser.save(tables)
    keep(source, facts, tables.getvalue())
    return parser
