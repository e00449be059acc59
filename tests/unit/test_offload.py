"""Moves to the host: what `--offload auto` adds, their times on links to hosts, and the report on them."""

import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

import chimera_ir
from chimera_ir.compilation import Compilation
from chimera_ir.cost.durations import Costs
from chimera_ir.cost.host_plan import offload
from chimera_ir.cost.simulate import Transfers, simulate
from chimera_ir.errors import OptionError, TextError
from chimera_ir.flow import live
from chimera_ir.ir.kinds import KEPT, Counted
from chimera_ir.ir.levels import Schedule
from chimera_ir.ir.ops import Worker, singles
from chimera_ir.ir.text.printer import show as text_of
from chimera_ir.options import Options
from chimera_ir.predict.events import Role, with_shared_ports
from chimera_ir.predict.replay import replay
from chimera_ir.predict.screen import show
from chimera_ir.predict.setting import Charges, Setting
from chimera_ir.profile.cluster import FREE, Cluster, HostLink, Link
from chimera_ir.profile.costs import StageCosts, Timing
from chimera_ir.source import Source
from chimera_ir.verify.verify import verify_schedule
from chimera_runtime.program.kept_bytes import MicroBatchBytes

SCHEMES = [
    ("dapple", {"D": 4, "N": 8}),
    ("gpipe", {"D": 4, "N": 6}),
    ("chimera", {"D": 4, "N": 8}),
    ("interleaved", {"P": 4, "N": 8}),
    ("zb_h1", {"D": 4, "N": 8}),
    ("dualpipe", {"D": 4, "N": 8}),
    ("seq1f1b", {"D": 3, "N": 2, "k": 4}),
]
FASTER_TO_SLOWER = [Fraction(1, 3), Fraction(1), Fraction(3, 2), Fraction(4)]


def of_library(name: str, **parameters: int) -> Schedule:
    return chimera_ir.compile(name, **parameters).schedule


def auto(text: str | Source, **parameters: int) -> Compilation:
    return chimera_ir.compile(text, options=Options(offload="auto"), **parameters)


def peaks(schedule: Schedule) -> list[int]:
    return [peak.amount for peak in live.activations(schedule)]


@pytest.mark.parametrize("transfer", FASTER_TO_SLOWER)
@pytest.mark.parametrize(("name", "parameters"), SCHEMES, ids=[name for name, _ in SCHEMES])
def test_what_is_offloaded_waits_long_enough_and_no_operation_waits_for_it(
    name: str, parameters: dict[str, int], transfer: Fraction
) -> None:
    schedule, costs = of_library(name, **parameters), Costs(offload=transfer, reload=transfer)
    before = simulate(schedule, costs)
    moved = offload(schedule, costs)
    checked = verify_schedule(moved, None)
    assert not checked.findings.errors
    after = simulate(moved, costs, checked.net)
    starts = [{timed.operation: timed.start for timed in lane if timed.in_lane} for lane in after.lanes]
    assert [
        {timed.operation: timed.start * before.tick / after.tick for timed in lane} for lane in before.lanes
    ] == starts
    assert all(map(int.__le__, peaks(moved), peaks(schedule)))
    for lane, timeds in zip(moved.lanes, before.lanes, strict=True):
        alone = [(part, timed) for timed in timeds for part in timed.operation.parts]
        for move in (part for part in singles(lane) if part.kind.moves):
            cell = move.micros, move.stage
            (made,) = (
                timed.end for part, timed in alone if (part.micros, part.stage) == cell and KEPT in part.kind.makes
            )
            read = min(
                timed.start for part, timed in alone if (part.micros, part.stage) == cell and KEPT in part.kind.reads
            )
            size = Fraction(len(move.micros), schedule.header.parts)
            assert (read - made) * before.tick >= 2 * transfer * size
            assert move.stage < schedule.header.stages - 1


