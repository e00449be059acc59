"""Output of commands: written into a temporary folder that is renamed, and no file of the user is touched.

A directory holds what the command wrote, a manifest M that lists it, and whatever the user put there. New files are
written into a folder ``M.part.*``, which is renamed to ``M.new``: that commits. Then what M lists is removed, in
reverse order, and the new files move in, in order, their manifest last. A writer that dies leaves the directory as it
is, and the next one goes on from there: without ``M.new``, what M lists is there; with it, the moves are not over.

So old and new files are never there together, and a file comes after those that it relies on and goes before them: a
program that is incomplete lacks its ``train.py``. Writers take turns by a lock on the directory, which the system
releases when its holder dies; without such locks, one of two at once may end in an error. All this is about processes
that die: nothing is forced onto the disk in case the machine does.
"""

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path, PurePath

from chimera_ir.errors import CompileError
from chimera_ir.source import contents

if sys.platform != "win32":
    import fcntl

MANIFEST = ".chimera-compile"
"""The manifest of chimera compile: it lists the files written into a directory, one relative path per line."""

ATTEMPTS, PAUSE = 200, 0.05
"""Number of attempts of a writer to get its turn, and the seconds between them; a turn takes milliseconds."""


class OutputRefused(CompileError):
    """The output cannot be written, or files are in its place that the command did not write."""


def write(directory: Path, files: Mapping[str, str], manifest: str = MANIFEST, option: str = "--out ") -> None:
    """Writes the files, by path relative to the directory, and ``manifest``, which is a dot and the command's name.

    Each file may rely on those before it only. An existing directory is replaced if the same command wrote it. If
    anything fails before the commitment, the directory is as it was before.

    Raises `OutputRefused`, with ``option`` before the directory, if anything else wrote it, or it cannot be written.
    """
    with _refusals(f"{option}{directory}"):
        target = _resolved(directory)
        if target.exists() and not target.is_dir():
            raise OutputRefused("exists and is not a directory")
        missing = [folder for folder in (target, *target.parents) if not folder.exists()]
        target.mkdir(parents=True, exist_ok=True)
        try:
            with _turn(target):
                _replace(target, files, manifest)
        except BaseException:
            _remove_empty(missing)
            raise


_FORCE = "choose another file, or write over it with --force"


def refuse_file(file: Path, mark: str, force: bool, option: str = "--out", remedy: str = _FORCE) -> None:
    """Raises `OutputRefused` if a file cannot be written, or exists without ``mark`` at its beginning and ``force``.

    The message has ``option``, by which the user named the file, and for a file without ``mark`` the ``remedy``.
    """
    with _refusals(f"{option} {file}"):
        if file.is_dir():
            raise OutputRefused("is a directory")
        if file.exists():
            if not file.is_file():
                raise OutputRefused("is no regular file")
            if not force and not contents(file).startswith(mark.encode()):
                raise OutputRefused(f"exists and was not written by this command, or is to be kept; {remedy}")
        folder = _resolved(file).parent
        folder.stat()
        if not os.access(folder, os.W_OK | os.X_OK):
            raise OutputRefused(f"{folder} cannot be written")


def write_file(file: Path, text: str, mark: str, force: bool, option: str = "--out", remedy: str = _FORCE) -> None:
    """Writes the line ``mark`` and a text to a file, whole; raises as `refuse_file`, and leaves the file as it was."""
    refuse_file(file, mark, force, option, remedy)
    with _refusals(f"{option} {file}"):
        target = _resolved(file)
        with _turn(target.parent):
            for left in target.parent.glob(f"{escape(f'.{target.name}.')}*.part"):
                left.unlink()
            descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
            fresh = Path(name)
            try:
                with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as stream:
                    stream.write(mark + text)
                os.umask(mask := os.umask(0))
                fresh.chmod(0o666 & ~mask)
                fresh.replace(target)
            finally:
                fresh.unlink(missing_ok=True)


@contextmanager
def _refusals(where: str) -> Iterator[None]:
    try:
        yield
    except (OSError, OutputRefused) as error:
        raise OutputRefused(f"{where}: {_reason(error)}") from error


def _resolved(path: Path) -> Path:
    try:
        return Path(os.path.realpath(path))
    except FileNotFoundError as error:
        raise OutputRefused("the working directory is gone") from error


def _reason(error: OSError | OutputRefused) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


@contextmanager
def _turn(folder: Path) -> Iterator[None]:
    if sys.platform == "win32":
        yield
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(handle)
        yield
    finally:
        os.close(handle)


if sys.platform != "win32":

    def _lock(handle: int) -> None:
        for _ in range(ATTEMPTS):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(PAUSE)
            except OSError:
                return  # a file system without locks
        raise OutputRefused("another command writes there and does not end")


