"""The scripts of a page play a schedule again: their numbers are the compiler's, whatever the sliders say."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import pairwise
from math import inf, log2
from pathlib import Path
from random import Random
from typing import Any

import pytest

import chimera_ir
from chimera_ir import library
from chimera_ir.compilation import Compilation
from chimera_ir.cost.durations import Costs
from chimera_ir.cost.simulate import earliest, structure_of
from chimera_ir.flow.net import reads_of
from chimera_ir.ir.kinds import COSTED, KINDS, PAIR, RECOMPUTATION
from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import Compute
from chimera_ir.page.contents import ShownSchedule, _Levels, packed
from chimera_ir.predict.events import Role
from chimera_ir.predict.replay import Cause, Replay, idle, replay
from chimera_ir.predict.setting import Setting
from chimera_ir.profile.cluster import FREE, Cluster, Link
from chimera_ir.profile.costs import RECOMPUTING, StageCosts, Timing
from chimera_runtime.program.kept_bytes import MicroBatchBytes
from tests.documents import unpacked
from tests.node import calls, needs_node
from tests.sizes import on_workers
from tests.test_architecture import ROOT

pytestmark = needs_node

PLAYS = Path(__file__).with_name("plays.mjs")
MOVING = "docs/examples/offloaded.chim"
SCHEMES = sorted({*library.names()} - {"breadth_first"})[:20]
PLAYED = [*SCHEMES, MOVING]
"""With a scheme that moves memory, whose moves are no operations of the lanes: for times, paths, memory, idle time."""
SETTINGS = 200
WITH_MESSAGES = 10
"""How many of the settings have messages and sums that take time; a replay says what they must give."""

SENT = ("message", "sum")


@dataclass(frozen=True)
class Page:
    """A compilation, and the tables of its page."""

    compilation: Compilation
    tables: Mapping[str, Any]

    @property
    def sliders(self) -> list[str]:
        return [slider["name"] for slider in self.tables["sliders"]]

    @property
    def header(self) -> Header:
        return self.compilation.verified.program.header


@cache
def page(scheme: str) -> Page:
    sizes = {"D": 4, "N": 4} if scheme == MOVING else on_workers(scheme, 4, 4)
    compilation = chimera_ir.compile(ROOT / scheme if scheme == MOVING else scheme, **sizes)
    return Page(compilation, tables_of(compilation))


def tables_of(levels: _Levels) -> Mapping[str, Any]:
    """The tables of the schedule, as a page reads them."""
    return unpacked(packed(ShownSchedule.of(levels).tables()))


def settings(sliders: Sequence[str], seed: str) -> list[list[Fraction]]:
    """Random values: half of them small integers, with which many paths are equally long."""
    random = Random(seed)

    def value(name: str, number: int) -> Fraction:
        if name in SENT:
            return Fraction(random.randint(0, 12), 4) if number % (SETTINGS // WITH_MESSAGES) == 0 else Fraction(0)
        return Fraction(random.randint(1, 3) if number % 2 else random.randint(1, 400), 1 if number % 2 else 100)

    return [[value(name, number) for name in sliders] for number in range(SETTINGS)]


def case(page: Page, values: Sequence[Sequence[Fraction]], *asked: str) -> dict[str, object]:
    return {"schedule": page.tables, "settings": [[*map(float, row)] for row in values], "asked": asked}


@dataclass(frozen=True)
class OwnTimes(Setting):
    """A setting in which an offload and a reload take a time of their own each, as sliders say."""

    def compute(self, stage: int, operation: Compute, header: Header) -> tuple[tuple[float, Fraction], ...]:
        if not operation.kind.moves:
            return super().compute(stage, operation, header)
        seconds = self.timing(stage).times[operation.kind.letter]
        return ((seconds, Fraction(len(operation.micros), header.parts)),)


def replayed(page: Page, values: Mapping[str, float]) -> Replay:
    """The replay of a program in which a message takes ``values["message"]`` and a sum ``values["sum"]``."""
    times = {letter: values.get(letter, float(kind.cost)) for letter, kind in KINDS.items()}
    times[RECOMPUTING] = times["B"] + times[RECOMPUTATION.letter]
    stage = StageCosts(0, 0, 0, {1: Timing(times, MicroBatchBytes(0, 0), 1, 1)})
    members = {len(page.header.members(group)) for holds in page.header.groups_of for group in holds} - {1}
    (ranks,) = members or {2}
    sums = Link(values.get("sum", 0.0) / (2 * log2(ranks)), 0.0)
    message = Link(0.0, values["message"])
    cluster = Cluster("sliders", page.header.workers, page.header.workers, 0, 0, FREE, message, sums)
    return replay(page.compilation.verified.program, OwnTimes((stage,) * page.header.stages, cluster, 1, 1))


def operations_of(replay: Replay) -> Iterator[tuple[float, float]]:
    for lane in replay.lanes:
        for event in lane:
            if event.role is Role.COMPUTE:
                yield from [(event.start, event.end)] * len(event.instruction.parts)


PATHS = ("span", "update", "path", "turns")
DETAILS = ("span", "slack", "needs", "memory", "links", "messages", "busy", "idle", "starts", "ends")
SOME = 24
"""How many of the settings the critical path is compared for."""

FEW = 4
"""How many of the settings everything else is compared for."""


@dataclass(frozen=True)
class Answers:
    """Results of the scripts for a page: for all settings the times, for a few of them everything."""

    page: Page
    settings: Sequence[Sequence[Fraction]]
    times: Sequence[Mapping[str, Any]]
    paths: Sequence[Mapping[str, Any]]
    details: Sequence[Mapping[str, Any]]

    def some(self) -> Iterator[tuple[Mapping[str, float], Mapping[str, Any]]]:
        """The settings that have paths, with these."""
        for values, paths in zip(self.settings, self.paths, strict=False):
            yield dict(zip(self.page.sliders, map(float, values), strict=True)), paths

    def few(self) -> Iterator[tuple[Mapping[str, float], Mapping[str, Any]]]:
        """The settings that have details, with these."""
        for values, details in zip(self.settings, self.details, strict=False):
            yield dict(zip(self.page.sliders, map(float, values), strict=True)), details


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Answers]:
    pages = [page(scheme) for scheme in PLAYED]
    values = [settings(shown.sliders, shown.tables["name"]) for shown in pages]
    asked = ((SETTINGS, ("update", "starts", "ends")), (SOME, PATHS), (FEW, DETAILS))
    cases = [
        case(shown, all_of[:count], *questions)
        for shown, all_of in zip(pages, values, strict=True)
        for count, questions in asked
    ]
    found = iter(calls(PLAYS, tmp_path_factory.mktemp("played"), cases))
    parts = zip(pages, values, found, found, found, strict=True)
    return {scheme: Answers(*answers) for scheme, answers in zip(PLAYED, parts, strict=True)}


def assert_equal(times: Sequence[float], expected: Sequence[float]) -> None:
    """Holds times against the compiler's, which are fractions: all that may differ is rounding."""
    assert len(times) == len(expected)
    rounding = 1e-12 * max(expected)
    assert [pair for pair in zip(times, expected, strict=True) if abs(pair[0] - pair[1]) > rounding] == []


