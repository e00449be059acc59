"""Files that are whole at every moment, and files that one job at a time writes."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from chimera_runtime.errors import Misuse
from chimera_runtime.tools.open.stdio import locked, release, reserve, write_atomically


def test_a_file_has_the_content_that_was_put_last_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    for content in (b"first", b"", b"\0\n\xff" * 1000):
        write_atomically(tmp_path / "f", content)
        assert (tmp_path / "f").read_bytes() == content
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_a_reader_who_has_opened_the_file_before_reads_what_it_held(tmp_path: Path) -> None:
    """No reader ever sees half of a file: it is replaced, not written over."""
    write_atomically(tmp_path / "f", b"before")
    with (tmp_path / "f").open("rb") as reader:
        write_atomically(tmp_path / "f", b"after")
        assert reader.read() == b"before"


def test_a_file_is_whole_or_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "f"
    write_atomically(file, b"first")

    def cut(path: Path, content: bytes) -> None:
        with path.open("wb") as half:
            half.write(content[:3])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", cut)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(file, b"second")
    assert file.read_bytes() == b"first"
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


# One job at a time.


def test_a_file_that_another_job_has_locked_is_free_once_that_job_is_killed_even_if_its_children_live(
    tmp_path: Path, other_job: Callable[..., Any]
) -> None:
    with other_job(tmp_path / "lock"):
        assert not locked(tmp_path / "lock", HashStore())
    assert locked(tmp_path / "lock", HashStore())


def test_ranks_of_one_job_lock_the_same_file(tmp_path: Path, other_job: Callable[..., Any]) -> None:
    store = HashStore()
    with other_job(tmp_path / "lock", number=store.compare_set("chimera/job", "", "7").decode()):
        assert locked(tmp_path / "lock", store)
        assert not locked(tmp_path / "lock", HashStore())


def test_a_file_is_reserved_by_a_lock_beside_it_which_goes_in_the_end(
    tmp_path: Path, other_job: Callable[..., Any]
) -> None:
    with (
        other_job(tmp_path / ".model.pt.lock"),
        pytest.raises(Misuse, match=r"--export .*model.pt: another run will write it; give each run a file of its own"),
    ):
        reserve("--export", tmp_path / "model.pt", HashStore())
    (tmp_path / "link.pt").symlink_to("model.pt")
    lock = reserve("--export", tmp_path / "link.pt", HashStore())
    assert lock == tmp_path / ".model.pt.lock"
    release([lock, None])
    assert [path.name for path in tmp_path.iterdir()] == ["link.pt"]


def test_what_is_no_regular_file_or_cannot_be_written_is_not_reserved(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "missing" / "file", tmp_path / ("x" * 300)):
        assert reserve("--metrics", path, HashStore()) is None
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
