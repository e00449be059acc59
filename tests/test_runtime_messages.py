"""Messages of the runtime have a home, `chimera_runtime/errors/`: a module for each room.

A mistake is a wording with its facts as fields there, or a constant if it has none. Code that raises an error names the
mistake and gives the facts; it has no words of its own.
"""

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from chimera_runtime.errors import Wording
from tests.syntax_trees import python, tree
from tests.test_architecture import ROOT, RUNTIME

HOME = RUNTIME / "errors"
MODEL_ERROR = "ModelError"
"""The error of the user's code: `blame` makes it of what was called, and elsewhere its words come from `errors`."""

ERRORS = {
    "BadCheckpoint",
    "BadModel",
    "CheckFailed",
    "Misuse",
    "NotFinite",
    "PeerLost",
    "RanksDiffer",
    "Unwritable",
    MODEL_ERROR,
}


def room(path: Path) -> str:
    return path.relative_to(RUNTIME).parts[0].removesuffix(".py")


def name_of(expression: ast.expr) -> str:
    match expression:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case _:
            return ""


def made_in(module: ast.Module, errors: set[str]) -> Iterator[ast.Call]:
    """The calls that make one of these errors; but for a `ModelError` without words, and errors of a constant."""
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and (name := name_of(node.func)) in errors:
            if all(name_of(argument).isupper() for argument in node.args):
                continue
            words = any(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in ast.walk(node))
            if name != MODEL_ERROR or words:
                yield node


def errors_of_users() -> set[str]:
    """The types of errors that a user may meet, subclasses included."""
    classes = [node for path in python(RUNTIME) for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)]
    errors: set[str] = set()
    more = ERRORS
    while more:
        errors |= more
        more = {node.name for node in classes if {*map(name_of, node.bases)} & errors} - errors
    return errors


def test_an_error_that_a_user_meets_is_made_where_its_message_is() -> None:
    errors = errors_of_users()
    wrong = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path in python(RUNTIME)
        if not path.is_relative_to(HOME)
        for call in made_in(tree(path), errors)
    ]
    assert wrong == [], (
        "write the message in chimera_runtime/errors: as a wording or a function that makes the error, or as a constant"
    )


def wordings(module: str) -> dict[str, Wording[object]]:
    return {name: value for name, value in vars(import_module(module)).items() if isinstance(value, Wording)}


def imported_wordings(module: ast.Module) -> dict[str, Wording[object]]:
    """The wordings that a module can call, by the text of the function in the call."""
    imported: dict[str, Wording[object]] = {}
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("chimera_runtime.errors"):
            for alias in node.names:
                name = alias.asname or alias.name
                if node.module == "chimera_runtime.errors" and (HOME / f"{alias.name}.py").exists():
                    several = wordings(f"{node.module}.{alias.name}")
                    imported |= {f"{name}.{wording}": value for wording, value in several.items()}
                elif alias.name in (several := wordings(node.module or "")):
                    imported[name] = several[alias.name]
    return imported


def test_a_wording_gets_its_fields() -> None:
    calls = 0
    for path in python(RUNTIME):
        home = path.parent == HOME and path.stem != "__init__"
        known = imported_wordings(tree(path)) | (wordings(f"chimera_runtime.errors.{path.stem}") if home else {})
        for node in ast.walk(tree(path)) if known else ():
            if isinstance(node, ast.Call) and (wording := known.get(ast.unparse(node.func))):
                calls += 1
                where = f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node.func)}"
                assert {keyword.arg for keyword in node.keywords} == wording.fields, where
    assert calls > 200


def test_messages_are_made_of_plain_values() -> None:
    """A module is named for its room, and imports nothing of the runtime but other messages."""
    modules = {path.relative_to(HOME).parts[0].removesuffix(".py") for path in python(HOME)} - {"__init__"}
    assert {name.partition("_")[0] for name in modules} <= {room(path) for path in python(RUNTIME)}
    for path in python(HOME):
        for node in ast.walk(tree(path)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            ours = [name for name in names if name.startswith("chimera_runtime")]
            assert all(name.split(".")[1] == "errors" for name in ours), f"{path.name}: {ours}"


def test_an_error_with_words_is_found_wherever_it_is_made() -> None:
    text = """
def f(error, doing):
    said = f"{error} was wrong"
    if error:
        raise Misuse(said)
    raise errors.BadModel("wrong") from ModelError(doing, 1)
    if doing:
        raise Misuse(mistakes.NO_LAYERS)
    return ModelError(f"the {doing}", 1)
"""
    assert sorted(call.lineno for call in made_in(ast.parse(text), ERRORS)) == [5, 6, 9]
