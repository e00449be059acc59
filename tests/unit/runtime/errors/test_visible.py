"""What a message quotes is shown and never acted upon."""

import logging
from pathlib import Path

import pytest

from chimera_ir.escapes import visible_lines
from chimera_runtime import blame, errors
from chimera_runtime.errors import visible
from chimera_runtime.errors.tools import file_cannot_be_written, program_was_replaced
from chimera_runtime.tools.open.stdio import last_lines, write_error, write_line
from chimera_runtime.update.updates import Hooks

EVIL = "\x1b[2J\x9b31m\x07\r\u202e\u2066\u200e\u2028\ufeff\udcff"


def assert_plain(text: str) -> None:
    assert text.replace("\n", "").isprintable(), ascii(text)
    assert "x1b[2J" in text, "it is shown"


def test_what_is_hidden_is_what_the_compiler_hides() -> None:
    for code in (*range(0x3000), *range(0xD7F0, 0xE010), *range(0xFE00, 0x10010), 0x1F600, 0xE0041, 0x10FFFF):
        letter = chr(code)
        if letter not in "\t\r":
            assert visible(letter) == visible_lines(letter)
    assert visible("a\tb\nc\r") == "a\tb\nc\\r"


def test_messages_remarks_and_lines_show_names_and_obey_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for error in (
        file_cannot_be_written(option="--export", path=Path(EVIL), why=EVIL),
        program_was_replaced(directory=Path(EVIL)),
    ):
        assert_plain(str(error))
    for kind in (errors.PeerLost, errors.BadModel, errors.BadCheckpoint, errors.CheckFailed, errors.NotFinite):
        assert_plain(str(kind(EVIL)))
    with pytest.raises(blame.ModelError) as raised, blame.UserCode("the loss", 1):
        raise ValueError(EVIL)
    assert_plain(str(raised.value))
    monkeypatch.setattr(logging.getLogger("chimera_runtime"), "warning", lambda form, text: print(form % text))
    Hooks().remark(EVIL)
    assert_plain(capsys.readouterr().out)
    write_line(EVIL)
    assert_plain(last_lines[-1])
    write_error(EVIL)
    assert_plain(last_lines[-1])
    said = capsys.readouterr()
    assert_plain(said.out)
    assert_plain(said.err)
