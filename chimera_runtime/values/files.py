"""Files that a user names."""

import os
import stat
from errno import EINVAL, EISDIR
from pathlib import Path

NOT_REGULAR = "it is no regular file"


def require_regular(path: Path, most: float = float("inf")) -> Path:
    """Returns the path of a file; reading it ends, and gives at most ``most`` bytes.

    Raises `OSError` if the file is not there, is larger, or is not a regular file: a pipe may have nobody who writes,
    and a device may have no end.
    """
    state = path.stat()
    if stat.S_ISDIR(state.st_mode):
        raise IsADirectoryError(EISDIR, os.strerror(EISDIR), str(path))
    if not stat.S_ISREG(state.st_mode):
        raise OSError(EINVAL, NOT_REGULAR, str(path))
    if state.st_size > most:
        raise OSError(EINVAL, f"it is larger than {most / 2**20:,.0f} MiB", str(path))
    return path
