"""Docstrings open with the noun or the verb that matters, so that nobody has to read to the end to know the subject."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.syntax_trees import python, tree
from tests.test_architecture import PACKAGE, ROOT, RUNTIME

HEADLESS = {
    *("what", "those", "that", "which", "who", "whose", "whom", "it", "its", "they", "their", "such"),
    *(
        "of",
        "in",
        "on",
        "to",
        "at",
        "with",
        "without",
        "from",
        "for",
        "by",
        "as",
        "after",
        "before",
        "beside",
        "besides",
    ),
    *("between", "among", "within", "behind", "under", "over", "inside", "outside", "while", "until", "unless"),
    *("where", "when", "why", "how", "if", "so", "because", "since", "but", "and", "or", "not", "also", "only", "even"),
    *("then", "there", "here", "still", "afterwards", "always", "something", "somebody", "nobody", "nothing", "alike"),
}
"""First words after which a reader still does not know what a docstring is about."""


def docstrings(module: ast.Module) -> Iterator[tuple[str, int]]:
    """Each docstring of a module with its line: of modules, classes, functions, and below constants and fields."""
    for node in ast.walk(module):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        before = [None, *body[:-1]] if body else []
        for previous, statement in zip(before, body, strict=True):
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))) if (
                    documented if previous is None else isinstance(previous, ast.Assign | ast.AnnAssign)
                ):
                    yield text, statement.lineno
                case _:
                    pass


def is_headless(text: str) -> bool:
    first = text.split()[0].strip(",:;.*").lower()
    return first in HEADLESS or text.lstrip().startswith("The same")


def headless(path: Path) -> list[str]:
    found = ((text, line) for text, line in docstrings(tree(path)) if is_headless(text))
    return [f"{path.relative_to(ROOT)}:{line}: {text.strip().splitlines()[0]}" for text, line in found]


@pytest.mark.parametrize("package", [PACKAGE, RUNTIME], ids=lambda package: package.name)
def test_a_docstring_opens_with_its_noun_or_its_verb(package: Path) -> None:
    assert [place for path in python(package) for place in headless(path)] == []


def test_docstrings_are_seen_wherever_they_stand() -> None:
    text = '''
"""What is first."""
X = 1
"""Of a constant."""
class A:
    """Those of a class."""
    field: int
    """The same of a field."""
    def f(self):
        """Nothing: a method."""
        "just a text"
'''
    assert [line for text, line in docstrings(ast.parse(text)) if is_headless(text)] == [2, 4, 6, 8, 10]
