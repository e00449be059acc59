"""Highlighting: lexers and editor grammars know the words of the grammars, and a terminal shows source in colours."""

import json
import re
from pathlib import Path

import pytest
from pygments import token
from pygments.lexer import RegexLexer

from chimera_ir.highlight import MAX_COLORED, IrLexer, SchemeLexer, colored, keywords
from chimera_ir.ir.kinds import KINDS
from chimera_ir.source import Source
from tests.unit.command import on_a_terminal

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("chimera_ir/schemes", "docs/examples", "docs/figures", "examples/schemes")
TEXTS = [path for folder in FOLDERS for kind in ("chim", "sir") for path in (ROOT / folder).glob(f"*.{kind}")]
MISTAKEN = {"mistakes.chim"}
EMIT = """
import os, sys
from chimera_ir import start
sys.argv = ["chimera-compile", *sys.argv[1:]]
start.compile_()
"""


def kinds(text: str, lexer: type[RegexLexer]) -> dict[str, str]:
    """What the lexer calls each word of a text, in short."""
    return {value: str(kind).removeprefix("Token.") for kind, value in lexer().get_tokens(text) if value.strip()}


@pytest.mark.parametrize("path", [path for path in TEXTS if path.name not in MISTAKEN], ids=lambda path: path.name)
def test_a_lexer_knows_everything_in_a_text(path: Path) -> None:
    lexer = IrLexer if path.suffix == ".sir" else SchemeLexer
    assert [value for kind, value in lexer().get_tokens(path.read_text()) if kind is token.Error] == []


def test_the_parts_of_a_scheme_differ() -> None:
    found = kinds('require N % 2 == 0, "even"  # why\npipe p { F(m, s) @ 2*m }', SchemeLexer)
    assert {found[word] for word in ("require", "pipe")} == {"Keyword"}
    names = {'"even"': "Literal.String", "# why": "Comment.Single", "F": "Name.Function", "N": "Name", "@": "Operator"}
    assert {word: found[word] for word in names} == names


def test_the_parts_of_a_program_differ() -> None:
    found = kinds("worker 0:\n  F m+1 s0 v-1\n  send m0 s0->s1 to w1\n  step s0+s3\n", IrLexer)
    assert {found[word] for word in ("worker", "send", "to", "step")} == {"Keyword"}
    assert {found[word] for word in ("m+1", "v-1", "m0", "s0", "s1", "s3", "w1")} == {"Name.Variable"}
    assert (found["F"], found["->"], found["0"]) == ("Keyword.Type", "Operator", "Literal.Number.Integer")


def test_what_no_text_may_have_is_an_error() -> None:
    assert kinds("workers 2.5 $", SchemeLexer)["$"] == "Error"
    assert kinds("workers 3x", SchemeLexer)["3"] == "Error"


def test_the_letters_of_operations_are_those_of_the_compiler() -> None:
    editor = json.loads((ROOT / "editors" / "vscode" / "syntaxes" / "sir.tmLanguage.json").read_text())["patterns"]
    (pattern,) = (each["match"] for each in editor if each["name"] == "storage.type.sir")
    for letter in KINDS:
        assert re.fullmatch(pattern, letter) or letter in keywords("ir.lark")
        assert kinds(f"{letter} m0 s0", IrLexer)[letter].startswith("Keyword")


@pytest.mark.parametrize(("language", "grammar"), [("chim", "scheme.lark"), ("sir", "ir.lark")])
def test_a_grammar_for_editors_has_the_words_of_the_grammar(language: str, grammar: str) -> None:
    folder = ROOT / "editors" / "vscode"
    patterns = json.loads((folder / f"syntaxes/{language}.tmLanguage.json").read_text())["patterns"]
    (pattern,) = (each["match"] for each in patterns if each["name"] == f"keyword.control.{language}")
    assert pattern == rf"\b(?:{'|'.join(sorted(keywords(grammar)))})\b"
    contributes = json.loads((folder / "package.json").read_text())["contributes"]
    assert all((folder / place["path"]).is_file() for place in contributes["grammars"])
    assert [f".{language}"] in [each["extensions"] for each in contributes["languages"]]


def test_colours_change_nothing_but_colours_and_a_text_that_is_too_long_or_not_ours_has_none() -> None:
    text = Source("a.chim", "\n\nworkers D  # one each\n\n").text
    assert re.sub(r"\x1b\[[\d;]*m", "", colored(text, ".chim")) == text
    assert "\x1b[" in colored(text, ".chim")
    assert colored(text, ".toml") == text
    assert colored("workers " * MAX_COLORED, ".chim") == "workers " * MAX_COLORED


def test_an_emitted_level_has_colours_on_a_terminal_and_nowhere_else(tmp_path: Path) -> None:
    look = {"TERM": "xterm-256color"}
    arguments = ("chimera", "--set", "D=2", "--emit", "schedule")
    for variables, shows in ((look, True), (look | {"NO_COLOR": "1"}, False)):
        shown = on_a_terminal(EMIT, *arguments, cwd=tmp_path, env=variables).out
        assert ("\x1b[34mworker\x1b[" in shown) == shows
        assert "worker 0:" in re.sub(r"\x1b\[[\d;]*m", "", shown)
