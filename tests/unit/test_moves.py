"""Memory that moves to the host and back, with all else that a scheme may have, and what it does to peaks and times."""

import json
from typing import Any

import pytest

import chimera_ir
from chimera_ir import Options, library
from chimera_ir.errors import TextError
from chimera_ir.flow import live
from chimera_ir.ir.kinds import KINDS, Counted
from chimera_ir.ir.levels import Program
from chimera_ir.ir.ops import Compute, WaitMove
from chimera_ir.ir.text.printer import show
from chimera_ir.ir.text.reader import parse
from chimera_ir.page import event_tables
from chimera_ir.page.event_tables import Lengths
from chimera_ir.page.tables import rows
from chimera_ir.predict.events import Role, events_of
from chimera_ir.predict.memory_need import memory
from chimera_ir.predict.replay import replay
from chimera_ir.predict.setting import Charges, Setting
from chimera_ir.profile.cluster import FREE, Cluster, HostLink, Link
from chimera_ir.profile.costs import StageCosts, Timing
from chimera_ir.source import Source
from chimera_ir.trace.event_files import FIRST_PROCESS, predicted_trace
from chimera_runtime.program.kept_bytes import MicroBatchBytes
from tests.executor import verdicts
from tests.simulator import Simulator
from tests.test_architecture import ROOT

SOURCE = (ROOT / "docs" / "examples" / "offloaded.chim").read_text(encoding="utf-8")
"""1F1B that offloads on all stages but the last."""

TIMES = {"F": 1.0, "B": 2.0, "recomputing": 3.0, "I": 1.0, "W": 1.0}

MOVES = "  offload(m, s) @ {after} + 1 when {when}\n  reload(m, s) @ {before} - 1 when {when}\n"
PIPE = "pipe {name} {{\n  stages s in 0..D on {on}\n  micros m in 0..{micros}\n{lines}}}\n"


def pipe(lines: str, micros: str = "N", on: str = "s", name: str = "down") -> str:
    return PIPE.format(name=name, on=on, micros=micros, lines=lines)


def moved(after: str, before: str, when: str = "s < D-1") -> str:
    return MOVES.format(after=after, before=before, when=when)


PLAIN = "  F(m, s) @ 2*m + s\n  B(m, s) @ 2*m + 2*D-1 - s\n" + moved("2*m + s", "2*m + 2*D-1 - s")
WIDE = "  F(m, s) @ 4*m + 2*s\n  {between}  B(m, s) @ 4*m + 4*D-2 - 2*s\n"
SLICED = """  slices q in 0..2
  F(m, s, q) @ 6*(2*m + q) + 2*s
  offload(m, s, q) @ 6*(2*m + q) + 2*s + 1
  reload(m, s, q) @ 6*(2*m + 2 - q) + 4*D-2 - 2*s
  B(m, s, q) @ 6*(2*m + 2 - q) + 4*D-1 - 2*s
"""
SPLIT = "  F(m, s) @ 6*m + 2*s\n  I(m, s) @ 6*m + 6*D-1 - 2*s\n  W(m, s) @ 6*m + 6*D+1 - 2*s\n" + moved(
    "6*m + 2*s", "6*m + 6*D-1 - 2*s"
)
HALFWAY = """  F(m, s) @ 8*m + 2*s
  offload(m, s) @ 8*m + 2*s + 1 when s == 0
  reload(m, s) @ 8*m + 8*D-3 - 2*s when s == 0
  I(m, s) @ 8*m + 8*D-2 - 2*s
  offload_operands(m, s) @ 8*m + 8*D-1 - 2*s
  reload_operands(m, s) @ 8*m + 8*D+2 - 2*s
  W(m, s) @ 8*m + 8*D+3 - 2*s
"""
AGAIN = """  F(m, s) @ 2*m + 2*s
  recompute(m, s) @ 2*N + 4*D + 6*m when s == 0
  offload(m, s) @ 2*N + 4*D + 6*m + 1 when s == 0
  reload(m, s) @ 2*N + 4*D + 6*m + 3 when s == 0
  B(m, s) @ 2*N + 4*D + 6*m + 5 - s
"""
PAIRED = """  F(m, s) @ 3*m when m == 0
  F(m, s) & B(m-1, s) @ 3*m when m > 0
  B(m, s) @ 3*N when m == N-1
  offload(m, s) @ 3*m + 1
  reload(m, s) @ 3*m + 2
"""
TEXTS = {
    "in one direction": "scheme a(D = 3, N = 4)\n" + pipe(PLAIN),
    "in slices": "scheme a(D = 2, N = 2)\n" + pipe(SLICED),
    "with split backwards": "scheme a(D = 2, N = 3)\n" + pipe(SPLIT),
    "between halves": "scheme a(D = 2, N = 3)\n" + pipe(HALFWAY),
    "after a recomputation": "scheme a(D = 2, N = 3)\n" + pipe(AGAIN),
    "in pairs": "scheme a(D = 1, N = 3)\n" + pipe(PAIRED),
    "in two directions": "scheme a(D = 2, N = 1)\n"
    + pipe(WIDE.format(between=moved("4*m + 2*s", "4*m + 4*D-2 - 2*s", "s == 0")))
    + pipe(WIDE.format(between="").replace("*m", "*m + 1"), on="D-1 - s", name="up"),
    "in groups": "scheme a(N = 2, D = 1)\n"
    + pipe(
        "  F(0..2, s) @ 0 when m == 0\n  offload(0..2, s) @ 1 when m == 0\n  reload(0..2, s) @ 3 when m == 0\n"
        "  B(m, s) @ 4 + m\n"
    ),
    "without a flush": "scheme a(D = 3)\nupdate every 1\n" + pipe(PLAIN + "  reads version max(0, m - 2)\n", micros=""),
}


