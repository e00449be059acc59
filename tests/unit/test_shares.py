"""Stages that keep a share of M_a: the option, the text, and everything that counts in M_a; bytes do not change."""

import json
from dataclasses import replace
from fractions import Fraction
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner

import chimera_ir
from chimera_ir import Options, library
from chimera_ir.commands.compare_command import compare_command
from chimera_ir.commands.compile_command import compile_command
from chimera_ir.errors import CompileError, OptionError
from chimera_ir.ir.text.printer import show
from chimera_ir.predict.memory_need import bounded
from chimera_ir.predict.setting import Setting
from chimera_ir.profile.cluster import FREE, Cluster
from chimera_ir.profile.costs import ModelProfile, StageCosts
from chimera_ir.profile.write import write_profile
from chimera_ir.source import Source
from tests.timings import stage_timing
from tests.unit.test_layers_of_a_profile import CLUSTER

QUARTER = Options(keep={0: "1/4"})
FREE_ORDER = """
scheme encoder
workers 4
memory activations <= 3
pipe via[i in 0..4] {
  stages s in 0..5 on if s == 0 then i else s - 1
  micros m in 0..2 as 4*m + i
  F(m, s)
  B(m, s)
}
"""
"""The colocated encoder without clocks, in less memory than it needs if every stage keeps 1."""


@pytest.mark.parametrize(
    ("keep", "shares"),
    [
        ({"first": "0.25", "last": 2}, "1/4 1 1 2"),
        ({"1..3": Fraction(1, 3), 0: 0.5}, "1/2 1/3 1/3 1"),
        ({"0..4": "1"}, ""),
        ({}, ""),
    ],
)
def test_stages_are_named_by_number_range_or_end(keep: dict[int | str, object], shares: str) -> None:
    header = chimera_ir.compile("dapple", D=4, N=4, options=Options(keep=keep)).schedule.header  # type: ignore[arg-type]
    assert header.shares == tuple(map(Fraction, shares.split()))


MISTAKES = [
    ("0=0", "the share of stage 0 is greater than 0: a stage without a backward is `frozen`, and keeps nothing"),
    ("0=-1", "the share of stage 0 is an integer, a decimal or a fraction (2, 0.5, 1/3), not '-1'"),
    ("0=much", "the share of stage 0 is an integer, a decimal or a fraction (2, 0.5, 1/3), not 'much'"),
    ("0=1/0", "the share of stage 0 is an integer, a decimal or a fraction (2, 0.5, 1/3), not '1/0'"),
    ("0=1000001", "the share of stage 0 is at most 1,000,000"),
    ("image=1/4", "image=1/4: dapple(D=4, N=4) has the stages 0 to 3"),
    ("4=1/4", "4=1/4: dapple(D=4, N=4) has the stages 0 to 3"),
    ("2..5=1/4", "2..5=1/4: dapple(D=4, N=4) has the stages 0 to 3"),
    ("2..2=1/4", "2..2=1/4: dapple(D=4, N=4) has the stages 0 to 3"),
    ("0=1/1000003", "the shares have the common denominator 1,000,003, more than 1,000,000"),
]


@pytest.mark.parametrize(("given", "said"), MISTAKES)
def test_a_share_that_cannot_be_is_refused(given: str, said: str) -> None:
    stages, _, share = given.partition("=")
    with pytest.raises(OptionError) as error:
        _ = chimera_ir.compile("dapple", D=4, N=4, options=Options(keep={stages: share})).schedule
    assert said in str(error.value)
    result = CliRunner().invoke(compile_command, ["dapple", "D=4", "N=4", "--keep", given])
    assert result.exit_code == 2
    assert said in result.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["0=1/4", "0=1/2"], "--keep 0: given twice"),
        (["0=1/4", "0..2=1/2"], "--keep 0..2=1/2: the share of stage 0 is given twice"),
        (["0=1/4", "first=1/2"], "--keep first=1/2: the share of stage 0 is given twice"),
        (["1/4"], "--keep 1/4: write STAGE=SHARE, as in --keep 0=1/4, or --keep profile alone"),
    ],
)
def test_a_share_is_given_once_and_with_its_stage(words: list[str], said: str) -> None:
    given = [word for text in words for word in ("--keep", text)]
    result = CliRunner().invoke(compile_command, ["dapple", "D=4", "N=4", *given])
    assert result.exit_code == 2
    assert said in result.output


