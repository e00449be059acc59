"""What a program finishes with: a communicator for each direction between two workers, for both, or a single one.

The oracle is `tests.executor`, which runs each choice by its rules and shares nothing with the proof.
"""

import json
import re
from collections import Counter
from itertools import product
from pathlib import Path

import pytest

import chimera_ir
from chimera_ir import library
from chimera_ir.console import printed
from chimera_ir.cost import table
from chimera_ir.errors import TextError
from chimera_ir.ir.levels import Program
from chimera_ir.ir.ops import AllReduce, Recv, Send, WaitAllReduce, WaitRecv, WaitSend
from chimera_ir.ir.sharing import Communicators
from chimera_ir.ir.text.printer import show
from chimera_ir.lower.lower import lower
from chimera_ir.verify.communicators import Communication
from chimera_ir.verify.in_order import replay_in_streams
from chimera_ir.verify.verify import Verified, verify_program
from tests.executor import verdict
from tests.lowered import evaluated
from tests.sizes import on_workers

SIZES = ((2, 2), (2, 4), (4, 4), (4, 8))
"""Workers and micro-batches."""


def verified(scheme: str, workers: int, micro_batches: int, ahead: int = 1) -> Verified:
    """A library scheme whose receives are posted so many operations before their use."""
    checked = chimera_ir.compile(scheme, **on_workers(scheme, workers, micro_batches)).verified.checked
    return verify_program(lower(checked.level, ahead), checked)


def known(program: Verified) -> dict[Communicators, Communication]:
    return {each.communicators: each for each in program.communications}


def assert_as_executed(made: Verified) -> None:
    for communicators, communication in known(made).items():
        ends = {verdict(made.program, communicators.value, seed) for seed in range(2)}
        assert ends == {"finished" if communication.finishes else "stuck"}, communicators


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("scheme", library.names())
def test_what_is_proven_is_what_happens(scheme: str, ahead: int) -> None:
    for size in SIZES:
        assert_as_executed(verified(scheme, *size, ahead))


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("scheme", library.names())
def test_to_compare_orders_is_to_play_the_streams(scheme: str, ahead: int) -> None:
    made = verified(scheme, 4, 4, ahead)
    for communicators, communication in known(made).items():
        streams = replay_in_streams(made.program, communicators).played
        ends = all(place == len(lane) for place, lane in zip(streams.places, streams.lanes, strict=True))
        assert ends == communication.finishes


def test_communicators_are_counted_for_one_copy() -> None:
    counts = {each.value: known(verified("chimera", 4, 4))[each].count for each in Communicators}
    assert counts == {"directed": 6, "pair": 3, "single": 1}
    ring = {each.value: known(verified("interleaved", 4, 4))[each].count for each in Communicators}
    assert ring == {"directed": 8, "pair": 4, "single": 1}
    alone = verified("gpipe", 1, 2)
    assert [(each.count, each.finishes) for each in alone.communications] == [(0, True)] * 3


def test_a_circle_is_told_by_the_operations_that_are_never_over() -> None:
    told = known(verified("dapple", 2, 4))
    assert told[Communicators.DIRECTED].blocked == ""
    assert told[Communicators.PAIR].blocked == told[Communicators.SINGLE].blocked
    assert told[Communicators.PAIR].blocked == (
        "`recv m0 s1->s0 from w1 into 0` on worker 0 and `recv m1 s0->s1 from w0 into 1` on worker 1 wait for each "
        "other"
    )


def test_with_a_single_one_a_whole_ring_of_workers_may_wait() -> None:
    told = known(verified("breadth_first", 4, 8, ahead=0))
    assert told[Communicators.PAIR].finishes
    assert told[Communicators.SINGLE].blocked == (
        "`send m3 s0->s1 to w1` on worker 0, `send m2 s1->s2 to w2` on worker 1, `send m1 s2->s3 to w3` on worker 2 "
        "and `send m0 s3->s4 to w0` on worker 3 wait for each other"
    )


@pytest.mark.parametrize(("scheme", "single"), [("gpipe", True), ("gems", True), ("breadth_first", False)])
def test_an_order_in_which_it_finishes_obeys_the_streams(scheme: str, single: bool) -> None:
    """Played one by one, each event comes after all that it must wait for; no stream is entered out of turn."""
    made = verified(scheme, 4, 8, ahead=0)
    assert known(made)[Communicators.SINGLE].finishes == single
    for communicators, communication in known(made).items():
        if communication.finishes:
            assert_in_order(made.program, replay_in_streams(made.program, communicators).played.order, communicators)


