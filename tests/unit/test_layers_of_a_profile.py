"""Stages that are made of layers: what adds up, what is the first's or the last's, and which splits there are."""

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chimera_ir.errors import OptionError
from chimera_ir.profile.choose import Wanted, read_both
from chimera_ir.profile.costs import ModelProfile, StageCosts, Timing, fastest, merged, problem, stages_of
from chimera_ir.source import Source
from tests.timings import stage_times, stage_timing

CLUSTER = """
[cluster]
name = "c"
workers = 8
memory = "1 GB"
[links.between]
latency = "0 s"
bandwidth = "unlimited"
"""
PROFILE = """
[model]
name = "m"
""" + "".join(
    f"""
[[layer]]
weights = "1 MB"
  [[layer.at]]
  micro_batch_size = 8
  forward = "{seconds} ms"
  activations = "1 MB"
{'  output = "1 kB"' if number < 5 else ""}
"""
    for number, seconds in enumerate([1, 1, 1, 1, 1, 5])
)


def layer(number: int) -> StageCosts:
    at = stage_timing(
        1.0 * number, 2.0 * number, 3.0 * number, 100 * number, 7 + 10 * number, 10 * (number + 1), number, 0.1
    )
    return StageCosts(number, 10 * number, 20 * number, {4: at}, 0.5 * number, 0.2)


def halves(timing: Timing) -> tuple[float, float]:
    return timing.times["I"], timing.times["W"]


def test_a_stage_costs_what_its_layers_cost_together_and_sends_what_the_last_sends() -> None:
    """Each layer keeps 7 bytes beside its input, such as the statistics of a norm."""
    stage = merged([layer(1), layer(2), layer(3)])
    assert (stage.weights, stage.gradients, stage.optimizer, stage.step) == (6, 60, 120, 3.0)
    assert stage.step_noise == pytest.approx(0.2)
    at = stage.at[4]
    assert (at.times["F"], at.times["B"], at.times["recomputing"], at.kept.activations) == (6.0, 12.0, 18.0, 600)
    assert (at.output, at.gradient) == (40, 3)
    assert at.kept.input == 10 + 3 * 7
    assert at.noise == pytest.approx(0.1)


def test_what_an_operation_costs_a_stage_pays_once() -> None:
    """Three forwards of 1, 2 and 3 s, of which 0.25 s are an operation's each: 0.75 + 1.75 + 2.75 + 0.25."""
    layers = [replace(layer(number), overhead=stage_times(0.25, 0.5, 0.75)) for number in (1, 2, 3)]
    stage = merged(layers)
    at = stage.at[4]
    assert (at.times["F"], at.times["B"], at.times["recomputing"]) == (6 - 2 * 0.25, 12 - 2 * 0.5, 18 - 2 * 0.75)
    assert stage.overhead == layers[0].overhead
    again = merged([merged(layers[:2]), layers[2]]).at[4]
    assert (again.times["F"], again.times["B"], again.times["recomputing"]) == (
        at.times["F"],
        at.times["B"],
        at.times["recomputing"],
    )


def test_the_halves_of_a_stage_are_those_of_its_layers_and_the_first_stage_has_but_the_second() -> None:
    """Of 1, 2 and 3 s with 0.25 s an operation, and twice as long; the first layer's own first half takes 1 s."""
    overhead = stage_times(0.25, 0.5, 0.75, (0.25, 0.5))
    layers = [replace(layer(number), overhead=overhead) for number in (1, 2, 3)]
    assert "I" not in merged(layers).at[4].times
    known = [
        replace(of, at={4: replace(of.at[4], times={**of.at[4].times, "I": n, "W": 2.0 * n})})
        for n, of in enumerate(layers, 1)
    ]
    assert halves(merged(known).at[4]) == (6 - 2 * 0.25, 12 - 2 * 0.5)
    assert halves(merged(known, opens=True).at[4]) == (1, (5 - 2 * 0.25) + (12 - 2 * 0.5))


def test_a_stage_lets_go_of_what_its_last_layers_do_and_keeps_the_gradients_of_all() -> None:
    """Behind the last layer that keeps anything; the first stage lets go of nothing and keeps what it was given."""
    kept = [(40, 1), (50, 2), (300, 3)]
    layers = [
        replace(of, at={4: replace(of.at[4], kept=of.at[4].kept._replace(released=released, operands=operands))})
        for of, (released, operands) in zip(map(layer, (1, 2, 3)), kept, strict=True)
    ]
    at = merged(layers).at[4]
    assert (at.kept.released, at.kept.operands) == (300 + 50, 6)
    at = merged(layers[:2]).at[4]
    assert (at.kept.released, at.kept.operands) == (50, 3)
    at = merged(layers, opens=True).at[4]
    assert (at.kept.released, at.kept.operands) == (0, 3)


