"""Checkpoints on disk: each is a directory that is complete or not there, with a hash of every file in it.

    DIR/update-00000200/       a complete checkpoint
    DIR/update-00000300/
    DIR/.writing/              a checkpoint that is being written, or that was when the job was killed
    DIR/.update-00000300/      the checkpoint of that name while a new one replaces it; it counts if there is no other
    DIR/.lock                  locked by the job that saves here

torch.distributed.checkpoint writes the files, in its own format.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from chimera_runtime.errors import data as mistakes
from chimera_runtime.values.files import lock, require_regular

_WRITING = ".writing"
_REMOVED = ".removed"
_LOCK = ".lock"
_METADATA = ".metadata"
_HASHES = ".hashes.json"
_LARGEST_HASHES = 2**28
_WHOLE = re.compile(r"\.?update-(\d+)")


def path_of(directory: Path, update: int) -> Path:
    """Path of the checkpoint after ``update`` updates, whether it exists or not."""
    return directory / f"update-{update:08d}"


def whole(directory: Path) -> list[Path]:
    """Returns the complete checkpoints in a directory, the oldest first."""
    try:
        paths = sorted(path for path in directory.iterdir() if _WHOLE.fullmatch(path.name))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise mistakes.directory_cannot_be_read(directory=directory, why=error.strerror) from error
    # A dot sorts before letters: of two paths with one name the one without a dot replaces the other in the dict.
    return sorted({path.name.removeprefix("."): path for path in paths}.values(), key=update_of)


def is_whole(path: Path) -> bool:
    """Whether a path is that of a complete checkpoint."""
    return (path / _METADATA).is_file()


def update_of(path: Path) -> int:
    """The number of updates in the name of a checkpoint."""
    name = _WHOLE.fullmatch(path.name)
    assert name is not None
    return int(name[1])


class Lock:
    """Locks a directory, so that one job at a time saves there; the lock ends with the process, even if it is killed.

    Removes what a job that was killed has left.
    """

    _held: ClassVar[set[Path]] = set()
    """Directories that this process has locked: to close their file under another handle would end the lock."""

    def __init__(self, directory: Path) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._place = directory.resolve()
            if self._place in self._held:
                raise mistakes.another_job_saves_there(directory=directory)
            self._file = os.open(directory / _LOCK, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise mistakes.directory_cannot_be_written(directory=directory, why=error.strerror) from error
        try:
            is_free = lock(self._file)
        except OSError as error:
            os.close(self._file)
            raise mistakes.directory_cannot_be_written(directory=directory, why=error.strerror) from error
        if not is_free:
            os.close(self._file)
            raise mistakes.another_job_saves_there(directory=directory)
        self._held.add(self._place)
        counting = whole(directory)
        replaced = [path for path in directory.glob(".update-*") if path not in counting]
        for left in (directory / _WRITING, directory / _REMOVED, *replaced):
            shutil.rmtree(left, ignore_errors=True)

    def release(self) -> None:
        """Lets other jobs save in the directory."""
        os.close(self._file)
        self._held.remove(self._place)


class Writer(FileSystemWriter):
    """Writes the checkpoint after ``update`` updates under a temporary name; renames it when all ranks have written.

    Each rank also writes the hashes of its files. The newest ``keep`` checkpoints stay, older ones are removed.
    """

    def __init__(self, directory: Path, update: int, keep: int) -> None:
        super().__init__(directory / _WRITING, overwrite=True)
        self._directory = directory
        self._update = update
        self._keep = keep

    def write_data(self, plan: Any, planner: Any) -> torch.futures.Future[Any]:
        """Writes this rank's part, and the hashes of it."""
        written = super().write_data(plan, planner)
        names = sorted({result.storage_data.relative_path for result in written.wait()})
        if names:
            folder = Path(self.path)
            _write(folder / f".{names[0]}{_HASHES}", json.dumps({name: _hash(folder / name) for name in names}))
        return written

    def finish(self, metadata: Any, results: Any) -> None:
        """Completes the checkpoint and removes the oldest; torch calls it on one rank when all have written."""
        super().finish(metadata, results)
        written = Path(self.path)
        hashes = {_METADATA: _hash(written / _METADATA)}
        for part in written.glob(f".*{_HASHES}"):
            hashes |= json.loads(part.read_text())
            part.unlink()
        _write(written / _HASHES, json.dumps(hashes))

        # A checkpoint of the same update is there until the new one has its name.
        target = path_of(self._directory, self._update)
        replaced = target.with_name(f".{target.name}")
        if target.exists():
            self._remove(replaced)
            target.rename(replaced)
        written.rename(target)
        _sync(self._directory)
        for old in (replaced, *whole(self._directory)[: -self._keep]):
            self._remove(old)

    def _remove(self, checkpoint: Path) -> None:
        """Removes a checkpoint; it is renamed first, so that a kill leaves no incomplete one."""
        away = self._directory / _REMOVED
        if checkpoint.exists():
            shutil.rmtree(away, ignore_errors=True)
            checkpoint.rename(away)
            shutil.rmtree(away)


def damage(checkpoint: Path, which: int, of: int) -> str | None:
    """Returns a complaint if a file is damaged: of the files every ``of``-th one is checked, from ``which`` on."""
    try:
        hashes: dict[str, str] = json.loads(require_regular(checkpoint / _HASHES, _LARGEST_HASHES).read_text())
        names: Sequence[str] = sorted(hashes.keys())
        files = (_METADATA, *sorted(path.name for path in checkpoint.glob("*.distcp")))
        lacking = next((name for name in files if name not in hashes), None)
        if lacking is not None:
            return mistakes.hash_is_missing(hashes=checkpoint / _HASHES, name=lacking)
        if any(os.path.basename(name) != name for name in names):
            return mistakes.file_is_damaged(path=checkpoint / _HASHES)
        for name in names[which::of]:
            if _hash(checkpoint / name) != hashes[name]:
                return mistakes.file_is_damaged(path=checkpoint / name)
    except OSError as error:
        return f"{error.filename or checkpoint}: {error.strerror}"
    except (ValueError, AttributeError, TypeError, RecursionError):
        return mistakes.file_is_damaged(path=checkpoint / _HASHES)
    return None


def others(checkpoint: Path) -> list[str]:
    """Names of the other checkpoints in the directory of one."""
    return [path.name for path in whole(checkpoint.parent) if path != checkpoint]


def _hash(path: Path) -> str:
    with require_regular(path).open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def _write(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    """Writes the names in a directory to disk, so that they survive a loss of power."""
    number = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
