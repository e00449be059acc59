"""Writers of an output directory that die, fail or are watched at every call they make of the system.

    python -m tests.unit.dying HOW FOLDER

is a process of its own: it forks, and its writers listen to Python's audit events, which tell of every change of a file
before it is made.
"""

import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from errno import EACCES, ENOSPC
from itertools import count, cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from chimera_ir import output

DIED, REFUSED, INTERRUPTED = 9, 2, 130
TAGS = {
    "old": ("support/__init__.py", "support/gone.py", "rank_0.py", "rank_1.py"),
    "new": ("support/__init__.py", "runtime/__init__.py", "rank_0.py"),
}
SETS = {tag: {name: f"{tag} {name}" for name in (*names, "train.py")} for tag, names in TAGS.items()}
"""Two programs, whose files say which one they are of."""

MINE = ("checkpoint.bin", "train.log", "runs/1/events", "support/mine.py", "__pycache__/model.cpython-311.pyc")
CACHED = ("__pycache__/rank_1.cpython-311.pyc", "support/__pycache__/gone.cpython-311.pyc")
"""What Python made of the old files, which goes with them."""


def begun(folder: Path, tag: str | None) -> Path:
    """A directory with a program, or none, and files of the user."""
    shutil.rmtree(folder, ignore_errors=True)
    directory = folder / "o"
    if tag:
        output.write(directory, SETS[tag])
        for name in (*MINE, *CACHED):
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text("mine")
        (directory / "link").symlink_to("checkpoint.bin")
    else:
        folder.mkdir()
    return directory


def mine(directory: Path) -> Mapping[str, object]:
    """The user's files, as the file system has them: one that was moved or written to differs."""
    states = {name: (directory / name).lstat() for name in (*MINE, "link")}
    return {name: (state.st_ino, state.st_mtime_ns, state.st_ctime_ns) for name, state in states.items()}


def seen(directory: Path) -> dict[str, str]:
    """Which program each file is of that a launch could read."""
    names = {name for files in SETS.values() for name in files}
    return {name: text.split()[0] for name in names if (text := _text(directory / name))}


def _text(file: Path) -> str:
    return file.read_text() if file.is_file() else ""


def assert_one_program(directory: Path) -> None:
    """What can be launched is one program, whole."""
    tags = seen(directory)
    assert len({*tags.values()}) <= 1, tags
    if "train.py" in tags:
        assert tags.keys() == SETS[tags["train.py"]].keys(), tags
        assert all(_text(directory / name) == text for name, text in SETS[tags["train.py"]].items())