def test_of_a_stage_the_input_and_the_output_stay_on_the_worker_and_what_is_between_its_layers_moves() -> None:
    """Each layer has an input of 2, 4 and 6 bytes, and as much again of its output stays."""
    layers = [
        replace(of, at={4: replace(of.at[4], kept=of.at[4].kept._replace(input=2 * n, resident=4 * n))})
        for n, of in enumerate(map(layer, (1, 2, 3)), 1)
    ]
    assert [at.kept.resident for at in (layers[0].at[4], merged(layers).at[4], merged(layers[:2]).at[4])] == [
        4,
        2 + 6,
        2 + 4,
    ]


def test_a_stage_takes_no_less_than_its_longest_layer() -> None:
    layers = [replace(layer(number), overhead=stage_times(2.9, 0.0, 0.0)) for number in (1, 2, 3)]
    assert merged(layers).at[4].times["F"] == 3.0


@settings(max_examples=60)
@given(st.lists(st.integers(10, 60), min_size=3, max_size=7), st.integers(0, 9), st.integers(2, 3))
def test_no_other_split_has_a_faster_slowest_stage(times: list[int], overhead: int, stages: int) -> None:
    """By brute force; every layer takes longer than an operation costs."""
    layers = [
        StageCosts(
            1, 1, 1, {1: stage_timing(time, 2 * time, 3 * time, 1, 1, 1, 1)}, overhead=stage_times(overhead, overhead)
        )
        for time in times
    ]

    def slowest(split: tuple[int, ...]) -> float:
        return max(stage.at[1].times["F"] + stage.at[1].times["B"] for stage in stages_of(layers, split))

    splits = [(0, *rest) for rest in combinations(range(1, len(layers)), stages - 1)]
    model = ModelProfile("m", {}, layers=tuple(layers))
    assert slowest(fastest(model, stages, 1)) == min(map(slowest, splits))
    # A group of stages begins with a given layer of the second stage, or of the third.
    for begins in [
        (stage, layer) for stage in range(1, stages) for layer in range(stage, len(layers) - stages + stage + 1)
    ]:
        grouped = fastest(replace(model, begins=(begins,)), stages, 1)
        among = [split for split in splits if split[begins[0]] == begins[1]]
        assert grouped in among
        assert slowest(grouped) == min(map(slowest, among))


def test_a_stage_of_one_layer_is_that_layer() -> None:
    assert stages_of([layer(1), layer(2), layer(3)], (0, 2)) == (merged([layer(1), layer(2)], opens=True), layer(3))


def test_a_stage_without_work_takes_a_moment() -> None:
    """As where a table of words is a stage by itself, of which no operations are counted."""
    (stage,) = stages_of([layer(0)], (0,))
    assert {stage.at[4].times["F"], stage.at[4].times["B"], stage.at[4].times["recomputing"]} == {1e-9}


@pytest.mark.parametrize(
    ("split", "words"),
    [
        ((), "begins with 0"),
        ((1, 2), "begins with 0"),
        ((0, 2, 2), "the numbers ascend"),
        ((0, 6), "there is no layer 6; there are the layers 0 to 5"),
        ((0, 1, 2), "it begins the stages 0 to 2, and the schedule has the stages 0 to 1"),
        ((0, 5), None),
    ],
)
def test_a_split_is_one_of_the_layers_or_says_why_not(split: tuple[int, ...], words: str | None) -> None:
    said = problem(split, 2, 6)
    assert (said is None) if words is None else (words in str(said))


def test_without_a_split_the_slowest_stage_is_the_fastest_and_a_split_decides() -> None:
    inputs = read_both(Source("p.profile.toml", PROFILE), Source("c.cluster.toml", CLUSTER))
    times = [stage.at[8].times["F"] for stage in inputs.choose(Wanted(2, 2, 1, 8))]
    assert times == pytest.approx([0.005, 0.005])
    times = [stage.at[8].times["F"] for stage in inputs.choose(Wanted(2, 2, 1, 8, (0, 3)))]
    assert times == pytest.approx([0.003, 0.007])
    with pytest.raises(OptionError, match="split 0,9: there is no layer 9"):
        inputs.choose(Wanted(2, 2, 1, 8, (0, 9)))
