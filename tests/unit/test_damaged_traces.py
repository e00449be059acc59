"""A trace that is damaged or not ours: read, or refused in one message, with little work and nothing hidden in it."""

import json
import math
import os
import random
import resource
import shutil
import sys
import unicodedata
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from chimera_ir.commands.common import WRONG_TEXT
from chimera_ir.commands.compile_command import compile_command
from chimera_ir.ir.ops import Compute, Pair
from chimera_ir.ir.text.reader import parse
from chimera_ir.source import Source
from chimera_ir.trace.forecast import play
from chimera_ir.trace.trace_files import recorded
from tests.repeatable import tries
from tests.unit import traced
from tests.unit.command import Run, contents
from tests.unit.test_page_tables import document_in

Files = list[list[dict[str, Any]]]
"""The lines of all ranks' files."""

EXTREMES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 7, 10**9, 2**63 - 1, -(2**63), 2**63, 10**18, 10**400, -(10**400)),
    *(0.5, -0.0, 1e-320, 1e308, math.nan, math.inf, -math.inf),
    *("", "x", "gloo", "\x1b[2J\x07", "\x9b31m", "\ud800", "\u202e", "\0", "<script>&", "a\nb", "\ufffe", "é" * 10_000),
    *([], {}, [[[]]], [0, "F m0 s0", 0, 1], {"F": 0.001, "B": 0.002}, {"at": 0, "offset": 0, "uncertainty": 0}),
)
"""What is put in the place of every value."""

MOST_CALLS = 400_000
"""Calls of functions in reading a trace; an undamaged one takes a third of it."""


def schedule(*arguments: str) -> str:
    result = CliRunner().invoke(compile_command, [*arguments, "--emit", "program"])
    assert result.exit_code == 0, result.output
    return result.output


def played(program: str, updates: int) -> Files:
    """What ranks would record that never wait for a message."""
    level = parse(Source("p.sir", program))
    first, *_, last = traced.lines(0)
    lanes = play(level, updates, lambda each: 1000 if isinstance(each, Compute | Pair) else 10)
    files = []
    for rank, lane in enumerate(lanes):
        rows = [
            [span.update, text, span.start if first else span.end, span.end]
            for span in lane
            for first, text in zip((True, *[False] * 9), recorded(span.operation), strict=False)
        ]
        facts = {"rank": rank, "worker": rank, "scheme": "played", "updates": updates, "rehearse": None}
        files.append([first | facts, {"operations": rows}, last])
    return files


def interrupted(files: Files) -> Files:
    """Of every rank the first part, up to what is said of a run that ends early."""
    last = {"ended": "train.py: interrupted\n", "clock": None}
    return [[first, {"operations": rows["operations"][:-2]}, last] for first, rows, _ in files]


IDLE = traced.program().replace("workers 2", "workers 3") + "\nworker 2:\n"
"""A program with a worker that has nothing to do."""

TRACES: dict[str, tuple[str, Files]] = {
    "rehearsed": (traced.program(), [traced.lines(rank) for rank in range(2)]),
    **{
        name: (program, played(program, updates))
        for name, program, updates in (
            ("stream", schedule("pipedream_2bw", "--set", "D=2", "--set", "N=2"), 5),
            ("two at once", schedule("chimera_doubling", "--set", "D=2"), 3),
        )
    },
    "interrupted": (IDLE, interrupted(played(IDLE, 3))),
}


def copied(files: Files) -> Files:
    return [[{**line} for line in lines] for lines in json.loads(json.dumps(files))]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where in a file values are; of many in a list, the first two and the last."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    if isinstance(value, list):
        for index in sorted({0, 1, len(value) - 1} & {*range(len(value))}):
            yield from places(value[index], (*path, index))


def put(files: Files, ranks: range, path: tuple[Any, ...], value: Any) -> None:
    for rank in ranks:
        at: Any = files[rank]
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = value