def assert_clean(directory: Path, tag: str, others: bool) -> None:
    """The program is there, the user's files, and nothing else; beside the directory there is nothing at all."""
    assert {*seen(directory).items()} == {(name, tag) for name in SETS[tag]}
    there = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if not _is_folder(path)}
    assert there == {*SETS[tag], output.MANIFEST, *((*MINE, "link") if others else ())}, there
    assert [path.name for path in directory.parent.iterdir()] == ["o"]


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def listen(hear: Callable[[str], None]) -> None:
    """From now on every change of a file, and every look into one or a directory, is told before it is made."""
    busy = False

    def heard(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal busy
        if not busy and event.split(".")[0] in ("open", "os", "fcntl"):
            looks = event == "open" and not arguments[2] & os.O_CREAT
            busy = True
            try:
                hear("look" if looks else event)
            finally:
                busy = False

    sys.addaudithook(heard)


def forked(act: Callable[..., object], *arguments: object) -> int:
    """The status of a process that does something."""
    child = os.fork()
    if not child:
        try:
            act(*arguments)
        except output.OutputRefused:
            os._exit(REFUSED)
        except KeyboardInterrupt:
            os._exit(INTERRUPTED)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def at(step: int, act: Callable[[str], None]) -> Callable[[str], None]:
    """What to do at a step and from it on."""
    numbers = count()
    return lambda event: act(event) if next(numbers) >= step else None


def write(directory: Path, tag: str, hear: Callable[[str], None] | None = None) -> None:
    """Writes a program; with ``hear``, in a process whose calls are listened to from now on."""
    if hear:
        listen(hear)
    output.write(directory, SETS[tag])


def write_on(directory: Path, tags: Iterable[str]) -> None:
    """Writes one program after the other."""
    for tag in tags:
        write(directory, tag)


def steps(folder: Path, before: str | None) -> int:
    """How many steps a replacement has."""
    directory, counted = begun(folder, before), folder / "counted"

    def counting() -> None:
        heard: list[str] = []
        write(directory, "new", heard.append)
        counted.write_text(str(len(heard)))

    assert forked(counting) == 0
    return int(counted.read_text())


def assert_the_next_run_succeeds(directory: Path, tag: str, untouched: Mapping[str, object]) -> None:
    assert forked(write, directory, tag) == 0
    assert_clean(directory, tag, bool(untouched))
    assert not untouched or mine(directory) == untouched


def die(folder: Path) -> None:
    """Dies at every step of a replacement, and at one of the steps of the run after it."""
    chance = random.Random(14)
    for before in ("old", None):
        for step in range(steps(folder, before)):
            directory = begun(folder, before)
            untouched = mine(directory) if before else {}
            for death in (step, chance.randrange(step + 1)):
                assert forked(write, directory, "new", at(death, lambda _: os._exit(DIED))) in (DIED, 0)
                assert_one_program(directory)
                assert not untouched or mine(directory) == untouched
            assert_the_next_run_succeeds(directory, chance.choice(["old", "new"]), untouched)


def refused(event: str) -> None:
    """Nothing may be changed."""
    raise PermissionError(EACCES, os.strerror(EACCES))


def full(event: str) -> None:
    """What needs room on the disk fails."""
    if event in ("open", "os.mkdir", "os.rename"):
        raise OSError(ENOSPC, os.strerror(ENOSPC))


def interrupted() -> Callable[[str], None]:
    """Ctrl-C, once."""
    errors = [KeyboardInterrupt()]

    def interrupt(_: str) -> None:
        if errors:
            raise errors.pop()

    return interrupt


def fail(folder: Path) -> None:
    """From every step on everything is refused, or all that needs room on the disk; every step is interrupted."""
    for step in range(steps(folder, "old")):
        for act in (refused, full, interrupted()):
            directory = begun(folder, "old")
            untouched, before = mine(directory), sorted(directory.rglob("*"))
            status = forked(write, directory, "new", at(step, act))
            assert_one_program(directory)
            assert mine(directory) == untouched
            tag = seen(directory).get("train.py")
            assert status in ((0, INTERRUPTED) if act not in (refused, full) else (0, REFUSED)), (step, act, status)
            assert tag == "new" or status, "nothing failed"
            if act is not refused and tag == "old" and not (directory / f"{output.MANIFEST}.new").exists():
                assert sorted(directory.rglob("*")) == before, "nothing was committed, and nothing is left"
            assert tag or act in (refused, full), "an interrupt comes before or after"
            assert_the_next_run_succeeds(directory, "new", untouched)


def watch(folder: Path) -> None:
    """A rank that starts meanwhile reads train.py, the runtime, its script, and compares the first with the last."""
    for there, fresh in (("old", "new"), ("new", "old")):
        assert forked(_watch, begun(folder, there), there, fresh) == 0


def _watch(directory: Path, there: str, fresh: str) -> None:
    moments = [seen(directory)]
    write(directory, fresh, lambda _: moments.append(seen(directory)))
    moments.append(seen(directory))
    assert {moment.get("train.py") for moment in moments} == {there, None, fresh}
    for first, moment in enumerate(moments):
        for last in range(first, len(moments)):
            program = moment.get("train.py")
            if program and moments[last].get("rank_0.py") == program:
                assert {tag for between in moments[first : last + 1] for tag in between.values()} == {program}


def kill(folder: Path) -> None:
    """Kills writers at random."""
    chance = random.Random(14)
    directory = begun(folder, "old")
    untouched = mine(directory)
    for _ in range(60):
        child = os.fork()
        if not child:
            write_on(directory, cycle(["new", "old"]))
        time.sleep(chance.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert_one_program(directory)
        assert mine(directory) == untouched
    assert_the_next_run_succeeds(directory, "new", untouched)


def race(folder: Path) -> None:
    """Several write the same directory at the same time."""
    for before in ("old", None):
        directory = begun(folder, before)
        untouched = mine(directory) if before else {}
        children = []
        for number in range(4):
            child = os.fork()
            if not child:
                os._exit(forked(write_on, directory, ("old", "new", "new")[number % 2 :] * 10))
            children.append(child)
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
        assert_clean(directory, seen(directory)["train.py"], bool(before))
        assert not untouched or mine(directory) == untouched


def closed(_: Path) -> None:
    """A folder may not be written by the user that the command runs for, who can reach it."""
    with TemporaryDirectory() as place:
        folder = Path(place)
        folder.chmod(0o755)
        for name, words in (("support", "support cannot be written"), (".", os.strerror(EACCES))):
            directory = begun(folder / "inside", "old")
            before = [folder / "inside", directory, *sorted(directory.rglob("*"))]
            for path in before:
                os.chown(path, NOBODY, -1, follow_symlinks=False)
            (directory / name).chmod(0o555)
            untouched = mine(directory)
            assert forked(_told, directory, f"--out {directory}: {words}") == 0
            assert_one_program(directory)
            assert [folder / "inside", directory, *sorted(directory.rglob("*"))] == before
            assert mine(directory) == untouched
            (directory / name).chmod(0o755)


def _told(directory: Path, message: str) -> None:
    os.setuid(NOBODY)
    told = ""
    try:
        write(directory, "new")
    except output.OutputRefused as error:
        told = str(error)
    assert told == message, told


NOBODY = os.getuid() or 65534
"""A user without rights."""

HOW = {each.__name__: each for each in (die, fail, watch, kill, race, closed)}

if __name__ == "__main__":
    HOW[sys.argv[1]](Path(sys.argv[2]))
