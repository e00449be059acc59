"""Checkpoints on disk: each a directory that is there as a whole or not at all, with a hash of every file in it.

    DIR/update-00000200/       whole: what it is called, it is
    DIR/update-00000300/
    DIR/.writing/              under way, or what a kill has left
    DIR/.update-00000300/      counts while that one is being replaced, and is not there
    DIR/.lock                  held by the job that saves here

torch.distributed.checkpoint writes the files; see there for what is in them.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from chimera_runtime.errors import BadCheckpoint

_WRITING = ".writing"
_REMOVED = ".removed"
_LOCK = ".lock"
_METADATA = ".metadata"
_HASHES = ".hashes.json"
_WHOLE = re.compile(r"\.?update-(\d+)")


def path_of(directory: Path, update: int) -> Path:
    """Where the checkpoint after so many updates is, or will be."""
    return directory / f"update-{update:08d}"


def whole(directory: Path) -> list[Path]:
    """The checkpoints in a directory, the oldest first."""
    try:
        paths = sorted(path for path in directory.iterdir() if _WHOLE.fullmatch(path.name))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise BadCheckpoint(f"{directory}: {error.strerror}") from error
    # A dot comes before letters: what is being replaced counts where there is nothing in its place.
    return sorted({path.name.removeprefix("."): path for path in paths}.values(), key=update_of)


def is_whole(path: Path) -> bool:
    """Whether this is a checkpoint."""
    return (path / _METADATA).is_file()


def update_of(path: Path) -> int:
    """The number of updates in the name of a checkpoint."""
    name = _WHOLE.fullmatch(path.name)
    assert name is not None
    return int(name[1])


class Lock:
    """A directory that one job at a time saves to; the lock ends with the process, however that ends.

    Raises
    ------
    BadCheckpoint
        If another job has it, or it cannot be made or written.
    """

    def __init__(self, directory: Path) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file = os.open(directory / _LOCK, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise BadCheckpoint(f"checkpoints cannot be saved in {directory}: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._file)
            raise BadCheckpoint(
                f"another job saves its checkpoints in {directory}: choose another directory, or end that job"
                if isinstance(error, BlockingIOError)
                else f"checkpoints cannot be saved in {directory}: {error.strerror}"
            ) from error
        counting = whole(directory)
        replaced = [path for path in directory.glob(".update-*") if path not in counting]
        for left in (directory / _WRITING, directory / _REMOVED, *replaced):
            shutil.rmtree(left, ignore_errors=True)

    def release(self) -> None:
        """Others may save there, even while processes live that were forked from this one and share the file."""
        fcntl.flock(self._file, fcntl.LOCK_UN)
        os.close(self._file)


class Writer(FileSystemWriter):
    """Writes a checkpoint beside the others, and gives it its name when all ranks have written all.

    Each rank leaves the hashes of its files beside them. ``keep`` is how many checkpoints may stay, the newest.
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
            _write(self._part(names[0]), json.dumps({name: _hash(Path(self.path) / name) for name in names}))
        return written

    def _part(self, first: str) -> Path:
        return Path(self.path) / f".{first}{_HASHES}"

    def finish(self, metadata: Any, results: Any) -> None:
        """Called on one rank when all have written: the checkpoint is whole, and those that are too many go."""
        super().finish(metadata, results)
        written = Path(self.path)
        _write(written / _HASHES, json.dumps(_gathered(written)))
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
        """Takes the name away first: a checkpoint is never there in part."""
        away = self._directory / _REMOVED
        if checkpoint.exists():
            shutil.rmtree(away, ignore_errors=True)
            checkpoint.rename(away)
            shutil.rmtree(away)


def _gathered(written: Path) -> dict[str, str]:
    """The hashes of all ranks, and that of the metadata."""
    hashes = {_METADATA: _hash(written / _METADATA)}
    for part in written.glob(f".*{_HASHES}"):
        hashes |= json.loads(part.read_text())
        part.unlink()
    return hashes


def damage(checkpoint: Path, which: int, of: int) -> str | None:
    """What is wrong with every ``of``-th file of a checkpoint, from number ``which``; None if nothing is."""
    try:
        hashes: dict[str, str] = json.loads((checkpoint / _HASHES).read_text())
        names: Sequence[str] = sorted(hashes.keys())
        lacking = next((name for name in _parts_of(checkpoint) if name not in hashes), None)
        if lacking is not None:
            return f"{checkpoint / _HASHES} is not as it was written: it lacks the hash of {lacking}"
        for name in names[which::of]:
            if _hash(checkpoint / name) != hashes[name]:
                return f"{checkpoint / name} is not as it was written"
    except OSError as error:
        return f"{error.filename or checkpoint}: {error.strerror}"
    except (ValueError, AttributeError, TypeError):
        return f"{checkpoint / _HASHES} is not as it was written"
    return None


def _parts_of(checkpoint: Path) -> list[str]:
    """The names of the files that a checkpoint is read from."""
    return [_METADATA, *sorted(path.name for path in checkpoint.glob("*.distcp"))]


def beside(checkpoint: Path) -> str:
    """The checkpoints beside one that cannot be read, in words."""
    names = [path.name for path in whole(checkpoint.parent) if path != checkpoint]
    return f"; beside it there is {', '.join(names)}" if names else ""


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def _write(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    """A new name is there after a loss of power, too."""
    number = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
