"""Where every rank of a run without a trace stopped, from the zip file of --bundle."""

import json
import os
import struct
import tracemalloc
import zipfile
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from chimera_ir.commands.common import WRONG_COMMAND, WRONG_TEXT
from chimera_ir.commands.compile_command import compile_command
from chimera_ir.ir.kinds import KINDS
from chimera_ir.ir.levels import Program
from chimera_ir.ir.streams import ProgramStream, view_of
from chimera_ir.ir.text.reader import parse
from chimera_ir.source import Source
from chimera_ir.trace.bundles import MOST_FILES
from chimera_ir.trace.match import instructions
from chimera_ir.trace.trace_files import words
from chimera_runtime.blame import Located
from chimera_runtime.errors import PeerLost
from chimera_runtime.lane.lane import Lane, LaneComponents
from chimera_runtime.lane.stream_lane import Driver, StreamLane, UpdateRange
from chimera_runtime.program.compiled_program import CompiledProgram, load
from chimera_runtime.program.job import Place
from chimera_runtime.tools.fail.faults import BugReport
from tests.repeatable import also
from tests.unit.command import Run
from tests.unit.test_page_tables import document_in

TIMEOUT = 8.0
FIRST = 5
"""The update with which a run begins, as if it had been resumed."""

UPDATES = 30

LATE = "rank 0 (worker 0): wait recv m0 s1->s0: rank 1: no answer within 8 s (timeout)"

CALLS = {
    *("isend", "irecv", "wait", "all_reduce", "wait_all_reduce", "step", "stash", "drop", "pair"),
    *(kind.method for kind in KINDS.values()),
}
"""The calls of a lane that are instructions."""


class Stopping:
    """A stage or a link whose calls do nothing, until the instruction of the rank that is number ``last``."""

    def __init__(self, count: list[int], last: int) -> None:
        self._count, self._last = count, last

    def at(self, _version: int) -> "Stopping":
        return self

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*_values: object, **_more: object) -> None:
            if name not in CALLS:
                return
            if self._count[0] == self._last:
                raise PeerLost(LATE, [1])
            self._count[0] += 1

        return call


def run(compiled: CompiledProgram, worker: int, last: int) -> None:
    """Runs the script of a worker, as the runtime does, until instruction ``last`` of the run."""
    facts, script, part = compiled.ranks[worker], compiled.script(worker), Stopping([0], last)
    components = LaneComponents(
        stages=dict.fromkeys(facts.stages, part),
        incoming=dict.fromkeys(facts.incoming, part),
        outgoing=dict.fromkeys(facts.outgoing, part),
        load_input=lambda _update, _micro: None,
        load_target=lambda _update, _micro: None,
    )
    if facts.turns is None:
        lane = Lane(components)
        for update in range(UPDATES):
            lane.begin(FIRST + update)
            script.update(lane)
        return
    stream = StreamLane(components, UpdateRange(compiled.job.passes), facts.initial)
    driver = Driver(script.turn, stream, facts.turns)
    driver.begin(FIRST)
    for _ in range(UPDATES):
        driver.add_update()
    driver.drain()


def program_of(directory: Path) -> Program | ProgramStream:
    text = (directory / "schedule.sir").read_text(encoding="utf-8")
    return parse(Source("schedule.sir", text))


def compiled_into(directory: Path, *words: str) -> Path:
    result = CliRunner().invoke(compile_command, [*words, "--out", str(directory), "--quiet"])
    assert result.exit_code == 0, result.output
    return directory


def bundle_of(directory: Path, file: Path, places: list[Place], lasts: dict[int, int]) -> Path:
    """The bundle of a run in which rank r waited for ever in its instruction ``lasts[r]``; others left nothing."""
    options, compiled = Namespace(bundle=file, backend="gloo", device=None, timeout=TIMEOUT), load(directory)
    reports = {place: BugReport(options, directory, place.rank) for place in places if place.rank in lasts}
    for place, report in reports.items():
        located = Located(place.rank, place.worker, str)
        with suppress(PeerLost), report.noting(place), located:
            run(compiled, place.worker, lasts[place.rank])
            raise AssertionError("it never stopped")
        report.add("train.py: the message of another rank")
    return file