@pytest.mark.parametrize("keep", ["1/4", {0: None}, {0: True}, [(0, 1)]])
def test_what_is_no_share_is_refused(keep: object) -> None:
    with pytest.raises(OptionError, match=r"keep.*write them as in {0: '1/4'}, or 'profile'"):
        Options(keep=keep)  # type: ignore[arg-type]


def test_the_text_of_a_schedule_has_the_shares_and_takes_no_others() -> None:
    compiled = chimera_ir.compile("dapple", D=4, N=4, options=Options(keep={"1..3": "1/4", 3: 2}))
    text = compiled.files["schedule.sir"]
    assert "keep 1/4 1..3\nkeep 2 3..4\n" in text
    again = chimera_ir.compile(Source("dapple.sir", text))
    assert again.files["program.json"] == compiled.files["program.json"]
    assert again.report.activations == compiled.report.activations == (4, Fraction(3, 4), Fraction(1, 2), 2)
    with pytest.raises(OptionError, match="an IR text says itself what stages keep"):
        chimera_ir.compile(Source("dapple.sir", text), options=QUARTER)


def test_what_runs_does_not_depend_on_the_shares() -> None:
    """What a run counts in micro-batches and measures in bytes stays as it is: the scripts, the program, evaluation."""
    plain = chimera_ir.compile("chimera", D=4, N=4).files
    files = chimera_ir.compile("chimera", D=4, N=4, options=QUARTER).files
    changed = {name for name in plain if plain[name] != files[name]}
    assert changed == {"report.json", "schedule.sir", "schedule.html"}
    assert json.loads(files["report.json"])["keep"] == [0.25, 1, 1, 1]


def test_without_a_share_nothing_changes() -> None:
    assert (
        chimera_ir.compile("dapple", D=2, options=Options(keep={0: 1})).files == chimera_ir.compile("dapple", D=2).files
    )


def test_memory_over_time_counts_by_the_shares() -> None:
    """Worker 0 of 1F1B keeps 4 micro-batches of stage 0, a quarter each."""
    compiled = chimera_ir.compile("dapple", D=4, N=8, options=QUARTER)
    assert max(row["activations"] for row in compiled.memory(0)) == 1
    assert {b["activations"] - a["activations"] for a, b in pairwise(compiled.memory(0))} == {0.25, -0.25}
    assert max(row["activations"] for row in compiled.memory(1)) == 3
    counters = [event for event in json.loads(compiled.trace)["traceEvents"] if event["ph"] == "C"]
    assert max(event["args"]["activations in M_a"] for event in counters if event["pid"] == counters[0]["pid"]) == 1


def test_a_scheme_that_is_compiled_by_turns_counts_as_a_whole_one() -> None:
    large = chimera_ir.compile("dapple", D=4, N=4096, options=QUARTER)
    assert large._repeated is not None
    assert large.report.activations == (1, 3, 2, 1) == large.report.baseline.activations


def test_inputs_and_carries_do_not_depend_on_the_shares() -> None:
    """They are messages: of these a stage keeps what it receives."""
    recomputing = Options(keep={0: "1/4"}, recompute=True)
    report = chimera_ir.compile("dapple", D=4, N=8, options=recomputing).report
    assert (report.activations, report.stashed_inputs) == ((Fraction(1, 4), 1, 1, 1), (4, 3, 2, 1))
    sliced = chimera_ir.compile("seq1f1b", D=2, N=2, k=4, options=QUARTER).report
    assert sliced.carries == chimera_ir.compile("seq1f1b", D=2, N=2, k=4).report.carries


