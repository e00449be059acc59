"""Profiles and plans of models of several parts: each group of stages has costs, and a depth, of its own."""

from itertools import combinations, product
from typing import Any

import pytest

import chimera_ir
from chimera_ir.options import Options
from chimera_ir.profile.choose import Unfit
from chimera_ir.profile.read import read_profile
from chimera_ir.profile.write import write_profile
from chimera_ir.source import Source
from tests.unit.command import Run
from tests.unit.test_plan import cluster, compiled, found

LAYERS = {"image": (3, 5, 4), "sound": (2, 2), "text": (6, 7, 6, 8)}
"""Milliseconds of the forward of each layer of a group."""


def part(heading: str, milliseconds: int, activations: int = 10, output: str = "8 B") -> str:
    times = f'micro_batch_size = 1\nforward = "{milliseconds} ms"\nbackward = "{2 * milliseconds} ms"'
    sizes = f'activations = "{activations} MB"\ninput = "8 B"\noutput = "{output}"'
    return f'{heading}\nweights = "{milliseconds} MB"\n  [[{heading.split("]]")[0][2:]}.at]]\n{times}\n{sizes}'


def in_layers(activations: int = 10) -> str:
    parts = [part(f'[[layer]]\ngroup = "{name}"', ms, activations) for name, of in LAYERS.items() for ms in of]
    return "\n".join(['[model]\nname = "m"\nfile = "model.py"', *parts])


def in_depths(**depths: dict[int, tuple[int, ...]]) -> str:
    lines = ['[model]\nname = "m"']
    for group, of_group in depths.items():
        for depth, milliseconds in of_group.items():
            lines.append(f'[[depth]]\ngroup = "{group}"\nstages = {depth}')
            lines += [part("[[depth.stage]]", ms, 10 * ms) for ms in milliseconds]
    return "\n".join(lines)


STAGES = in_depths(image={1: (12,), 2: (6, 6)}, text={2: (14, 13), 4: (6, 7, 6, 8)})


def options(text: str, tmp_path: Any, **more: Any) -> Options:
    (tmp_path / "m.toml").write_text(text)
    (tmp_path / "c.toml").write_text(cluster(8))
    return Options(profile=tmp_path / "m.toml", cluster=tmp_path / "c.toml", micro_batch_size=1, **more)


@pytest.mark.parametrize("text", [STAGES, in_layers()])
def test_what_is_written_reads_as_the_same_profile(text: str) -> None:
    profile = read_profile(Source("m.toml", text))
    assert read_profile(Source("m.toml", write_profile(profile))) == profile


def test_each_group_gets_the_costs_of_its_own_depth(tmp_path: Any) -> None:
    made = chimera_ir.compile("colocated", P=4, N=4, options=options(STAGES, tmp_path, keep="profile"))
    forwards = made.forecast.durations(made.header).setting.stages
    assert [stage.at[1].times["F"] for stage in forwards] == [0.012, 0.006, 0.007, 0.006, 0.008]
    assert [float(share) for share in made.header.shares] == [1.0, 0.5, 0.584, 0.5, 0.667]
    other = chimera_ir.compile("colocated", P=2, N=4, options=options(STAGES, tmp_path))
    assert other.forecast.durations(other.header).setting.stages[1].at[1].times["F"] == 0.014


@pytest.mark.parametrize(
    ("scheme", "text", "parameters", "words"),
    [
        (
            "colocated",
            STAGES,
            {"P": 3, "N": 3},
            "the schedule has text in 3 stages, and the profile has no such depth of it",
        ),
        ("two_encoders", STAGES, {}, "the profile is of image and text, and the schedule is of image, sound and text"),
        ("dapple", STAGES, {}, "the profile is of image and text, and the schedule is a chain without groups"),
        (
            "two_encoders",
            in_layers(),
            {"b": 3},
            "the schedule has sound in 3 stages, and the profile has 2 layers of it",
        ),
    ],
)
def test_what_a_profile_lacks_is_named(
    tmp_path: Any, scheme: str, text: str, parameters: dict[str, int], words: str
) -> None:
    with pytest.raises(Unfit, match=words):
        _ = chimera_ir.compile(scheme, options=options(text, tmp_path), **parameters).report


