"""The problem of ordering operations as other programs get it: as JSON, as a graph of networkx, evaluated fast."""

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import networkx as nx
import pytest

import chimera_ir
from chimera_ir import Compilation, Options, Source
from chimera_ir.errors import OptionError
from chimera_ir.ir.levels import Quantity
from chimera_ir.orders.instance import instance_of
from chimera_ir.predict.replay import replay
from chimera_ir.predict.setting import Measured, Setting
from chimera_ir.profile.cluster import FREE, Cluster, Link
from chimera_ir.profile.costs import StageCosts, Timing
from chimera_runtime.program.kept_bytes import MicroBatchBytes
from tests.pages import SMALL
from tests.unit.command import Run

PREDICTED = Options(**SMALL)
COSTS = {"F": "3/2", "B": 4, "I": 2, "W": "5/3"}
SCHEMES = [
    *(("zb_v", {"P": 4}), ("interleaved", {"P": 4}), ("chimera_doubling", {"D": 4}), ("dualpipe", {"D": 4})),
    ("seq1f1b", {"D": 3, "k": 2}),
]
CASES = [
    *((name, size, Options(recompute=again, costs=COSTS)) for name, size in SCHEMES for again in (False, True)),
    ("dapple", {"D": 3, "N": 4}, Options()),
    ("chimera", {"D": 4, "N": 4}, Options(recompute=True, costs={"F": "2/3", "recompute": 1})),
    ("dualpipe_v", {"P": 2, "N": 4}, Options(costs={"pair": 2})),
    ("seq1f1b_zb", {"D": 2, "N": 2, "k": 2}, Options(costs={"F": [1, 2]})),
]


@pytest.mark.parametrize(("scheme", "settings", "options"), CASES)
def test_an_order_is_evaluated_as_its_schedule_is_timed(
    scheme: str, settings: dict[str, int], options: Options
) -> None:
    """Also orders that others have shuffled: each is compiled, or closes a cycle for the compiler, too."""
    c = chimera_ir.compile(scheme, options=options, **settings)
    graph = c.graph
    shuffle, closed = random.Random(scheme), 0
    for _ in range(6):
        lanes = [[*lane] for lane in graph.lanes]
        for _ in range(2):
            lane = shuffle.choice(lanes)
            place = shuffle.randrange(len(lane) - 1)
            lane[place : place + 2] = lane[place : place + 2][::-1]
        starts, makespan = graph.starts(lanes), graph.makespan(lanes)
        other = Compilation.of(graph.schedule(lanes), Options(costs=options.costs))
        if makespan is None or starts is None:
            closed += 1
            with pytest.raises(chimera_ir.CompileError):
                assert other.schedule
            continue
        ends = {f"{timed.operation}": timed.start for lane in other.timeline.lanes for timed in lane}
        numbers = {f"{operation}": number for number, operation in enumerate(graph.instance.operations)}
        assert {text: starts[number] * graph.tick for text, number in numbers.items()} == {
            text: start * other.timeline.tick for text, start in ends.items()
        }
        peaks = zip(graph.instance.stores, graph.peaks(lanes), strict=True)
        held = [peak for store, peak in peaks if store.quantity is Quantity.ACTIVATIONS]
        assert held == [amount * c.schedule.header.parts for amount in other.report.activations]
    assert closed < 6
    assert graph.schedule(graph.lanes) == c.schedule


def test_the_json_says_all_that_a_solver_needs(run: Run) -> None:
    """A solver that knows nothing else computes the makespan, as the longest path through waits and lanes."""
    data = json.loads(run("dapple", "D=3", "N=4", "--cost", "B=5/2", "--emit", "graph").out)
    operations = data["operations"]
    paths = nx.DiGraph()
    for number, operation in enumerate(operations):
        paths.add_edge(-1, number, weight=0)
        for other, delay in operation["waits"]:
            paths.add_edge(other, number, weight=operations[other]["duration"] + delay)
    for lane in data["lanes"]:
        for before, after in pairwise(lane):
            paths.add_edge(before, after, weight=operations[before]["duration"])
    for last, operation in enumerate(operations):
        paths.add_edge(last, len(operations), weight=operation["duration"])
    longest = nx.dag_longest_path_length(paths)
    assert longest == data["makespan"]
    report = chimera_ir.compile("dapple", D=3, N=4, options=Options(costs={"B": "5/2"})).report
    assert Fraction(longest) * Fraction(data["tick"]) == report.makespan
    assert data["stores"][0] == {"worker": 0, "quantity": "activations", "limit": None}
    assert operations[0]["keeps"] == [{"store": 0, "at_start": 1, "at_end": 0}]