@pytest.mark.parametrize(("D", "N"), [(4, 8), (8, 16), (16, 20)])
def test_a_worker_of_1f1b_keeps_two_whatever_the_number_of_stages(D: int, N: int) -> None:
    report = auto("dapple", D=D, N=N).report
    assert list(report.activations) == [2] * (D - 1) + [1]
    assert list(report.host) == [*range(D, 2, -1), 0, 0]
    assert report.makespan == 3 * (N + D - 1)
    assert (report.without_offload.makespan, max(report.without_offload.activations)) == (report.makespan, D)
    assert report.as_json()["without_offload"] == {
        "makespan": 3 * (N + D - 1),
        "activations": [*range(D, 0, -1)],
        "moved": report.without_offload.offloads,
        "forwards": D * N,
    }


def test_a_bound_is_that_of_the_schedule_with_its_moves() -> None:
    text = chimera_ir.library.source("dapple").text.replace("pipe down", "memory activations <= 2\npipe down")
    bounded = Source("bounded.chim", text)
    assert list(auto(bounded, D=4).report.activations) == [2, 2, 2, 1]
    with pytest.raises(TextError, match="CH4"):
        _ = chimera_ir.compile(bounded, D=4).schedule


def test_a_declared_bound_is_kept_with_the_moves_that_it_needs() -> None:
    text = chimera_ir.library.source("dapple").text.replace("pipe down", "memory activations <= {}\npipe down")
    needed = [auto(Source("bounded.chim", text.replace("{}", str(bound))), D=4).report for bound in (2, 3, 4)]
    assert [max(report.activations) for report in needed] == [2, 3, 4]
    moved = [report.without_offload.offloads for report in needed if report.without_offload]
    assert moved[0] > moved[1] > moved[2] == 0


@pytest.mark.parametrize(("transfer", "makespan"), [("1", 33), ("2", 39), ("3", 53)])
def test_a_declared_bound_is_kept_over_a_slow_link_at_the_cost_of_time(transfer: str, makespan: int) -> None:
    text = chimera_ir.library.source("dapple").text.replace("pipe down", "memory activations <= 2\npipe down")
    options = Options(offload="auto", costs={"offload": transfer, "reload": transfer})
    report = chimera_ir.compile(Source("bounded.chim", text), D=4, N=8, options=options).report
    assert (list(report.activations), report.makespan) == ([2, 2, 2, 1], makespan)
    assert max(report.transfers) <= makespan


@pytest.mark.parametrize(
    ("transfer", "peak"), [("1/2", [2, 2, 2, 1]), ("1", [2, 2, 2, 1]), ("3/2", [3, 3, 2, 1]), ("2", [4, 3, 2, 1])]
)
@pytest.mark.parametrize(("name", "period"), [("pipedream", 3), ("pipedream_2bw", 12)])
def test_without_a_flush_the_steady_state_takes_as_long_and_keeps_less(
    name: str, period: int, transfer: str, peak: list[int]
) -> None:
    """Where a transfer takes more than half of the 3 that a micro-batch takes, not all of them can move."""
    options = Options(offload="auto", costs={"offload": transfer, "reload": transfer})
    compiled = chimera_ir.compile(name, D=4, options=options)
    assert compiled.report.makespan == period
    assert list(compiled.report.activations) == list(compiled.verified.live) == peak
    assert ("memory activations <= 3 3 2 1" in text_of(compiled.schedule)) == (transfer == "3/2")


@pytest.mark.parametrize(("transfer", "peak"), [(1, "1/2"), (2, "5/4")])
def test_the_least_is_a_bound_of_the_schedule_also_in_parts_of_a_micro_batch(transfer: int, peak: str) -> None:
    options = Options(offload="auto", costs={"offload": transfer, "reload": transfer})
    compiled = chimera_ir.compile("seq1f1b", D=4, N=4, k=4, options=options)
    text = text_of(compiled.schedule)
    assert re.search(rf"memory activations <= {peak} ", text)
    again = chimera_ir.compile(Source("again.sir", text), options=replace(options, offload=None))
    assert again.schedule == compiled.schedule
    assert again.report.activations == compiled.report.activations
    with pytest.raises(TextError, match=r"holds .* more than the declared 1/4"):
        _ = chimera_ir.compile(Source("again.sir", text.replace(f"<= {peak} ", "<= 1/4 "))).schedule