@pytest.mark.parametrize("name", TEXTS)
def test_moves_go_with_all_else_that_a_scheme_says(name: str) -> None:
    """From the text to scripts that are proven; the evaluation moves nothing, and every level reads back."""
    compilation = chimera_ir.compile(Source("a.chim", TEXTS[name]))
    program, evaluation = compilation.verified.program, compilation.evaluation
    assert verdicts(program, seeds=2) == verdicts(evaluation, seeds=1) == {"finished"}
    assert program.header.moves
    assert not evaluation.header.moves
    for level in (compilation.plan, compilation.schedule, compilation.program, evaluation):
        assert parse(Source("", show(level))) == level
    script = compilation.scripts.files["rank_0.py"]
    assert script.count("wait_reload(") == script.count(".reload(") > 0
    facts = json.loads(compilation.scripts.files["program.json"])
    assert 0 in facts["moving"]
    assert facts["ranks"][0]["on_host"]
    assert ("moving_operands" in facts) == ("operands" in TEXTS[name])


@pytest.mark.parametrize("depth", [3, 4, 8, 12])
def test_right_after_the_forward_and_before_the_backward_it_takes_two_and_what_moves(depth: int) -> None:
    """With any warm-up: one that computes, one that goes out and one that comes back; no time is lost."""
    report = chimera_ir.compile(Source("a.chim", SOURCE), D=depth, N=2 * depth).report
    plain = chimera_ir.compile(library.source("dapple"), D=depth, N=2 * depth).report
    assert [*report.activations] == [3] * (depth - 2) + [2, 1]
    assert [*plain.activations] == [*range(depth, 0, -1)]
    assert report.makespan == plain.makespan == 3 * (3 * depth - 1)


@pytest.mark.parametrize("bound", [2, 3, 4])
def test_a_copy_has_all_the_time_that_the_declared_bound_allows(bound: int) -> None:
    """Less than that of the next operation, or more: a lane waits where it would else keep more."""
    text = SOURCE.replace("memory activations <= 3", f"memory activations <= {bound}")
    report = chimera_ir.compile(Source("a.chim", text)).report
    assert (max(report.activations), report.makespan) == (bound, 33)


