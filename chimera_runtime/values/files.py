"""Files that a user names."""

import fcntl
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import EINVAL, EISDIR
from pathlib import Path

NOT_REGULAR = "it is no regular file"


def require_regular(path: Path, most: float = float("inf")) -> Path:
    """Returns the path of a file; reading it ends, and gives at most ``most`` bytes.

    Raises `OSError` if it is missing, larger, or not regular: a pipe may have no writer, and a device no end.
    """
    state = path.stat()
    if stat.S_ISDIR(state.st_mode):
        raise IsADirectoryError(EISDIR, os.strerror(EISDIR), str(path))
    if not stat.S_ISREG(state.st_mode):
        raise OSError(EINVAL, NOT_REGULAR, str(path))
    if state.st_size > most:
        raise OSError(EINVAL, f"it is larger than {most / 2**20:,.0f} MiB", str(path))
    return path


def lock(handle: int) -> bool:
    """Locks an open file for this process until it is closed, even by a kill; returns False if another has locked it.

    Unlike that of flock, the lock is not of children too, such as workers of a loader, which may outlive this process.
    It ends if the process closes the file under any other handle. Raises `OSError` if the file system has no locks.
    """
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives the path of a new file, which replaces ``path`` at the end, or is removed after an error.

    So the file is complete at every moment, also if several machines share the directory.
    """
    fresh = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        yield fresh
        fresh.replace(path)
    finally:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