@pytest.mark.full
@pytest.mark.parametrize("scheme", PLAYED)
def test_operations_start_and_end_when_the_compiler_says_for_200_settings(
    scheme: str, answers: Mapping[str, Answers]
) -> None:
    shown = page(scheme)
    structure = structure_of(shown.compilation.verified.schedule)
    parts = [len(operation.parts) * (not operation.kind.moves) for operation in structure.net.operations]
    for values, answer in zip(answers[scheme].settings, answers[scheme].times, strict=True):
        named = dict(zip(shown.sliders, values, strict=True))
        if any(named.get(name) for name in SENT):
            expected = replayed(shown, {name: float(value) for name, value in named.items()})
            starts, ends = zip(*operations_of(expected), strict=True)
            assert_equal([answer["update"]], [expected.seconds])
            assert_equal(answer["starts"], starts)
            assert_equal(answer["ends"], ends)
            continue
        costs = Costs(**{name: value for name, value in named.items() if name not in SENT})
        run = earliest(shown.header, structure, costs)
        assert_equal([answer["update"] / float(run.tick)], [float(run.length)])
        ends = [end * float(run.tick) for end, rows in zip(run.ends, parts, strict=True) for _ in range(rows)]
        assert_equal(answer["ends"], ends)


def is_sent(values: Mapping[str, float]) -> bool:
    return any(values.get(name) for name in SENT)


