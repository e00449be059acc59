"""Lines of a rank if standard output and standard error are closed, full, or without a reader."""

import os
import pty
import socket
import subprocess
import sys
from pathlib import Path

import pytest

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
