"""Mistakes of a model file that its text shows without running it, and without torch."""

import ast
import symtable
import warnings
from collections.abc import Sequence
from importlib.util import decode_source
from pathlib import Path

from chimera_runtime.errors import Misuse

REQUIRED = {
    "build_stage": "build_stage(stage: int, num_stages: int) -> torch.nn.Module, or in its place layers()",
    "loss": "loss(output, target) -> torch.Tensor",
    "dataset": "dataset() -> torch.utils.data.Dataset",
    "optimizer": "optimizer(parameters) -> torch.optim.Optimizer",
}
"""The functions that every model file has, as messages show them."""

_DYNAMIC = {"exec", "eval", "globals", "locals", "vars", "setattr", "__import__", "import_module", "modules"}
_DYNAMIC_ATTRIBUTES = {"__dict__", "import_module", "modules"}


def lacks(path: Path, missing: Sequence[str]) -> Misuse:
    """The error of a model file that lacks functions."""
    functions = ", ".join(REQUIRED[name] for name in missing)
    return Misuse(f"{path} lacks the function{'s' if len(missing) > 1 else ''} {functions}")


def require_plausible(path: Path) -> None:
    """Refuses a model file that is certain to fail as soon as ranks import it.

    Raises
    ------
    Misuse
        If its text is not Python, or defines a required function nowhere.
    """
    if path.suffix != ".py" or not path.is_file():
        return
    try:
        text = path.read_bytes()
        with warnings.catch_warnings(action="ignore"):
            compile(text, str(path), "exec", dont_inherit=True)
            tree = ast.parse(text)
            names = _bound(symtable.symtable(decode_source(text), str(path), "exec"))
    except SyntaxError as error:
        raise Misuse(_described(path, error)) from None
    except (OSError, ValueError, RecursionError, MemoryError):
        return  # a rank says what it is
    if _is_dynamic(tree):
        return
    names |= {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    missing = [name for name in REQUIRED if name not in names and not (name == "build_stage" and "layers" in names)]
    if missing:
        raise lacks(path, missing)


def _bound(table: symtable.SymbolTable) -> set[str]:
    return {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}


def _is_dynamic(tree: ast.Module) -> bool:
    """Whether names may come into the module that its text does not show."""
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(names=[ast.alias(name="*")]):
                return True
            case ast.Name(id=name) if name in _DYNAMIC:
                return True
            case ast.Attribute(attr=name) if name in _DYNAMIC_ATTRIBUTES:
                return True
            case ast.FunctionDef(name="__getattr__"):
                return True
    return False


def _described(path: Path, error: SyntaxError) -> str:
    """The error with its line and a caret below the column, as Python shows it."""
    line_number = "" if error.lineno is None else f":{error.lineno}"
    message = f"{path}{line_number}: {type(error).__name__}: {error.msg}"
    if error.text is None or error.offset is None:
        return message
    line = error.text.rstrip()
    indent = len(line) - len(line.lstrip())
    return f"{message}\n  {line.lstrip()}\n  {' ' * max(0, error.offset - 1 - indent)}^"
