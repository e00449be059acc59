"""What errors carry, and that a status says which kind of failure it was."""

import ast
import logging
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import chimera_runtime
from chimera_ir.escapes import visible_lines
from chimera_runtime import blame, errors
from chimera_runtime.errors import (
    FAILED,
    INTERRUPTED,
    MISUSED,
    OUR_FAULT,
    TERMINATED,
    Misuse,
    PeerLost,
    Wording,
    visible,
    worded,
)
from chimera_runtime.errors.tools import file_cannot_be_written, program_was_replaced
from chimera_runtime.tools.open.stdio import last_lines, write_error, write_line
from chimera_runtime.update.updates import Hooks


def test_every_way_to_fail_has_a_status_of_its_own_that_a_shell_can_pass_on() -> None:
    statuses = [FAILED, MISUSED, OUR_FAULT, INTERRUPTED, TERMINATED]
    assert len(set(statuses)) == len(statuses)
    assert all(0 < status < 256 for status in statuses)


def test_what_a_signal_ended_has_the_status_of_a_shell() -> None:
    """128 and the number of the signal: SIGINT is 2, SIGTERM is 15."""
    assert (INTERRUPTED, TERMINATED) == (128 + 2, 128 + 15)


def test_a_lost_peer_names_the_ranks_that_were_waited_for_as_far_as_they_are_known() -> None:
    assert PeerLost("gone", [3, 1]).peers == (3, 1)
    assert PeerLost("gone").peers == ()
    assert str(PeerLost("gone", [3])) == "gone"


# What a message quotes is shown and never acted upon.


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


# Wordings of messages: how they show their fields, and that each call gives all of them, which mypy cannot know.


RUNTIME = Path(chimera_runtime.__file__).parent
HOME = "chimera_runtime.errors"
MODULES = [path.stem for path in (RUNTIME / "errors").glob("[a-z]*.py")]


@pytest.mark.parametrize(
    ("text", "value", "shown"),
    [
        ("{x}", (2, 3), "(2, 3)"),
        ("{x:list}", ["a", "b"], "a, b"),
        ("{x:list}", [], "none"),
        ("{x:joined}", [0, 3, 6], "0,3,6"),
        ("{x:and}", iter([1, 2]), "1 and 2"),
        ("{x:first 1}", ["a", "b", "c"], "a and 2 more"),
        ("{x:first 1}", ["a"], "a"),
        ("{x:function}", ["a", "b"], "functions a, b"),
        ("{x:function}", ["a"], "function a"),
        ("{x:step}", 1, "1 step"),
        ("{x:step}", 3, "3 steps"),
        ("{x:last}", 4, "3"),
        ("{x:g}", 0.50, "0.5"),
        ("{x!r}", "a", "'a'"),
    ],
)
def test_a_field_is_shown_as_its_format_says(text: str, value: object, shown: str) -> None:
    assert worded(text)(x=value) == shown


def test_a_wording_of_an_error_makes_the_error() -> None:
    error = Misuse.worded("{path}: {why}")(path=Path("a"), why="gone")
    assert (type(error), str(error)) == (Misuse, "a: gone")


def wordings(module: str) -> dict[str, Wording[object]]:
    return {name: value for name, value in vars(import_module(module)).items() if isinstance(value, Wording)}


def callable_in(path: Path, tree: ast.Module) -> Iterator[tuple[str, Wording[object]]]:
    """Yields the wordings that a module can call, each after the text of the function in the call."""
    if path.parent == RUNTIME / "errors":
        yield from wordings(f"{HOME}.{path.stem}").items()
    for node in ast.walk(tree):
        module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names if isinstance(node, ast.ImportFrom) and module.startswith(HOME) else ():
            name = alias.asname or alias.name
            if module == HOME and alias.name in MODULES:
                yield from ((f"{name}.{wording}", value) for wording, value in wordings(f"{HOME}.{alias.name}").items())
            elif alias.name in (known := wordings(module)):
                yield name, known[alias.name]


def test_every_call_of_a_wording_gives_its_fields() -> None:
    calls = 0
    for path in sorted(RUNTIME.rglob("*.py")):
        if path.name != "__init__.py" and HOME in (text := path.read_text(encoding="utf-8")):
            tree = ast.parse(text)
            known = dict(callable_in(path, tree))
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and (wording := known.get(ast.unparse(node.func))):
                    calls += 1
                    fields = {keyword.arg for keyword in node.keywords}
                    assert (fields, node.args) == (wording.fields, []), f"{path}:{node.lineno}"
    assert calls > 200
