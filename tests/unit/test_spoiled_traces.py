"""What is said of a trace that is cut off, mixed with another, or says what cannot be."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from chimera_ir.commands.common import WRONG_TEXT
from tests.unit import traced


def _cut(directory: Path) -> None:
    path = directory / "rank_1.jsonl"
    path.write_text(path.read_text()[:-200])


def _no_end(directory: Path) -> None:
    (directory / "rank_1.jsonl").write_text(traced.text(traced.lines(1)[:-1]))


def _missing(directory: Path) -> None:
    (directory / "rank_1.jsonl").rename(directory / "rank_1.jsonl.part")


def _other_program(directory: Path) -> None:
    (directory / "schedule.sir").write_text(traced.program().replace("parameters D=2", "parameters D=3"))


def _other_run(directory: Path) -> None:
    (directory / "rank_1.jsonl").write_text(traced.text(traced.lines(1, micro_batch_size=2)))


def _other_order(directory: Path) -> None:
    path = directory / "rank_1.jsonl"
    path.write_text(path.read_text().replace("B m0 s1", "B m1 s1"))


def _short(directory: Path) -> None:
    lines = traced.lines(0)
    lines[2]["operations"].pop()
    (directory / "rank_0.jsonl").write_text(traced.text(lines))


def _backwards(directory: Path) -> None:
    lines = traced.lines(0)
    lines[1]["operations"][0][3] = 0
    (directory / "rank_0.jsonl").write_text(traced.text(lines))


def _of_tomorrow(directory: Path) -> None:
    (directory / "rank_0.jsonl").write_text(traced.text(traced.lines(0, version=2)))


def _empty(directory: Path) -> None:
    (directory / "rank_0.jsonl").write_text("")


def _no_program(directory: Path) -> None:
    (directory / "schedule.sir").unlink()


def _impossible_clock(directory: Path) -> None:
    lines = traced.lines(1)
    lines[0]["clock"] = {"at": 0, "offset": float("nan"), "uncertainty": 0}
    (directory / "rank_1.jsonl").write_text(traced.text(lines))


def _not_verified(directory: Path) -> None:
    shutil.rmtree(directory)
    lines = traced.program().splitlines(keepends=True)
    text = "".join(line for line in lines if not line.lstrip().startswith("send"))
    traced.write_of(directory, text, [traced.lines(rank) for rank in range(2)])


def _with(**facts: object) -> Callable[[Path], None]:
    """A trace of which all ranks say so."""

    def spoil(directory: Path) -> None:
        for rank in range(2):
            first, *rest = traced.lines(rank)
            (directory / f"rank_{rank}.jsonl").write_text(traced.text([first | facts, *rest]))

    return spoil


def _in_place(old: str, new: str) -> Callable[[Path], None]:
    """A trace in which the file of rank 1 says something else, everywhere."""

    def spoil(directory: Path) -> None:
        path = directory / "rank_1.jsonl"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    return spoil


def _other_copy(directory: Path) -> None:
    (directory / "rank_1.jsonl").write_text(traced.text(traced.lines(1, copy=7)))


def _surplus(directory: Path) -> None:
    (directory / "rank_2.jsonl").write_text((directory / "rank_1.jsonl").read_text())


MISTAKES = {
    _impossible_clock: ("rank_1.jsonl: garbles what a trace has", "nan is not a whole number"),
    _other_copy: ("rank_1.jsonl: says that it is of rank 1, worker 1 of copy 7",),
    _not_verified: ("schedule.sir: is not a program that chimera compile wrote (CH",),
    _with(copies=10**9): ("the files of ranks 2, 3, 4, 5, 6, 7, 8, 9 .. of 2,000,000,000 ranks are missing",),
    _with(copies=0): ("garbles what a trace has: 0 is not a whole number from 1 to",),
    _with(updates=10**9): ("is of 1,000,000,000 updates, and no rank recorded as many",),
    _with(layout="spiral"): ("'spiral' is not pipeline or replica",),
    _with(scheme=["dapple"]): ("['dapple'] is not a text",),
    _with(rehearse={"F": math.nan, "B": 1.0}): ("nan is not a number of seconds",),
    _with(rehearse={"F": 1.0, "B": math.inf}): ("inf is not a number of seconds",),
    _with(rehearse={"F": 10**400, "B": 1}): ("is not a number of seconds",),
    _with(rehearse={"F": 1}): ("lacks 'B', which a trace has",),
    _in_place('"offset": 5000000000', '"offset": 1' + "0" * 400): ("is not a whole number from -9223372036854775807",),
    _in_place('"at": 0', '"at": [' + "[" * 10**5): ("rank_1.jsonl:1: is cut off or damaged",),
    _in_place("[2, ", "[7, "): ("rank 1, update 3: recorded 'recv m0 s0->s1' of update 8",),
    _in_place('{"ended": null', '{"ended": 5'): ("5 is not a text",),
    _in_place("load target m0", "load \\u001b[2J"): ("recorded 'load \\x1b[2J' of update 1",),
    _in_place('{"operations": [[0,', '{"operations": [[0, "recv m0 s0->s1", 0, 1], [0,'): (
        "recorded 'recv m0 s0->s1'",
    ),
    _surplus: ("rank_2.jsonl: says that it is of rank 1",),
    _cut: ("rank_1.jsonl:", "cut off"),
    _no_end: ("rank_1.jsonl: is cut off: its last line is missing",),
    _missing: ("the file of rank 1 of 2 ranks is missing", ".part belongs to a rank that still runs or was killed"),
    _other_program: ("schedule.sir: is not the program that was traced",),
    _other_run: ("rank_1.jsonl: is of another run than rank_0.jsonl",),
    _other_order: ("rank 1, update 1: recorded 'B m1 s1' of update 1, where the program has 'B m0 s1'",),
    _short: ("rank 0: 'step s0' and what follows it are missing",),
    _backwards: ("rank_0.jsonl: garbles what a trace has", "is not an operation"),
    _of_tomorrow: ("is of version 2 of the format; this command reads 1",),
    _empty: ("rank_0.jsonl: does not begin like a trace",),
    _no_program: ("has no schedule.sir; name the directory that train.py --trace wrote",),
}


@pytest.mark.parametrize("spoil", MISTAKES, ids=lambda spoil: spoil.__name__)
def test_a_trace_that_cannot_be_read_is_one_clear_message(spoil, tmp_path: Path, tracer) -> None:  # type: ignore[no-untyped-def]
    directory = traced.write(tmp_path / "t")
    spoil(directory)
    tracer(directory).assert_refused(WRONG_TEXT, *MISTAKES[spoil])
    assert not (directory / "view").exists()
