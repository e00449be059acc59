"""The answer of ``chimera plan``: a recommendation with its reasons, equal configurations once, a row for each name."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chimera_ir import library
from chimera_ir.planner import space
from chimera_ir.planner.planning import rank_schemes
from chimera_ir.planner.rank import by_throughput
from chimera_ir.planner.space import sample
from tests.unit.command import Run
from tests.unit.test_plan import EXAMPLES, cluster, found, profile
from tests.unit.test_planned_splits import EVEN, of_layers

FLUSHING = "--mini-batch", 16


def rows(out: str) -> list[list[str]]:
    """The words of the rows of the first table."""
    lines = out.split(" \u2500", 1)[1].splitlines()[1:]
    return [line.split() for line in lines[: next(n for n, line in enumerate(lines) if not line.strip())]]


def test_a_model_that_fits_one_worker_needs_no_pipeline_where_that_is_fastest(plan: Run) -> None:
    """Two stages of 1F1B on 2 workers, N = 8: (8 + 1) slots for 8 micro-batches, 12.5 % of them bubbles."""
    out = plan(of_layers(EVEN), cluster(2), *FLUSHING, "--scheme", "dapple").out
    answer, figures, fits, pipeline = out.splitlines()[:4]
    assert answer.startswith("Run data parallelism (as dapple): 2 copies (W) of the whole model, 4 micro-batches (N)")
    assert figures.startswith(
        "Predicted: 222.2 items/s, 72 ms for an update; the fullest worker needs 22.89 MiB of 14.9 GiB."
    )
    assert fits == "Your model fits one worker, which needs no pipeline: plain data parallelism is fastest."
    assert pipeline == "The best pipeline, dapple, takes 12.5 % longer (more: 12.5 % on bubbles)."


def test_slow_gradient_sums_are_the_reason_for_a_pipeline(plan: Run) -> None:
    out = plan(of_layers(EVEN), cluster(2, sums="100 MB/s"), *FLUSHING, "--scheme", "dapple").out
    assert out.startswith("Run dapple: 1 copy (W) of 2 stages (D), 8 micro-batches (N) of 2 items (B) in each.")
    (said,) = (line for line in out.splitlines() if line.startswith("Your model fits one worker, but"))
    assert "data parallelism takes " in said
    assert " on gradient sums; less: 11.1 % on bubbles)" in said


@pytest.mark.parametrize("memory", ["20 MB", "23.9 MB"])
@pytest.mark.parametrize("scheme", ["dapple", "chimera", "gems", "interleaved"])
def test_what_plain_data_parallelism_needs_depends_on_the_model_alone(plan: Run, memory: str, scheme: str) -> None:
    """Six layers of 1 MB, their gradients twice in a first backward, and 1 MB of activations of the one micro-batch."""
    out = plan(of_layers(EVEN), cluster(2, memory=memory), *FLUSHING, "--scheme", scheme).out
    assert "Plain data parallelism does not fit a worker: it needs at least 22.89 MiB (D=1, B=2), and there are" in out


def test_plain_data_parallelism_that_was_not_asked_for_is_said_to_fit(plan: Run) -> None:
    out = plan(of_layers(EVEN), cluster(2, memory="24 MB"), *FLUSHING, "--scheme", "chimera").out
    assert "Plain data parallelism was not considered; it needs at least 22.89 MiB (D=1, B=2) and would fit." in out


def test_data_parallelism_that_recomputes_in_pieces_is_not_called_plain(plan: Run) -> None:
    """Recomputation stage by stage keeps the activations of one stage: 15 MB, and 3 MB of two stages or less."""
    asked = "--scheme", "interleaved", "--set", "P=1", "--set", "v=2"
    out = plan(of_layers(EVEN), cluster(2, memory="20 MB"), *FLUSHING, *asked).out
    assert out.startswith("Run data parallelism (as interleaved): 2 copies (W) of the whole model in 2 stages (D), ")
    fits = "Your model fits one worker, which needs no pipeline: data parallelism that recomputes its activations in "
    assert f"{fits}2 pieces is fastest." in out
    assert "plain data parallelism is fastest" not in out


@pytest.mark.parametrize("schemes", [(), ("interleaved_overlap", "gpipe", "dapple")])
def test_the_plainest_data_parallelism_is_compiled_where_others_gain_less_than_the_error(
    plan: Run, schemes: tuple[str, ...]
) -> None:
    """The replay predicts 0.7 % more for two pieces of this model, whose sums start one after the other."""
    model, on = (EXAMPLES / f"{name}.toml" for name in ("cnn.profile", "nodes.cluster"))
    asked = "--mini-batch", 16, "--workers", 2, *(f"--scheme={name}" for name in schemes), "--json"
    result = json.loads(plan(model.read_text("utf-8"), on.read_text("utf-8"), *asked).out)
    first = result["choices"][0]
    assert (first["name"], first["scheme"], first["D"]) == ("data parallelism", "dapple", 1)
    assert result["commands"][0].startswith("chimera compile dapple D=1 N=1 ")
    assert result["recommendation"][0].startswith("run data parallelism (as dapple): 2 copies (W) of the whole model, ")
    assert any(choice["D"] > 1 and choice["throughput"] > first["throughput"] for choice in result["choices"])


@pytest.mark.parametrize(("gain", "is_plain"), [(0.99, True), (1.0, True), (1.09, True), (1.11, False)])
def test_pieces_that_gain_more_than_the_error_go_before_plain_data_parallelism(gain: float, is_plain: bool) -> None:
    model, on = (EXAMPLES / f"{name}.toml" for name in ("cnn.profile", "nodes.cluster"))
    ranked = rank_schemes("dapple", "interleaved_overlap", profile=model, cluster=on, mini_batch=16, workers=2)
    plain = next(judged for judged in ranked.choices if judged.is_plain and judged.replayed)
    pieces = next(judged for judged in ranked.choices if judged.is_alone and judged.choice.stages > 1)
    timed = replace(pieces, replayed=plain.seconds / gain)
    for configurations in ([plain, timed], [timed, plain]):
        assert by_throughput(configurations, library.source("dapple"))[0].is_plain is is_plain


def test_where_nothing_fits_the_least_need_is_said_and_an_example_of_each_reason(plan: Run) -> None:
    ended = plan(of_layers(EVEN), cluster(2, memory="1 MB"), *FLUSHING)
    assert ended.status == 1
    answer, remedy = ended.out.splitlines()[:2]
    assert answer.startswith("No configuration is left: the nearest to fitting needs ")
    assert answer.endswith(" B=2, recompute), and there are 976.6 KiB.")
    assert remedy.startswith("More workers, ")
    reasons = [line.split("   ")[0].strip() for line in ended.out.splitlines() if "=" in line]
    assert "out of memory" in reasons
    assert len({*reasons}) == len(reasons), "one example of each"


def test_the_nearest_to_fitting_is_named_with_its_exact_bytes_and_is_the_example(plan: Run) -> None:
    """Stage 0 of 1F1B: 9 MB, and two micro-batches of 3 MB; with just as many bytes it is the choice."""
    asked = *FLUSHING, "--scheme", "gpipe", "--scheme", "dapple", "--set", "D=2", "--no-recompute"
    out = plan(of_layers(EVEN), cluster(2, memory="14.9 MB"), *asked).out
    assert (
        "nearest to fitting needs 14.31 MiB on its fullest worker (dapple D=2 N=8, B=2), and there are 14.21 MiB" in out
    )
    (example,) = (line for line in out.splitlines() if line.strip().startswith("out of memory"))
    assert " dapple D=2, B=2: " in example
    assert plan(of_layers(EVEN), cluster(2, memory="15 MB"), *asked).out.startswith("Run dapple: ")


def test_a_mini_batch_that_no_micro_batch_divides_is_named_with_the_sizes(plan: Run) -> None:
    ended = plan(profile((2, 4), (4, 8, 16)), cluster(4), "--mini-batch", 7)
    assert ended.out.startswith("No configuration is left: the mini-batch of 7 is no multiple of 4, 8 or 16 (B in")


def test_no_figure_is_wrapped_in_a_terminal_of_80_columns(plan: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = plan(of_layers(EVEN), cluster(4, memory="14 MB"), *FLUSHING, "--recompute").out
    table = out.split(" \u2500", 1)[1].split("\n\n")[0].splitlines()[1:]
    assert max(map(len, table)) <= 80
    assert all(line.rstrip().endswith("iB") for line in table if line.strip()[:1].isdigit())
    assert "recompute" in "".join(table)


def test_recomputation_is_a_reason_and_named_where_a_choice_does_not_fit_without(plan: Run) -> None:
    small = profile((4,), (1,), weights="100 B"), cluster(4, memory="2010 kB")
    ended = plan(*small, "--mini-batch", 8, "--scheme", "dapple", "--scheme", "gems")
    assert ended.out.startswith("Run dapple: ")
    assert "It recomputes activations, because it does not fit without." in ended.out
    (said,) = (line for line in ended.out.splitlines() if line.startswith("The next best, gems,"))
    assert "% on bubbles; less: " in said
    assert "% on recomputation)" in said


@pytest.mark.parametrize("sums", ["unlimited", "20 MB/s"])
def test_what_costs_and_what_saves_time_adds_up_to_the_difference(plan: Run, sums: str) -> None:
    out = plan(profile((4,), (1,)), cluster(4, sums=sums), "--mini-batch", 16, "--scheme", "dapple", "--scheme", "gems")
    (said,) = (line for line in out.out.splitlines() if line.startswith("The next best, gems,"))
    numbers = [float(word) for word in said.replace(",", " ").replace("(", " ").split() if word[0].isdigit()]
    assert numbers[0] == pytest.approx(sum(numbers[1:]), abs=1.5)


def test_on_one_worker_every_scheme_is_data_parallelism_and_one_row(plan: Run) -> None:
    out = plan(of_layers(EVEN), cluster(2), *FLUSHING, "--why").out
    names = [" ".join(row[1:-9]) for row in rows(out)]
    assert sum("data parallelism" in " ".join(row) for row in rows(out)) == 1
    assert len(set(names)) == len(names)


def test_configurations_with_the_same_lanes_are_one_under_the_plainest_name(plan: Run) -> None:
    """One micro-batch: all forwards, then all backwards is 1F1B; the baseline goes before, at as many parameters."""
    model, on = profile((4,), (1,)), cluster(4)
    result = found(plan(model, on, "--mini-batch", 1, "--scheme", "gpipe", "--scheme", "dapple", "--json"))
    (only,) = result["choices"]
    assert (only["scheme"], [of["scheme"] for of in only["equal"]]) == ("dapple", ["gpipe"])
    more = found(plan(model, on, "--mini-batch", 2, "--scheme", "gpipe", "--scheme", "dapple", "--json"))["choices"]
    assert [(each["scheme"], each["equal"]) for each in more] == [("dapple", []), ("gpipe", [])]


def test_a_copy_of_a_scheme_under_another_name_is_no_row_of_its_own(plan: Run) -> None:
    """However its micro-batches are numbered."""
    text = library.source("dapple").text.replace("scheme dapple", "scheme mine")
    Path("mine.chim").write_text(text, encoding="utf-8")
    asked = "--mini-batch", 8, "--scheme", "mine.chim", "--scheme", "dapple", "--json"
    (only,) = found(plan(profile((4,), (1,)), cluster(4), *asked))["choices"]
    assert (only["scheme"], only["equal"]) == ("dapple", [{"scheme": "mine.chim", "settings": {"D": 4, "N": 8}}])


def test_all_shows_what_a_row_for_each_scheme_hides(plan: Run) -> None:
    asked = profile((2, 4), (1, 2)), cluster(4), "--mini-batch", 8, "--scheme", "dapple", "--scheme", "gems"
    few, everything = plan(*asked).out, plan(*asked, "--all").out
    assert [row[1] for row in rows(few)] == ["dapple", "gems"]
    hidden = len(rows(everything)) - 2
    assert f"{hidden} other configurations of the same schemes: --all shows them" in few
    chosen = plan(*asked, "--all", "--choose", 2).out.splitlines()[-2]
    assert shlex.split(chosen)[2] == rows(everything)[1][1]
    assert found(plan(*asked, "--json"))["choices"][1]["scheme"] == rows(everything)[1][1]


def test_what_was_left_out_is_counted_and_listed_where_it_is_asked_for(plan: Run) -> None:
    asked = profile((2, 4), (1,)), cluster(4), "--mini-batch", 8, "--scheme", "dapple", "--scheme", "pipedream"
    asked = *asked, "--synchronous-only"
    assert "Left out: 2 without a flush; --why says which and why." in plan(*asked).out
    listed = plan(*asked, "--why").out
    assert "--asynchronous considers it" in listed
    assert "--why says" not in listed


MANY = """\
scheme many(D = 2, a = 1, b = 1, c = 1) workers D pipe p { stages s in 0..D on s  micros m in 0..8
F(m, s) @ 2*m + s  B(m, s) @ 2*m + 2*D-1 - s }
"""


def test_too_many_values_of_parameters_are_sampled_and_that_is_said(plan: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """D = 4 has 3 divisors, and three further parameters 3 values each: 27; what has another depth does not count."""
    Path("many.chim").write_text(MANY, encoding="utf-8")
    asked = profile((4,), (1,)), cluster(4), "--mini-batch", 8, "--scheme", "many.chim"
    assert "combinations" not in plan(*asked).out
    monkeypatch.setattr(space, "MOST", 27)
    assert "combinations" not in plan(*asked).out
    monkeypatch.setattr(space, "MOST", 10)
    first = plan(*asked)
    said = "or many.chim 10 of 27 combinations of its parameters were tried, spread evenly; fix some with --set"
    assert f"F{said}." in first.out
    assert plan(*asked) == first
    result = found(plan(*asked, "--json"))
    assert f"f{said}" in result["notes"]
    (only,) = result["choices"]
    tried = [tuple(of["settings"].values()) for of in (only, *only["equal"])]
    assert len(tried) == 10
    for parameter in (1, 2, 3):
        assert {values[parameter] for values in tried} == {1, 2, 4}, "every value of every parameter is tried"


@pytest.mark.parametrize("size", [11, 27, 100, 101])
def test_a_sample_has_no_combination_twice_and_leaves_no_value_out(size: int) -> None:
    columns = [list(range(size)), ["a", "b"], [True, False, None]]
    drawn = list(sample(columns, 4 * size))
    assert len({*drawn}) == len(drawn) == 4 * size
    for place, column in enumerate(columns):
        assert {values[place] for values in drawn} == {*column}


def test_the_commands_name_the_model_file_of_the_profile(plan: Run) -> None:
    named = profile((4,), (1,)).replace('name = "m"', 'name = "m"\nfile = "my models/m.py"')
    result: dict[str, Any] = json.loads(plan(named, cluster(4), "--mini-batch", 8, "--json").out)
    words = shlex.split(result["commands"][1])
    assert words[words.index("--model") + 1] == "my models/m.py"
