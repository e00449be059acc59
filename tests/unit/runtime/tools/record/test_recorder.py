"""The file of a trace: its directory, its lines, and what there is of it however the run ends."""

import errno
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from chimera_runtime.errors import Misuse
from chimera_runtime.lane.profiler_ranges import ProgramLine
from chimera_runtime.ranks.world import World
from chimera_runtime.start.assemble import RankContext
from chimera_runtime.tools.record import recorder as clocks
from chimera_runtime.tools.record import recorder as to
from chimera_runtime.tools.record.recorder import EventClock, HostClock, Recorder, clock_of, prepare
from tests.unit.runtime.models import given, setting
from tests.unit.runtime.thread_ranks import alone_job, job, together, worlds

PROGRAM = b"a program\n"


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "schedule.sir").write_bytes(PROGRAM)
    return folder


@pytest.fixture
def known(alone: World) -> Iterator[RankContext]:
    with worlds(alone, alone_job()) as (world,):
        yield setting(world, options="--micro-batch-size 3")[0]


@pytest.fixture
def folder(known: RankContext, tmp_path: Path, scripts: Path) -> Path:
    prepare(known.world.control_group, tmp_path / "trace", scripts)
    return tmp_path / "trace"


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# The directory.


def test_a_directory_is_made_with_the_program_in_it(folder: Path) -> None:
    assert (folder / "schedule.sir").read_bytes() == PROGRAM
    assert {path.name for path in folder.iterdir()} == {"schedule.sir", ".chimera-trace"}


def test_an_older_trace_goes_and_what_else_lies_there_stays(known: RankContext, folder: Path, scripts: Path) -> None:
    for name in ("rank_0.jsonl", "rank_7.jsonl.part", "notes.txt"):
        (folder / name).write_text("old")
    prepare(known.world.control_group, folder, scripts)
    assert {path.name for path in folder.iterdir()} == {"schedule.sir", ".chimera-trace", "notes.txt"}


def test_a_directory_of_somebody_else_is_refused_and_left_alone(
    known: RankContext, tmp_path: Path, scripts: Path
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "rank_0.jsonl").write_text("precious")
    with pytest.raises(Misuse, match=r"mine: exists and was not written by --trace; choose another directory"):
        prepare(known.world.control_group, tmp_path / "mine", scripts)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["rank_0.jsonl"]
    (tmp_path / "empty").mkdir()
    prepare(known.world.control_group, tmp_path / "empty", scripts)


def test_a_directory_in_which_another_run_records_is_refused_and_left_alone(
    known: RankContext, tmp_path: Path, scripts: Path, other_job: Callable[..., Any]
) -> None:
    (tmp_path / "trace").mkdir()
    part = tmp_path / "trace" / "rank_0.jsonl.part"
    refusal = r"--trace .*trace: another run records there; give each run a directory of its own"
    with other_job(tmp_path / "trace" / to.MARKER):
        part.write_text("precious")
        with pytest.raises(Misuse, match=refusal):
            prepare(known.world.control_group, tmp_path / "trace", scripts)
    assert part.read_text() == "precious"
    prepare(known.world.control_group, tmp_path / "trace", scripts)
    assert not part.exists()


def test_a_directory_that_cannot_be_made_is_told(known: RankContext, tmp_path: Path, scripts: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Misuse, match=r"--trace .*file.*: (Not a directory|File exists)"):
        prepare(known.world.control_group, tmp_path / "file" / "trace", scripts)


def test_one_rank_of_a_machine_makes_it(
    known: RankContext, tmp_path: Path, scripts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "LOCAL_RANK", "1")
    prepare(known.world.control_group, tmp_path / "trace", scripts)
    assert not (tmp_path / "trace").exists()


# The lines.


def test_the_first_line_is_about_the_run_and_the_last_about_its_end(known: RankContext, folder: Path) -> None:
    recorder = Recorder(known.world, given(folder))
    assert [path.name for path in folder.glob("rank_*")] == ["rank_0.jsonl.part"]
    recorder.close()
    assert [path.name for path in folder.glob("rank_*")] == ["rank_0.jsonl"]
    about, operations, end = lines(folder / "rank_0.jsonl")
    assert about.pop("clock").keys() == {"at", "offset", "uncertainty"}
    assert about == {
        "format": "chimera trace",
        "version": 1,
        "scheme": "two",
        "program": hashlib.sha256(PROGRAM).hexdigest(),
        "rank": 0,
        "worker": 0,
        "copy": 0,
        "copies": 1,
        "layout": "pipeline",
        "backend": "gloo",
        "updates": 5,
        "micro_batch_size": 3,
        "rehearse": None,
        "sharded_optimizer": False,
    }
    assert operations == {"operations": []}
    assert end["ended"] is None
    assert end["clock"]["offset"] == 0