def test_messages_of_a_cluster_are_delays() -> None:
    graph = chimera_ir.compile("dapple", D=4, N=4, options=PREDICTED).graph
    net = graph.as_networkx()
    assert nx.is_directed_acyclic_graph(net)
    assert {net.nodes[number]["operation"] for number in net} == {*graph.operations}
    delays = {
        (net.nodes[before]["worker"] == net.nodes[after]["worker"]): data["delay"]
        for before, after, data in net.edges(data=True)
    }
    assert delays[True] == 0 < delays[False]


def test_messages_delay_an_order_as_in_a_replay() -> None:
    """Without sums and steps, and with links that messages do not share."""
    compilation = chimera_ir.compile("interleaved", P=4)
    schedule = compilation.schedule
    timing = Timing({"F": 0.011, "B": 0.023, "recompute": 0.0}, MicroBatchBytes(0, 0), 3000, 7000)
    link = Link(alpha=0.001, beta=1e-6)
    cluster = Cluster("c", schedule.header.workers, 2, 0, 0, between=link, within=Link(0.002, 0.0), sums=FREE)
    setting = Setting((StageCosts(0, 0, 0, {1: timing}),) * schedule.header.stages, cluster, 1, 1)
    instance = instance_of(schedule, Measured.of(setting))
    starts = instance.starts(instance.lanes)
    seconds = float(instance.makespan(starts) * instance.tick)
    assert seconds == pytest.approx(replay(compilation.program, setting).seconds, rel=1e-6)
    unlinked = replace(setting, cluster=replace(cluster, between=FREE, within=FREE))
    free = instance_of(schedule, Measured.of(unlinked))
    free_starts = free.starts(free.lanes)
    assert free.makespan(free_starts) * free.tick < seconds


@pytest.mark.parametrize("scheme", ["pipedream", "amdp"])
def test_without_a_flush_the_graph_has_the_updates_that_are_shown(scheme: str) -> None:
    """Its lanes are timed as the simulator times them, and give the stream back."""
    c = chimera_ir.compile(scheme, D=4)
    graph = c.graph
    starts = graph.starts(graph.lanes)
    timed = {f"{timed.operation}": timed.start * c.timeline.tick for lane in c.timeline.lanes for timed in lane}
    assert {f"{o}": start * graph.tick for o, start in zip(graph.instance.operations, starts, strict=True)} == timed
    assert max(graph.peaks(graph.lanes)) == max(c.report.activations) * c.schedule.header.parts
    other = graph.schedule(graph.lanes)
    assert Compilation.of(other).schedule == c.schedule
    with pytest.raises(OptionError, match="no turn of a steady state"):
        graph.schedule([lane[::-1] for lane in graph.lanes])


def test_bounds_are_limits_of_stores() -> None:
    text = "scheme b(D = 2) memory activations <= 2 pipe p { stages s in 0..D on s micros m in 0..3 "
    c = chimera_ir.compile(Source("b.chim", text + "F(m, s) @ 2*m + s B(m, s) @ 2*m + 2*D-1 - s }"))
    assert json.loads(c.graph.json)["stores"][1]["limit"] == 2
    assert c.graph.schedule(c.graph.lanes) == c.schedule


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda lanes: [[] for _ in lanes], "`F m0 s0` is missing"),
        (lambda lanes: [lanes[0][:-1], *lanes[1:]], "`W m3 s0` is missing"),
        (lambda lanes: [[lanes[0][0], *lanes[0][:-1]], *lanes[1:]], "`F m0 s0` is there more than once"),
        (lambda lanes: [lanes[1], lanes[0], *lanes[2:]], "`F m0 s1` of worker 1 is on worker 0"),
        (lambda lanes: lanes[:-1], "there are 3 lanes for 4 workers"),
        (lambda lanes: [*lanes[:-1], [999, *lanes[-1][1:]]], "there is no operation 999, numbers are 0 to 47"),
        (lambda lanes: [*lanes[:-1], [-1, *lanes[-1][:-1]]], "there is no operation -1"),
        (lambda lanes: [*lanes[:-1], [*lanes[-1][:-1], -1]], "there is no operation -1"),
    ],
)
def test_lanes_that_lack_operations_or_have_them_elsewhere_are_refused(
    change: Callable[[list[list[int]]], list[list[int]]], words: str
) -> None:
    graph = chimera_ir.compile("zb_h1", D=4, N=4).graph
    lanes = change([[*lane] for lane in graph.lanes])
    for evaluate in (graph.makespan, graph.starts, graph.peaks, graph.schedule):
        with pytest.raises(OptionError, match=re.escape(words)):
            evaluate(lanes)
