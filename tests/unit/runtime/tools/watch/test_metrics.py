"""The file of ``--metrics``: whole at every moment, however a run ends, and never written more than is worth it."""

import errno
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chimera_runtime.errors import Unwritable
from chimera_runtime.tools.open.stdio import write_atomically
from chimera_runtime.tools.watch import progress as writing
from chimera_runtime.tools.watch.progress import Metrics

NAMES = ["loss", "step_seconds", "cpu_seconds"]


class Disk:
    """Stands in for time and for what is written: a byte takes ``seconds_per_byte``, and a full disk takes nothing."""

    def __init__(self, seconds_per_byte: float = 0.0) -> None:
        self.now = 0.0
        self.spent = 0.0
        self.writes = 0
        self.full = False
        self._seconds_per_byte = seconds_per_byte

    def put(self, path: Path, content: bytes) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_atomically(path, content)
        took = self._seconds_per_byte * len(content)
        self.now += took
        self.spent += took
        self.writes += 1


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Disk]:
    def made(**options: Any) -> Disk:
        disk = Disk(**options)
        monkeypatch.setattr(writing, "write_atomically", disk.put)
        monkeypatch.setattr(writing.time, "monotonic", lambda: disk.now)
        return disk

    return made


def read(path: Path) -> dict[str, list[float | None]]:
    """Reads as a strict reader of JSON does, which refuses NaN and Infinity."""
    numbers: dict[str, list[float | None]] = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert list(numbers) == NAMES
    return numbers


def test_a_file_has_every_update_and_null_for_what_is_no_number(tmp_path: Path) -> None:
    file = tmp_path / "m.json"
    metrics = Metrics(file)
    assert read(file) == {name: [] for name in NAMES}, "from the beginning it is about this run"
    losses = [0.1, None, float("nan"), float("inf"), 1e-300]
    for number, loss in enumerate(losses):
        metrics.add(loss, number / 3, number)
    metrics.close()
    assert read(file) == {
        "loss": [0.1, None, None, None, 1e-300],
        "step_seconds": [number / 3 for number in range(5)],
        "cpu_seconds": [0, 1, 2, 3, 4],
    }
    assert [path.name for path in tmp_path.iterdir()] == ["m.json"], "nothing is left beside it"


def test_whenever_a_run_is_killed_the_file_is_whole_and_misses_little(
    tmp_path: Path, disk: Callable[..., Disk]
) -> None:
    """Every moment between two updates is one; a second's updates are missing at most."""
    time, file = disk(), tmp_path / "m.json"
    metrics, draw = Metrics(file), random.Random(1)
    for update in range(200):
        metrics.add(draw.random(), 0.1, 0.1)
        time.now += 0.1
        kept = read(file)
        assert {len(column) for column in kept.values()} == {len(kept["loss"])}
        assert update - 10 <= len(kept["loss"]) <= update + 1


def test_writing_takes_a_hundredth_of_the_time_however_long_the_run(tmp_path: Path, disk: Callable[..., Disk]) -> None:
    """Writes to a disk so slow that a file of all updates takes seconds."""
    time = disk(seconds_per_byte=1e-6)
    metrics = Metrics(tmp_path / "m.json")
    for _ in range(30_000):
        time.now += 0.01
        metrics.add(0.123456789, 0.01, 0.01)
    assert time.writes > 5
    assert time.spent < 0.02 * time.now


def test_a_full_disk_leaves_what_was_written_before_and_is_told_at_the_end(
    tmp_path: Path, disk: Callable[..., Disk]
) -> None:
    time, file = disk(), tmp_path / "m.json"
    metrics = Metrics(file)
    for update in range(6):
        time.now += 2
        time.full = update >= 4
        metrics.add(float(update), 2.0, 1.0)
    assert read(file)["loss"] == [0, 1, 2, 3]
    with pytest.raises(Unwritable, match=r"m\.json: No space left on device; .* has 4 of 6 updates"):
        metrics.close()
    metrics.keep()
    time.full = False
    metrics.close()
    assert read(file)["loss"] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("name", ["nowhere/m.json", ".", "m" * 300])
def test_a_file_that_cannot_be_written_is_told_before_training(tmp_path: Path, name: str) -> None:
    with pytest.raises(Unwritable, match=r"--metrics .*: "):
        Metrics(tmp_path / name)


def test_a_pipe_and_a_device_are_written_once_and_a_link_stays_one(tmp_path: Path) -> None:
    Metrics(Path(os.devnull)).close()
    assert not Path(os.devnull).is_file()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    metrics = Metrics(pipe)
    metrics.add(1.0, 2.0, 3.0)
    metrics.keep()
    assert os.read(reading, 100) == b""
    metrics.close()
    assert json.loads(os.read(reading, 100)) == {"loss": [1.0], "step_seconds": [2.0], "cpu_seconds": [3.0]}
    os.close(reading)
    (tmp_path / "link").symlink_to(tmp_path / "target")
    Metrics(tmp_path / "link").close()
    assert (tmp_path / "link").is_symlink()
    assert read(tmp_path / "target")["loss"] == []
