"""Forwards alone: the order that is made for them, what is sent and kept, and the text that says so of itself."""

from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import pairwise

import pytest

import chimera_ir
from chimera_ir import library
from chimera_ir.compilation import Compilation
from chimera_ir.errors import TextError
from chimera_ir.flow.net import net_of
from chimera_ir.ir.kinds import FORWARD
from chimera_ir.ir.levels import Program, Schedule
from chimera_ir.ir.ops import AllReduce, Compute, Recv, Send, Step, WaitAllReduce, WaitSend
from chimera_ir.ir.streams import ScheduleStream
from chimera_ir.ir.text.printer import line, show
from chimera_ir.ir.text.reader import parse
from chimera_ir.lower.lower import forwards
from chimera_ir.source import Source
from chimera_runtime.program.rank_facts import Route
from tests.executor import verdicts
from tests.instructions import singly
from tests.lowered import scripts_of
from tests.repeatable import also
from tests.sizes import on_workers
from tests.unit.journal import journals, loaded

SIZES = also([(2, 2), (4, 8)], [(4, 4), (8, 16)])


@cache
def compilation(name: str, workers: int, micro_batches: int) -> Compilation:
    return chimera_ir.compile(name, **on_workers(name, workers, micro_batches))


def trained(made: Compilation) -> Schedule:
    """The schedule, or the first updates of a stream that an evaluation is of."""
    level = made.schedule
    if not isinstance(level, ScheduleStream):
        return level
    return level.view(made.evaluation.header.micro_batches // level.header.per_update)


def inherited(schedule: Schedule) -> Schedule:
    """The forwards in the order of the schedule that trains."""
    lanes = tuple(
        tuple(replace(each, kind=FORWARD) for each in singly(lane) if each.kind.opens) for lane in schedule.lanes
    )
    return Schedule(forwards(schedule).header, lanes)


def makespan(schedule: Schedule) -> int:
    net = net_of(schedule)
    return max(net.ends([len(each.micros) for each in net.operations]))


def computes(program: Program) -> Schedule:
    lanes = (tuple(each for each in lane if isinstance(each, Compute)) for lane in program.lanes)
    return Schedule(program.header, tuple(lanes))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", library.names())
def test_an_evaluation_is_every_forward_once_where_the_scheme_has_it(name: str, size: tuple[int, int]) -> None:
    made = compilation(name, *size)
    there, here = trained(made), made.evaluation
    for mine, theirs in zip(computes(here).lanes, there.lanes, strict=True):
        cells = [(each.micros, each.stage) for each in singly(theirs) if each.kind.opens]
        assert sorted((each.micros, each.stage) for each in mine) == sorted(cells)
        assert all(each.version is None for each in mine)
    assert [pipe.workers for pipe in here.header.pipes] == [pipe.workers for pipe in there.header.pipes]
    assert all(pipe.micros for pipe in here.header.pipes) or len(there.header.pipes) > here.header.micro_batches
    assert not any(isinstance(each, AllReduce | WaitAllReduce | Step) for lane in here.lanes for each in lane)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", library.names())
def test_it_finishes_whatever_happens_when_on_both_transports(name: str, size: tuple[int, int]) -> None:
    assert verdicts(compilation(name, *size).evaluation, seeds=2) == {"finished"}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", library.names())
def test_its_order_is_never_longer_than_that_of_the_schedule_which_trains(name: str, size: tuple[int, int]) -> None:
    made = compilation(name, *size)
    assert makespan(computes(made.evaluation)) <= makespan(inherited(trained(made)))


@pytest.mark.parametrize(
    ("name", "settings", "before", "after"),
    [
        ("chimera", {"D": 8, "N": 16}, 28, 22),
        ("gems", {"D": 8, "N": 16}, 128, 22),
        ("gpipe", {"D": 8, "N": 16}, 16 + 8 - 1, 16 + 8 - 1),
        ("interleaved", {"P": 8, "v": 2, "N": 16}, 2 * 16 + 8 - 1, 2 * 16 + 8 - 1),
    ],
)
def test_its_order_is_shorter_where_backwards_held_forwards_up(
    name: str, settings: dict[str, int], before: int, after: int
) -> None:
    made = chimera_ir.compile(name, **settings)
    assert makespan(inherited(trained(made))) == before
    assert makespan(computes(made.evaluation)) == after


def test_a_stream_is_evaluated_with_a_micro_batch_for_every_worker() -> None:
    for settings, micro_batches in (({"D": 4}, 4), ({"D": 5}, 5)):
        header = chimera_ir.compile("pipedream", **settings).evaluation.header
        assert (header.micro_batches, header.updates, header.period) == (micro_batches, 1, 0)
    header = chimera_ir.compile("pipedream_2bw", D=4, N=6).evaluation.header
    assert header.micro_batches == 6


@pytest.mark.parametrize("name", library.names())
def test_what_is_kept_and_received_does_not_grow_with_the_micro_batches(name: str) -> None:
    """At most three sends of a stage to another under way, at most three slots; all of it waited for at the end.

    Of a graph a few more: values wait for others that go a longer way, and stages of several pipes for each other.
    """
    evaluation = compilation(name, 4, 32).evaluation
    most = 3 + 2 * bool(evaluation.header.feeds)
    for lane in evaluation.lanes:
        under_way: dict[tuple[int, int], int] = {}
        for each in lane:
            if isinstance(each, Send | WaitSend):
                way = each.message.source, each.message.target
                under_way[way] = under_way.get(way, 0) + (1 if isinstance(each, Send) else -1)
                assert under_way[way] <= most
            if isinstance(each, Recv):
                assert each.slot <= most
        assert not any(under_way.values())


def test_a_send_has_the_time_of_an_operation_before_it_is_waited_for() -> None:
    lane = compilation("gpipe", 4, 8).evaluation.lanes[0]
    waits = [place for place, each in enumerate(lane) if isinstance(each, WaitSend)]
    for place in waits[:-1]:
        send = next(p for p, each in enumerate(lane) if isinstance(each, Send) and each.message == lane[place].message)
        assert any(isinstance(each, Compute) for each in lane[send:place])


@pytest.mark.parametrize("name", library.names())
def test_its_text_reads_back_and_is_verified_as_it_stands(name: str) -> None:
    made = compilation(name, 4, 4)
    text = show(made.evaluation)
    assert parse(Source("evaluate.sir", text)) == made.evaluation
    again = chimera_ir.compile(Source("evaluate.sir", text))
    assert again.program == again.evaluation == made.evaluation
    assert again.verified.rules == made.verified_evaluation.rules
    assert again.timeline.makespan == Fraction(makespan(computes(made.evaluation)), made.evaluation.header.parts)


def test_forwards_alone_have_no_report_and_no_scripts() -> None:
    made = compilation("chimera", 2, 2)
    text = made.files["evaluate.sir"]
    assert text == show(made.evaluation)
    for level in ("report", "files"):
        with pytest.raises(TextError, match="CH420"):
            getattr(chimera_ir.compile(Source("evaluate.sir", text)), level)


def test_nothing_is_kept_for_a_backward() -> None:
    verified = compilation("chimera", 4, 8).verified_evaluation
    assert set(verified.live) == {0}
    assert verified.weights == (2, 2, 2, 2)


def test_an_evaluation_of_an_evaluation_is_itself() -> None:
    for name in library.names():
        schedule = computes(compilation(name, 4, 8).evaluation)
        assert forwards(schedule) == schedule


def test_a_later_stage_goes_first_and_then_the_first_micro_batch() -> None:
    for lane in computes(compilation("interleaved", 4, 8).evaluation).lanes[:1]:
        for before, after in pairwise(lane):
            assert after.stage != before.stage or after.micros > before.micros


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", library.names())
def test_a_script_that_evaluates_does_its_lane_and_nothing_else(name: str, size: tuple[int, int]) -> None:
    """Its facts say which links and slots there are, and how much room each slot has."""
    made = compilation(name, *size)
    program, written = made.evaluation, scripts_of(made.verified)
    for journal in journals(written):
        journal.evaluate(loaded(written[f"rank_{journal.worker}.py"]))
        lane, facts = program.lanes[journal.worker], journal.facts.evaluation
        assert journal.lines == [line(each, program.header) for each in lane]
        sent = {Route(each.message.source, each.message.target, each.to) for each in lane if isinstance(each, Send)}
        assert {*facts.outgoing} == sent
        received = [(each.message[1:3], each.slot) for each in lane if isinstance(each, Recv)]
        rooms = {
            (source, stage): len(slots)
            for stage, by_source in facts.slots.items()
            for source, slots in zip(journal.job.feeding[stage], by_source, strict=True)
            if slots
        }
        assert rooms == {way: 1 + max(slot for other, slot in received if other == way) for way, _ in received}
        assert journal.job.evaluated == program.header.whole_micro_batches
