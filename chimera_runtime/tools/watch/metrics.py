"""``--metrics``: file of losses and times, which rank 0 writes while updates end."""

import json
import math
import os
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from chimera_runtime.errors import Unwritable
from chimera_runtime.errors import tools as mistakes
from chimera_runtime.tools.open.files import write_atomically

_NAMES = (b"loss", b"step_seconds", b"cpu_seconds")
_PAUSE = 1.0
_SHARE = 100
"""The file is written again after ``_PAUSE`` seconds at the earliest, and ``_SHARE`` times the time of the last write.
"""


class Metrics:
    """Writes the file of ``--metrics``: a JSON object with three lists, each with a number for every update.

    They are those of `add`. A number that is not finite is null. The file is complete at every moment: it is written
    under another name and renamed. Nothing is formatted twice, and writing takes at most a hundredth of the time,
    however long the run. A file that is not a regular one, such as a pipe, is written once, by `close`.

    Raises `Unwritable` if the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._given = path
        self._lock = threading.Lock()
        self._columns = [bytearray() for _ in _NAMES]
        self._count = self._saved = 0
        self._due = 0.0
        try:
            self._once = path.exists() and not path.is_file()
            self._path = path if self._once else Path(os.path.realpath(path))
            if path.is_dir() or (path.exists() and not os.access(path, os.W_OK)):
                path.open("ab").close()
            if not self._once:
                self._save()
        except OSError as error:
            raise mistakes.file_cannot_be_written("--metrics", path, error.strerror) from error

    def add(self, loss: float | None, step_seconds: float, cpu_seconds: float) -> None:
        """Adds the numbers of an update, and writes the file now and then; if that fails, it is tried again later."""
        numbers = (loss, step_seconds, cpu_seconds)
        with self._lock:
            for column, number in zip(self._columns, numbers, strict=True):
                shown = json.dumps(number if number is not None and math.isfinite(number) else None)
                column += f"{', ' if self._count else ''}{shown}".encode()
            self._count += 1
        if time.monotonic() >= self._due and not self._once:
            with suppress(OSError):
                self._save()

    def close(self) -> None:
        """Writes the numbers that are not yet in the file. Raises `Unwritable` if the file cannot be written."""
        try:
            self._save()
        except OSError as error:
            raise mistakes.metrics_are_incomplete(self._given, error.strerror, self._saved, self._count) from error

    def keep(self) -> None:
        """Writes as `close` does, without its errors; called when the run ends early.

        It does nothing for a pipe, which may have no reader and block.
        """
        if not self._once:
            with suppress(Unwritable):
                self.close()

    def _save(self) -> None:
        with self._lock:
            start = time.monotonic()
            lists = [b"".join((b'"', name, b'": [', c, b"]")) for name, c in zip(_NAMES, self._columns, strict=True)]
            write = self._path.write_bytes if self._once else partial(write_atomically, self._path)
            write(b"{" + b", ".join(lists) + b"}\n")
            self._saved = self._count
            end = time.monotonic()
            self._due = end + max(_PAUSE, _SHARE * (end - start))
