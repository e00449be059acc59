"""Makes parsers from grammar files. The tables that lark computes for a parser are kept in ``__pycache__``."""

import hashlib
import os
import sys
from contextlib import suppress
from importlib.util import cache_from_source
from io import BytesIO
from pathlib import Path

import lark
from lark import Lark

from chimera_ir.resources import grammar
from chimera_ir.source import is_written_by


def parser_of(name: str, more: str = "", **options: object) -> Lark:
    """Returns the parser of the grammar file ``name``, with the lines ``more`` added; ``options`` are those of lark.

    The parser's tables take longer to compute than most texts take to parse, so they are written to a file. They are
    computed again if the lines, the options, lark or Python have changed, the file is damaged, or it belongs to another
    user than the grammar does and may run code of that user: lark unpickles it. Options are compared
    by their repr, which must not contain an address.
    """
    source = grammar(name)
    text = source.read_text(encoding="utf-8") + more
    facts = repr((text, options, lark.__version__)).encode()
    path = Path(cache_from_source(str(source))).with_suffix(".tables")
    with suppress(OSError):
        digest, _, tables = path.read_bytes().partition(b"\n")
        if digest == _digest(facts, tables) and is_written_by(path.stat(), source.stat().st_uid):
            return Lark.load(BytesIO(tables))
    parser = Lark(text, parser="lalr", lexer="basic", **options)
    if not sys.dont_write_bytecode:
        with suppress(OSError):
            _write(parser, facts, path)
    return parser


def _write(parser: Lark, facts: bytes, path: Path) -> None:
    """Writes the tables of a parser whole or not at all, even if other processes write the same ones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tables = BytesIO()
    parser.save(tables)
    part = path.with_suffix(f".{os.getpid()}")
    part.touch(0o644, exist_ok=False)
    part.write_bytes(_digest(facts, tables.getvalue()) + b"\n" + tables.getvalue())
    os.replace(part, path)


def _digest(facts: bytes, tables: bytes) -> bytes:
    return hashlib.sha256(facts + tables).hexdigest().encode()
