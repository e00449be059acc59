"""Files of Python as syntax trees, each parsed once in a process."""

import ast
from functools import cache
from pathlib import Path


def python(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path: Path) -> list[ast.AST]:
    """The syntax tree of a file, node by node."""
    return [*ast.walk(tree(path))]


@cache
def imported(path: Path) -> list[tuple[str, int]]:
    """Every module that a file imports, anywhere in it, with its line; ``from a import b`` gives ``a.b``."""
    modules: list[tuple[str, int]] = []
    for node in nodes(path):
        if isinstance(node, ast.Import):
            modules += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            modules += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
    return modules
