"""A file with a mistake beside the message that it gets, and the messages that there are."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.diagnostics.render import render_all
from chimera_ir.source import Source


def inputs(folder: Path, *patterns: str) -> list[Path]:
    """The files with a mistake, in order; no two of them share one ``.err``."""
    paths = sorted(path for pattern in patterns for path in folder.glob(pattern))
    first: dict[Path, Path] = {}
    for path in paths:
        other = first.setdefault(path.with_suffix(".err"), path)
        assert other == path, f"{other.name} and {path.name} share one .err file: rename one of them"
    return paths


def read(path: Path) -> Source:
    """The text of a file, under its name alone."""
    return Source(path.name, path.read_text(encoding="utf-8"))


def compare(path: Path, found: Sequence[Diagnostic], source: Source, update: bool) -> None:
    """Holds what is said of the file against the ``.err`` beside it, or writes that."""
    assert found
    said = render_all(found, source) + "\n"
    expected = path.with_suffix(".err")
    if update:
        expected.write_text(said, encoding="utf-8")
    assert said == expected.read_text(encoding="utf-8")


def classes(catalogues: Sequence[ModuleType]) -> dict[str, type[Diagnostic]]:
    """The messages of some catalogues, and their forms, by the names of their classes."""
    return {
        name: member
        for catalogue in catalogues
        for name, member in vars(catalogue).items()
        if inspect.isclass(member) and issubclass(member, Diagnostic) and hasattr(member, "code") and member.label
    }