@pytest.mark.parametrize(
    "scheme",
    [
        *("dapple D=3 N=8", "chimera D=4 N=8", "interleaved P=2 N=6", "dualpipe D=4", "zb_v P=2", "seq1f1b D=2 N=4"),
        *("chimera_doubling D=4", "pipedream D=3", "pipedream_2bw D=3 N=6", "amdp D=4"),
    ],
)
def test_every_rank_is_shown_in_the_instruction_that_it_was_in(scheme: str, tmp_path: Path, tracer: Run) -> None:
    """Near the beginning, in the middle and near the end of a run."""
    directory = compiled_into(tmp_path / "compiled", *scheme.split())
    program = program_of(directory)
    header = program.header
    lanes = [[*instructions(program, worker, UPDATES)] for worker in range(header.workers)]
    places = [Place(rank, header.workers, 1, "pipeline") for rank in range(header.workers)]
    for share in also((0.0, 0.5, 1.0), (0.31, 0.77)):
        lasts = {rank: round(share * (len(lane) - 1)) for rank, lane in enumerate(lanes)}
        bundle = bundle_of(directory, tmp_path / f"{share}.zip", places, lasts)
        ended = tracer(bundle, "--json")
        assert ended.status == 0, ended
        for stop, lane in zip(json.loads(ended.out)["ranks"], lanes, strict=True):
            update, instruction = lane[lasts[stop["rank"]]]
            assert (stop["line"], stop["update"]) == (words(instruction, view_of(program).header), FIRST + update)
            assert (stop["seconds"], stop["message"]) == (TIMEOUT, LATE)
        document = document_in((tmp_path / f"{share}.view" / "trace.html").read_text(encoding="utf-8"))
        events = document["schedules"][0]["events"]
        for stop in document["trace"]["hang"]:
            if stop["event"] >= 0:
                verb = events["verbs"][events["verb"][stop["event"]]]
                assert stop["line"].startswith(verb) or verb not in ("wait recv", "wait send")
                assert events["lane_from"][stop["worker"]] <= stop["event"] < events["lane_from"][stop["worker"] + 1]


@pytest.fixture
def two_workers(tmp_path: Path) -> Path:
    return compiled_into(tmp_path / "compiled", "dapple", "D=2", "N=2")


def test_a_rank_that_left_nothing_is_said_with_the_ranks_that_waited_for_it(
    two_workers: Path, tmp_path: Path, tracer: Run
) -> None:
    """In the layout "replica" ranks 0 and 1 are copies of worker 0."""
    places = [Place(rank, 2, 2, "replica") for rank in range(4)]
    ended = tracer(bundle_of(two_workers, tmp_path / "bug.zip", places, {0: 3, 2: 1, 3: 1}))
    assert ended.status == 0
    first, silent, *others = ended.out.splitlines()[1:5]
    assert first.startswith("rank 0 (worker 0): ")
    assert first.endswith(" of update 6, for 8 s")
    assert silent.startswith("rank 1 (worker 0): left no record: ")
    assert silent.endswith("; ranks 0, 2, 3 waited for it")
    assert [line[:20] for line in others] == ["rank 2 (worker 1): w", "rank 3 (worker 1): w"]
    hang = document_in((tmp_path / "bug.view" / "trace.html").read_text(encoding="utf-8"))["trace"]["hang"]
    assert [(stop["line"] == "", stop["event"] >= 0) for stop in hang] == [
        *((False, True), (True, False), (False, True), (False, True))
    ]


def changed(bundle: Path, name: str, text: str | None) -> Path:
    """The bundle with another text in one of its files, or without that file."""
    with zipfile.ZipFile(bundle) as archive:
        texts = {each: archive.read(each) for each in archive.namelist()}
    target = bundle.with_name("changed.zip")
    with zipfile.ZipFile(target, "w") as archive:
        for each, content in texts.items():
            if each != name:
                archive.writestr(each, content)
        if text is not None:
            archive.writestr(name, text)
    return target


@pytest.mark.parametrize("forged", [False, True], ids=["as packed", "with a size of 9 bytes in the header"])
@pytest.mark.parametrize(
    ("name", "size", "count"), [("rank_{0}.json", 2**24, 20), ("rank_{0}.json", 2**18, 200), ("schedule.sir", 2**27, 1)]
)
def test_a_bundle_that_unpacks_to_far_more_than_a_run_writes_takes_no_memory_of_that_size(
    two_workers: Path, tmp_path: Path, tracer: Run, name: str, size: int, count: int, forged: bool
) -> None:
    record = json.dumps(
        {
            "format": "chimera stop",
            "version": 1,
            "copies": 200,
            "layout": "pipeline",
            "update": 0,
            "line": None,
            "counters": {},
            "text": "x",
            "waits_for": [],
            "seconds": 0,
            "rank": 1000,
            "message": "",
        }
    )
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        if name != "schedule.sir":
            archive.write(two_workers / "schedule.sir", "schedule.sir")
        for number in range(count):
            text = record.replace("1000", f"{number}").replace('""', f'"{"a" * (size - len(record))}"')
            archive.writestr(name.format(number), text)
    if forged:
        data = bytearray((tmp_path / "bomb.zip").read_bytes())
        data = data.replace(struct.pack("<I", archive.infolist()[-1].file_size), struct.pack("<I", 9))
        (tmp_path / "bomb.zip").write_bytes(data)
    tracemalloc.start()
    try:
        refused = tracer(tmp_path / "bomb.zip")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    refused.assert_refused(WRONG_TEXT, "name what train.py --bundle wrote")
    assert peak < 2**28


