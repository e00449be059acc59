"""Splits that a plan chooses for a profile of layers, beside a plan of every split as a profile of stages."""

import shlex
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

import chimera_ir
from chimera_ir import library
from chimera_ir.commands.common import WRONG_COMMAND, WRONG_TEXT
from chimera_ir.compilation import Compilation
from chimera_ir.errors import TextError
from tests.repeatable import also
from tests.unit.command import Run
from tests.unit.test_plan import cluster, compiled, found

SIZE = 2
Layer = tuple[int, int, int]
"""Milliseconds of a forward, megabytes of weights and of activations, of a micro-batch of two items."""

EVEN: tuple[Layer, ...] = ((1, 1, 1),) * 6
ENDS: tuple[Layer, ...] = ((1, 40, 1), (10, 10, 30), (10, 10, 30), (10, 10, 30), (10, 10, 30), (25, 40, 20))
LATE: tuple[Layer, ...] = ((1, 1, 90), (1, 1, 70), (9, 1, 5), (9, 1, 5), (9, 1, 5), (9, 1, 5))


def parts(table: str, rows: Sequence[Layer]) -> list[str]:
    """Stages or layers; all gradients are as large as the weights, backwards twice as long as forwards."""
    lines = []
    for number, (forward, weights, activations) in enumerate(rows):
        lines += [f'[[{table}]]\nweights = "{weights} MB"', f"[[{table}.at]]\nmicro_batch_size = {SIZE}"]
        lines += [f'forward = "{forward} ms"\nactivations = "{activations} MB"\ninput = "0 B"']
        lines += ['output = "0 B"'] if number < len(rows) - 1 else []
    return lines


def of_layers(rows: Sequence[Layer]) -> str:
    return "\n".join(['[model]\nname = "m"', *parts("layer", rows)])


def of_stages(rows: Sequence[Layer], split: Sequence[int]) -> str:
    ranges = [rows[first:end] for first, end in zip(split, (*split[1:], len(rows)), strict=True)]
    summed = [tuple(map(sum, zip(*held, strict=True))) for held in ranges]
    return "\n".join(['[model]\nname = "m"', f"[[depth]]\nstages = {len(split)}", *parts("depth.stage", summed)])  # type: ignore[arg-type]


def asked(plan: Run, model: str, workers: int, memory: str, scheme: str, *more: str) -> Any:
    ended = plan(model, cluster(workers, memory), "--mini-batch", 16, "--json", "--scheme", scheme, *more)
    return found(ended)["choices"] if ended.status == 0 else []


@pytest.mark.parametrize(
    ("workers", "items", "depths"),
    [(8, 48, {1, 2, 4, 8}), (10, 60, {1, 2, 3, 4, 5, 6, 8}), (7, 84, {1, 2, 3, 4, 6, 7}), (3, 12, {1, 2, 3, 6})],
)
def test_depths_that_leave_workers_idle_are_tried_if_fewer_stages_have_more_layers(
    plan: Run, workers: int, items: int, depths: set[int]
) -> None:
    """Of 8 layers and less than a quarter of the workers; twice each depth is for two stages on a worker."""
    model = of_layers(((1, 1, 1),) * 8)
    asked = "--mini-batch", str(items), "--json", "--scheme", "dapple", "--scheme", "interleaved", "--set", "v=2"
    choices = found(plan(model, cluster(workers), *asked))["choices"]
    assert {choice["D"] for choice in choices} == depths
    assert all(choice["workers"] * choice["W"] + choice["idle"] == workers for choice in choices)


@pytest.mark.parametrize("scheme", also(["dapple"], ["gpipe"]))
@pytest.mark.parametrize("recomputation", ["--recompute", "--no-recompute"])
@pytest.mark.parametrize("memory", ["10 GB", "330 MB", "230 MB", "180 MB"])
@pytest.mark.parametrize("rows", [EVEN, ENDS, LATE])
def test_no_other_split_that_fits_has_a_faster_slowest_stage(
    plan: Run, scheme: str, recomputation: str, memory: str, rows: tuple[Layer, ...]
) -> None:
    """Each worker has one stage, and messages take no bytes: so what a split needs is known without compiling."""
    options = ("--set", "D=3", recomputation)
    choices = asked(plan, of_layers(rows), 3, memory, scheme, *options)
    fitting = {
        (0, *rest): others[0]
        for rest in combinations(range(1, len(rows)), 2)
        if (others := asked(plan, of_stages(rows, (0, *rest)), 3, memory, scheme, *options))
    }
    assert bool(choices) == bool(fitting)
    if choices:
        split = tuple(choices[0]["split"])
        assert choices[0]["T"] == pytest.approx(fitting[split]["T"], rel=1e-9), "the time is that of the split"
        slowest = {
            other: max(sum(row[0] for row in rows[a:b]) for a, b in zip(other, (*other[1:], len(rows)), strict=True))
            for other in fitting
        }
        assert slowest[split] == min(slowest.values())