def test_nothing_moves_where_nothing_waits_long_enough() -> None:
    slow = Options(offload="auto", costs={"offload": 100, "reload": 100})
    compiled = chimera_ir.compile("dapple", D=4, N=4, options=slow)
    assert compiled.schedule == of_library("dapple", D=4, N=4)
    assert "--offload auto moves nothing" in screen(compiled)


def screen(compiled: Compilation) -> str:
    lines = show(compiled.report, compiled.summary, compiled.prediction, 500, "dapple")
    return "\n".join(line.plain for line in lines)


def test_the_first_screen_says_what_it_bought_and_cost() -> None:
    text = screen(auto("dapple", D=4, N=8))
    assert "activations of 13 of 32 forwards move: a worker keeps up to 2 M_a in place of 4" in text
    assert "an update takes as long as without" in text
    assert (
        "the busiest link, of P0, moves activations for 14, 42.4% of the time, 71.4% of that beside computing" in text
    )


@pytest.mark.parametrize(
    ("name", "parameters", "said"),
    [
        (
            "gpipe",
            {"D": 4, "N": 8},
            "up to 8 M_a in place of 8 (by worker 2, 2, 2 and 8 in place of 8, 8, 8 and 8; "
            "the last stage, on P3, moves nothing)",
        ),
        (
            "gpipe",
            {"D": 9, "N": 8},
            "up to 8 M_a in place of 8 (the others up to 2 in place of 8; the last stage, on P8, moves nothing)",
        ),
        ("dapple", {"D": 4, "N": 8}, "up to 2 M_a in place of 4; "),
    ],
)
def test_where_the_fullest_worker_gains_nothing_the_first_screen_has_the_others(
    name: str, parameters: dict[str, int], said: str
) -> None:
    assert said in screen(auto(name, **parameters))


@pytest.mark.parametrize(
    ("text", "message"), [("dapple_offload", "says itself what moves"), ("program", "of the program of")]
)
def test_a_text_that_cannot_have_moves_added_is_refused(text: str, message: str) -> None:
    program = Source("text.sir", chimera_ir.compile("dapple", D=2, N=2).program_text)
    with pytest.raises(OptionError, match=message):
        _ = auto(program if text == "program" else text).schedule


def test_a_line_that_moves_the_same_micro_batches_again_is_said_to_repeat_them_alone() -> None:
    source = chimera_ir.library.source("dapple_offload")
    assert source.text.count("offload(m, s)") == 1
    with pytest.raises(TextError) as raised:
        _ = chimera_ir.compile(Source("a.chim", source.text.replace("offload(m, s)", "offload(0..2, s)"))).schedule
    assert "CH303" in str(raised.value)
    assert "CH302" not in str(raised.value)


def test_the_time_of_transfers_is_hidden_while_the_worker_computes() -> None:
    """The first offload runs beside the second forward, all other transfers of the first worker in its bubbles."""
    report = chimera_ir.compile("dapple_offload", D=4, N=2).report
    assert report.host_links[0] == Transfers(Fraction(4), Fraction(1))
    assert report.host_links[3] == Transfers(Fraction(0), Fraction(0))
    shown = report.as_json()
    assert (shown["host"], shown["transfers"]) == ([2, 2, 0, 0], [4, 4, 0, 0])


def setting(host: HostLink | None, per_node: int = 4, copies: int = 1, replicas: bool = False) -> Setting:
    """Stages of 3 s forward and 6 s backward, of whose 700 bytes of activations 100 stay."""
    timing = Timing(
        {"F": 3.0, "B": 6.0, "recomputing": 9.0}, MicroBatchBytes(700, 0, resident=100), output=0, gradient=0
    )
    cluster = Cluster("any", 64, per_node, 10**6, 0, FREE, FREE, FREE, host=host)
    return Setting((StageCosts(1, 1, 0, {1: timing}),) * 4, cluster, copies, 1, replicas)