def test_a_split_begins_each_group_with_its_first_layer(tmp_path: Any) -> None:
    size, split = {"a": 2, "b": 1, "D": 1}, (0, 1, 3, 5)
    with pytest.raises(
        chimera_ir.errors.WrongOption, match="begins with stage 2, and in the profile with layer 3, not 2"
    ):
        _ = chimera_ir.compile(
            "two_encoders", **size, options=options(in_layers(), tmp_path, split=(0, 1, 2, 5))
        ).report
    made = chimera_ir.compile("two_encoders", **size, options=options(in_layers(), tmp_path, split=split))
    assert made.forecast.split_of(made.header) == split


def splits(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """All splits with so many stages of each group."""
    of_groups, start = [], 0
    for layers, stages in zip(LAYERS.values(), sizes, strict=True):
        rest = combinations(range(start + 1, start + len(layers)), stages - 1)
        of_groups.append([(start, *others) for others in rest])
        start += len(layers)
    return [tuple(first for of_group in chosen for first in of_group) for chosen in product(*of_groups)]


def slowest(split: tuple[int, ...]) -> int:
    times = [ms for of_group in LAYERS.values() for ms in of_group]
    return max(sum(times[first:end]) for first, end in zip(split, (*split[1:], len(times)), strict=True))


def test_a_plan_tries_every_depth_of_every_group_with_its_best_split(plan: Run, run: Run) -> None:
    result = found(plan(in_layers(), cluster(8), "--mini-batch", 8, "--scheme", "two_encoders", "--json"))
    tried = {(c["settings"]["a"], c["settings"]["b"], c["settings"]["D"]): c for c in result["choices"]}
    sizes = product(range(1, 4), range(1, 3), range(1, 5))
    assert {*tried} == {size for size in sizes if sum(size) <= 8}
    for size, choice in tried.items():
        assert choice["split"] in [list(split) for split in splits(size)]
        best = min(map(slowest, splits(size)))
        even = slowest(tuple(choice["split"])) > best  # a replay may find the even split faster
        assert not even or choice["T_replay"] < choice["T"], size
    first = result["choices"][0]
    times = [choice["T_replay"] / choice["mini_batch"] for choice in result["choices"] if choice["T_replay"]]
    assert times[0] == min(times)
    report = compiled(run, result["commands"][0])
    assert report["prediction"]["T_replay"] == pytest.approx(first["T_replay"])
    assert report["prediction"]["memory"] == first["memory"]
    assert f"--split {','.join(map(str, first['split']))}" in result["commands"][1]


def test_a_plan_of_measured_stages_takes_the_depths_that_there_are(plan: Run) -> None:
    result = found(plan(STAGES, cluster(8), "--mini-batch", 8, "--json"))
    assert {(c["scheme"], c["settings"]["P"]) for c in result["choices"]} == {
        (scheme, workers) for scheme in ("colocated", "colocated_nested") for workers in (2, 4)
    }
    assert result["baseline"] is None
    others = {left["scheme"]: left["detail"] for left in result["left_out"]}
    assert (
        others["two_encoders"] == "it is for image, sound and text, and the model of the profile is of image and text"
    )
    assert others["dapple"] == "it is for a chain of stages, and the model of the profile is of image and text"
    ended = plan(STAGES, cluster(8), "--mini-batch", 8)
    assert "Run colocated" in ended.out
    assert "(image 1, text" in ended.out


def test_a_depth_that_a_user_fixes_and_the_profile_lacks_is_named(plan: Run) -> None:
    asked = "--mini-batch", 8, "--scheme", "colocated", "--set", "P=3", "--why"
    ended = plan(STAGES, cluster(8), *asked)
    assert "depth 1 of image, 3 of text; the profile has 1, 2 of image, 2, 4 of text" in " ".join(ended.out.split())