def test_memory_moves_layers_away_from_where_most_micro_batches_wait(plan: Run) -> None:
    """By time alone the first of two stages of 1F1B has four layers; it keeps two micro-batches, the last keeps one."""
    (roomy, *_) = asked(plan, of_layers(LATE), 2, "10 GB", "dapple", "--no-recompute", "--set", "D=2")
    assert roomy["split"] == [0, 4]
    (tight, *_) = asked(plan, of_layers(LATE), 2, "340 MB", "dapple", "--no-recompute", "--set", "D=2")
    assert tight["split"] == [0, 3]


def test_a_declared_bound_in_bytes_moves_layers_away_from_the_worker_that_it_leaves_little(plan: Run) -> None:
    options = ("mine.chim", "--no-recompute", "--set", "D=2")
    splits = []
    for room in ("10000", "if w == 0 then 340 else 10000", "if w == 1 then 100 else 10000", "340"):
        text = library.source("dapple").text.replace("scheme dapple", "scheme mine")
        bounded = text.replace("pipe down", f"memory bytes on w <= ({room}) * MB\npipe down", 1)
        Path("mine.chim").write_text(bounded, encoding="utf-8")
        splits.append(asked(plan, of_layers(LATE), 2, "10 GB", *options)[0]["split"])
    assert splits == [[0, 4], [0, 3], [0, 4], [0, 3]]


def test_a_compilation_has_the_fastest_split_that_keeps_a_declared_bound_in_bytes(tmp_path: Path) -> None:
    """By time alone the first stage has four layers, and needs 352 MB; with three it needs 339 MB."""
    model, on, text = (tmp_path / name for name in ("m.toml", "c.toml", "mine.chim"))
    model.write_text(of_layers(LATE), encoding="utf-8")
    on.write_text(cluster(2, "10 GB"), encoding="utf-8")

    def bounded(room: str, split: Sequence[int] | None = None) -> Compilation:
        bound = f"memory bytes on w <= ({room}) * MB"
        text.write_text(library.source("dapple").text.replace("pipe", f"{bound}\npipe", 1), encoding="utf-8")
        options = chimera_ir.Options(profile=model, cluster=on, micro_batch_size=SIZE, split=split)
        return chimera_ir.compile(text, options=options, D=2, N=8)

    def split(compilation: Compilation) -> tuple[int, ...] | None:
        assert compilation.forecast
        return compilation.forecast.split_of(compilation.schedule.header)

    def fullest(compilation: Compilation) -> int:
        assert compilation.prediction
        return max(need.total for need in compilation.prediction.memory)

    free, tight = bounded("10000"), bounded("340")
    assert [split(free), split(bounded("if w == 1 then 100 else 10000")), split(tight)] == [(0, 4), (0, 4), (0, 3)]
    assert (fullest(free), fullest(tight)) == (352_000_000, 339_000_000)
    assert tight.report.makespan > free.report.makespan
    with pytest.raises(TextError, match="worker 0 needs 352,000,000 bytes, more than the declared 340,000,000"):
        _ = bounded("340", [0, 4]).program
    with pytest.raises(TextError, match="CH413"):
        _ = bounded("10").program


def test_the_stages_of_a_worker_fit_together(plan: Run) -> None:
    """Two stages are on each worker of Chimera: with less memory than the first split needs there is another one."""
    options = ("chimera", "--no-recompute", "--set", "D=4", "--set", "f=1")
    (roomy, *_) = asked(plan, of_layers(ENDS), 4, "10 GB", *options)
    (tight, *_) = asked(plan, of_layers(ENDS), 4, f"{max(roomy['memory']) - 1} B", *options)
    assert tight["split"] != roomy["split"]
    assert max(tight["memory"]) < max(roomy["memory"])


def test_depths_are_divisors_of_the_workers_and_twice_as_many_unless_they_are_fixed(plan: Run) -> None:
    model = of_layers(EVEN)
    assert {choice["D"] for choice in asked(plan, model, 4, "16 GB", "dapple")} == {1, 2, 4}
    assert {choice["D"] for choice in asked(plan, model, 2, "16 GB", "interleaved")} == {2, 4}
    assert {choice["D"] for choice in asked(plan, model, 3, "16 GB", "dapple", "--set", "D=3")} == {3}


def test_the_lines_compile_and_train_with_the_split_that_was_predicted(plan: Run, run: Run) -> None:
    model, on = of_layers(ENDS), cluster(4, "700 MB")
    result = found(plan(model, on, "--mini-batch", 16, "--json", "--scheme", "dapple", "--set", "D=2"))
    compiling, training = result["commands"]
    split = ",".join(map(str, result["choices"][0]["split"]))
    assert compiling.endswith(f" --split {split}")
    assert training.endswith(f" --split {split}")
    report = compiled(run, compiling)
    assert report["prediction"]["T"] == result["choices"][0]["T"]
    assert report["prediction"]["memory"] == result["choices"][0]["memory"]