def test_a_bundle_of_very_many_files_or_packed_in_another_way_or_no_regular_file_is_refused(
    two_workers: Path, tmp_path: Path, tracer: Run
) -> None:
    (tmp_path / "many.zip").write_bytes(b"PK\1\2" * (MOST_FILES + 1))
    tracer(tmp_path / "many.zip").assert_refused(WRONG_TEXT, "has more than 131,072 files")
    with zipfile.ZipFile(tmp_path / "packed.zip", "w", zipfile.ZIP_LZMA) as archive:
        archive.write(two_workers / "schedule.sir", "schedule.sir")
    tracer(tmp_path / "packed.zip").assert_refused(WRONG_TEXT, "is no zip file, or a damaged one")
    os.mkfifo(tmp_path / "pipe.zip")
    tracer(tmp_path / "pipe.zip").assert_refused(WRONG_TEXT, "it is no regular file")
    with (tmp_path / "large.zip").open("wb") as file:
        file.truncate(2**40)
    tracer(tmp_path / "large.zip").assert_refused(WRONG_TEXT, "it is larger than 64 MiB")


def test_what_is_no_bundle_is_refused_in_one_line(two_workers: Path, tmp_path: Path, tracer: Run) -> None:
    places = [Place(rank, 2, 1, "pipeline") for rank in range(2)]
    bundle = bundle_of(two_workers, tmp_path / "bug.zip", places, {0: 1})
    with zipfile.ZipFile(bundle) as archive:
        good = json.loads(archive.read("rank_0.json"))
    (tmp_path / "text.zip").write_text("no zip file")
    tracer(tmp_path / "text.zip").assert_refused(WRONG_TEXT, "is no zip file")
    tracer(changed(bundle, "schedule.sir", None)).assert_refused(WRONG_TEXT, "has no schedule.sir")
    tracer(changed(bundle, "schedule.sir", "program x")).assert_refused(WRONG_TEXT, "schedule.sir is not a program")
    tracer(changed(bundle, "rank_0.json", None)).assert_refused(WRONG_TEXT, "has no rank_<r>.json")
    for wrong, said in (
        ({"version": 9}, "another version of the format"),
        ({"rank": 1}, "it is of another rank"),
        ({"line": 10**6}, "another version of chimera compile"),
        ({"text": "stage0.forward(9)"}, "another version of chimera compile"),
        ({"line": "\x1b[2J"}, "garbles what a rank records"),
        ({"counters": {"m": None}}, "garbles what a rank records"),
        ({"copies": 0}, "garbles what a rank records"),
        ({"copies": 10**9}, "has a rank that no run on copies of 2 workers has"),
    ):
        ended = tracer(changed(bundle, "rank_0.json", json.dumps(good | wrong)))
        ended.assert_refused(WRONG_TEXT, said)
        assert "\x1b" not in ended.err
    tracer(changed(bundle, "rank_0.json", "[" * 100_000)).assert_refused(WRONG_TEXT, "garbles")
    tracer(bundle, "--profile", "p", "--cluster", "c").assert_refused(WRONG_COMMAND)


def test_a_rank_outside_of_an_update_is_in_none(two_workers: Path, tmp_path: Path, tracer: Run) -> None:
    """As one that loads data, or saves."""
    report = BugReport(
        Namespace(bundle=tmp_path / "bug.zip", backend="gloo", device=None, timeout=TIMEOUT), two_workers, 0
    )
    with suppress(PeerLost), report.noting(Place(0, 2, 1, "pipeline")):
        raise PeerLost("rank 0: wait for the losses: rank 1: the connection was closed", [1])
    report.add("train.py: lost")
    ended = tracer(tmp_path / "bug.zip")
    assert ended.out.splitlines()[1] == "rank 0 (worker 0): in no update"
