"""``--log-file``: a line of JSON for each update, written as soon as the update is over on all ranks."""

import json
import math
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from chimera_runtime.errors import tools as mistakes
from chimera_runtime.values import files


class Log:
    """Appends lines to a file, each with one write: the file has whole lines, however the run ends.

    Raises `Unwritable` if the file cannot be opened, or another run appends to it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise mistakes.file_cannot_be_written("--log-file", path, error.strerror) from error
        with suppress(OSError):  # a file system without locks refuses nobody
            if stat.S_ISREG(os.fstat(self._file).st_mode) and not files.lock(self._file):
                os.close(self._file)
                raise mistakes.file_cannot_be_written("--log-file", path, mistakes.LOG_IS_OF_ANOTHER_RUN)

    def add(self, content: dict[str, Any]) -> None:
        """Writes a line, with null for a number that is not finite. Raises `Unwritable` if it cannot be written."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in content.items()}
        try:
            os.write(self._file, json.dumps(finite).encode() + b"\n")
        except OSError as error:
            raise mistakes.file_cannot_be_written("--log-file", self._path, error.strerror) from error

    def close(self) -> None:
        """Closes the file; each line was written when it was added."""
        os.close(self._file)
