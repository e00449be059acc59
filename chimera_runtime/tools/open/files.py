"""Files that are complete at every moment, and files that one job at a time writes."""

import os
import time
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from chimera_runtime.errors import tools as mistakes
from chimera_runtime.values import files

_JOB = "chimera/job"
"""Key in the store: a number of the job that no other has."""

_PATIENCE = 1.0
"""Seconds to wait for the number of a job that has just locked a file."""


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces a file by a complete new one, or leaves it as it is; also if several machines share the directory."""
    fresh = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        fresh.write_bytes(content)
        fresh.replace(path)
    except OSError:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise


def reserve(option: str, path: Path, store: Any) -> Path | None:
    """Reserves a file for this job, by a lock on ``.NAME.lock`` beside it, which is returned.

    Returns None, and reserves nothing, if the path is not that of a regular file in a directory that can be written:
    whoever writes there says so. Raises `Misuse` if another job has reserved the file.
    """
    target = Path(os.path.realpath(path))
    lock = target.with_name(f".{target.name}.lock")
    with suppress(OSError):
        if not target.exists() or target.is_file():
            if not locked(lock, store):
                raise mistakes.directory_cannot_be_written(option, path, mistakes.FILE_IS_OF_ANOTHER_RUN)
            return lock
    return None


def release(locks: Iterable[Path | None]) -> None:
    """Removes the files by which this job has reserved others; those of a job that is killed stay, without a lock."""
    for lock in locks:
        if lock is not None:
            with suppress(OSError):
                lock.unlink(missing_ok=True)


def locked(path: Path, store: Any) -> bool:
    """Locks a file for this job until the process ends, even if it is killed; False if another job has locked it.

    The file is made if there is none. Several ranks of a job may lock one file: it has the number of the job, which its
    ``store`` keeps.
    """
    job: bytes = store.compare_set(_JOB, "", uuid.uuid4().hex)
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if not files.lock(handle):
                holder = _content(handle)
                os.close(handle)
                return holder == job
        except OSError:
            return True  # a file system without locks refuses nobody
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), path.stat()):
                os.ftruncate(handle, 0)
                os.pwrite(handle, job, 0)
                return True
        os.close(handle)  # its former holder has just removed it


def _content(handle: int) -> bytes:
    deadline = time.monotonic() + _PATIENCE
    while not (content := os.pread(handle, 64, 0)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return content
