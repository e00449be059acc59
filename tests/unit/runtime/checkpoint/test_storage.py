"""Checkpoints on disk: whole or not there, whenever a rank dies; hashed; in a directory that one job has."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.api import CheckpointException

from chimera_runtime.checkpoint import storage
from chimera_runtime.checkpoint.storage import Lock, Writer, damage, is_whole, others, path_of, update_of, whole
from chimera_runtime.errors import BadCheckpoint
from chimera_runtime.ranks.world import World

ROOT = Path(__file__).resolve().parents[4]


def saved(directory: Path, update: int, keep: int = 2, value: float = 0.0) -> Path:
    save({"tensor": torch.full((3,), value)}, storage_writer=Writer(directory, update, keep))
    return path_of(directory, update)


def value_in(checkpoint: Path) -> float:
    state = {"tensor": torch.empty(3)}
    load(state, checkpoint_id=checkpoint)
    return float(state["tensor"][0])


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_the_newest_stay_and_are_found_in_the_order_of_their_updates(alone: World, tmp_path: Path) -> None:
    """The order is that of numbers: the one of more than eight digits is the last one."""
    for update in (999, 123456789, 5000):
        saved(tmp_path, update, keep=3)
    (tmp_path / "update-mine").mkdir()
    assert [update_of(path) for path in whole(tmp_path)] == [999, 5000, 123456789]
    saved(tmp_path, 123456790, keep=2)
    assert names(tmp_path) == ["update-123456789", "update-123456790", "update-mine"]
    assert all(is_whole(path) and damage(path, 0, 1) is None for path in whole(tmp_path))
    assert not is_whole(tmp_path / "update-mine")
    assert whole(tmp_path / "none") == []
    assert others(path_of(tmp_path, 123456790)) == ["update-123456789"]
    with pytest.raises(BadCheckpoint, match=r"Not a directory"):
        whole(tmp_path / "update-123456790" / ".metadata")


# A rank that dies.


class Died(BaseException):
    """Ends this process at once."""


def dying(monkeypatch: pytest.MonkeyPatch, at: int) -> Callable[[], bool]:
    """Stops before the ``at``-th change of the file system; returns whether there was one."""
    count = 0

    def watched(original: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count >= at:
                raise Died
            return original(*arguments, **options)

        return call

    for name in ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))
    return lambda: count >= at


@pytest.mark.full
@pytest.mark.parametrize("update", [2, 1], ids=["a further one", "one in place of the same"])
def test_whenever_a_rank_dies_in_a_save_there_is_the_old_checkpoint_or_the_new_one(
    alone: World, tmp_path: Path, update: int
) -> None:
    """Uses ``keep=1``, so that the old one goes; the next job finds nothing else there."""
    values, at, has_died = set(), 0, True
    while has_died:
        at += 1
        directory = tmp_path / str(at)
        directory.mkdir()
        saved(directory, 1, keep=1, value=1.0)
        with pytest.MonkeyPatch.context() as patch:
            came = dying(patch, at)
            with suppress(Died, CheckpointException):
                saved(directory, update, keep=1, value=2.0)
            has_died = came()
        before = [(path, value_in(path), damage(path, 0, 1)) for path in whole(directory)]
        assert before, f"nothing is there after a death at change {at}"
        assert {fault for _, _, fault in before} == {None}
        values.add(tuple(value for _, value, _ in before))
        Lock(directory).release()
        after = [(path, value_in(path), damage(path, 0, 1)) for path in whole(directory)]
        assert [value for _, value, _ in after] == [value for _, value, _ in before]
        assert set(names(directory)) == {".lock", *(path.name for path, _, _ in after)}
        saved(directory, 3, keep=1, value=3.0)
        assert names(directory) == [".lock", "update-00000003"]
    assert at > 8, "or nothing has died"
    assert {(1.0,), (2.0,)} <= values


# One job at a time.


SECOND = """
import os
import sys
from pathlib import Path
from chimera_runtime.errors import BadCheckpoint
from chimera_runtime.checkpoint.storage import Lock
for _ in range(2):
    sys.stdin.readline()
    try:
        kept = Lock(Path(sys.argv[1]))
        if os.fork():
            print("held", flush=True)
    except BadCheckpoint as error:
        print(error, flush=True)
