"""Text of a model file: finds mistakes in it without running the file, and without torch."""

import ast
import symtable
import warnings
from importlib.util import decode_source
from pathlib import Path

from chimera_runtime.errors import model as mistakes

REQUIRED = {
    "build_stage": "build_stage(stage: int, num_stages: int) -> torch.nn.Module, or in its place layers()",
    "loss": "loss(output, target) -> torch.Tensor",
    "dataset": "dataset() -> torch.utils.data.Dataset",
    "optimizer": "optimizer(parameters) -> torch.optim.Optimizer",
}
"""Functions that every model file has, as messages show them."""

_DYNAMIC = {"exec", "eval", "globals", "locals", "vars", "setattr", "__import__", "import_module", "modules"}
_DYNAMIC_ATTRIBUTES = {"__dict__", "import_module", "modules"}


def require_plausible(path: Path) -> None:
    """Raises `Misuse` if the text of a model file is certain to fail when ranks import it: no Python, or a function
    missing.
    """
    if path.suffix != ".py" or not path.is_file():
        return
    try:
        text = path.read_bytes()
        if b"\0" in text:
            raise SyntaxError("source code string cannot contain null bytes")  # before Python 3.11.4 a ValueError
        with warnings.catch_warnings(action="ignore"):
            compile(text, str(path), "exec", dont_inherit=True)
            tree = ast.parse(text)
            names = _bound(symtable.symtable(decode_source(text), str(path), "exec"))
    except SyntaxError as error:
        raise mistakes.text_is_not_python(
            path, type(error).__name__, error.msg, line_number=error.lineno, line=error.text, column=error.offset
        ) from None
    except (OSError, ValueError, RecursionError, MemoryError):
        return  # a rank reports it
    if _is_dynamic(tree):
        return
    names |= {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    missing = [name for name in REQUIRED if name not in names and not (name == "build_stage" and "layers" in names)]
    if missing:
        raise mistakes.functions_are_missing(path=path, functions=[REQUIRED[name] for name in missing])


def _bound(table: symtable.SymbolTable) -> set[str]:
    return {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}


def _is_dynamic(tree: ast.Module) -> bool:
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
            case _:
                pass
    return False