def test_a_transfer_takes_latency_and_the_bytes_that_move() -> None:
    program = chimera_ir.compile("dapple_offload", D=4, N=4).verified.program
    found = replay(program, setting(HostLink(Link(0.5, 1 / 400, 0.25))))
    assert {node.seconds for node in found.events.nodes if node.role is Role.MOVE} == {0.5 + 600 / 400}
    assert {event.end - event.start for event in found.lanes[0] if event.role is Role.POST} == {0.25}


@pytest.mark.parametrize(
    ("workers", "copies", "replicas", "links"),
    [
        (1, 1, False, [(0, 1), (1, 1), (2, 1), (3, 1)]),
        (2, 1, False, [(0, 1), (0, 1), (2, 1), (2, 1)]),
        (8, 2, False, [(0, 1), (0, 1), (0, 1), (0, 1)]),
        (2, 2, True, [(0, 2), (1, 2), (2, 2), (3, 2)]),
        (4, 2, True, [(0, 2), (0, 2), (2, 2), (2, 2)]),
    ],
)
def test_workers_share_a_link_with_their_neighbours_and_copies(
    workers: int, copies: int, replicas: bool, links: list[tuple[int, int]]
) -> None:
    """Four workers of a copy, four ranks to a node; with replicas next to each other a link has both copies of one."""
    shared = setting(HostLink(FREE, workers), copies=copies, replicas=replicas)
    charges = Charges(chimera_ir.compile("dapple", D=4, N=4).schedule.header, shared)
    assert [charges.host_link(worker) for worker in map(Worker, range(4))] == links


def test_transfers_at_once_over_one_link_take_twice_as_long() -> None:
    """Of four workers two have moves; alone each transfer takes 1 s."""
    alone, shared = (setting(HostLink(Link(0.0, 1 / 600), workers)) for workers in (1, 2))
    verified = chimera_ir.compile("dapple_offload", D=4, N=8).verified
    one, both = (replay(verified.program, each) for each in (alone, shared))
    assert one.seconds == both.seconds == 3 * 33
    spans = [node.seconds for node in with_shared_ports(both.events).nodes if node.role is Role.MOVE]
    assert min(spans) == 1.0
    assert max(spans) == 2.0


ROOT = Path(__file__).resolve().parents[2]


def predicted(tmp_path: Path, pattern: str = "", changed: str = "") -> Compilation:
    """The prediction for the examples of the docs, of whose cluster what matches a pattern is ``changed``."""
    examples, cluster = ROOT / "docs" / "examples", tmp_path / "c.toml"
    text = (examples / "small.cluster.toml").read_text(encoding="utf-8")
    cluster.write_text(re.sub(pattern, changed, text, flags=re.DOTALL) if pattern else text, encoding="utf-8")
    options = Options(profile=examples / "small.profile.toml", cluster=cluster, micro_batch_size=8)
    return chimera_ir.compile("dapple_offload", D=4, N=8, options=options)


def test_a_prediction_has_the_bytes_of_the_host_and_says_whether_they_fit(tmp_path: Path) -> None:
    compiled = predicted(tmp_path)
    assert [need.host for need in compiled.prediction.memory] == [4 * 1_500_000_000, 3 * (1_500_000_000 - 2**22), 0, 0]
    assert compiled.prediction.as_json()["host_memory"] == [6_000_000_000, 4_487_417_088, 0, 0]
    assert compiled.summary.fits
    small = predicted(tmp_path, "120 GB", "5 GB")
    assert not small.summary.fits
    assert "does not fit: a worker needs 5.588 GiB of 4.657 GiB of its host's memory" in screen(small)


def test_a_cluster_without_a_link_to_the_host_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TextError, match="CH728"):
        _ = predicted(tmp_path, r"\[host\].*").prediction


def test_where_memory_moves_the_peak_in_host_memory_counts_apart() -> None:
    schedule = of_library("dapple_offload", D=4, N=8)
    assert [peak.amount for peak in live.peaks(schedule, Counted.HOST)] == [4, 3, 0, 0]
    assert peaks(schedule) == [3, 3, 2, 1]
