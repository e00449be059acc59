"""The file of ``--metrics``: whole at every moment, however a run ends, and never written more than is worth it."""

import errno
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore
from torch.profiler import record_function

from chimera_runtime.errors import Misuse, Unwritable
from chimera_runtime.tools.open.stdio import write_atomically
from chimera_runtime.tools.watch import progress as writing
from chimera_runtime.tools.watch.progress import MARKER, Log, Metrics, TensorBoard, prepare, scalars, torch_profile

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
        metrics.add({"loss": loss, "seconds": number / 3}, number)
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
        metrics.add({"loss": draw.random(), "seconds": 0.1}, 0.1)
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
        metrics.add({"loss": 0.123456789, "seconds": 0.01}, 0.01)
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
        metrics.add({"loss": float(update), "seconds": 2.0}, 1.0)
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
    metrics.add({"loss": 1.0, "seconds": 2.0}, 3.0)
    metrics.keep()
    assert os.read(reading, 100) == b""
    metrics.close()
    assert json.loads(os.read(reading, 100)) == {"loss": [1.0], "step_seconds": [2.0], "cpu_seconds": [3.0]}
    os.close(reading)
    (tmp_path / "link").symlink_to(tmp_path / "target")
    Metrics(tmp_path / "link").close()
    assert (tmp_path / "link").is_symlink()
    assert read(tmp_path / "target")["loss"] == []


# The log has a whole line for every update, at once.


def test_a_line_is_there_as_soon_as_it_is_added_behind_those_of_an_earlier_run(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"update": 7}\n')
    log = Log(path)
    log.add({"update": 1, "loss": float("nan"), "learning_rates": {0: [0.5]}})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"update": 7},
        {"update": 1, "loss": None, "learning_rates": {"0": [0.5]}},
    ]
    log.close()


@pytest.mark.full
def test_a_log_of_another_run_that_goes_on_is_refused_also_beside_its_children(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    program = f"""
import os, pathlib, sys
from chimera_runtime.tools.watch.progress import Log
log = Log(pathlib.Path({str(path)!r}))
if os.fork():
    print("opened", flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "opened\n"
        with pytest.raises(Unwritable, match=r"log.jsonl: another run appends to it; give each run a file of its own"):
            Log(path)
        other.kill()
        other.wait()
        Log(path).close()


@pytest.mark.full
def test_what_is_no_file_may_be_the_log_of_several_runs() -> None:
    program = "import pathlib; from chimera_runtime.tools.watch.progress import Log; Log(pathlib.Path('/dev/null'))"
    log = Log(Path("/dev/null"))
    subprocess.run([sys.executable, "-c", program], check=True)
    log.close()


def test_a_log_that_cannot_be_opened_or_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unwritable, match=r"--log-file .*: No such file or directory"):
        Log(tmp_path / "nowhere" / "log.jsonl")
    full = Log(Path("/dev/full"))
    with pytest.raises(Unwritable, match=f"--log-file /dev/full: {os.strerror(28)}"):
        full.add({"update": 1})
    full.close()


# The curves of TensorBoard have the numbers of the log, and nothing trains for them if the package is not there.

UPDATE = {
    "update": 3,
    "loss": 1.5,
    "norm": 2.5,
    "learning_rates": {"0": [0.1], "0+3": [0.2, 0.3], "1": []},
    "items_per_second": 46.9,
}


class Writer:
    """Stands in for torch's, of a disk that is full from the third number on."""

    def __init__(self, directory: str, flush_secs: int) -> None:
        if "nowhere" in directory:
            raise NotADirectoryError(20, "Not a directory")
        self.added: list[tuple[str, float, int]] = []
        self.room = 2 if "full" in directory else 100
        self.closed = 0

    def add_scalar(self, tag: str, number: float, update: int) -> None:
        if len(self.added) == self.room:
            raise OSError(28, "No space left on device")
        self.added.append((tag, number, update))

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def _stub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))  # type: ignore[misc]


