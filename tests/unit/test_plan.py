"""``chimera-plan``: what there is, what fits, what is best; by formulas, by enumeration, and against the compiler."""

import json
import os
import shlex
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from chimera_ir import library
from chimera_ir.commands.common import WRONG_COMMAND, WRONG_TEXT
from chimera_ir.planner import rank
from chimera_ir.planner.planning import rank_schemes
from tests.unit.command import Ended, Run

EXAMPLES = Path(__file__).resolve().parents[2] / "docs/examples"

FULL = 10**6
"""Bytes of the activations of one item on one of the hand-made stages."""


def profile(
    depths: tuple[int, ...], sizes: tuple[int, ...], weights: str = "1 MB", recomputing: str = "30 ms", more: str = ""
) -> str:
    """Stages of 10 ms forward and 20 ms backward an item, whatever the depth; messages of 8 bytes."""
    lines = ['[model]\nname = "m"']
    for depth in depths:
        lines.append(f"[[depth]]\nstages = {depth}")
        for stage in range(depth):
            lines.append(f'[[depth.stage]]\nweights = "{weights}"')
            for size in sizes:
                lines.append(f'[[depth.stage.at]]\nmicro_batch_size = {size}\nforward = "{10 * size} ms"')
                again = float(recomputing.split()[0]) * size
                lines.append(f'recomputing = "{again} ms"\nactivations = "{FULL * size} B"\ninput = "8 B"')
                lines += [more, *(['output = "8 B"'] if stage < depth - 1 else [])]
    return "\n".join(lines)


def cluster(workers: int, memory: str = "16 GB", sums: str = "unlimited", per_node: int = 1) -> str:
    return f"""
[cluster]
name = "c"
workers = {workers}
per_node = {per_node}
memory = "{memory}"
[links.between]
latency = "0 s"
bandwidth = "unlimited"
[sum]
latency = "0 s"
bandwidth = "{sums}"
"""


def found(ended: Ended) -> dict[str, Any]:
    assert (ended.status, ended.err) == (0, "")
    return json.loads(ended.out)


def compiled(run: Run, line: str) -> dict[str, Any]:
    """The report of what a line of a plan compiles."""
    words = shlex.split(line)
    assert words[:2] == ["chimera", "compile"]
    return found(run(*words[2:], "--emit", "report"))


def named(*schemes: str) -> list[str]:
    return [f"--scheme={name}" for name in schemes]


def expanded(choices: list[Any]) -> list[Any]:
    """The choices, with those that compile to the same program one by one."""
    return [{**each, **of} for each in choices for of in (each, *each["equal"])]


