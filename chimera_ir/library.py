"""Finds schemes by name in the library: those that come with the compiler, and those of further directories.

A directory of schemes has files NAME.chim, and may have a ``library.toml`` that says what a plan tries for their
parameters. The further directories are those that the user names, then those of the environment variable. A name that
two files have is refused where it is used, so that a name means the same wherever it compiles.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import chain
from os import PathLike
from os.path import isfile
from pathlib import Path
from typing import Any

from chimera_ir.diagnostics.model import Rejected, closest
from chimera_ir.errors import UnreadableText
from chimera_ir.source import ENDINGS, Source, contents, schemes

# The texts that a user names.


def named(text: str | PathLike[str] | Source, directories: Iterable[str | PathLike[str]] = ()) -> Source:
    """The text that a caller names by a string (as in `scheme_or_ir`), a path or a `Source`."""
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

    ``directories`` are more directories of the library, named by ``option``; ``remark`` gets a sentence if the library
    calls the scheme by another name. Raises `UnreadableText` if there is no such text, or several have this name.
    """
    path = Path(scheme)
    if path.suffix in ENDINGS or len(path.parts) > 1:
        return _read_known(path)
    others = further(directories, option)
    if scheme in names(others):
        return source(scheme, others)
    if other := alias(scheme, others):
        name, sentence = other
        remark(sentence)
        return source(name, others)
    raise UnreadableText(missing(scheme, others))


def _read_known(path: Path) -> Source:
    if path.suffix not in ENDINGS and not _is_handed(path):
        raise UnreadableText(f"{path}: a scheme ends in .chim, an IR text in .sir, a schedule of torch in .csv")
    hint = f"; for the library scheme write {path.stem}" if path.stem in names() else ""
    return read(path, "", hint)


def _is_handed(path: Path) -> bool:
    """Whether a path is that of a shell's ``<(command)``, whose ending says nothing about the text."""
    try:
        return path.is_fifo() or path.parts[:2] == ("/", "dev")
    except OSError:
        return False


def read(path: Path, option: str = "", hint: str = "") -> Source:
    """The text of a file that a user names; in messages ``option`` stands before its path, ``hint`` at the end."""
    try:
        data = contents(path, LARGEST, pipes=True)
    except OSError as error:
        raise UnreadableText(f"{option}{' ' if option else ''}{path}: {error.strerror}{hint}") from error
    return Source(str(path), data.decode("utf-8", errors="replace").removeprefix("\ufeff"))


VARIABLE = "CHIMERA_LIBRARY"
"""The environment variable that names further directories, separated as in PATH."""

LARGEST = 2**28
"""Bytes of the largest text that a user names, and of the largest file of a library."""

_ENDING = ".chim"
_TITLE = re.compile(r"^[ \t]*scheme[ \t]+(\w+)", re.MULTILINE)
_BESIDE = "library.toml"

Further = Sequence[Path]
"""Directories of schemes in addition to the compiler's own."""


def further(named: Iterable[str | os.PathLike[str]] = (), option: str = "library") -> tuple[Path, ...]:
    """The directories ``named`` by the user and those of the environment, each once, without the compiler's own.

    Raises `UnreadableText` if one is not a directory or cannot be listed.
    """
    listed = [(option, Path(path)) for path in named]
    listed += [(VARIABLE, Path(path)) for path in os.environ.get(VARIABLE, "").split(os.pathsep) if path]
    for origin, path in listed:
        try:
            os.listdir(path)
        except OSError as error:
            raise UnreadableText(f"{origin} {path}: {error.strerror}") from error
    unique = {path.resolve(): path for _, path in reversed(listed)}
    unique.pop(schemes().resolve(), None)
    return tuple(unique.values())[::-1]


def names(directories: Further = ()) -> tuple[str, ...]:
    """The names of the library schemes, in alphabetical order."""
    return tuple(sorted(_files(directories)))


def source(name: str, directories: Further = ()) -> Source:
    """The text of a library scheme; a text from a further directory is named by its path.

    Raises `KeyError` if the library has no such scheme, `UnreadableText` if two files have this name, or the file
    cannot be read, or the scheme in it is called as another file.
    """
    files = _files(directories)
    path, *others = files[name]
    if others:
        where = ", ".join("the compiler's" if file.parent == schemes() else str(file) for file in (path, *others))
        raise UnreadableText(f"several library schemes are called '{name}': {where}; rename a file, or give its path")
    text = _text(path)
    title = _TITLE.search(text)
    if title and title[1] != name and title[1] in files:
        raise UnreadableText(f"{path}: the scheme in it is called '{title[1]}', as another file is; rename the scheme")
    if path.parent == schemes():
        return Source(path.name, text, "library: ")
    return Source(str(path), text)


def summary(name: str, directories: Further = ()) -> str:
    """Summary of a library scheme: the first line of the comment at its beginning; empty without one."""
    first = source(name, directories).text.split("\n", 1)[0]
    return first[1:].strip() if first.startswith("#") else ""


def use(name: str, directories: Further = ()) -> str:
    """Advice on when to use a library scheme, from ``[use]`` in the ``library.toml`` beside it, if any."""
    folder = _files(directories)[name][0].parent
    table = _beside(folder).get("use", {}) if isfile(folder / _BESIDE) else {}
    sentence = table.get(name, "") if isinstance(table, dict) else ""
    return sentence if isinstance(sentence, str) else ""