@pytest.mark.parametrize("scheme", PLAYED)
def test_the_critical_path_is_the_compilers(scheme: str, answers: Mapping[str, Answers]) -> None:
    """Without messages it has as many operations of each kind; with them it still fills the time without a gap."""
    shown = page(scheme)
    structure = structure_of(shown.compilation.verified.schedule)
    for values, answer in answers[scheme].some():
        path = answer["path"]
        if not shown.tables["turn"]:
            assert path[0]["start"] == 0
            assert path[-1]["end"] == answer["span"]
            gaps = [after["start"] - before["end"] for before, after in pairwise(path)]
            assert max(map(abs, gaps)) <= 1e-9 * answer["span"]
        if is_sent(values):
            continue
        costs = Costs(
            **{name: Fraction(value).limit_denominator(100) for name, value in values.items() if name not in SENT}
        )
        expected = earliest(shown.header, structure, costs).critical_path.counts
        counts = Counter[str]()
        for event in path:
            counts[letter_of(shown.tables, event["operations"])] += size_of(shown.tables, event["operations"])
            if event["move"]:
                counts[event["move"].split()[0]] += 1
        updates = answer["turns"] * (shown.tables["turn"] or {"updates": 1})["updates"]
        length = sum(count * values.get(letter, float(costs[letter])) for letter, count in counts.items() if letter)
        assert length / updates == pytest.approx(answer["update"])
        decided = {kind["letter"] for kind in shown.tables["kinds"] if kind["preference"]} | {PAIR.letter}
        assert {letter: counts[letter] / updates for letter in decided & expected.keys()} == {
            letter: float(expected[letter]) for letter in decided & expected.keys()
        }
        if shown.header.moves:
            computed = [letter for letter in expected if not COSTED[letter].moves]
            assert sum(counts[letter] for letter in computed) == sum(expected[letter] for letter in computed)


def letter_of(tables: Mapping[str, Any], rows: Sequence[int]) -> str:
    letters = [tables["kinds"][tables["operations"]["kind"][row]]["letter"] for row in rows]
    return PAIR.letter if len(rows) > 1 else "".join(letters)


def size_of(tables: Mapping[str, Any], rows: Sequence[int]) -> float:
    return tables["operations"]["size"][rows[0]] if rows else 0


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_operation_can_take_its_slack_longer_and_no_more(scheme: str, answers: Mapping[str, Answers]) -> None:
    for _, answer in answers[scheme].few():
        span = pytest.approx(answer["span"], rel=1e-9)
        assert all(operation["spent"] == span for operation in answer["slack"])
        assert all(operation["beyond"] == pytest.approx(answer["span"] + 0.125) for operation in answer["slack"])
        assert any(operation["slack"] == 0 for operation in answer["slack"])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_sent_to_an_operation_is_what_it_reads_from_another_worker(
    scheme: str, answers: Mapping[str, Answers]
) -> None:
    verified, (_, answer) = page(scheme).compilation.verified, next(answers[scheme].few())
    operations = [(worker, each) for worker, lane in enumerate(verified.schedule.lanes) for each in lane]
    lane_of = [worker for worker, _ in operations]
    numbers = [number for number, (_, each) in enumerate(operations) if not each.kind.moves for _ in each.parts]
    assert [lane_of[number] for number in numbers] == [*page(scheme).tables["operations"]["worker"]]
    reads = reads_of(verified.schedule)
    expected = {
        (maker, taker) for taker, makers in enumerate(reads) for maker in makers if lane_of[maker] != lane_of[taker]
    }
    sent = [need for need in answer["needs"] if need["by"] == "message"]
    assert {(numbers[need["from"][0]], numbers[need["to"][0]]) for need in sent} == expected
    starts, ends = answer["starts"], answer["ends"]
    for need in answer["needs"]:
        if need["by"] == "lane" and need["from"] and need["to"] and need["decides"]:
            assert starts[need["to"][0]] == pytest.approx(ends[need["from"][0]])


