"""Files and pipes that a command line names, in every state: read to their end, or refused in one message."""

import os
import subprocess
from pathlib import Path

import pytest

from chimera_ir import library, source
from chimera_ir.commands.common import WRONG_COMMAND
from chimera_ir.source import Source
from tests.patience import PATIENCE
from tests.programs import COMPILE
from tests.unit.command import TINY, Run


def test_a_file_without_permission_is_status_two(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def refuse(path: object, *arguments: int, **more: int) -> int:
        if str(path).endswith("mine.chim"):
            raise PermissionError(13, "Permission denied")
        return opened(path, *arguments, **more)  # type: ignore[call-overload, no-any-return]

    (tmp_path / "mine.chim").write_text("")
    monkeypatch.setattr(os, "open", refuse)
    run(str(tmp_path / "mine.chim")).assert_refused(WRONG_COMMAND, "mine.chim: Permission denied")


def test_what_has_no_end_is_not_read(run: Run, tmp_path: Path) -> None:
    (tmp_path / "zero.chim").symlink_to("/dev/zero")
    (tmp_path / "folder.chim").mkdir()
    with (tmp_path / "large.chim").open("wb") as file:
        file.truncate(2**30 + 1)
    for name, said in (("zero", "no regular file"), ("folder", "directory"), ("large", "larger")):
        file = str(tmp_path / f"{name}.chim")
        predicted = ["--profile", file, "--cluster", file, "--micro-batch-size", 1]
        for arguments in ([file], ["chimera", *predicted]):
            run(*arguments).assert_refused(WRONG_COMMAND, f"{name}.chim: ", said)


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("cat tiny.chim", ""),
        ("cat tiny.sir", ""),
        ("sleep 0.2; cat tiny.chim; sleep 0.1", ""),
        ("cat tiny.chim", "--set D=3"),
    ],
)
def test_what_another_command_writes_is_compiled(run: Run, tmp_path: Path, command: str, option: str) -> None:
    """As a shell hands it over: a pipe without a name that says what is in it."""
    (tmp_path / "tiny.chim").write_text(TINY)
    program = run("tiny.chim", "--emit", "program").out
    (tmp_path / "tiny.sir").write_text(program)
    line = f'exec "$@" <({command}) --emit program {option}'
    done = subprocess.run(
        ["bash", "-c", line, "bash", *COMPILE], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (program if not option else run("tiny.chim", "--emit", "program", *option.split()).out)


def test_a_pipe_without_a_writer_or_without_an_end_is_status_two(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "PATIENCE", 0.0)
    os.mkfifo(tmp_path / "pipe.chim")
    run("pipe.chim").assert_refused(WRONG_COMMAND, "pipe.chim: nobody writes to this pipe")
    monkeypatch.setattr(library, "LARGEST", 2**20)
    with subprocess.Popen(["yes"], stdout=subprocess.PIPE) as endless:
        run(f"/dev/fd/{endless.stdout.fileno()}").assert_refused(WRONG_COMMAND, "it is larger than 1 MiB")
        endless.kill()


def test_a_pipe_is_an_ir_text_if_it_begins_like_one() -> None:
    for text in ("program p\n", "\n\n# about\n  schedule x", "# plan\n\tplan a"):
        assert Source("/dev/fd/63", text).is_ir
        assert not Source("a.chim", text).is_ir
    for text in ("", "scheme p", "# program p", "programs", "x\nprogram p", "#" * 10**6, " " * 10**6, "#\n" * 10**6):
        assert not Source("/dev/fd/63", text).is_ir
        assert Source("a.sir", text).is_ir


def test_a_file_that_grows_while_it_is_read_is_not_read_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some files of the system have no size, and an end that depends on who reads."""
    file, read = tmp_path / "log", os.read
    file.write_bytes(b"x")
    reads: list[int] = []

    def growing(handle: int, size: int) -> bytes:
        reads.append(handle)
        with file.open("ab") as grown:
            grown.write(b"x" * size)
        return read(handle, size)

    monkeypatch.setattr(os, "read", growing)
    with pytest.raises(OSError, match="larger than 3 MiB"):
        source.contents(file, 3 * 2**20)
    assert len(reads) == 4