def parameters(name: str, directories: Further = ()) -> str:
    """The parameters of a library scheme with defaults, as in ``D = 4, N = D``; raises `Rejected` for other texts."""
    from chimera_ir.syntax.formatter import show_expression
    from chimera_ir.syntax.parser import parse  # with lark, which takes a while

    scheme = parse(source(name, directories))
    return ", ".join(f"{p.name.text} = {show_expression(p.default)}" for p in scheme.parameters)


def alias(name: str, directories: Further = ()) -> tuple[str, str] | None:
    """The library's scheme that ``name`` means in the literature or by its spelling, with a sentence; else None."""
    known = _known_as(name)
    if scheme := known.get("scheme"):
        return scheme, f"'{name}' is {scheme} here: {known['what']}"
    spelled = next((scheme for scheme in names(directories) if _plain(scheme) == _plain(name)), None)
    return (spelled, f"'{name}' is {spelled} here") if spelled else None


def aliases() -> dict[str, tuple[str, ...]]:
    """The other names of each library scheme that has some."""
    return {known["scheme"]: tuple(known["names"]) for known in _own_table()["known"] if "scheme" in known}


def _known_as(name: str) -> Mapping[str, Any]:
    """The entry of a schedule of the literature: its ``names``, ``what`` it is, and the ``scheme`` here, if any."""
    return next((known for known in _own_table()["known"] if _plain(name) in map(_plain, known["names"])), {})


def missing(name: str, directories: Further = ()) -> str:
    """Returns the message that the library has no scheme of this name, and which name may be meant instead."""
    if known := _known_as(name):
        return f"the library does not have '{name}': {known['what']}"
    for path in chain.from_iterable(_files(directories).values()):
        with suppress(UnreadableText):
            if (title := _TITLE.search(_text(path))) and title[1] == name:
                return f"no library scheme is called '{name}', which is in {path}: its name here is {path.stem}"
    guess = closest(name, names(directories))
    advice = f"did you mean {guess}?" if guess else f"there are {', '.join(names(directories))}"
    file = Path(f"{name}{_ENDING}")
    here = f"; for the file here write {file}" if isfile(file) else ""
    return f"no library scheme is called '{name}' ({advice}){here}; further directories: --library or {VARIABLE}"


def baseline(workers: int, micro_batches: int) -> tuple[Source, dict[str, int]]:
    """The scheme that reports compare with, and the settings that give it these workers and micro-batches."""
    table = _own_table()["baseline"]
    return source(table["scheme"]), {table["workers"]: workers, table["micro_batches"]: micro_batches}


def called(scheme: str) -> str:
    """A scheme's name; for the baseline, followed by the name that it has in the literature."""
    table = _own_table()["baseline"]
    return f"{scheme} ({table['called']})" if scheme == table["scheme"] else scheme


def stated(text: Source) -> Mapping[str, object]:
    """The values that a plan tries for each parameter, by the ``library.toml`` beside the scheme; else empty.

    Raises `UnreadableText` if the ``library.toml`` is not written as it should be.
    """
    path = Path(text.name)
    if path.stem in names() and source(path.stem) == text:
        path = schemes() / path
    beside = _beside(path.parent) if isfile(path.parent / _BESIDE) else {}
    table = beside.get("parameters", {})
    entry = table.get(path.stem, {}) if isinstance(table, dict) else table
    if not isinstance(entry, dict):
        raise UnreadableText(f"{path.parent / _BESIDE}: write [parameters.{path.stem}], and a line for each parameter")
    missing_files = [name for name in table if not isfile(path.parent / f"{name}{_ENDING}")]
    if missing_files:
        where = f"{path.parent / _BESIDE}: [parameters.{missing_files[0]}]"
        raise UnreadableText(f"{where}: there is no {missing_files[0]}{_ENDING} beside it")
    return entry


def _files(directories: Further) -> dict[str, list[Path]]:
    """The files of each scheme's name; the compiler's own file comes first."""
    files = {path.stem: [path] for path in _own_files()}
    for folder in directories:
        for path in sorted(folder.glob(f"*{_ENDING}")):
            files.setdefault(path.stem, []).append(path)
    return files


def _text(path: Path) -> str:
    try:
        return contents(path, LARGEST).decode("utf-8", errors="replace").removeprefix("\ufeff")
    except OSError as error:
        raise UnreadableText(f"{path}: {error.strerror}") from error


def _beside(folder: Path) -> dict[str, Any]:
    from chimera_ir.profile.document import entries  # with the messages of profiles, which few calls need

    source = Source(str(folder / _BESIDE), _text(folder / _BESIDE))
    try:
        return entries(source)
    except Rejected as rejected:
        first = rejected.diagnostics[0]
        line, column = source.position(first.span.start)
        raise UnreadableText(f"{source.name}:{line}:{column}: {first.fill(first.title)}") from rejected


@cache
def _own_table() -> dict[str, Any]:
    import tomllib  # takes a while, and not every call needs it

    return tomllib.loads(_text(schemes() / _BESIDE))


@cache
def _own_files() -> tuple[Path, ...]:
    return tuple(sorted(schemes().glob(f"*{_ENDING}")))


def _plain(name: str) -> str:
    """The letters and digits of a name in lower case, without the ``schedule`` with which names of classes begin."""
    return "".join(character for character in name.lower() if character.isalnum()).removeprefix("schedule")
