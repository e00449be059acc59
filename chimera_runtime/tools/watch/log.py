"""``--log-file``: a line of JSON for each update, in the file as soon as the update is over on all ranks."""

import fcntl
import json
import math
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from chimera_runtime.errors import Unwritable


class Log:
    """Appends lines to a file, each with one write: whatever ends the run, the file has whole lines.

    Raises
    ------
    Unwritable
        If the file cannot be opened, or another run appends to it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failed: OSError | None = None
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise Unwritable(f"--log-file {path}: {error.strerror}") from error
        if stat.S_ISREG(os.fstat(self._file).st_mode) and self._is_taken():
            os.close(self._file)
            raise Unwritable(f"--log-file {path}: another run appends to it; give each run a file of its own")

    def _is_taken(self) -> bool:
        """Whether another process has the lock of the file; else it is ours, and no child's, until this one ends."""
        with suppress(OSError):  # a file system without locks refuses nobody
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                return True
        return False

    def add(self, content: dict[str, Any]) -> None:
        """A line; null is what is no finite number. After one that cannot be written no further one is tried."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in content.items()}
        if self._failed is not None:
            return
        try:
            os.write(self._file, json.dumps(finite).encode() + b"\n")
        except OSError as error:
            self._failed = error

    def close(self) -> None:
        """Nothing more is to come.

        Raises
        ------
        Unwritable
            If a line could not be written.
        """
        os.close(self._file)
        if self._failed is not None:
            raise Unwritable(f"--log-file {self._path}: {self._failed.strerror}")
