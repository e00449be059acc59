"""Paths of grammars, templates and library schemes: inside an installed package, or next to it in a checkout."""

import os
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

_PACKAGE = Path(str(files("chimera_ir")))


def _folder(name: str) -> Path:
    installed = _PACKAGE / name
    return installed if installed.is_dir() else _PACKAGE.parent / name


def grammar(name: str) -> Path:
    """The file of a grammar, as in ``grammar("scheme.lark")``."""
    return _folder("grammar") / name


def templates() -> Path:
    """The folder of the templates of generated files."""
    return _folder("templates")


def mistakes() -> Path:
    """The folder of the texts with a mistake, each next to its message."""
    installed = _PACKAGE / "mistakes"
    return installed if installed.is_dir() else _PACKAGE.parent / "tests" / "errors"


def runtime() -> Path:
    """The folder of the package that generated ranks run on."""
    return _PACKAGE.parent / "chimera_runtime"


def schemes() -> Path:
    """The folder of the library schemes."""
    return _PACKAGE / "schemes"


def everything() -> Iterator[Path]:
    """Yields all files of the compiler, those in Python included, folder by folder, each folder sorted by path."""
    for folder in (_PACKAGE, _folder("grammar"), templates(), runtime()):
        yield from sorted(
            Path(place, name)
            for place, _, names in os.walk(folder)
            if os.path.basename(place) != "__pycache__"
            for name in names
        )
