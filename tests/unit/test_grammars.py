"""Tables of the grammars and code of templates: computed once, and again when they do not fit any more."""

import os
import sys
from pathlib import Path

import lark
import pytest

from chimera_ir import source as grammars
from chimera_ir import templates
from chimera_ir.library import source
from chimera_ir.syntax import parser


@pytest.fixture
def computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The grammars whose tables lark computes; bytecode and tables are in an empty directory."""
    texts: list[str] = []

    class Counted(lark.Lark):
        def __init__(self, text: str, **options: object) -> None:
            texts.append(text)
            super().__init__(text, **options)

    monkeypatch.setattr(lark, "Lark", Counted)
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    return texts


def tables(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_tables_are_computed_once_and_parse_alike(computed: list[str], tmp_path: Path) -> None:
    text = source("chimera").text
    trees = [parser._lark.__wrapped__().parse(text) for _ in range(2)]
    assert len(computed) == len(tables(tmp_path)) == 1
    assert trees[0] == trees[1] == parser._lark().parse(text)


def test_other_lines_have_other_tables(computed: list[str]) -> None:
    for letter in "FB":
        grammars.parser_of("ir.lark", f'\nLETTER: "{letter}"\n')
    assert len(computed) == 2


def test_a_damaged_file_is_replaced(computed: list[str], tmp_path: Path) -> None:
    parser._lark.__wrapped__()
    (path,) = tables(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    for _ in range(2):
        parser._lark.__wrapped__()
    assert len(computed) == 2


def test_tables_that_others_may_write_are_not_loaded(computed: list[str], tmp_path: Path) -> None:
    parser._lark.__wrapped__()
    (path,) = tables(tmp_path)
    path.chmod(0o664)
    for _ in range(2):
        parser._lark.__wrapped__()
    assert len(computed) == 2
    assert path.stat().st_mode & 0o022 == 0


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_tables_of_another_user_are_not_loaded_unless_the_grammar_is_of_that_user(
    computed: list[str], tmp_path: Path
) -> None:
    parser._lark.__wrapped__()
    os.chown(*tables(tmp_path), 12345, -1)
    parser._lark.__wrapped__()
    assert len(computed) == 2


def test_a_directory_that_cannot_be_written_costs_only_time(
    computed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "file"))
    for _ in range(2):
        parser._lark.__wrapped__()
    assert len(computed) == 2


def test_the_code_of_a_template_is_kept_until_the_template_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    (tmp_path / "a.txt.j2").write_text("one {{ number }}\n")
    shown = [templates.text.__wrapped__(tmp_path).get_template("a.txt.j2").render(number=1) for _ in range(2)]
    assert shown == ["one 1\n"] * 2
    assert len([*(tmp_path / "__pycache__").iterdir()]) == 1
    (tmp_path / "a.txt.j2").write_text("two {{ number }}\n")
    assert templates.text.__wrapped__(tmp_path).get_template("a.txt.j2").render(number=1) == "two 1\n"
    assert templates.markup.__wrapped__(tmp_path).get_template("a.txt.j2").render(number="<") == "two &lt;\n"