sys.stdin.readline()
"""


@pytest.mark.full
def test_a_directory_is_locked_until_it_is_released_or_its_process_ends_even_if_its_children_live(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "a" / "b"
    refusal = f"another job saves its checkpoints in {directory}: choose another directory, or end that job"
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", SECOND, str(directory)], stdin=pipe, stdout=pipe, text=True, cwd=ROOT
    ) as second:

        def said() -> str:
            assert second.stdin is not None
            assert second.stdout is not None
            second.stdin.write("\n")
            second.stdin.flush()
            return second.stdout.readline()

        held = Lock(directory)
        with pytest.raises(BadCheckpoint, match="another job saves its checkpoints"):
            Lock(directory.parent / "." / directory.name)
        assert said() == f"{refusal}\n"
        held.release()
        assert said() == "held\n"
        with pytest.raises(BadCheckpoint) as refused:
            Lock(directory)
        assert str(refused.value) == refusal
        second.kill()
        second.wait()
        Lock(directory).release()


def test_a_directory_that_cannot_be_made_or_locked_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadCheckpoint, match=r"checkpoints cannot be saved in .*file: File exists"):
        Lock(tmp_path / "file")

    def never(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(storage, "lock", never)
    with pytest.raises(BadCheckpoint, match=r"checkpoints cannot be saved in .*: No locks available"):
        Lock(tmp_path)


# What is not as it was written.


def test_every_file_that_is_spoilt_or_missing_is_named(alone: World, tmp_path: Path) -> None:
    good = saved(tmp_path, 1)
    hashes = json.loads((good / ".hashes.json").read_text())
    assert set(hashes) | {".hashes.json"} == set(names(good))
    for name in hashes:
        bad = tmp_path / "copy"
        shutil.copytree(good, bad)
        content = (bad / name).read_bytes()
        (bad / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        shares = [damage(bad, which, 3) for which in range(3)]
        assert [share for share in shares if share] == [f"{bad / name} is not as it was written"]
        (bad / name).unlink()
        assert damage(bad, 0, 1) == f"{bad / name}: No such file or directory"
        (bad / name).write_bytes(content)
        (bad / ".hashes.json").write_text(json.dumps({other: hashes[other] for other in hashes if other != name}))
        lacking = f"{bad / '.hashes.json'} is not as it was written: it lacks the hash of {name}"
        assert [damage(bad, which, 3) for which in range(3)] == [lacking] * 3
        shutil.rmtree(bad)


@pytest.mark.parametrize(
    "text", ["", "{}", "[1", "null", "[1]", "[" * 100_000, '"what"', '{"__0_0.distcp": 1}', b"\xff"]
)
def test_spoilt_hashes_are_named(alone: World, tmp_path: Path, text: str | bytes) -> None:
    checkpoint = saved(tmp_path, 1)
    (checkpoint / ".hashes.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    fault = damage(checkpoint, 0, 1)
    assert fault is not None
    assert "/.hashes.json is not as it was written" in fault


@pytest.mark.parametrize("name", ["../secret", "/dev/zero", "a/b", "\0"])
def test_a_name_of_a_file_elsewhere_is_not_followed(alone: World, tmp_path: Path, name: str) -> None:
    checkpoint = saved(tmp_path, 1)
    hashes = json.loads((checkpoint / ".hashes.json").read_text())
    (checkpoint / ".hashes.json").write_text(json.dumps({name: "00", **hashes}))
    fault = damage(checkpoint, 0, 1)
    assert fault is not None
    assert "/.hashes.json is not as it was written" in fault


@pytest.mark.parametrize("name", [".hashes.json", "__0_0.distcp"])
def test_a_file_that_is_no_regular_file_is_named(alone: World, tmp_path: Path, name: str) -> None:
    checkpoint = saved(tmp_path, 1)
    (checkpoint / name).unlink()
    os.mkfifo(checkpoint / name)
    assert damage(checkpoint, 0, 1) == f"{checkpoint / name}: it is no regular file"