def test_every_number_of_a_line_is_a_scalar() -> None:
    assert [*scalars(UPDATE)] == [
        ("loss", 1.5),
        ("norm", 2.5),
        ("learning_rates/0", 0.1),
        ("learning_rates/0+3/0", 0.2),
        ("learning_rates/0+3/1", 0.3),
        ("items_per_second", 46.9),
    ]
    assert [*scalars({"update": 1, "loss": None})] == []


@pytest.mark.usefixtures("_stub")
def test_a_line_is_added_at_its_update_and_the_end_writes_what_is_left() -> None:
    board = TensorBoard(Path("curves"))
    board.add({"update": 3, "loss": 1.5})
    board.add({"update": 3, "held_out": 1.25})
    board.close()
    writer: Any = board._writer
    assert (writer.added, writer.closed) == ([("loss", 1.5, 3), ("held_out", 1.25, 3)], 1)


@pytest.mark.usefixtures("_stub")
def test_a_directory_that_cannot_be_made_is_refused_and_a_full_disk_is_an_error() -> None:
    with pytest.raises(Unwritable, match="--tensorboard nowhere: Not a directory"):
        TensorBoard(Path("nowhere"))
    board = TensorBoard(Path("full"))
    for update in range(2):
        board.add({"update": update, "loss": 1.0})
    with pytest.raises(Unwritable, match="--tensorboard full: No space left on device"):
        board.add({"update": 2, "loss": 1.0})
    board.keep()


def test_without_the_package_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(Misuse, match=r"--tensorboard needs a package that is not there .*: pip install tensorboard; "):
        TensorBoard(tmp_path)


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path / "curves")
    board.add(UPDATE)
    board.close()
    events = EventAccumulator(str(tmp_path / "curves")).Reload()
    assert {*events.Tags()["scalars"]} == {tag for tag, _ in scalars(UPDATE)}
    ((at, loss),) = ((event.step, event.value) for event in events.Scalars("loss"))
    assert (at, loss) == (3, 1.5)


# ``--torch-profile``: the second to the fourth update of a run, a file for each rank.


def names(file: Path) -> list[str]:
    events = json.loads(file.read_text())["traceEvents"]
    return [event["name"] for event in events if event.get("cat") == "user_annotation" and event["name"][:2] == "up"]


@pytest.mark.parametrize(("updates", "recorded"), [(2, [1]), (4, [1, 2, 3]), (6, [1, 2, 3])])
def test_updates_after_the_first_are_recorded_three_at_most(tmp_path: Path, updates: int, recorded: list[int]) -> None:
    directory = tmp_path / "of" / "runs"
    prepare(HashStore(), directory)
    with torch_profile(directory, 1, updates) as of_run:
        for update in range(updates):
            with record_function(f"update {update}"):
                pass
            of_run.step()
    assert {file.name for file in directory.iterdir()} == {"rank_1.json", MARKER}
    assert sorted(names(directory / "rank_1.json")) == [f"update {update}" for update in recorded]


def test_a_run_of_one_update_has_none_to_record(tmp_path: Path) -> None:
    with pytest.raises(Misuse, match="records updates after the first of a run, and this run has 1"):
        torch_profile(tmp_path, 0, 1)


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Misuse, match=r"--torch-profile .*file"):
        prepare(HashStore(), tmp_path / "file")


def test_a_directory_in_which_another_run_records_is_refused(tmp_path: Path, other_job: Callable[..., Any]) -> None:
    with (
        other_job(tmp_path / MARKER),
        pytest.raises(Misuse, match=r"--torch-profile .*: another run records"),
    ):
        prepare(HashStore(), tmp_path)
    prepare(HashStore(), tmp_path)


def test_a_run_that_fails_before_it_has_recorded_anything_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="broken"), torch_profile(tmp_path, 0, 4):
        raise ValueError("broken")
    assert list(tmp_path.iterdir()) == []