@pytest.mark.parametrize("bound", [2, 3])
def test_a_stream_waits_where_the_declared_bound_says(bound: int) -> None:
    """For 2 it waits for an offload before the next forward, as with a flush."""
    text = TEXTS["without a flush"].replace("update every 1", f"update every 1\nmemory activations <= {bound}")
    compilation = chimera_ir.compile(Source("a.chim", text))
    assert max(compilation.report.activations) == max(compilation.verified.live) == bound
    assert verdicts(compilation.verified.program, seeds=1) == {"finished"}
    assert compilation.report.makespan == 3


def test_the_host_has_what_the_workers_of_1f1b_have() -> None:
    program = chimera_ir.compile(Source("a.chim", SOURCE)).verified.program
    assert [peak.amount for peak in live.peaks(program, Counted.HOST)] == [4, 3, 2, 0]


def test_traces_and_curves_show_what_moves() -> None:
    """A worker's curve and its counters have the peaks of the report; a stretch of time for each of 48 moves."""
    compilation = chimera_ir.compile(Source("a.chim", SOURCE))
    curves = [compilation.memory(worker) for worker in range(4)]
    assert [max(row["activations"] for row in curve) for curve in curves] == [*compilation.report.activations]
    assert [max(row.get("on_host", 0) for row in curve) for curve in curves] == [4, 3, 2, 0]
    assert {curve[-1]["activations"] for curve in curves} == {0}
    events = json.loads(predicted_trace(compilation.replay))["traceEvents"]
    assert sum(event.get("cat") == "move" and event["ph"] in "Xb" for event in events) == 48
    for worker, kept in enumerate(compilation.report.activations):
        assert counted(events, worker, "activations in M_a") == (kept, 0)
        most, last = counted(events, worker, "activations on the host in M_a")
        assert (most > 0, last) == (worker < 3, 0)


def counted(events: list[dict[str, Any]], worker: int, name: str) -> tuple[float, float]:
    """The largest and the last value of a counter of a worker."""
    of_worker = [event for event in events if event["ph"] == "C" and event["pid"] == FIRST_PROCESS + worker]
    values = [event["args"][name] for event in of_worker if event["name"] == name]
    return max(values, default=0), values[-1] if values else 0


def test_a_page_shows_moves_whose_launch_takes_time() -> None:
    """The post of a move is about the move."""
    program = chimera_ir.compile(Source("a.chim", SOURCE)).verified.program
    stage = StageCosts(1, 1, 0, {1: Timing(TIMES, MicroBatchBytes(1, 1), 1, 1)})
    cluster = Cluster("slow launches", 4, 4, 1, 0, FREE, FREE, FREE, host=HostLink(Link(0.5, 0.25, overhead=0.125)))
    charges = Charges(program.header, Setting((stage,) * 4, cluster, 1, 1))
    shown = rows(parts.computes.lines for parts in program.parts)
    tables, _ = event_tables.tables(events_of(program, charges), shown, charges, Lengths(charges))
    posts = [n for n, role in enumerate(tables.events.role) if role == Role.POST.value - 1]
    assert len(posts) == len(tables.moves.words) == 48
    assert {tables.events.subject[post] for post in posts} == {*range(48)}


@pytest.mark.parametrize("name", [*TEXTS][:-1])
@pytest.mark.parametrize("cost", [1, 4])
def test_a_replay_takes_as_long_as_the_simulator_and_the_timeline(name: str, cost: int) -> None:
    """Also where a copy takes longer than the operation beside it, so that lanes wait and copies queue."""
    costs = dict.fromkeys(("offload", "reload", "offload_operands", "reload_operands"), cost)
    compilation = chimera_ir.compile(Source("a.chim", TEXTS[name]), options=Options(costs=costs))
    program = compilation.verified.program
    stage = StageCosts(1, 1, 0, {1: Timing(TIMES, MicroBatchBytes(1, 1), 1, 1)})
    free = Cluster("free", 4096, 1, 1, 0, FREE, FREE, FREE, host=HostLink(Link(0.0, cost)))
    simulated = Simulator(program, Setting((stage,) * program.header.stages, free, 1, 1)).ended
    assert max(simulated.values()) == compilation.replay.span == compilation.report.makespan


