"""No catalogue of messages is left out: each is held against mistakes by one of the tests beside this one."""

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pytest

from chimera_ir.diagnostics import catalogue
from chimera_ir.diagnostics.model import messages
from tests.errors import test_front, test_middle, test_profiles, test_torch
from tests.errors.goldens import classes, inputs
from tests.syntax_trees import python, tree
from tests.test_architecture import PACKAGE, ROOT

ALL = [import_module(f"{catalogue.__name__}.{found.name}") for found in iter_modules(catalogue.__path__)]
MESSAGES = {message.__name__: message for message in (*messages().values(), *classes(ALL).values())}


def test_every_message_has_a_mistake_that_shows_it() -> None:
    shown = {
        type(diagnostic).__name__
        for test in (test_front, test_middle, test_profiles, test_torch)
        for path in test.MISTAKES
        for diagnostic in test.diagnostics(test.read(path))
    }
    elsewhere = test_front.NOT_IN_A_FILE | test_middle.NOT_IN_A_FILE | test_profiles.NOT_IN_A_FILE
    assert set(classes(ALL)) - shown == elsewhere


def test_every_message_has_a_code_of_its_own() -> None:
    every = {message for module in ALL for message in classes([module]).values()}
    owners = {next(base for base in message.__mro__ if "code" in vars(base)) for message in every}
    assert {*messages().values()} == owners


def test_two_mistakes_do_not_share_one_expected_message(tmp_path: Path) -> None:
    for name in ("few.chim", "few.sir", "few.err", "other.sir"):
        (tmp_path / name).touch()
    with pytest.raises(AssertionError, match=r"few\.chim and few\.sir share one \.err file"):
        inputs(tmp_path, "*.sir", "*.chim")


def constructions(path: Path) -> Iterator[ast.Call]:
    """The places at which a file makes a message of the catalogue."""
    for node in ast.walk(tree(path)):
        match node:
            case ast.Call(func=ast.Name(id=name)) | ast.Call(func=ast.Attribute(attr=name)) if name in MESSAGES:
                yield node
            case _:
                pass


def test_the_words_of_a_message_are_in_its_class() -> None:
    """No title, label or help is one field alone, and no place that makes a message passes a text of several words."""
    fields = re.compile(r"\{[a-z_]+\}")
    bare = {
        f"{name}.{part}"
        for name, message in MESSAGES.items()
        for part in ("title", "label", "help")
        if fields.fullmatch(vars(message).get(part, ""))
    }
    assert bare == {
        "RequirementFails.title",  # the author of the scheme wrote it
        *("ForeignSpelling.label", "ForeignSpelling.help"),  # a table of signs, beside the class
    }
    prose = [
        f"{path.relative_to(ROOT)}:{text.lineno}: {text.value}"
        for path in python(PACKAGE)
        for call in constructions(path)
        for argument in (*call.args, *(keyword.value for keyword in call.keywords))
        for text in ast.walk(argument)
        if isinstance(text, ast.Constant) and isinstance(text.value, str) and " " in text.value.strip()
    ]
    assert prose == []
