"""What the commands write: whole or not at all, and never over something that is not ours."""

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

MANIFEST = ".chimera-compile"
"""The file that lists what chimera-compile wrote into a directory, one relative path a line; other commands' too."""


class OutputRefused(Exception):
    """The output cannot be written, or there is something that the command did not write."""


def write(directory: Path, files: Mapping[str, str], manifest: str = MANIFEST) -> None:
    """Writes the files, by path relative to the directory, and ``manifest``, which is a dot and the command's name.

    An existing directory is replaced if the same command wrote it; files that others put there (metrics,
    checkpoints) are carried over. If anything fails, the directory is as it was before.

    Raises
    ------
    OutputRefused
        If the directory is not ours or cannot be written; nothing has changed then.
    """
    target = Path(os.path.realpath(directory))
    try:
        if target.exists():
            _must_be_ours(directory, target, files, manifest)
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise OutputRefused(f"--out {directory}: {error.strerror}") from error
    try:
        fresh.chmod(0o777 & ~_umask())
        for name, text in files.items():
            path = fresh / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="\n")
        (fresh / manifest).write_text("".join(f"{name}\n" for name in sorted(files)), encoding="utf-8")
        _replace(target, fresh, manifest)
    except OSError as error:
        raise OutputRefused(f"--out {directory}: {error.strerror}") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def refuse_file(file: Path, mark: str, force: bool) -> None:
    """Makes sure that a file can be written, before the work that fills it begins.

    Raises
    ------
    OutputRefused
        If it cannot, or if there is a file that does not begin with ``mark`` and nobody uses ``force``.
    """
    try:
        if file.is_dir():
            raise OutputRefused(f"--out {file}: is a directory")
        if file.exists() and not force and not file.read_bytes().startswith(mark.encode()):
            raise OutputRefused(
                f"--out {file}: exists and was not written by this command, or is to be kept; "
                "choose another file, or write over it with --force"
            )
        descriptor, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=Path(os.path.realpath(file)).parent)
        os.close(descriptor)
        Path(name).unlink()
    except OSError as error:
        raise OutputRefused(f"--out {file}: {error.strerror}") from error


def write_file(file: Path, text: str, mark: str, force: bool) -> None:
    """Writes a file whose text begins with ``mark``; whoever removes that line from it keeps it.

    Raises
    ------
    OutputRefused
        As `refuse_file`; the file is as it was then.
    """
    refuse_file(file, mark, force)
    target = Path(os.path.realpath(file))
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        fresh = Path(name)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as stream:
                stream.write(mark + text)
            fresh.chmod(0o666 & ~_umask())
            fresh.replace(target)
        finally:
            fresh.unlink(missing_ok=True)
    except OSError as error:
        raise OutputRefused(f"--out {file}: {error.strerror}") from error


def _must_be_ours(shown: Path, target: Path, files: Mapping[str, str], manifest: str) -> None:
    if not target.is_dir():
        raise OutputRefused(f"--out {shown}: exists and is not a directory")
    empty = not any(target.iterdir())
    if not empty and not (target / manifest).is_file():
        raise OutputRefused(
            f"--out {shown}: exists and was not written by {manifest[1:]}; choose another directory or remove it"
        )
    for path in _foreign(target, manifest):
        name = path.relative_to(target).as_posix()
        if name in files:
            raise OutputRefused(f"--out {shown}: {name} was not written by {manifest[1:]} and is in the way")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _replace(target: Path, fresh: Path, manifest: str) -> None:
    """Puts the fresh directory in the target's place; the old one's foreign files move over."""
    if not target.exists():
        fresh.rename(target)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
    target.rename(old)
    try:
        for path in _foreign(old, manifest):
            destination = fresh / path.relative_to(old)
            destination.parent.mkdir(parents=True, exist_ok=True)
            _carry_over(path, destination)
        fresh.rename(target)
    except BaseException:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _carry_over(path: Path, destination: Path) -> None:
    """Puts a file in a second place, without a copy where the file system allows it: a checkpoint may be large."""
    try:
        os.link(path, destination, follow_symlinks=False)
    except OSError:
        shutil.copy2(path, destination, follow_symlinks=False)


def _foreign(directory: Path, manifest: str) -> list[Path]:
    """The files of a directory of ours that its command did not write."""
    listing = directory / manifest
    ours = set(listing.read_text(encoding="utf-8").splitlines()) if listing.is_file() else set()
    found = (path for path in sorted(directory.rglob("*")) if path.is_symlink() or path.is_file())
    return [
        path
        for path in found
        if path != listing
        and path.relative_to(directory).as_posix() not in ours
        and "__pycache__" not in path.relative_to(directory).parts
    ]