def test_operands_take_bytes_and_time_of_their_own() -> None:
    """Of 5 bytes 1 stays; between the halves there are 5 - 1 + 2, of which 4 stay. Lines say what the host has."""
    program = chimera_ir.compile(Source("a.chim", TEXTS["between halves"])).verified.program
    timing = Timing(TIMES, MicroBatchBytes(5, 1, 1, 2, resident=1, resident_operands=4), 1, 1)
    link = HostLink(Link(0.0, 0.25))
    cluster = Cluster("free", 4096, 1, 1, 0, FREE, FREE, FREE, host=link)
    setting = Setting((StageCosts(1, 1, 0, {1: timing}),) * 2, cluster, 1, 1)
    assert [setting.transfer(0, KINDS[kind])[1] for kind in ("reload", "offload_operands")] == [4 * 0.25, 2 * 0.25]
    simulator = Simulator(program, setting)
    assert replay(program, setting).seconds == max(simulator.ended.values())
    assert [need.host for need in memory(program, setting)] == [
        on_host(program, worker, {"offload": 4, "offload_operands": 2}) for worker in range(2)
    ]


def on_host(program: Program, worker: int, sizes: dict[str, int]) -> int:
    """The most bytes on the host of a worker, by its lines: from each launch there to the wait for the way back."""
    amounts = [0]
    for line in program.lanes[worker]:
        if isinstance(line, Compute) and line.kind.letter in sizes:
            amounts.append(amounts[-1] + sizes[line.kind.letter])
        if isinstance(line, WaitMove) and line.kind.letter.startswith("reload"):
            amounts.append(amounts[-1] - sizes[line.kind.letter.replace("reload", "offload")])
    return max(amounts)


def test_a_program_may_wait_where_it_likes_and_is_counted_by_its_lines() -> None:
    """With both waits of an offload right behind it, one fewer is on the worker; with later ones, more."""
    program = chimera_ir.compile(Source("a.chim", TEXTS["in one direction"])).verified.program
    early = waiting(program, 0)
    assert [peak.amount for peak in live.activations(program)] == [3, 2, 1]
    assert [peak.amount for peak in live.activations(early)] == [2, 2, 1]
    assert verdicts(early, seeds=1) == {"finished"}
    compiled = chimera_ir.compile(Source("", show(early)))
    assert compiled.verified.live == compiled.report.activations == (2, 2, 1)
    bounded = show(early).replace("micro_batches 4", "micro_batches 4\nmemory activations <= 2")
    assert chimera_ir.compile(Source("", bounded)).verified.live == (2, 2, 1)
    with pytest.raises(TextError, match="holds the activations of 2"):
        _ = chimera_ir.compile(Source("", bounded.replace("<= 2", "<= 1"))).verified


def waiting(program: Program, after: int) -> Program:
    """The program in which each lane waits for an offload ``after`` lines behind its launch."""
    lanes = []
    for lane in program.lanes:
        lines = [line for line in lane if not (isinstance(line, WaitMove) and line.kind.letter == "offload")]
        for line in [line for line in lines if isinstance(line, Compute) and line.kind.letter == "offload"]:
            place = next(n for n, other in enumerate(lines) if other is line)
            lines.insert(place + 1 + after, WaitMove(line.kind, line.micros, line.stage))
        lanes.append(tuple(lines))
    return Program(program.header, tuple(lanes))


def test_a_text_without_moves_is_as_before() -> None:
    """No cost, no key and no line of it names them."""
    compilation = chimera_ir.compile(library.source("dapple"), D=2, N=2)
    names = ("rank_0.py", "program.json", "report.json", "schedule.sir", "schedule.html")
    texts = [compilation.files[name] for name in names]
    assert not any(word in text for text in texts for word in ("offload", "on_host", '"moving"'))