@pytest.mark.parametrize("scheme", PLAYED)
def test_a_curve_of_memory_is_what_a_count_of_everything_gives(scheme: str, answers: Mapping[str, Answers]) -> None:
    shown = page(scheme)
    figures = shown.compilation.report
    for _, answer in answers[scheme].few():
        kept = dict(zip((memory["name"] for memory in shown.tables["memory"]), answer["memory"], strict=True))
        assert [curve["peak"] for curve in kept["activations"]] == [*map(float, figures.activations)]
        for memory, curves in zip(shown.tables["memory"], answer["memory"], strict=True):
            assert [curve["peak"] for curve in curves] == memory["peak"]
            for worker, curve in enumerate(curves):
                assert_counted(memory, worker, curve, answer)


def assert_counted(memory: Mapping[str, Any], worker: int, curve: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
    """Holds the curve of a worker against the sum of all changes up to each time, the last at that time included."""
    columns = memory["changes"]
    changes = [
        (answer["ends" if at_end else "starts"][operation], amount)
        for number, operation, at_end, amount in zip(
            *(columns[name] for name in ("worker", "operation", "at_end", "amount")), strict=True
        )
        if number == worker
    ]
    for (time, amount), (later, _) in pairwise([*zip(curve["times"], curve["amounts"], strict=True), (inf, 0)]):
        if later > time:
            total = memory["start"][worker] + sum(change for when, change in changes if when <= time)
            assert amount == pytest.approx(total)
    if curve["at"] >= 0:
        assert columns["worker"][curve["at"]] == worker
        assert columns["amount"][curve["at"]] > 0


@pytest.mark.parametrize("scheme", SCHEMES)
def test_messages_on_a_link_are_those_that_have_left_and_not_arrived(
    scheme: str, answers: Mapping[str, Answers]
) -> None:
    link_of = page(scheme).tables["messages"]["link"]
    for _, answer in answers[scheme].few():
        for link, curve in enumerate(answer["links"]):
            times = [pair for pair, number in zip(answer["messages"], link_of, strict=True) if number == link]
            points = [*zip(curve["times"], curve["amounts"], curve["found"], strict=True)]
            for (time, amount, found), (later, *_) in pairwise([*points, (inf, 0, 0)]):
                if later > time:
                    assert amount == found == sum(start <= time < end for start, end in times)
            assert curve["peak"] >= max(curve["amounts"])


@pytest.mark.parametrize("scheme", PLAYED)
def test_causes_of_idle_time_add_up_and_are_those_of_the_replay(scheme: str, answers: Mapping[str, Answers]) -> None:
    shown = page(scheme)
    for values, answer in answers[scheme].few():
        expected = replayed(shown, values)
        lanes = idle(expected)
        for worker, (totals, lane) in enumerate(zip(answer["idle"]["totals"], lanes, strict=True)):
            assert sum(totals.values()) == pytest.approx(answer["span"] - answer["busy"][worker])
            of = {cause: sum(end - start for why, start, end in lane if why is cause) for cause in Cause}
            assert totals["link"] == pytest.approx(of[Cause.MESSAGE])
            assert totals["sum"] == pytest.approx(of[Cause.SUM])
            assert totals["host"] == pytest.approx(of[Cause.MOVE])
            assert totals["imbalance"] == 0, "operations of a kind take equally long"
            computes = [event for event in expected.lanes[worker] if event.role is Role.COMPUTE]
            columns = (answer["idle"][name] for name in ("worker", "cause", "start", "end"))
            for _, cause, start, end in filter(lambda row: row[0] == worker, zip(*columns, strict=True)):
                assert not any(min(end, e.end) - max(start, e.start) > 1e-9 for e in computes), "it computes"
                assert (cause == "fill") <= (end <= computes[0].start + 1e-9)
                assert (cause == "drain") <= (start >= computes[-1].end - 1e-9)
                assert (cause == "dependency") <= (computes[0].start - 1e-9 <= start < computes[-1].end)
