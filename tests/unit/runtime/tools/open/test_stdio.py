"""Lines of a rank if standard output and standard error are closed, full, or without a reader."""

import errno
import os
import pty
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from chimera_runtime.errors import Misuse
from chimera_runtime.tools.open.stdio import locked, release, reserve, write_atomically
from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[5]

pytestmark = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")

RANK = """
from chimera_runtime.errors import Unwritable
from chimera_runtime.tools.open.stdio import drop_unwritable, write_line, write_error
import os, sys
opened = os.open(os.devnull, os.O_RDONLY)
write_error("an error")
try:
    write_line("a line")
except Unwritable as error:
    write_error(str(error))
    drop_unwritable()
    sys.exit(2)
write_line("another")
drop_unwritable()
sys.exit(3 if opened > 2 else 4)
"""


@pytest.mark.parametrize(
    ("redirected", "status", "output", "errors"),
    [
        ("", 3, "a line\nanother\n", "an error\n"),
        ("2>&-", 3, "a line\nanother\n", ""),
        ("2>/dev/full", 3, "a line\nanother\n", ""),
        (">&-", 2, "", "an error\nstandard output: Bad file descriptor\n"),
        (">/dev/full", 2, "", "an error\nstandard output: No space left on device\n"),
        (">&- 2>&-", 2, "", ""),
        (">/dev/full 2>&1", 2, "", ""),
        ("> >(true)", 3, "", "an error\n"),
    ],
)
def test_a_rank_keeps_its_status_and_no_file_gets_the_number_of_a_closed_stream(
    redirected: str, status: int, output: str, errors: str
) -> None:
    command = ["bash", "-c", f'"$@" {redirected}', "bash", sys.executable, "-c", RANK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (status, output, errors)


SHOWN = """
from chimera_runtime.tools.open.stdio import is_terminal, last_lines, write_line, show_line, write_error
import sys
if is_terminal(sys.stdout):
    show_line("update 1, which is out of date soon")
    show_line("update 2")
write_line("a line")
write_error("an error")
write_line(str(len(last_lines)))
"""

CLEARED = "\r\x1b[K"


@pytest.mark.parametrize(
    ("kind", "written"),
    [
        (
            "xterm",
            f"{CLEARED}update 1, which is {CLEARED}update 2{CLEARED}a line\r\n{CLEARED}an error\r\n{CLEARED}2\r\n",
        ),
        ("dumb", "a line\r\nan error\r\n2\r\n"),
    ],
)
def test_on_a_terminal_a_line_takes_the_place_of_what_was_shown(kind: str, written: str) -> None:
    """The text is cut to what fits into 20 columns: the last one would begin a line."""
    ours, theirs = pty.openpty()
    variables = os.environ | {"TERM": kind, "COLUMNS": "20"}
    subprocess.run(
        [sys.executable, "-c", SHOWN],
        stdout=theirs,
        stderr=theirs,
        env=variables,
        timeout=PATIENCE,
        check=True,
        cwd=ROOT,
    )
    os.close(theirs)
    assert os.read(ours, 10000).decode() == written
    os.close(ours)


def test_a_line_is_one_write_where_python_is_unbuffered() -> None:
    """A socket of packets keeps writes apart."""
    heard, spoken = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with heard, spoken:
        command = [sys.executable, "-u", "-c", RANK]
        subprocess.run(command, stdout=spoken, stderr=spoken, timeout=PATIENCE, check=False, cwd=ROOT)
        heard.setblocking(False)
        assert [heard.recv(100) for _ in range(3)] == [b"an error\n", b"a line\n", b"another\n"]


# Files that are whole at every moment, and files that one job at a time writes.


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
