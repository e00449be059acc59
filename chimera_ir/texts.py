"""The texts that a command line names."""

from pathlib import Path

from chimera_ir import library
from chimera_ir.command import Misuse
from chimera_ir.diagnostics.suggest import closest
from chimera_ir.source import Source, handed

LARGEST = 2**28
"""Bytes of the largest text."""


def scheme_or_ir(scheme: str) -> Source:
    """The text that SCHEME names: a file if it looks like one, else a scheme of the library.

    Raises
    ------
    Misuse
        If there is none.
    """
    path = Path(scheme)
    if path.suffix in (".chim", ".sir") or len(path.parts) > 1:
        return _known(path)
    if scheme in library.names():
        return library.source(scheme)
    guess = closest(scheme, library.names())
    advice = f"did you mean {guess}?" if guess else f"there are {', '.join(library.names())}"
    raise Misuse(f"no library scheme is called '{scheme}' ({advice}); a file ends in .chim or .sir")


def _known(path: Path) -> Source:
    if path.suffix not in (".chim", ".sir") and not _is_handed(path):
        raise Misuse(f"{path}: a scheme ends in .chim, an IR text in .sir")
    hint = f"; for the library scheme write {path.stem}" if path.stem in library.names() else ""
    return read(path, "", hint)


def _is_handed(path: Path) -> bool:
    """Whether a path was not chosen by the user, as that of a shell's ``<(command)``; the text says then what it is."""
    try:
        return path.is_fifo() or path.parts[:2] == ("/", "dev")
    except OSError:
        return False


def read(path: Path, option: str = "", hint: str = "") -> Source:
    """A file that the command line names, as the value of an option or by itself.

    Raises
    ------
    Misuse
        If it cannot be read.
    """
    try:
        data = handed(path, LARGEST)
    except OSError as error:
        raise Misuse(f"{option}{' ' if option else ''}{path}: {error.strerror}{hint}") from error
    return Source(str(path), data.decode("utf-8", errors="replace").removeprefix("\ufeff"))
