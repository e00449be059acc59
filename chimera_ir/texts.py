"""The texts that a user names."""

from collections.abc import Callable, Iterable
from os import PathLike
from pathlib import Path

from chimera_ir import library
from chimera_ir.errors import UnreadableText
from chimera_ir.source import ENDINGS, Source, contents


def named(text: str | PathLike[str] | Source, directories: Iterable[str | PathLike[str]] = ()) -> Source:
    """The text that a caller names by a string (as in `scheme_or_ir`, with ``directories``), a path or a `Source`."""
    match text:
        case Source():
            return text
        case str():
            return scheme_or_ir(text, directories)
        case PathLike():
            return _read_known(Path(text))
        case _:
            raise UnreadableText(f"{text!r:.60} is no text: give a scheme's name, the path of a file, or a Source")


def scheme_or_ir(
    scheme: str,
    directories: Iterable[str | PathLike[str]] = (),
    option: str = "library",
    remark: Callable[[str], None] = lambda _: None,
) -> Source:
    """The text that ``scheme`` names: a file if it ends in .chim, .sir or .csv or has a folder, else a library scheme.

    ``directories`` are more directories of the library; messages say that the user named them by ``option``. ``remark``
    is called with a sentence if the library calls the scheme by another name.

    Raises `UnreadableText` if there is no such text, or several schemes have this name.
    """
    path = Path(scheme)
    if path.suffix in ENDINGS or len(path.parts) > 1:
        return _read_known(path)
    others = library.further(directories, option)
    if scheme in library.names(others):
        return library.source(scheme, others)
    if other := library.alias(scheme, others):
        name, sentence = other
        remark(sentence)
        return library.source(name, others)
    raise UnreadableText(library.missing(scheme, others))


def _read_known(path: Path) -> Source:
    if path.suffix not in ENDINGS and not _is_handed(path):
        raise UnreadableText(f"{path}: a scheme ends in .chim, an IR text in .sir, a schedule of torch in .csv")
    hint = f"; for the library scheme write {path.stem}" if path.stem in library.names() else ""
    return read(path, "", hint)


def _is_handed(path: Path) -> bool:
    """Whether a path is that of a shell's ``<(command)``, whose ending says nothing about the text."""
    try:
        return path.is_fifo() or path.parts[:2] == ("/", "dev")
    except OSError:
        return False


def read(path: Path, option: str = "", hint: str = "") -> Source:
    """The text of a file that a user names; in messages ``option`` stands before its path, ``hint`` at the end.

    Raises `UnreadableText` if the file cannot be read.
    """
    try:
        data = contents(path, library.LARGEST, pipes=True)
    except OSError as error:
        raise UnreadableText(f"{option}{' ' if option else ''}{path}: {error.strerror}{hint}") from error
    return Source(str(path), data.decode("utf-8", errors="replace").removeprefix("\ufeff"))