def test_one_stage_that_fits_and_is_fastest_is_said_to_be_no_pipeline(plan: Run) -> None:
    """Without bubbles and with sums that cost nothing, data parallelism is as fast as can be."""
    ended = plan(of_layers(EVEN), cluster(2), "--mini-batch", 16, "--scheme", "dapple")
    assert ended.out.startswith("Run data parallelism (as dapple): 2 copies (W) of the whole model, ")
    ended = plan(of_layers(EVEN), cluster(2), "--mini-batch", 16, "--scheme", "dapple", "--set", "D=2")
    assert "No pipeline" not in ended.out


def test_one_stage_of_tied_ends_is_no_pipeline_and_its_lines_compile(plan: Run, run: Run) -> None:
    """In one stage what is tied is one parameter, and the schedule knows no tie."""
    model, on = of_layers(EVEN), cluster(2)
    result = found(plan(model, on, "--mini-batch", 16, "--scheme", "dapple", "--tied", "first,last", "--json"))
    assert {choice["D"] for choice in result["choices"]} == {1, 2}
    assert result["choices"][0]["D"] == 1
    assert " --tied first,last" in result["commands"][0]
    assert compiled(run, result["commands"][0])


def test_what_an_operation_costs_makes_one_stage_of_all_layers_faster(plan: Run) -> None:
    """Six layers of 1 ms forward and 2 backward, of which 0.5 ms each are an operation's.

    One stage takes 6 + 12 - 5 ms for a micro-batch, of which an update has eight. Of two workers each computes four
    of them without a bubble; in two stages all eight take 3 + 6 - 2 ms on each, and one more for the bubble.
    """
    operation = '[operation]\nforward = "0.5 ms"\nbackward = "0.5 ms"\n'
    model = of_layers(EVEN).replace("[[layer]]", f"{operation}[[layer]]", 1)
    times = {
        choice["D"]: choice["T"]
        for choice in asked(plan, model, 2, "16 GB", "dapple", "--no-recompute")
        if choice["W"] * choice["D"] == 2
    }
    assert times == pytest.approx({1: 4 * 0.013, 2: 9 * 0.007})


def of_a_split(text: str) -> str:
    return of_stages(EVEN, (0, 2)).replace("stages = 2", f'stages = 2\nsplit = "{text}"')


def test_stages_that_were_measured_of_a_split_are_compiled_and_started_with_it(plan: Run, run: Run) -> None:
    model, on = of_a_split("0,2"), cluster(2)
    result = found(plan(model, on, "--mini-batch", 16, "--json", "--scheme", "dapple"))
    assert [line.endswith(" --split 0,2") for line in result["commands"]] == [True, True]
    assert result["choices"][0]["split"] == [0, 2]
    words = shlex.split(result["commands"][0])[2:]
    assert run(*words).out.splitlines()[-1].endswith(" --split 0,2 --check")
    refused = run(*words, "--split", "0,3")
    refused.assert_refused(WRONG_COMMAND, "the profile has the costs of stages, and so of one split")


@pytest.mark.parametrize("text", ["0", "0,2,4", "1,2", "0,0", "0,x", "2,0", ""])
def test_what_is_no_split_into_these_stages_is_an_error_of_the_profile(plan: Run, text: str) -> None:
    ended = plan(of_a_split(text), cluster(2), "--mini-batch", 16)
    ended.assert_refused(WRONG_TEXT, "`split` is out of range", "first layer of each of the 2 stages, from 0 upwards")


def test_an_even_split_is_taken_where_its_replay_is_faster(plan: Run) -> None:
    """Cut after the first layer the slowest stage is fastest, but each message there takes 100 ms."""
    rows: tuple[Layer, ...] = ((3, 1, 1), (1, 1, 1), (1, 1, 1), (1, 1, 1))
    model = of_layers(rows).replace('output = "0 B"', 'output = "10 MB"', 1)
    slow = cluster(2).replace('bandwidth = "unlimited"', 'bandwidth = "100 MB/s"', 1)
    choices = found(plan(model, slow, "--mini-batch", 16, "--json", "--scheme", "gems"))["choices"]
    assert [choice["split"] for choice in choices if choice["D"] == 2] == [[0, 2]]


FREE = """scheme free(D = 3, N = 4)
workers D
memory activations on w <= 2*(D-w) - 1
pipe p {
  stages s in 0..D on s
  micros m in 0..N
  F(m, s)
  B(m, s)
}
"""


def test_operations_without_clocks_are_ordered_by_the_costs_of_the_split(plan: Run) -> None:
    """Another profile has the stages of the split itself, so their costs are the only ones that can order it."""
    Path("free.chim").write_text(FREE, encoding="utf-8")
    rows = tuple((forward, 1, 1) for forward in (2, 12, 1, 3, 1, 5))
    options = ("free.chim", "--no-recompute", "--set", "D=3")
    (choice, *_) = asked(plan, of_layers(rows), 3, "10 GB", *options)
    assert choice["split"] == [0, 1, 2]
    (other, *_) = asked(plan, of_stages(rows, choice["split"]), 3, "10 GB", *options)
    assert (choice["T"], choice["T_replay"]) == pytest.approx((other["T"], other["T_replay"]), rel=1e-9)
