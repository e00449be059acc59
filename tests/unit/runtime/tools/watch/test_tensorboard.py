"""The curves of TensorBoard have the numbers of the log, and nothing trains for them if the package is not there."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chimera_runtime.errors import Misuse, Unwritable
from chimera_runtime.tools.watch.progress import TensorBoard, scalars

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