@pytest.fixture
def little() -> Iterator[Callable[[], None]]:
    """Bounds the work and the memory of what follows its call."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    statm = Path("/proc/self/statm")
    used = int(statm.read_text().split()[0]) * resource.getpagesize() if statm.exists() else 2**40
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, hard))
    calls = count()

    def counted(_: FrameType, event: str, __: object) -> None:
        if event == "call" and next(calls) > MOST_CALLS:
            sys.setprofile(None)
            raise AssertionError("too much work")

    def begin() -> None:
        nonlocal calls
        calls = count()
        sys.setprofile(counted)

    yield begin
    sys.setprofile(None)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def assert_read_or_refused(directory: Path, tracer: Run, begin: Callable[[], None]) -> int:
    """Status 0 with files that others can read, or one message and nothing written."""
    begin()
    ended = tracer(directory, "--out", directory / "view")
    sys.setprofile(None)
    assert ended.status in (0, WRONG_TEXT), ended.err
    if ended.status:
        ended.assert_refused(WRONG_TEXT)
        assert ended.err.startswith("Error: ")
        assert len(ended.err) < 20_000 + 2 * len(str(directory))
        assert not (directory / "view").exists()
    else:
        assert ended.err == ""
        written = {name: data.decode() for name, data in contents(directory / "view").items()}
        if "compare.svg" in written:
            ElementTree.fromstring(written["compare.svg"])
            json.loads(written["trace.json"], parse_constant=pytest.fail)
        json.dumps(document_in(written["trace.html"]), allow_nan=False)
        assert_plain("".join(written.values()))
    assert_plain(ended.out + ended.err)
    return ended.status


def assert_plain(text: str) -> None:
    acted_upon = {character for character in set(text) if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Cn")}
    assert acted_upon <= {"\n"}, acted_upon


@pytest.mark.parametrize("name", TRACES)
def test_a_trace_with_any_value_in_the_place_of_any_other_is_read_or_refused(
    name: str, tmp_path: Path, tracer: Run, little: Callable[[], None]
) -> None:
    program, files = TRACES[name]
    chance, numbers, statuses = random.Random(14), count(), set()
    assert assert_read_or_refused(traced.write_of(tmp_path / "whole", program, copied(files)), tracer, little) == 0
    found = [path for path in places(files[0]) if path]
    for path in found:
        facts = path[0] == 0 and path[1:] not in [("rank",), ("worker",), ("copy",), ("clock",)]
        for value in chance.sample(EXTREMES, min(tries(1 if len(path) > 2 else 3), len(EXTREMES))):
            damaged = copied(files)
            put(damaged, range(len(files)) if facts else range(1), path, value)
            if any(not isinstance(lines[0], dict) for lines in damaged):
                continue
            statuses.add(
                assert_read_or_refused(traced.write_of(tmp_path / str(next(numbers)), program, damaged), tracer, little)
            )
    assert statuses == {0, WRONG_TEXT}


def _cut(text: str, chance: random.Random) -> str:
    return text[: chance.randrange(len(text))]


def _without_a_line(text: str, chance: random.Random) -> str:
    lines = text.splitlines(keepends=True)
    del lines[chance.randrange(len(lines))]
    return "".join(lines)


def _a_line_twice(text: str, chance: random.Random) -> str:
    lines = text.splitlines(keepends=True)
    lines.insert(chance.randrange(len(lines)), chance.choice(lines))
    return "".join(lines)


def _without_a_key(text: str, chance: random.Random) -> str:
    lines = [json.loads(line) for line in text.splitlines()]
    line = chance.choice(lines)
    del line[chance.choice([*line])]
    return traced.text(lines)


def _two_changed_places(text: str, chance: random.Random) -> str:
    lines = [json.loads(line) for line in text.splitlines()]
    rows = chance.choice([line["operations"] for line in lines if "operations" in line])
    one, other, column = chance.randrange(len(rows)), chance.randrange(len(rows)), chance.randrange(4)
    rows[one][column], rows[other][column] = rows[other][column], rows[one][column]
    return traced.text(lines)


def _a_byte(text: str, chance: random.Random) -> str:
    place = chance.randrange(len(text))
    return text[:place] + chr(chance.randrange(256)) + text[place + 1 :]


def _a_number(text: str, chance: random.Random) -> str:
    found = [place for place, letter in enumerate(text) if letter.isdigit()]
    place = chance.choice(found)
    return text[:place] + chance.choice(["9" * 5000, "1e999", "-", "NaN", "Infinity"]) + text[place + 1 :]


def _deep(text: str, chance: random.Random) -> str:
    place = chance.choice([place for place, letter in enumerate(text) if letter in "[:"]) + 1
    depth = chance.choice([900, 100_000])
    return text[:place] + "[" * depth + "]" * depth + chance.choice([",", ""]) + text[place:]


TEXTS = (_cut, _without_a_line, _a_line_twice, _without_a_key, _two_changed_places, _a_byte, _a_number, _deep)


@pytest.mark.parametrize("damage", TEXTS, ids=lambda damage: damage.__name__)
def test_a_trace_whose_text_is_damaged_is_read_or_refused(
    damage: Callable[[str, random.Random], str], tmp_path: Path, tracer: Run, little: Callable[[], None]
) -> None:
    chance = random.Random(14)
    for number in range(tries(6)):
        program, files = chance.choice([*TRACES.values()])
        directory = traced.write_of(tmp_path / str(number), program, copied(files))
        file = chance.choice([*directory.iterdir()])
        if damage in (_without_a_key, _two_changed_places):
            file = directory / "rank_1.jsonl"
        file.write_text(damage(file.read_text(), chance))
        assert_read_or_refused(directory, tracer, little)


# What is said of a trace that is cut off, mixed with another, or says what cannot be.

Spoil = Callable[[Path], object]


def edited(rank: int, edit: Callable[[list[Any]], object] = lambda _: None, **facts: object) -> Spoil:
    """Other lines in the file of a rank, or other facts of the run."""

    def spoil(directory: Path) -> None:
        lines = traced.lines(rank, **facts)
        edit(lines)
        (directory / f"rank_{rank}.jsonl").write_text(traced.text(lines))

    return spoil


def of_all(**facts: object) -> Spoil:
    """A trace of which all ranks say so."""
    return lambda directory: [edited(rank, lambda lines: lines[0].update(facts))(directory) for rank in range(2)]


def in_place(old: str, new: str) -> Spoil:
    """A trace in which the file of rank 1 says something else, everywhere."""

    def spoil(directory: Path) -> None:
        path = directory / "rank_1.jsonl"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    return spoil


def without_sends(directory: Path) -> None:
    """A trace of a program that is not verified."""
    shutil.rmtree(directory)
    lines = traced.program().splitlines(keepends=True)
    text = "".join(line for line in lines if not line.lstrip().startswith("send"))
    traced.write_of(directory, text, [traced.lines(rank) for rank in range(2)])


MISTAKES: list[tuple[Spoil, tuple[str, ...]]] = [
    (
        edited(1, lambda lines: lines[0].update(clock={"at": 0, "offset": math.nan, "uncertainty": 0})),
        ("rank_1.jsonl: garbles what a trace has", "nan is not a whole number"),
    ),
    (edited(1, copy=7), ("rank_1.jsonl: says that it is of rank 1, worker 1 of copy 7",)),
    (without_sends, ("schedule.sir: is not a program that chimera compile wrote (CH",)),
    (of_all(copies=10**9), ("the files of ranks 2, 3, 4, 5, 6, 7, 8, 9 .. of 2,000,000,000 ranks are missing",)),
    (of_all(copies=0), ("garbles what a trace has: 0 is not a whole number from 1 to",)),
    (of_all(updates=10**9), ("is of 1,000,000,000 updates, and no rank recorded as many",)),
    (of_all(layout="spiral"), ("'spiral' is not pipeline or replica",)),
    (of_all(scheme=["dapple"]), ("['dapple'] is not a text",)),
    (of_all(rehearse={"F": math.nan, "B": 1.0}), ("nan is not a number of seconds",)),
    (of_all(rehearse={"F": 1.0, "B": math.inf}), ("inf is not a number of seconds",)),
    (of_all(rehearse={"F": 10**400, "B": 1}), ("is not a number of seconds",)),
    (of_all(rehearse={"F": 1}), ("lacks 'B', which a trace has",)),
    (in_place('"offset": 5000000000', '"offset": 1' + "0" * 400), ("is not a whole number from -9223372036854775807",)),
    (in_place('"at": 0', '"at": [' + "[" * 10**5), ("rank_1.jsonl:1: is cut off or damaged",)),
    (in_place("[2, ", "[7, "), ("rank 1, update 3: recorded 'recv m0 s0->s1' of update 8",)),
    (in_place('{"ended": null', '{"ended": 5'), ("5 is not a text",)),
    (in_place("load target m0", "load \\u001b[2J"), ("recorded 'load \\x1b[2J' of update 1",)),
    (
        in_place('{"operations": [[0,', '{"operations": [[0, "recv m0 s0->s1", 0, 1], [0,'),
        ("recorded 'recv m0 s0->s1'",),
    ),
    (
        lambda directory: shutil.copy(directory / "rank_1.jsonl", directory / "rank_2.jsonl"),
        ("rank_2.jsonl: says that it is of rank 1",),
    ),
    (
        lambda directory: os.truncate(file := directory / "rank_1.jsonl", file.stat().st_size - 200),
        ("rank_1.jsonl:", "cut off"),
    ),
    (edited(1, lambda lines: lines.pop()), ("rank_1.jsonl: is cut off: its last line is missing",)),
    (
        lambda directory: (directory / "rank_1.jsonl").rename(directory / "rank_1.jsonl.part"),
        ("the file of rank 1 of 2 ranks is missing", ".part belongs to a rank that still runs or was killed"),
    ),
    (
        lambda directory: (directory / "schedule.sir").write_text(traced.program().replace("D=2", "D=3")),
        ("schedule.sir: is not the program that was traced",),
    ),
    (edited(1, micro_batch_size=2), ("rank_1.jsonl: is of another run than rank_0.jsonl",)),
    (
        in_place("B m0 s1", "B m1 s1"),
        ("rank 1, update 1: recorded 'B m1 s1' of update 1, where the program has 'B m0 s1'",),
    ),
    (edited(0, lambda lines: lines[2]["operations"].pop()), ("rank 0: 'step s0' and what follows it are missing",)),
    (
        edited(0, lambda lines: lines[1]["operations"][0].__setitem__(3, 0)),
        ("rank_0.jsonl: garbles what a trace has", "is not an operation"),
    ),
    (edited(0, version=2), ("is of version 2 of the format; this command reads 1",)),
    (lambda directory: (directory / "rank_0.jsonl").write_text(""), ("rank_0.jsonl: does not begin like a trace",)),
    (
        lambda directory: (directory / "schedule.sir").unlink(),
        ("has no schedule.sir; name the directory that train.py --trace wrote",),
    ),
]


@pytest.mark.parametrize(("spoil", "words"), MISTAKES, ids=[words[0][:50] for _, words in MISTAKES])
def test_a_trace_that_cannot_be_read_is_one_clear_message(
    spoil: Spoil, words: tuple[str, ...], tmp_path: Path, tracer: Run
) -> None:
    directory = traced.write(tmp_path / "t")
    spoil(directory)
    tracer(directory).assert_refused(WRONG_TEXT, *words)
    assert not (directory / "view").exists()
