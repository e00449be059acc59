"""Files that are whole at every moment."""

import errno
import os
from pathlib import Path

import pytest

from chimera_runtime.tools.open.files import write_atomically


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
