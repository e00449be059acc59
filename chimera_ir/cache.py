"""Keeps the answers to calls of chimera compile, as text files named after everything that determines an answer.

An answer is determined by the question (the text and every option), the appearance of standard output, and the
compiler: the contents of all its files, the libraries that it uses, Python. So no answer is ever out of date. The
answers that were used least recently are dropped once the directory holds more than `LIMIT`. A file is a line with the
SHA-256 of the rest, then the answer. A file that is damaged, not regular, or cannot be read or written counts as
missing: the cache is never a reason to fail. An answer has scripts that run: of a directory or a file that belongs to
another user, or that others may write, nothing is read.
"""

import hashlib
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from chimera_ir import source
from chimera_ir.answer import Answer, read
from chimera_ir.source import contents, is_written_by

VARIABLE = "CHIMERA_CACHE"
"""The environment variable with the directory that keeps answers; an empty value turns the cache off."""

LIMIT = 256 * 2**20
"""The most bytes that are kept; the answers that were used least recently are dropped first."""

WORTHWHILE = 0.3
"""Seconds of processor time that making an answer must take for it to be kept, about those of the program's start."""

SETTLED = 10.0
"""Seconds for which all files of the compiler must have been unchanged, or else no answer is kept.

A file that changed more recently may have changed after it was loaded.
"""

LIBRARIES = ("click", "jinja2", "lark", "networkx", "pygments", "rich")

_OURS = re.compile(r"[0-9a-f]{64}(\.json|\.\w+\.part)")


def recall(question: Callable[[], str], make: Callable[[], Answer]) -> Answer:
    """Returns the answer that an earlier call kept; without one, calls ``make`` and returns its answer.

    That answer is kept if it took long to make. ``question`` is called before and after ``make``: if its text or the
    compiler changed meanwhile, nothing is kept.
    """
    directory = _directory()
    if directory is not None and not _is_private(directory):
        return make()
    key = None if directory is None else _key(question())
    if directory is None or key is None:
        return make()
    known = _load(directory / f"{key}.json")
    if known is not None:
        return known
    started = time.process_time()
    answer = make()
    if time.process_time() - started >= WORTHWHILE and _key(question()) == key:
        with suppress(OSError):
            _store(directory, key, answer)
            _drop(directory)
    return answer


def _directory() -> Path | None:
    """Returns the directory that `VARIABLE` names or, without it, one in the user's cache.

    The result is None if the variable is empty, or the user has no home.
    """
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named) if named else None
    base = os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME", "")
    try:
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "chimera_ir"
    except RuntimeError:
        return None


def _is_private(directory: Path) -> bool:
    try:
        return is_written_by(directory.stat())
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _key(question: str) -> str | None:
    """Returns a digest of the question and of the compiler: its files, its libraries and Python.

    The result is None if a file of the compiler cannot be read, or changed within the last `SETTLED` seconds.
    """
    now = time.time()
    try:
        libraries = [metadata.version(name) for name in LIBRARIES]
        digest = hashlib.sha256(repr((question, libraries, sys.version)).encode())
        for path in source.everything():
            state, content = path.stat(), path.read_bytes()
            if max(state.st_mtime, state.st_ctime) > now - SETTLED:
                return None
            digest.update(f"{path.name} {len(content)}\n".encode() + content)
    except (OSError, metadata.PackageNotFoundError):
        return None
    return digest.hexdigest()


def _load(path: Path) -> Answer | None:
    try:
        digest, _, text = contents(path, LIMIT).partition(b"\n")
        if not is_written_by(path.stat()):
            return None
    except OSError:
        return None
    if digest != _digest(text):
        return None
    with suppress(OSError):
        os.utime(path)
    return read(text)


def _store(directory: Path, key: str, answer: Answer) -> None:
    """Writes an answer whole or not at all, even if other processes write the same one."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    text = answer.as_json().encode()
    handle, part = tempfile.mkstemp(prefix=f"{key}.", suffix=".part", dir=directory)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_digest(text) + b"\n" + text)
        os.replace(part, directory / f"{key}.json")
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest().encode()


def _drop(directory: Path) -> None:
    """Removes the answers that were used least recently until the rest is within the limit; other files stay."""
    ours = [(path.lstat(), path) for path in directory.iterdir() if _OURS.fullmatch(path.name)]
    kept = 0
    for state, path in sorted(ours, key=lambda entry: entry[0].st_mtime, reverse=True):
        kept += state.st_size
        if kept > LIMIT:
            with suppress(OSError):
                path.unlink()
