"""``chimera-compile --profile``: levels that need durations take those of the profile; the report is in seconds."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from chimera_ir import library
from chimera_ir.commands.common import WRONG_COMMAND, WRONG_TEXT
from chimera_ir.cost.durations import COST_LETTERS
from chimera_ir.elaborate.elaborate import Outline
from chimera_ir.verify import verify
from tests.sizes import of_stages
from tests.unit.command import Ended, Run

FILES = "--profile", "m.toml", "--cluster", "c.toml", "--micro-batch-size", "1"
EQUAL = (10, 20), (10, 20), (10, 20), (10, 20)
FAST_MIDDLE = (10, 20), (10, 10), (10, 10), (10, 20)
SLOW_END = (10, 20), (10, 20), (10, 20), (20, 40)

CLUSTER = """
[cluster]
name = "c"
workers = 64
memory = "16 GB"
[links.between]
latency = "0 s"
bandwidth = "unlimited"
[host]
latency = "0 s"
bandwidth = "100 MB/s"
"""


def profile(*depths: tuple[tuple[int, int], ...]) -> str:
    """Stages of so many milliseconds forward and backward."""
    lines = ['[model]\nname = "m"']
    for stages in depths:
        lines.append(f"[[depth]]\nstages = {len(stages)}")
        for stage, (forward, backward) in enumerate(stages):
            lines.append('[[depth.stage]]\nweights = "1 MB"\n[[depth.stage.at]]\nmicro_batch_size = 1')
            lines.append(f'forward = "{forward} ms"\nbackward = "{backward} ms"\nactivations = "1 MB"\ninput = "1 B"')
            lines.append(f'input_gradient = "{backward / 2} ms"\nweight_gradient = "{backward / 2} ms"')
            lines += ['output = "1 B"'] if stage < len(stages) - 1 else []
    return "\n".join(lines)


@pytest.fixture
def measured(run: Run, tmp_path: Path) -> Run:
    """Compiles with a profile of these stages."""
    (tmp_path / "c.toml").write_text(CLUSTER, encoding="utf-8")

    def call(stages: tuple[tuple[int, int], ...], *arguments: object) -> Ended:
        (tmp_path / "m.toml").write_text(profile(stages), encoding="utf-8")
        return run(*arguments, *FILES)

    return call


def reported(ended: Ended) -> dict[str, Any]:
    assert (ended.status, ended.err) == (0, "")
    return json.loads(ended.out)


@pytest.mark.full
@pytest.mark.parametrize("name", library.names())
def test_equal_stages_make_the_report_of_the_unit_costs_in_seconds(run: Run, measured: Run, name: str) -> None:
    sizes = of_stages(name, 4, 4).items()
    asked = name, *(word for size in sizes for word in ("--set", "{}={}".format(*size))), "--emit", "report"
    plain, found = reported(run(*asked)), reported(measured(EQUAL, *asked))
    for report in (plain, found):
        report["times"] = [report["makespan"], report["baseline"].pop("makespan")]
        for figures in (report, report["baseline"]):
            report["times"] += [figures.pop("steady_period"), *figures.pop("spans", ())]
            report["times"] += [*figures.pop("transfers", ()), *figures.pop("hidden_transfers", ())]
        report["times"] += [
            each.pop(key) for each in report["synchronisation"] for key in ("launched", "free", "flush")
        ]
        report["said"] = len(report.pop("remarks")), report.pop("costs"), report.pop("cost_unit")
        report["answers"] = ratios(report.pop("summary"))
    assert found.pop("times") == pytest.approx([time / 100 for time in plain.pop("times")])
    remarks, costs, unit = found.pop("said")
    plain_remarks, _, none = plain.pop("said")
    assert (remarks, unit, none) == (plain_remarks + ("carries" in found), "s", None)
    times = {"F": 0.01, "B": 0.02, "I": 0.01, "W": 0.01, "pair": 0.03, "recompute": 0.01}
    times |= {"offload": 0.01, "reload": 0.01}
    counts = found["critical_path"]
    assert costs == pytest.approx({kind: time for kind, time in times.items() if counts.get(f"C_{kind.lower()}")})
    for key in ("makespan", "prediction"):
        found.pop(key), plain.pop(key, None)
    assert found.pop("answers") == pytest.approx(plain.pop("answers"))
    assert found == plain


def ratios(summary: dict[str, Any]) -> dict[str, float]:
    """The answers that no unit changes: how many times as fast, and the parts of an update that are not zero.

    On a cluster a schedule without a flush waits, for messages too, where it has bubbles without one. One that moves
    memory waits for moves.
    """
    names = {"waiting": "bubbles", "moves_to_the_host": "bubbles"}
    shares: Counter[str] = Counter()
    for part, share in summary["limit"]["shares"].items():
        shares[names.get(part, part)] += share
    return {part: share for part, share in shares.items() if share} | {
        "times as fast": summary["speed"]["times_as_fast"]
    }


def test_a_bound_in_bytes_holds_for_what_is_predicted_and_not_for_a_byte_less(run: Run, measured: Run) -> None:
    """A worker keeps a stage of 1 MB, its gradients, twice in a first backward, and 1 MB for each micro-batch.

    Of the micro-batches that wait it keeps less what was sent.
    """
    scheme, plain = Path("mine.chim"), library.source("dapple").text

    def bounded(limit: str, *more: object) -> Ended:
        scheme.write_text(plain.replace("pipe down", f"memory bytes on w <= {limit}\npipe down", 1), encoding="utf-8")
        return measured(EQUAL, scheme, "--set", "N=8", *more)

    needed = reported(measured(EQUAL, "dapple", "--set", "N=8", "--emit", "report"))["prediction"]["memory"]
    assert [round(size / 1e6) for size in needed] == [7, 6, 5, 4]
    each = "if w == 0 then {} else if w == 1 then {} else if w == 2 then {} else {}"
    assert bounded(each.format(*needed), "--emit", "program").status == 0
    assert bounded("(7 - w)*MB + 100*kB", "--emit", "report").status == 0
    ended = bounded(each.format(*needed[:2], needed[2] - 1, needed[3]), "--emit", "program")
    assert (ended.status, ended.out) == (WRONG_TEXT, "")
    assert f"worker 2 needs {needed[2]:,} bytes, more than the declared {needed[2] - 1:,}" in ended.err
    ended = run(scheme, "--emit", "program")
    assert ended.status == 0
    assert ended.err.startswith("warning[CH423]: this bound in bytes is not checked")


def test_a_sum_is_eager_where_the_measured_backwards_leave_a_bubble(run: Run, measured: Run) -> None:
    """By hand, in tens of ms: P0 ends its last backward of stage 3 at 9, as with F = 1 and B = 2.

    With those, the first backward of stage 0 is there at 6 + 2 + 2 = 10; with middle backwards of 1, at 6 + 1 + 1 = 8.
    """
    compute = [line.split() for line in measured(FAST_MIDDLE, "chimera", "--emit", "program").out.splitlines()]
    first = compute[: compute.index(["worker", "1:"])]
    assert first.index(["all_reduce", "s3"]) > first.index(["B", "m1", "s0"])
    plain = [line.split() for line in run("chimera", "--emit", "program").out.splitlines()]
    assert plain.index(["all_reduce", "s3"]) < plain.index(["B", "m0", "s0"])
    report = reported(measured(FAST_MIDDLE, "chimera", "--emit", "report"))
    launched = {(each["worker"], each["stage"]): each for each in report["synchronisation"]}
    assert launched[0, 3]["launched"] == pytest.approx(0.13)
    assert report["makespan"] == pytest.approx(0.13)


def test_table_and_pictures_are_in_seconds_and_nowhere_in_unit_costs(measured: Run, tmp_path: Path) -> None:
    """1F1B by hand, D = 2 and N = 2, F = 10 and 20, B = 20 and 40: 10 + 20 + 40 + 20 + 40 + 20.

    P1 works 120 of 150 ms, P0 60, the mean is 90: 30 are uneven work, and 30 bubbles.
    """
    ended = measured(((10, 20), (20, 40)), "dapple", "--set", "D=2", "--set", "N=2", "--out", "o")
    assert "F = 10 ms to 20 ms, B = 20 ms to 40 ms" in ended.out
    assert "speed:  150 ms an update" in ended.out
    assert "P1 works 20.0% of the time more than a worker does on average; also bubbles 20.0%" in ended.out
    assert "0 ms" in ended.out
    drawn = (tmp_path / "o" / "timeline.svg").read_text(encoding="utf-8")
    for text in (ended.out, drawn):
        assert "F = 1," not in text
    assert "makespan 150 ms" in drawn
    assert "backward of micro-batch 0 on stage 1, pipe down: 30 ms to 70 ms" in drawn
    assert ">0 ms<" in drawn


def test_the_costs_are_the_means_of_the_critical_path(measured: Run) -> None:
    report = reported(measured(SLOW_END, "chimera", "--emit", "report"))
    path, costs = report["critical_path"], report["costs"]
    assert report["makespan"] == pytest.approx(costs["F"] * path["C_f"] + costs["B"] * path["C_b"])
    assert 0.01 < costs["F"] < 0.02


def test_the_baseline_has_the_times_of_the_same_model(measured: Run, tmp_path: Path) -> None:
    """Two stages a worker: plain 1F1B has two larger ones, with forwards of 20 and 30 ms, backwards of 40 and 60."""
    (tmp_path / "two.chim").write_text(
        "scheme two(D = 4, N = 2) workers 2 pipe p { stages s in 0..D on s % 2  micros m in 0..N "
        "F(m, s) @ 16*m + s  B(m, s) @ 16*m + 15 - s }"
    )
    report = reported(measured(SLOW_END, "two.chim", "--emit", "report"))
    assert report["makespan"] == pytest.approx(2 * 0.15)
    assert report["baseline"]["makespan"] == pytest.approx(0.02 + 2 * (0.03 + 0.06) + 0.04)


def test_costs_and_a_profile_contradict_each_other(measured: Run) -> None:
    for costs in ("F=2", "F=1"):
        measured(EQUAL, "chimera", "--cost", costs).assert_refused(WRONG_COMMAND, "--cost, --profile", "leave one")


@pytest.mark.parametrize("kind", COST_LETTERS)
def test_a_cost_that_no_operation_has_is_said_to_change_nothing(run: Run, kind: str) -> None:
    report = reported(run("chimera", "--cost", f"{kind}=5/3", "--emit", "report"))
    remarks = [remark for remark in report["remarks"] if "--cost" in remark]
    if kind in ("F", "B"):
        assert remarks == []
    else:
        (remark,) = remarks
        assert remark == f"--cost {kind}=5/3 changes nothing: no operation of this schedule is of kind {kind}"


def test_a_profile_that_does_not_fit_is_refused_before_operations_are_made(
    run: Run, measured: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "p.sir").write_text(run("chimera", "--set", "D=2", "--emit", "program").out)

    def never(*_: object) -> None:
        raise AssertionError("operations were looked at")

    monkeypatch.setattr(Outline, "plan", never)
    monkeypatch.setattr(verify, "verify_schedule", never)
    for scheme in (("chimera", "--set", "D=2"), ("p.sir",)):
        measured(EQUAL, *scheme).assert_refused(WRONG_TEXT, "CH717", "2 stages", "depths: 4")
    measured(EQUAL, "chimera", "--copies", "17").assert_refused(WRONG_TEXT, "CH719")