def test_the_baseline_has_the_same_model_in_other_stages() -> None:
    """Of 5 stages in 4, the first has the encoder and a quarter of the next one: 4 * (1/4 + 1/4) M_a."""
    base = chimera_ir.compile("colocated", options=QUARTER).report.baseline
    assert base.activations == (2, 3 * Fraction(5, 4), 2 * Fraction(5, 4), Fraction(5, 4))
    chosen = Options(keep={0: "1/4"}, against="gpipe")
    assert chimera_ir.compile("dapple", D=4, N=8, options=chosen).report.baseline.activations == (2, 8, 8, 8)


def test_schemes_side_by_side_have_the_same_model() -> None:
    """interleaved has two stages for each of dapple's, of which the first two keep a quarter of half an M_a."""
    words = ["dapple", "interleaved", "D=2", "N=4", "--keep", "0=1/4", "--json"]
    rows = json.loads(CliRunner().invoke(compare_command, words).output)
    assert [row["report"]["keep"] for row in rows] == [[0.25, 1], [0.25, 0.25, 1, 1]]


def test_a_bound_counts_by_the_shares() -> None:
    """5 stages of which the first keeps 1/4: what holds with it does not hold without it, nor with a larger one."""
    text = library.source("colocated").text.replace("workers P\n", "workers P\nmemory activations <= 5\n")
    source = Source("bounded.chim", text)
    assert max(chimera_ir.compile(source, options=QUARTER).report.activations) == Fraction(9, 2)
    with pytest.raises(CompileError, match=r"activations of 6 micro-batches \(M_a\), more than the declared 5"):
        _ = chimera_ir.compile(source).schedule
    with pytest.raises(CompileError, match=r"of 16/3 micro-batches \(M_a\), (.*\n)*.*bound to 6,"):
        _ = chimera_ir.compile(source, options=Options(keep={0: "2/3"})).schedule


def test_a_list_schedule_keeps_its_bounds_by_the_shares() -> None:
    source = Source("encoder.chim", FREE_ORDER)
    report = chimera_ir.compile(source, options=QUARTER).report
    assert max(report.activations) <= 3
    assert report.makespan < chimera_ir.compile(source).report.makespan
    tight = Source("tight.chim", FREE_ORDER.replace("<= 3", "<= 1"))
    with pytest.raises(CompileError, match="it keeps 5/4 micro-batches"):
        _ = chimera_ir.compile(tight, options=QUARTER).schedule


@pytest.mark.skipif(find_spec("ortools") is None, reason="OR-Tools is not installed: the extra search")
def test_a_search_keeps_its_limit_by_the_shares() -> None:
    """In 2 M_a a worker of 1F1B has room for 2 micro-batches, or for 4 of a quarter each beside one of 1."""
    found = {
        share: chimera_ir.compile("dapple", D=2, N=4, options=Options(search=30, memory={"activations": 1}, keep=keep))
        for share, keep in ((1, {}), (2, {0: "1/2"}))
    }
    assert found[1].improvement.result.proven
    assert found[2].improvement.result.proven
    assert found[2].report.activations == (1, 1)
    # One micro-batch after the other takes 4 * 6; with two of them on stage 0, 1F1B takes 3 * (4 + 1).
    assert (found[1].report.makespan, found[2].report.makespan) == (24, 15)