def _replace(target: Path, files: Mapping[str, str], manifest: str) -> None:
    committed = target / f"{manifest}.new"
    if _is_folder(committed):
        _settle(target, committed, manifest)
    for left in target.glob(f"{escape(manifest)}.part.*"):
        shutil.rmtree(left)
    if any(target.iterdir()) and not _is_file(target / manifest):
        raise OutputRefused(f"exists and was not written by {manifest[1:]}; choose another directory or remove it")
    _refuse_others(target, files, _listed(target / manifest), manifest)
    part = Path(tempfile.mkdtemp(prefix=f"{manifest}.part.", dir=target))
    try:
        for folder in _folders(part, files):
            folder.mkdir(parents=True, exist_ok=True)
        for name, text in {**files, manifest: "".join(f"{name}\n" for name in files)}.items():
            (part / name).write_text(text, encoding="utf-8", newline="\n")
        part.rename(committed)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    try:
        _settle(target, committed, manifest)
    except KeyboardInterrupt:
        _settle(target, committed, manifest)
        raise
    except OSError as error:
        raise OutputRefused(f"{_reason(error)}; the old files are gone in part, and the next run goes on") from error


def _settle(target: Path, committed: Path, manifest: str) -> None:
    """Removes the files that ``manifest`` lists, and moves in those in ``committed``, from wherever that has ended."""
    if _is_file(committed / manifest):
        ours, fresh = _listed(target / manifest), _listed(committed / manifest)
        waiting = {name for name in fresh if os.path.lexists(os.path.join(committed, name))}
        _refuse_others(target, waiting, ours, manifest)
        for name in reversed(ours):
            if name in waiting or name not in fresh:
                _remove(target, name)
        for folder in _folders(target, fresh):
            folder.mkdir(parents=True, exist_ok=True)
        for name in (*fresh, manifest):
            with suppress(FileNotFoundError):  # it is in its place already
                os.replace(os.path.join(committed, name), os.path.join(target, name))
    shutil.rmtree(committed)


def _remove(target: Path, name: str) -> None:
    """Removes a file that the command wrote, its bytecode, and folders that are empty then."""
    path, folders = target / name, _folders(target, [name])
    if not (all(map(_is_folder, folders)) and _is_file(path)):
        return
    cached, compiled = path.parent / "__pycache__", f"{path.stem}."
    for other in os.listdir(cached) if cached.is_dir() else ():
        if other.startswith(compiled) and other[len(compiled) :].endswith(".pyc"):
            (cached / other).unlink()
    path.unlink()
    _remove_empty([cached, *folders])


def _remove_empty(folders: Iterable[Path]) -> None:
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def _refuse_others(target: Path, names: Collection[str], ours: Mapping[str, None], manifest: str) -> None:
    """Raises `OutputRefused` if ``names`` would replace something other than ``ours``, which ``manifest`` lists."""

    def in_the_way(path: str | Path) -> OutputRefused:
        name = Path(path).relative_to(target).as_posix()
        return OutputRefused(f"{name} was not written by {manifest[1:]} and is in the way")

    for folder in _folders(target, names):
        if os.path.lexists(folder) and not _is_folder(folder):
            raise in_the_way(folder)
        if _is_folder(folder) and not os.access(folder, os.W_OK | os.X_OK):
            raise OutputRefused(f"{folder.relative_to(target)} cannot be written")
    for name in names:
        path = os.path.join(target, name)
        if os.path.lexists(path) and not (name in ours and _is_file(path)):
            raise in_the_way(path)


def _folders(target: Path, names: Iterable[str]) -> list[Path]:
    """The folders inside ``target`` that the files ``names`` need, a folder before the one that contains it."""
    parents = map(PurePath, dict.fromkeys(map(os.path.dirname, names)))
    nested = dict.fromkeys(folder for parent in parents for folder in (parent, *parent.parents))
    return [target / folder for folder in sorted(nested, key=lambda folder: -len(folder.parts)) if folder.parts]


def _is_folder(path: Path) -> bool:
    """Whether the path is a directory, not a link to one."""
    return os.path.isdir(path) and not os.path.islink(path)


def _is_file(path: str | Path) -> bool:
    """Whether the path is a regular file, not a link to one."""
    return os.path.isfile(path) and not os.path.islink(path)


def _listed(listing: Path) -> dict[str, None]:
    """The files that a manifest lists, if there is one; raises `OutputRefused` if it lists paths elsewhere."""
    if not _is_file(listing):
        return {}
    try:
        names = contents(listing).decode().split("\n")
    except UnicodeDecodeError as error:
        raise OutputRefused(f"{listing.name} is damaged: it is not UTF-8; {_ADVICE}") from error
    for name in names:
        path = PurePath(name)
        if path.anchor or ".." in path.parts or "\0" in name:
            raise OutputRefused(f"{listing.name} is damaged: it lists {name!r}, which lies elsewhere; {_ADVICE}")
    return dict.fromkeys(filter(None, names))


_ADVICE = "choose another directory, or remove that file and what chimera_ir wrote there"