def test_the_space_is_every_split_that_an_enumeration_finds(plan: Run) -> None:
    """P = 8, a mini-batch of 16: all (D, B, N, W) with W D = P and B N W = 16, and what the schemes require of them."""
    requires: dict[str, Callable[[int, int, int, int], bool]] = {
        "gpipe": lambda D, B, N, f: f == 0,
        "dapple": lambda D, B, N, f: f == 0,
        "gems": lambda D, B, N, f: f == 0,
        "chimera": lambda D, B, N, f: f > 0 and D % (2 * f) == 0,
        "chimera_doubling": lambda D, B, N, f: f == 0 and N >= D and N % D == 0,
        "chimera_halving": lambda D, B, N, f: f == 0 and N >= D and N % D == 0 and B % 2 == 0,
        "pipedream_2bw": lambda D, B, N, f: f == 0 and N >= D,
        "amdp": lambda D, B, N, f: f == 0 and N >= D and N % D == 0,
    }
    asked = profile((2, 4, 8), (1, 2, 4)), cluster(8), "--mini-batch", 16, "--json", "--asynchronous"
    choices = expanded(found(plan(*asked, *named(*requires, "pipedream")))["choices"])
    seen = {(each["scheme"], *map(each.get, "DBNW"), each["settings"].get("f")) for each in choices}
    assert len(seen) == len(choices)
    expected = {
        (name, D, B, N, W, f or None)
        for name, holds in requires.items()
        for D in (2, 4, 8)
        for B in (1, 2, 4)
        for N in range(1, 17)
        for W in range(1, 9)
        for f in range(9)
        if W * D == 8 and B * N * W == 16 and holds(D, B, N, f)
    }
    expected |= {("pipedream", D, B, 1, 8 // D, None) for D in (2, 4, 8) for B in (1, 2, 4) if B * 8 // D <= 16}
    assert seen == expected


def test_the_space_of_schemes_with_several_stages_on_a_worker_is_every_split_of_them(plan: Run) -> None:
    """P = 8, a mini-batch of 16: all (P, v, B, N, W) with W P = 8, B N W = 16 and as many stages as the profile has."""
    names = {"interleaved": "v", "breadth_first": "v", "waves": "w", "bitpipe": "none"}
    result = found(plan(profile((2, 4, 8), (1, 2, 4)), cluster(8), "--mini-batch", 16, "--json", *named(*names)))
    seen = {
        (each["scheme"], *(each["settings"].get(name, 0) for name in ("P", names[each["scheme"]], "N")), each["B"])
        for each in expanded(result["choices"])
    }
    assert len(seen) == len(expanded(result["choices"]))
    stages: dict[str, Callable[[int, int], int]] = {
        "interleaved": lambda P, v: P * v if v > 1 else 0,
        "breadth_first": lambda P, v: P * v if v > 1 else 0,
        "waves": lambda P, w: 2 * P * w,
        "bitpipe": lambda P, none: 2 * P if (P % 2, none) == (0, 0) else 0,
    }
    assert seen == {
        (name, P, v, N, B)
        for name, of in stages.items()
        for P in (1, 2, 4, 8)
        for v in range(9)
        for B in (1, 2, 4)
        for N in range(1, 17)
        if of(P, v) in (2, 4, 8) and B * N * (8 // P) == 16
    }
    assert not any({"g", "hop"} & each["settings"].keys() for each in result["choices"]), "they stay at their defaults"


def makespans(plan: Run, depth: int, count: int, *schemes: str) -> dict[str, float]:
    """T of schemes, or of the whole library, where communication is free, in forwards."""
    asked = profile((depth,), (1,), weights="1 B"), cluster(depth), "--mini-batch", count, "--json", "--set", "f=1"
    choices = found(plan(*asked, *named(*schemes)))["choices"]
    assert [each["T_replay"] for each in choices] == pytest.approx([each["T"] for each in choices])
    return {each["scheme"]: each["T"] * 100 for each in choices}


@pytest.mark.parametrize(
    ("depth", "units", "wins"), [(4, 2, True), (4, 3, True), (4, 4, False), (6, 2, True), (6, 3, False)]
)
def test_plain_1f1b_beats_direct_concatenation_from_three_or_four_units_on(
    plan: Run, depth: int, units: int, wins: bool
) -> None:
    """FACTS.md: 3N + (K+1)(D-2) against 3(N+D-1), communication free."""
    count = units * depth
    times = makespans(plan, depth, count, "chimera", "dapple")
    assert times["chimera"] == pytest.approx(3 * count + (units + 1) * (depth - 2))
    assert times["dapple"] == pytest.approx(3 * (count + depth - 1))
    assert (times["chimera"] < times["dapple"]) is wins


def test_doubling_which_recomputes_loses_to_plain_1f1b(plan: Run) -> None:
    """4N + 2(D-2) against 3(N+D-1), for D = 4 and N = 8."""
    times = makespans(plan, 4, 8)
    assert (times["chimera_doubling"], times["dapple"]) == (pytest.approx(36), pytest.approx(33))


def test_a_plan_says_when_plain_1f1b_is_faster(plan: Run) -> None:
    """D = 4, N = 16: 1F1B takes 57, direct concatenation 58, halving 50."""
    asked = "--scheme", "chimera", "--set", "f=1"
    ended = plan(profile((4,), (1,), weights="1 B"), cluster(4), "--mini-batch", 16, *asked)
    assert "Plain 1F1B with a flush (dapple) is 1.75 % faster than chimera here." in ended.out


def test_where_memory_is_tight_only_what_keeps_little_is_left(plan: Run) -> None:
    """Room for two micro-batches' activations: 1F1B keeps min(D - s, N) = 4 and must recompute, GEMS keeps 1."""
    small = cluster(4, memory="2010 kB")
    asked = "--scheme", "dapple", "--scheme", "gems", "--json"
    result = found(plan(profile((4,), (1,), weights="100 B"), small, "--mini-batch", 8, *asked))
    assert {each["scheme"]: each["recompute"] for each in result["choices"]} == {"dapple": True, "gems": False}
    without = found(plan(profile((4,), (1,), weights="100 B"), small, "--mini-batch", 8, *asked, "--no-recompute"))
    assert [each["scheme"] for each in without["choices"]] == ["gems"]
    (out,) = (each for each in without["left_out"] if each["reason"] == "out of memory")
    assert (out["scheme"], out["B"]) == ("dapple", 1)
    assert out["detail"].startswith("worker 0 needs at least 3.8")


def test_slow_sums_of_gradients_make_for_few_copies(plan: Run) -> None:
    """Stages of D = 2 and 8 cost alike here, so W = 4 is the faster by far, unless 1 MB take 2 (r - 1) / r seconds."""
    model, asked = profile((2, 8), (1,)), ("--mini-batch", 32, "--scheme", "dapple", "--json")
    fast = found(plan(model, cluster(8), *asked))["choices"]
    slow = found(plan(model, cluster(8, sums="1 MB/s"), *asked))["choices"]
    assert [each["W"] for each in fast] == [4, 1]
    assert [each["W"] for each in slow] == [1, 4]
    assert slow[1]["T"] - fast[0]["T"] == pytest.approx(2 * 3 / 4)


def test_the_greedy_rule_takes_the_largest_micro_batch_that_fits_and_fills_the_pipelines(plan: Run) -> None:
    """A mini-batch of 32 on D = 4: B = 8 has N = 4 = D, B = 16 has less; with room for 17 items B = 8 does not fit."""
    model = profile((4,), (1, 2, 4, 8, 16), weights="100 B")
    asked = "--mini-batch", 32, "--scheme", "dapple", "--greedy", "--json"
    assert [each["B"] for each in found(plan(model, cluster(4), *asked))["choices"]] == [8]
    result = found(plan(model, cluster(4, memory="17 MB"), *asked))
    assert [(each["B"], each["recompute"]) for each in result["choices"]] == [(4, False)]
    (out,) = (each for each in result["left_out"] if each["reason"] == "out of memory")
    assert out["B"] == 8
    everything = found(plan(model, cluster(4), *asked[:-2], "--json"))
    assert sorted(each["B"] for each in everything["choices"]) == [1, 2, 4, 8, 16]


@pytest.mark.parametrize(
    "asked",
    [
        ("--scheme", "chimera", "--set", "f=2"),
        ("--scheme", "chimera_halving"),
        ("--scheme", "chimera", "--recompute", "--sync", "lazy", "--set", "f=1"),
        ("--scheme", "pipedream"),
        ("--scheme", "pipedream_2bw", "--recompute"),
    ],
    ids=" ".join,
)
def test_the_compile_line_compiles_just_what_was_predicted(plan: Run, run: Run, asked: tuple[str, ...]) -> None:
    result = found(plan(profile((4,), (2,)), cluster(8, sums="100 MB/s"), "--mini-batch", 32, "--json", *asked))
    best, report = result["choices"][0], compiled(run, result["commands"][0])
    prediction = report["prediction"]
    assert (best["T"], best["memory"]) == (pytest.approx(prediction["T"]), prediction["memory"])
    assert best["mini_batch"] == best["B"] * report["micro_batches"] * best["W"]
    assert {key: report["parameters"][key] for key in best["settings"]} == best["settings"]
    assert any(report["stashed_inputs"]) is best["recompute"]


def test_the_torchrun_line_fills_the_nodes(plan: Run) -> None:
    asked = "--mini-batch", 8, "--scheme", "dapple", "--json"
    line = found(plan(profile((4,), (1,)), cluster(8, per_node=4), *asked))["commands"][1]
    assert line.startswith("torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 --nproc-per-node=4 ")
    line = found(plan(profile((4,), (1,)), cluster(8, per_node=8), *asked, "--layout", "replica"))["commands"][1]
    options = "--model MODEL.py --micro-batch-size 1 --layout replica"
    assert line == f"torchrun --nproc-per-node=8 dapple.out/train.py {options}"


@pytest.mark.parametrize(
    ("workers", "depth", "copies", "per_node", "start"),
    [
        (10, 4, 2, 10, "--nproc-per-node=8 "),
        (10, 4, 2, 5, "--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 --nproc-per-node=4 "),
        (13, 4, 3, 4, "--nnodes=3 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 --nproc-per-node=4 "),
        (7, 3, 2, 4, "--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 --nproc-per-node=3 "),
        (11, 3, 3, 8, "--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 --nproc-per-node=8 "),
        (12, 4, 3, 12, "--nproc-per-node=12 "),
        (3, 2, 1, 3, "--nproc-per-node=2 "),
    ],
)
def test_depths_that_do_not_divide_the_workers_leave_some_idle(
    plan: Run, workers: int, depth: int, copies: int, per_node: int, start: str
) -> None:
    """1F1B of D stages, N = 4: (N + D - 1) slots of 30 ms for the items of W copies."""
    asked = profile((depth,), (1,), weights="8 B"), cluster(workers, per_node=per_node), "--mini-batch", 4 * copies
    result = found(plan(*asked, *named("dapple"), "--json"))
    (best,) = result["choices"]
    assert (best["W"], best["D"], best["N"]) == (copies, depth, 4)
    idle = workers - copies * depth
    assert best["idle"] == idle
    assert best["throughput"] == pytest.approx(4 * copies / ((4 + depth - 1) * 0.03), rel=1e-6)
    compiled, started = result["commands"]
    assert f" --copies {copies} " in compiled
    assert started.startswith(f"torchrun {start}")
    assert ("--nproc-per-node=1" in started.partition("#")[2]) is (copies * depth == 9)
    out = plan(*asked, *named("dapple")).out
    said = f"{idle} of {workers} workers {'stays' if idle == 1 else 'stay'} idle: a copy takes {depth}, and "
    assert (said in out, f" {idle} idle " in out) == (idle > 0, idle > 0)


def test_idle_workers_are_ranked_beside_configurations_that_use_all(plan: Run) -> None:
    """Ten workers: two copies of four stages are 2 N / (N + 3) items in 30 ms, five copies of two stages 5 N / (N + 1).

    The stages of every depth take as long, so that four stages are twice the work of two.
    """
    asked = profile((2, 4), (1,), weights="8 B"), cluster(10), "--mini-batch", 40, *named("dapple", "gpipe")
    choices = found(plan(*asked, "--json"))["choices"]
    speeds = [choice["throughput"] for choice in choices]
    assert speeds == sorted(speeds, reverse=True)
    assert {(choice["D"], choice["W"], choice["idle"]) for choice in choices} == {(2, 5, 0), (4, 2, 2)}
    assert "idle:" not in plan(*asked).out


def test_close_choices_are_called_close(plan: Run) -> None:
    """GPipe and 1F1B take the same time, GEMS (2D + 1) N + D - 1 = 75 against 33."""
    asked = "--mini-batch", 8, "--scheme", "dapple", "--scheme", "gems", "--scheme", "gpipe"
    ended = plan(profile((4,), (1,), weights="1 B"), cluster(4), *asked)
    assert "The first 2 rows are equally fast: measure them." in ended.out
    assert [line.split()[1] for line in ended.out.splitlines() if "+127 %" in line] == ["gems"]


def test_what_was_asked_for_is_replayed_before_the_baseline(plan: Run) -> None:
    """The baseline has more and faster configurations than gems; of its own it gets one replay, to compare with."""
    result = found(plan(profile((4, 8), (1, 2, 4)), cluster(64), "--mini-batch", 256, "--scheme", "gems", "--json"))
    replayed = [each["T_replay"] is not None for each in result["choices"]]
    assert sum(replayed) >= 2
    assert replayed == sorted(replayed, reverse=True), "a time of the replay is not ranked among those of equation 1"
    assert result["baseline"]["T_replay"] is not None


def test_the_order_is_that_of_throughput_and_asynchronous_schemes_are_told_apart(plan: Run) -> None:
    asked = "--mini-batch", 8, "--scheme", "dapple", "--scheme", "pipedream", "--json"
    result = found(plan(profile((4,), (1, 2)), cluster(4), *asked))
    rates = [each["throughput"] for each in result["choices"]]
    assert rates == sorted(rates, reverse=True)
    (note,) = (each for each in result["notes"] if "has no flush" in each)
    assert note.startswith("pipedream")
    assert note.endswith("the first with a flush is number 3, dapple")
    without = found(plan(profile((4,), (1, 2)), cluster(4), *asked, "--synchronous-only"))
    assert [each for each in result["choices"] if not each["asynchronous"]] == without["choices"]


@pytest.mark.parametrize("files", [("plan.profile.toml", 256), ("layers.profile.toml", 32)])
def test_what_is_not_replayed_cannot_be_faster_than_the_first(
    files: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is that of all replays, also where equation 1 had only two replayed; no replay is below its bound."""
    name, items = files
    asked = {"profile": EXAMPLES / name, "cluster": EXAMPLES / "small.cluster.toml", "mini_batch": items, "workers": 8}
    monkeypatch.setattr(rank, "REPLAYED_OPERATIONS", 300)
    few = rank_schemes("dapple", "chimera", "waves", "zb_h1", "gpipe", **asked)  # type: ignore[arg-type]
    monkeypatch.setattr(rank, "REPLAYED_OPERATIONS", 10**9)
    monkeypatch.setattr(rank, "REPLAYED", 10**9)
    full = rank_schemes("dapple", "chimera", "waves", "zb_h1", "gpipe", **asked)  # type: ignore[arg-type]
    assert any(judged.replayed is None for judged in few.choices)
    assert all(judged.least <= judged.seconds * (1 + 1e-9) for judged in full.choices)
    assert few.choices[0].seconds == full.choices[0].seconds
    assert not rank.contenders(few.choices)


@pytest.mark.parametrize(("latency", "bandwidth"), [("12 us", "1 GB/s"), ("1 ms", "0.1 GB/s")])
@pytest.mark.parametrize("per_node", [2, 4])
def test_where_nodes_are_far_apart_no_replay_is_faster_than_the_first(
    latency: str, bandwidth: str, per_node: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is the best of all replays, also where only small configurations are replayed before the bound is."""
    within = '[links.within]\nlatency = "5 us"\nbandwidth = "10 GB/s"\n[links.between]'
    far = cluster(8, per_node=per_node).replace("[links.between]", within, 1)
    far = far.replace('latency = "0 s"\nbandwidth = "unlimited"', f'latency = "{latency}"\nbandwidth = "{bandwidth}"')
    (tmp_path / "far.toml").write_text(far, encoding="utf-8")
    asked = {"profile": EXAMPLES / "plan.profile.toml", "cluster": tmp_path / "far.toml", "mini_batch": 64}
    schemes = "dapple", "gpipe", "eager_1f1b", "chimera", "waves", "interleaved", "breadth_first"
    monkeypatch.setattr(rank, "REPLAYED_OPERATIONS", 40)
    few = rank_schemes(*schemes, **asked)  # type: ignore[arg-type]
    monkeypatch.setattr(rank, "REPLAYED_OPERATIONS", 10**9)
    monkeypatch.setattr(rank, "REPLAYED", 10**9)
    full = rank_schemes(*schemes, **asked)  # type: ignore[arg-type]
    assert all(judged.replayed is not None for judged in full.choices)
    assert few.choices[0].seconds == full.choices[0].seconds == min(judged.seconds for judged in full.choices)


def test_a_plan_says_if_what_was_not_replayed_may_be_faster(plan: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank, "REPLAYED_OPERATIONS", 300)
    monkeypatch.setattr(rank, "CONTENDING_OPERATIONS", 0)
    model, on = ((EXAMPLES / name).read_text() for name in ("plan.profile.toml", "small.cluster.toml"))
    ended = plan(model, on, "--mini-batch", 256)
    assert "of them may be faster, beyond" in " ".join(ended.out.split())


def test_several_processes_say_what_one_says(plan: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same order, with everything that was left out."""
    asked = profile((2, 4), (1, 2, 4)), cluster(8, memory="12 MB"), "--mini-batch", 32
    asked += "--json", "--asynchronous", *named("chimera", "chimera_halving", "dapple", "pipedream")
    monkeypatch.setattr(rank, "_ALONE", 10**9)
    alone = found(plan(*asked))
    monkeypatch.setattr(rank, "_ALONE", 1)
    started: list[int] = []

    class Seen(ProcessPoolExecutor):
        def __init__(self, count: int, **rest: Any) -> None:
            started.append(count)
            super().__init__(count, **rest)

    monkeypatch.setattr(rank, "ProcessPoolExecutor", Seen)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    assert found(plan(*asked)) == alone
    assert started == [3]
    assert {"out of memory", "no such split"} <= {*alone["left_out_by_reason"]}


def test_what_fits_fits_to_the_byte(plan: Run) -> None:
    """PipeDream's versions take room where one copy would have fitted."""
    asked = profile((4,), (1, 2, 4), weights="2 MB"), cluster(8, memory="18 MB"), "--mini-batch", 16
    asked += "--json", "--asynchronous", *named("amdp", "chimera", "dapple", "pipedream", "zb_h1")
    few, all_of_them = (found(plan(*asked, "--top", count)) for count in (1, 1000))
    assert max(max(each["memory"]) for each in all_of_them["choices"]) <= all_of_them["memory_available"]
    assert few == all_of_them
    assert "out of memory" in few["left_out_by_reason"]


GROUPED = """\
scheme grouped(D = 2)
workers D
update every 12
pipe p {
  stages s in 0..D on s
  micros m in 0.. by 6
  reads version max(0, m/12 - 3)
  F(m..m+6, s) @ 1024*(3*(m/6) + s) + s
  B(m..m+6, s) @ 1024*(3*(m/6) + 3 - s) + 128 + s
}
"""


@pytest.mark.parametrize("top", [1, 10])
def test_what_misses_by_a_byte_recomputes(plan: Run, tmp_path: Path, top: int) -> None:
    """Whatever is on its way in a stream of large messages."""
    (tmp_path / "grouped.chim").write_text(GROUPED)
    asked = "--mini-batch", 24, "--scheme", "grouped.chim", "--scheme", "dapple", "--json", "--top", 10
    (roomy,) = (
        each for each in found(plan(profile((2,), (1,)), cluster(2), *asked))["choices"] if each["asynchronous"]
    )
    assert not roomy["recompute"]
    tight = cluster(2, memory=f"{max(roomy['memory']) - 1} B")
    result = found(plan(profile((2,), (1,)), tight, *asked[:-1], top))
    (again,) = (each for each in result["choices"] if each["asynchronous"])
    assert again["recompute"]
    assert max(again["memory"]) < max(roomy["memory"])


def test_a_scheme_of_ones_own_is_verified_and_ranked(plan: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.chim").write_text(library.source("dapple").text.replace("scheme dapple", "scheme mine"))
    result = found(plan(profile((4,), (1,)), cluster(4), "--mini-batch", 8, "--scheme", "mine.chim", "--json"))
    assert [each["scheme"] for each in result["choices"]] == ["mine.chim"]
    assert result["commands"][0].startswith("chimera compile mine.chim D=4 N=8 ")
    colliding = library.source("dapple").text.replace("@ 2*m + 2*D-1 - s", "@ 2*m + 2*D - s")
    (tmp_path / "mine.chim").write_text(colliding)
    ended = plan(profile((4,), (1,)), cluster(4), "--mini-batch", 8, "--scheme", "mine.chim")
    assert ended.status == WRONG_TEXT
    assert "refused by the scheme" in ended.out


IR = Path(__file__).resolve().parent.parent / "golden" / "one_direction_D2_N2.sir"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--mini-batch", 8, "--scheme", "dappel"), "did you mean dapple?"),
        (("--mini-batch", 8, "--set", "Q=1"), "no scheme has such a parameter; there are "),
        (("--mini-batch", 8, "--set", "hpo=1"), "no scheme has such a parameter; did you mean hop?"),
        (("--mini-batch", 8, "--workers", 9), "the cluster c has 8"),
        (("--mini-batch", 8, "--workers", 6), "a node has 4"),
        (("--mini-batch", 8, "--choose", 999), "--choose 999: there are only "),
        (("--mini-batch", 8, "--error", "nan"), "Invalid value for '--error': nan is no finite number."),
        (("--mini-batch", 8, "--tied", "0"), "--tied 0: write two stages or more"),
        ((), "Missing option '--mini-batch'"),
        (("--mini-batch", 8, "--scheme", IR), "no parameters to choose"),
    ],
)
def test_a_command_line_that_cannot_be_meant_is_refused(plan: Run, arguments: tuple[object, ...], said: str) -> None:
    plan(profile((2,), (1,)), cluster(8, per_node=4), *arguments).assert_refused(WRONG_COMMAND, said)


def test_a_profile_or_cluster_with_mistakes_gets_their_diagnostics(plan: Run) -> None:
    ended = plan(profile((2,), (1,), weights="1"), cluster(8).replace("workers = 8", ""), "--mini-batch", 8)
    ended.assert_refused(WRONG_TEXT, "error[CH7", "m.toml", "c.toml")


def test_where_nothing_fits_it_is_told_why(plan: Run) -> None:
    ended = plan(profile((9,), (1,)), cluster(8), "--mini-batch", 7, "--scheme", "dapple")
    assert (ended.status, ended.err) == (WRONG_TEXT, "")
    assert "No configuration is left." in ended.out
    assert "it takes 9 workers, and there are 8" in ended.out
    ended = plan(profile((8,), (2,)), cluster(8), "--mini-batch", 7, "--scheme", "dapple")
    assert "the number of items, 7, is no multiple of W B = 2" in ended.out
    asked = "--mini-batch", 64, "--scheme", "dapple", "--max-operations", 100
    assert "too many operations" in plan(profile((8,), (1,)), cluster(8), *asked).out
