"""Each mistake of a scheme with the message it gets: ``front/<mistake>.chim`` beside ``front/<mistake>.err``.

A file may say in its first lines how it is compiled: ``#: set N = 0``, ``#: max-operations 10``.
"""

import re
from pathlib import Path

import pytest

from chimera_ir.diagnostics.model import Diagnostic, Rejected
from chimera_ir.diagnostics.render import render_all
from chimera_ir.elaborate.elaborate import elaborate
from chimera_ir.source import Source
from chimera_ir.syntax.parser import MAX_TEXT, MAX_TOKENS, parse
from tests.errors.goldens import compare, inputs

FRONT = Path(__file__).parent / "front"
MISTAKES = inputs(FRONT, "*.chim")
NOT_IN_A_FILE = {"TextTooLong", "TooManyTokens"}
"""Tested below: a golden pair of a million characters would teach nobody anything."""


def diagnostics(source: Source) -> tuple[Diagnostic, ...]:
    settings = {name: int(value) for name, value in re.findall(r"^#: set (\w+) = (-?\d+)$", source.text, re.M)}
    limit = re.search(r"^#: max-operations (\d+)$", source.text, re.M)
    try:
        _, warnings = elaborate(parse(source), settings, int(limit[1]) if limit else 100_000)
    except Rejected as rejected:
        return rejected.diagnostics
    return warnings


def read(path: Path) -> Source:
    return Source(path.name, path.read_bytes().decode("utf-8", errors="replace"))


@pytest.mark.parametrize("path", MISTAKES, ids=lambda path: path.stem)
def test_a_mistake_gets_its_message(path: Path, update_goldens: bool) -> None:
    source = read(path)
    compare(path, diagnostics(source), source, update_goldens)


@pytest.mark.parametrize(
    ("text", "limit"),
    [("scheme a" + " " * MAX_TEXT, "1,048,576 characters"), ("a " * MAX_TOKENS + "a", "100,000 words and signs")],
    ids=["characters", "words"],
)
def test_a_text_that_is_too_long_is_rejected_unread(text: str, limit: str) -> None:
    source = Source("long.chim", text)
    with pytest.raises(Rejected) as rejected:
        parse(source)
    said = render_all(rejected.value.diagnostics, source)
    assert said.startswith(f"error[CH102]: the text has more than {limit}")
    assert max(map(len, said.splitlines())) < 160