def test_moves_to_the_host_count_by_the_shares() -> None:
    options = Options(offload="auto", keep={"0..3": "1/4"})
    moved = chimera_ir.compile("dapple", D=4, N=8, options=options)
    plain = chimera_ir.compile("dapple", D=4, N=8, options=Options(offload="auto"))
    report, whole = moved.report, plain.report
    assert moved.schedule.lanes == plain.schedule.lanes
    assert report.activations == (*(peak / 4 for peak in whole.activations[:3]), whole.activations[3])
    assert report.host == (*(peak / 4 for peak in whole.host[:3]), whole.host[3])
    limits = moved.schedule.header.bounds[0].limits
    assert limits[:3] == tuple(Fraction(limit, 4) for limit in plain.schedule.header.bounds[0].limits[:3])
    again = chimera_ir.compile(Source("moved.sir", show(moved.schedule)), options=Options(costs={"B": 2}))
    assert again.report.activations == report.activations


def test_the_graph_for_other_programs_counts_by_the_shares() -> None:
    graph = json.loads(chimera_ir.compile("dapple", D=2, N=2, options=QUARTER).graph.json)
    assert graph["parts"] == 4
    amounts = {row["operation"]: [keeps["at_start"] for keeps in row["keeps"]] for row in graph["operations"]}
    assert (amounts["F m0 s0"], amounts["F m0 s1"]) == ([1], [4])


def test_free_bytes_hold_more_of_a_stage_that_keeps_little() -> None:
    """Each stage has 4 bytes of a micro-batch: 8 free bytes are 2 more of them, of stage 0 3/2 M_a."""
    stage = StageCosts(1, 1, 0, {1: stage_timing(1, 2, 3, 4, 1, 1, 1, halves=(1, 1))})
    setting = Setting((stage,) * 2, Cluster("free", 4096, 1, 1, 0, FREE, FREE, FREE), 1, 1)
    schedule = chimera_ir.compile("dapple", D=2, N=8, options=Options(keep={"first": "3/4"})).schedule
    plain = replace(schedule, header=replace(schedule.header, shares=()))
    assert bounded(plain, setting, (8, 8)).header.bounds[0].limits == (4, 3)
    assert bounded(schedule, setting, (8, 8)).header.bounds[0].limits == (3, 3)


def test_a_profile_tells_the_shares_if_it_is_asked(tmp_path: Path) -> None:
    """Stages that keep 100 and 300 bytes; what is predicted in bytes does not change."""
    timings = stage_timing(1, 2, 3, 100, 10, 10, 0), stage_timing(1, 2, 3, 300, 10, 0, 10)
    profile = ModelProfile("m", {2: tuple(StageCosts(1, 1, 0, {1: timing}) for timing in timings)})
    (tmp_path / "p.toml").write_text(write_profile(profile))
    (tmp_path / "c.toml").write_text(CLUSTER)
    options = Options(profile=tmp_path / "p.toml", cluster=tmp_path / "c.toml", micro_batch_size=1)
    plain = chimera_ir.compile("dapple", D=2, N=4, options=options)
    asked = chimera_ir.compile("dapple", D=2, N=4, options=replace(options, keep="profile"))
    assert plain.schedule.header.shares == ()
    assert asked.schedule.header.shares == (Fraction(334, 1000), 1)
    assert asked.report.activations == (Fraction(668, 1000), 1)
    assert asked.prediction.memory == plain.prediction.memory
    assert asked.report.baseline.activations == asked.report.activations
    given = replace(options, keep="profile", against="gpipe")
    assert chimera_ir.compile("dapple", D=2, N=4, options=given).report.baseline.activations[1] == 4


def test_without_a_profile_it_tells_no_shares() -> None:
    with pytest.raises(OptionError, match="sizes are those of a profile; add profile, cluster and micro_batch_size"):
        chimera_ir.compile("dapple", options=Options(keep="profile"))
    result = CliRunner().invoke(compile_command, ["dapple", "--keep", "profile"])
    assert "--keep profile: sizes are those of a profile; add --profile, --cluster and --micro" in str(result.exception)
    result = CliRunner().invoke(compile_command, ["dapple", "--keep", "profile", "--keep", "0=1"])
    assert "--keep profile: write STAGE=SHARE, as in --keep 0=1/4, or --keep profile alone" in result.output