def assert_in_order(program: Program, order: object, communicators: Communicators) -> None:
    """The instructions of an order, with the transfers that their posts allow, one stream operation after the other."""
    lines = [(worker, line) for worker, lane in enumerate(program.lanes) for line in lane]
    queues: dict[tuple[int, ...], list[object]] = {}
    posted: Counter[object] = Counter()
    over: set[object] = set()
    for event in order:  # type: ignore[attr-defined]
        if event >= len(lines):
            continue  # a start, which this repeats by itself
        worker, line = lines[event]
        match line:
            case Send(message, peer) | Recv(message, peer):
                key = communicators.stream(worker, peer, isinstance(line, Send))
                queues.setdefault(key, []).append(message)
            case WaitSend(message) | WaitRecv(message):
                assert message in over
            case AllReduce(group, version=version):
                posted[group, version] += 1
            case WaitAllReduce(group, version=version):
                assert posted[group, version] == len(program.header.members(group))
        while ready := [m for m, ends in Counter(queue[0] for queue in queues.values() if queue).items() if ends == 2]:
            over |= {*ready}
            queues = {key: queue[1:] if queue and queue[0] in ready else queue for key, queue in queues.items()}
    assert not any(queues.values())


def late(scheme: str, workers: int = 4) -> chimera_ir.Compilation:
    """A text of a program whose receives are posted where they are needed."""
    checked = chimera_ir.compile(scheme, **on_workers(scheme, workers, 4)).verified.checked
    return chimera_ir.compile(chimera_ir.Source(f"{scheme}.sir", show(lower(checked.level, 0))))


def test_the_report_says_what_is_proven_and_where_it_blocks() -> None:
    assert json.loads(late("gpipe").report_json)["communicators"] == {
        "directed": {"count": 6, "proven": True},
        "pair": {"count": 3, "proven": True},
        "single": {"count": 1, "proven": True},
    }
    blocked = json.loads(chimera_ir.compile("gpipe", D=4, N=4).report_json)["communicators"]["pair"]
    assert (blocked["count"], blocked["proven"]) == (3, False)
    assert blocked["blocked"].endswith(" on worker 1 wait for each other")


@pytest.mark.parametrize(
    ("scheme", "lines"), [("gpipe", ["pair (3), single (1)"]), ("breadth_first", ["pair (4)"]), ("dapple", [])]
)
def test_the_table_of_the_report_has_a_line_for_what_is_proven(scheme: str, lines: list[str]) -> None:
    said = printed(lambda console: console.print(table.show(late(scheme).report))).splitlines()
    fewer = "finishes with fewer communicators, too: "
    assert [line.removeprefix(fewer) for line in said if line.startswith(fewer)] == lines


def test_evaluations_count_as_well() -> None:
    """Those of a schedule in two directions cross, whatever the program of its training does."""
    compilation = late("gems")
    assert all(each.finishes for each in compilation.verified.communications)
    assert [each.blocked[:14] for each in compilation.report.communicators] == ["", "in evaluations", "in evaluations"]
    assert json.loads(compilation.files["program.json"])["communicators"] == ["directed"]


def test_what_runs_a_program_knows_what_is_proven() -> None:
    assert json.loads(late("gpipe").files["program.json"])["communicators"] == ["directed", "pair", "single"]
    assert json.loads(late("dapple").files["program.json"])["communicators"] == ["directed"]


ROW = r"^\| receives are posted (.+?) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$"


@pytest.mark.parametrize(
    ("ahead", "how"), [(1, "an operation ahead, as by the compiler"), (0, "where they are needed")]
)
def test_so_many_programs_of_the_library_are_proven_as_the_page_says(ahead: int, how: str) -> None:
    """With 4 and 8 workers, and as many micro-batches or twice as many, where a scheme takes these."""
    proven: Counter[str] = Counter()
    for scheme, workers, factor in product(library.names(), (4, 8), (1, 2)):
        names = library.parameters(scheme)
        settings = {"P" if "P" in names else "D": workers} | ({"N": factor * workers} if "N" in names else {})
        if "N" not in names and factor == 2:
            continue
        try:
            checked = chimera_ir.compile(scheme, **settings).verified.checked
        except TextError:
            continue  # a size that the scheme refuses
        made = verify_program(lower(checked.level, ahead), checked)
        known = made.with_evaluation(lambda made=made: evaluated(made))  # type: ignore[misc]
        proven["programs"] += 1
        proven.update(each.communicators.value for each in known if each.finishes)
    rows = re.findall(ROW, (Path(library.__file__).parents[1] / "docs" / "gpus.md").read_text(), re.M)
    counts = [str(proven[name]) for name in ("programs", *(each.value for each in Communicators))]
    assert (how, *counts) in rows