def record(recorder: Recorder, update: int, words: str) -> None:
    recorder.timed(lambda: None, lambda: ProgramLine(words, (), "", update=update))()


def test_a_line_names_the_first_micro_batch_and_belongs_to_its_update(known: RankContext, folder: Path) -> None:
    recorder = Recorder(known.world, given(folder))
    recorder.begin(2)
    backward = ProgramLine("B", (0, 1), "s0")
    lines = [
        ProgramLine("F", (3,), "s1", "v2", also=backward),
        ProgramLine("wait send", (1, 2), "s0->s1", "to w1"),
        ProgramLine("load input", (0,), ""),
        ProgramLine("stash", (), "s0", "v5", update=5),
    ]
    assert [recorder._noted(line) for line in lines] == [
        (3, "F m3 s1 & B m0 s0"),
        (2, "wait send m1 s0->s1"),
        (2, "load input m0"),
        (5, "stash s0 v5"),
    ]
    assert f"{lines[0]}" == "F m3 s1 v2 & B m0,m1 s0"
    recorder.close()


def test_much_is_written_before_the_end_and_little_is_not(
    known: RankContext, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostClock, "most", 3)
    recorder = Recorder(known.world, given(folder))
    part = folder / "rank_0.jsonl.part"
    for number in range(4):
        record(recorder, number, "step s0")
        recorder.spill()
        assert len(lines(part)) == (2 if number >= 2 else 1)
    recorder.close()
    counts = [len(line["operations"]) for line in lines(folder / "rank_0.jsonl") if "operations" in line]
    assert counts == [3, 1]


# However it ends.


def test_a_run_that_ends_early_keeps_what_there_is_and_why(known: RankContext, folder: Path) -> None:
    recorder, before = Recorder(known.world, given(folder)), time.monotonic_ns()
    record(recorder, 0, "step s1")
    recorder.abandon("train.py: rank 1 has died")
    recorder.abandon("a second time")
    _, operations, end = lines(folder / "rank_0.jsonl")
    assert [words for _, words, *_ in operations["operations"]] == ["step s1"]
    assert before <= end.pop("at") <= time.monotonic_ns()
    assert end == {"ended": "train.py: rank 1 has died", "clock": None}


