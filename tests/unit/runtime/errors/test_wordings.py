"""Wordings of messages: how they show their fields, and that each call gives all of them, which mypy cannot know."""

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import chimera_runtime
from chimera_runtime.errors import Misuse, Wording, worded

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
