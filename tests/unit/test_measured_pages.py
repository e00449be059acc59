"""Pages with a profile, and with a second schedule beside the first."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

import chimera_ir
from chimera_ir.compilation import Compilation
from chimera_ir.ir.kinds import KINDS, PAIR
from chimera_ir.page.contents import ShownSchedule, packed
from chimera_ir.predict.replay import Cause, idle, replay
from chimera_ir.predict.setting import Setting
from chimera_ir.profile.cluster import FREE, Cluster, Link
from chimera_ir.profile.costs import RECOMPUTING, StageCosts, Timing
from chimera_runtime.program.kept_bytes import MicroBatchBytes
from tests.documents import unpacked
from tests.node import calls, needs_node
from tests.sizes import on_workers
from tests.unit.test_played_pages import PLAYS, operations_of, tables_of

pytestmark = needs_node

SCHEMES = ("dapple", "chimera", "chimera_doubling", "chimera_halving", "zb_h1", "dualpipe", "pipedream_2bw")
FACTORS = 20


def measured(compilation: Compilation, setting: Setting) -> Mapping[str, Any]:
    """The tables of a compilation with the times of a setting."""
    program = compilation.verified.program
    events = replay(program, setting).events
    shown = ShownSchedule(compilation.verified, events, compilation.report, setting, None)
    return unpacked(packed(shown.tables()))


def setting(name: str, stages: int, shared: bool) -> Setting:
    """Costs that differ from stage to stage, on a small cluster."""
    random = Random(name)

    def stage() -> StageCosts:
        times = {letter: random.uniform(1, 3) for letter in (*KINDS, PAIR.letter)}
        times[RECOMPUTING] = times["B"] + times["recompute"]
        size = random.randint(1, 5)
        return StageCosts(
            0, random.randint(1, 9), 0, {1: Timing(times, MicroBatchBytes(0, 0), size, size)}, step=random.uniform(0, 2)
        )

    links = [Link(random.random() / 4, random.random() / 2, random.random() / 8, shared) for _ in range(3)]
    per_node = 8 if shared else 2  # a worker has a port for each kind of link
    return Setting(tuple(stage() for _ in range(stages)), Cluster("few nodes", 8, per_node, 0, 0, *links), 2, 1)


def scaled(setting: Setting, factors: Mapping[str, float]) -> Setting:
    """A setting whose seconds are multiplied, those of each kind by the factor that its name has."""

    def link(link: Link, factor: float) -> Link:
        return replace(link, alpha=link.alpha * factor, beta=link.beta * factor, overhead=link.overhead * factor)

    def stage(costs: StageCosts) -> StageCosts:
        timing = costs.at[1]
        times = {key: seconds * factors.get(key, 1.0) for key, seconds in timing.times.items()}
        return replace(costs, at={1: replace(timing, times=times)}, step=costs.step * factors.get("step", 1.0))

    cluster, sent = setting.cluster, factors.get("message", 1.0)
    cluster = replace(
        cluster,
        between=link(cluster.between, sent),
        within=link(cluster.within, sent),
        sums=link(cluster.sums, factors.get("sum", 1.0)),
    )
    return replace(setting, stages=tuple(map(stage, setting.stages)), cluster=cluster)


@pytest.mark.parametrize("shared", [False, True])
def test_a_page_with_a_profile_plays_as_the_replay_on_the_cluster(shared: bool, tmp_path: Path) -> None:
    cases, expected = [], []
    for scheme in SCHEMES:
        compilation = chimera_ir.compile(scheme, **on_workers(scheme, 4, 4))
        program = compilation.verified.program
        costs = setting(scheme, program.header.stages, shared)
        tables = measured(compilation, costs)
        random, names = Random(scheme), [slider["name"] for slider in tables["sliders"]]
        factors = [[1.0] * len(names), *([random.uniform(0, 4) for _ in names] for _ in range(FACTORS))]
        cases.append({"schedule": tables, "settings": factors, "asked": ["update", "starts", "ends", "idle"]})
        named = (dict(zip(names, values, strict=True)) for values in factors)
        expected += [replay(program, scaled(costs, values)) for values in named]
    found = [answer for answers in calls(PLAYS, tmp_path, cases) for answer in answers]
    for answer, run in zip(found, expected, strict=True):
        starts, ends = zip(*operations_of(run), strict=True)
        assert answer["starts"] == pytest.approx(starts)
        assert answer["ends"] == pytest.approx(ends)
        assert answer["update"] == pytest.approx(run.seconds)
        for totals, lane in zip(answer["idle"]["totals"], idle(run), strict=True):
            of = {cause: sum(end - start for why, start, end in lane if why is cause) for cause in Cause}
            assert (totals["link"], totals["sum"]) == pytest.approx((of[Cause.MESSAGE], of[Cause.SUM]))
            assert sum(totals.values()) == pytest.approx(sum(of.values()))


def test_a_worker_that_waits_for_a_slow_stage_idles_by_imbalance_for_what_is_above_the_mean(tmp_path: Path) -> None:
    """Two stages whose forwards take 1 and 3 seconds: the longer one is a second above the mean.

    P0  F0 F1 -------------- B0 ======= -------- B1
    P1  ----- F0 ========== B0 F1 ======== B1

    P0 idles from 2 to 6 and from 8 to 11. In these times the forwards of P1 run for 2 and for 1 of their 3 seconds.
    """
    compilation = chimera_ir.compile("dapple", D=2, N=2)
    stages = [
        StageCosts(0, 0, 0, {1: Timing({"F": f, "B": 2, RECOMPUTING: 2}, MicroBatchBytes(0, 0), 0, 0)})
        for f in (1.0, 3.0)
    ]
    alone = Setting(tuple(stages), Cluster("free", 2, 2, 0, 0, FREE, FREE, FREE), 1, 1)
    tables = measured(compilation, alone)
    case = {"schedule": tables, "settings": [[1.0] * len(tables["sliders"])], "asked": ["span", "idle"]}
    ((answer,),) = calls(PLAYS, tmp_path, [case])
    assert answer["span"] == 13
    none = {"fill": 0, "drain": 0, "dependency": 0, "link": 0, "imbalance": 0, "sum": 0, "host": 0}
    first, second = answer["idle"]["totals"]
    assert first == pytest.approx(none | {"dependency": 6, "imbalance": 1})
    assert second == pytest.approx(none | {"fill": 1, "drain": 2})


def test_differences_are_what_the_lanes_of_both_schedules_show(tmp_path: Path) -> None:
    """1F1B and GPipe: the same operations on the same workers, in another order, so that some start later."""
    shown = [chimera_ir.compile(scheme, D=3, N=4) for scheme in ("dapple", "gpipe")]
    tables = [tables_of(compilation) for compilation in shown]
    words = [schedule["operations"]["words"] for schedule in tables]
    matches = [words[1].index(word) for word in words[0]]
    lanes = [[[timed.operation for timed in lane] for lane in each.timeline.lanes] for each in shown]
    follows = [{after: before for lane in of for before, after in pairwise([None, *lane])} for of in lanes]
    starts = [{timed.operation: timed.start for lane in each.timeline.lanes for timed in lane} for each in shown]
    operations = [*chain(*lanes[0])]
    last = len(operations) - 1
    matches[last] = -1  # as if the second schedule had no such operation
    back = [words[0].index(word) for word in words[1]]
    back[words[1].index(words[0][last])] = -1
    (found,) = calls(PLAYS, tmp_path, [{"matches": matches, "back": back, "schedules": tables}])
    assert found["match"] == matches
    assert found["added"] == [words[1].index(words[0][last])]
    assert found["moved"] == [0] * len(operations)
    reordered = [follows[0][operation] != follows[1][operation] for operation in operations[:last]]
    assert any(reordered)
    assert found["reordered"] == [*reordered, False]
    later = [starts[1][operation] - starts[0][operation] for operation in operations[:last]]
    assert any(later)
    assert found["later"] == [*later, 0]
    for total, each in zip(found["totals"], shown, strict=True):
        assert total["span"] == each.report.makespan
        assert total["idleShare"] == pytest.approx(float(each.report.bubble_ratio))