class Full:
    """A file on a disk that is full."""

    def write(self, _: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Writes nothing."""


def test_a_disk_that_is_full_is_one_message_and_nothing_where_the_run_ends_anyway(
    known: RankContext, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostClock, "most", 0)
    recorder = Recorder(known.world, given(folder))
    recorder._file.close()
    recorder._file = Full()  # type: ignore[assignment]
    with pytest.raises(Misuse, match=r"--trace .*trace: No space left on device"):
        recorder.spill()
    with pytest.raises(Misuse, match="No space left on device"):
        recorder.close()
    recorder.abandon("nothing more can be done")


def test_a_directory_that_went_away_is_one_message(known: RankContext, folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    with pytest.raises(Misuse, match=r"--trace .*trace: No such file or directory"):
        Recorder(known.world, given(folder))


def test_on_a_gpu_times_are_those_of_its_events(
    known: RankContext, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written as nanoseconds of the host's clock, with others in every piece that is written."""

    class Event:
        """Each is a millisecond after the one before."""

        made: ClassVar[list["Event"]] = []

        def __init__(self) -> None:
            self.made.append(self)

        def synchronize(self) -> None:
            assert self is self.made[-1], "the last"

        def elapsed_time(self, end: "Event") -> float:
            return float(self.made.index(end) - self.made.index(self))

    monkeypatch.setattr(EventClock, "most", 2)
    monkeypatch.setattr(to, "clock_of", lambda _device: EventClock(Event, lambda: 1000))
    recorder = Recorder(known.world, given(folder))
    for micro in range(3):
        record(recorder, 0, f"F m{micro} s1")
        recorder.spill()
    recorder.close()
    _, *pieces, _ = lines(folder / "rank_0.jsonl")
    times = [[line[2:] for line in piece["operations"]] for piece in pieces]
    later = [1000 + 10**6 * event for event in range(7)]
    assert times == [[later[1:3], later[3:5]], [later[5:7]]]


# Times by events: of a stream that is behind its host, in the nanoseconds of the host's clock.

START = 10**12
"""Time of the host's clock when the GPU comes to its first event, in nanoseconds."""


class Event:
    """Happens at a millisecond of the GPU's own clock, once the stream comes to it."""

    at: float | None = None

    def __init__(self, stream: "Stream") -> None:
        self.stream = stream

    def synchronize(self) -> None:
        self.stream.synchronise(self)

    def elapsed_time(self, end: "Event") -> float:
        assert self.at is not None
        assert end.at is not None, "it has not happened"
        return end.at - self.at


class Stream:
    """A GPU of which the host says what it does, and that does it when the host waits."""

    def __init__(self) -> None:
        self.waited = 0
        self._time = 7.0
        self._waiting: list[Any] = []

    def compute(self, milliseconds: float) -> None:
        self._waiting.append(milliseconds)

    def mark(self) -> Event:
        self._waiting.append(Event(self))
        return self._waiting[-1]

    def synchronise(self, event: Event) -> None:
        self.waited += 1
        while event.at is None:
            work = self._waiting.pop(0)
            if isinstance(work, Event):
                work.at = self._time
            else:
                self._time += work


def timed(clock: EventClock, stream: Stream, *durations: float) -> list[int]:
    """The times before and after each of some operations."""
    times = []
    for duration in durations:
        times.append(clock.now())
        stream.compute(duration)
        times.append(clock.now())
    return times


def test_times_are_when_the_gpu_began_and_ended_and_the_host_waits_only_to_read_them() -> None:
    stream = Stream()
    clock = EventClock(stream.mark, lambda: START)
    times = timed(clock, stream, 2.0, 0.5)
    assert stream.waited == 1, "at the start"
    assert clock.read(times) == [START, START + 2_000_000, START + 2_000_000, START + 2_500_000]
    assert stream.waited == 2


def test_after_they_were_read_time_goes_on() -> None:
    stream = Stream()
    clock = EventClock(stream.mark, lambda: START)
    assert clock.read(timed(clock, stream, 3.0))[-1] == START + 3_000_000
    stream.compute(4.0)
    assert clock.read(timed(clock, stream, 1.0)) == [START + 7_000_000, START + 8_000_000]
    assert clock._events == [], "and no event is kept"


def test_an_operation_that_begins_before_others_are_read_has_a_time() -> None:
    stream = Stream()
    clock = EventClock(stream.mark, lambda: START)
    begun = clock.now()
    clock.read(timed(clock, stream, 1.0))
    assert clock.read([begun, clock.now()]) == [START + 1_000_000] * 2
    assert clock.read([begun]) == [START + 1_000_000], "also where there is no further event"


def test_on_the_cpu_times_are_the_hosts() -> None:
    clock = clock_of(torch.device("cpu"))
    assert type(clock) is HostClock
    times = [clock.now(), clock.now()]
    assert clock.read(times) == sorted(times)


def test_on_a_gpu_they_are_of_events_of_torch_in_its_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Cuda:
        def __init__(self, **options: bool) -> None:
            made.append(options)

        def record(self, stream: Any) -> None:
            made.append(stream)

        def synchronize(self) -> None:
            made.append("synchronised")

        def elapsed_time(self, _end: Any) -> float:
            return 1.5

    monkeypatch.setattr(torch.cuda, "Event", Cuda)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the current one of {device}")
    clock = clock_of(torch.device("cuda", 1))
    assert isinstance(clock, EventClock)
    assert made == [{"enable_timing": True}, "the current one of cuda:1", "synchronised"]
    assert clock.read([clock.now()]) == [clock._at_base]


# Offsets of clocks, however long the questions and answers take.


@hypothesis.given(
    offset=st.integers(-(10**12), 10**12),
    delays=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), min_size=16, max_size=16),
)
def test_the_offset_of_a_clock_is_within_its_uncertainty(offset: int, delays: list[tuple[int, int]]) -> None:
    """However long question and answer take, and however differently."""
    now, left = 0, iter(delays)

    def ask() -> int:
        nonlocal now
        there, back = next(left)
        theirs = now + there + offset
        now += there + back
        return theirs

    found = clocks.estimate(ask, lambda: now)
    assert abs(found.offset - offset) <= found.uncertainty
    assert found.uncertainty <= min(map(sum, delays)) / 2 + 1


def test_the_round_that_counts_is_the_shortest() -> None:
    times = iter([0, 100, 1000, 1010, 2000, 2500])
    answers = iter([7, 1004, 9])
    assert clocks.estimate(lambda: next(answers), lambda: next(times), rounds=3) == clocks.OffsetEstimate(1005, -1, 5)


def test_rank_0_is_its_own_clock_and_answers_all_others(alone: World) -> None:
    """Threads of one process read one clock: the offset of each is within its uncertainty of 0."""
    with worlds(alone, job(workers=3, stages=3, placement=((0, 1, 2),))) as ranks:
        first, *others = together([lambda world=world: clocks.compare(world.control_group) for world in ranks])  # type: ignore[misc]
    assert (first.offset, first.uncertainty) == (0, 0)
    for offset in others:
        assert abs(offset.offset) <= offset.uncertainty
        assert offset.uncertainty > 0
