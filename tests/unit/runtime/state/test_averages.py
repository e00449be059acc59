"""Averages of the weights: tensors by name or copies of stages, saved like the pipeline's own; others are named.

That training goes on with them is tested in test_checkpoints_states.py.
"""

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from chimera_runtime.errors import Misuse
from chimera_runtime.pipeline import Pipeline
from chimera_runtime.ranks.world import World
from tests.unit.runtime.kept import compiled, pipeline, stage

BIAS = "stages.0.0.bias"


@pytest.fixture
def pipe(alone: World, one_worker: Path) -> Iterator[Pipeline]:
    with pipeline(one_worker) as made:
        yield made


def test_copies_of_stages_have_the_names_of_the_model(pipe: Pipeline) -> None:
    names = {name for name, _ in pipe.named_parameters()}
    plain = pipe.average_state({0: deepcopy(pipe.stages[0]), 1: deepcopy(pipe.stages[1])}, "averages['a']").saved()
    assert plain["model"].keys() == names
    assert plain["replicas"].keys() == pipe.state_dict()["replicas"].keys()
    assert plain["count"] == {}
    averaged = {number: AveragedModel(module) for number, module in pipe.stages.items()}
    saved = pipe.average_state(averaged, "averages['a']").saved(replica=3)
    assert saved["model"].keys() == names
    assert {name[:2] for name in saved["replicas"]} == {"3/"}
    assert int(saved["count"]["0"]) == 0


def test_what_is_loaded_is_in_the_tensors_themselves(pipe: Pipeline) -> None:
    average = {BIAS: torch.zeros(3)}
    state = pipe.average_state(average, "averages['a']")
    state.load({"model": {BIAS: torch.ones(3)}, "count": {}})
    assert average[BIAS].tolist() == [1.0] * 3


def test_a_copy_of_what_stages_share_gets_its_value_everywhere(alone: World, tmp_path: Path) -> None:
    directory = compiled(tmp_path / "out", 2, 0, 1)
    with pipeline(directory, tied=[[(0, "0.weight"), (1, "0.weight")]]) as pipe:
        copies = {number: deepcopy(module) for number, module in pipe.stages.items()}
        state = pipe.average_state(copies, "averages['a']")
        saved = state.saved()
        assert "stages.1.0.weight" not in saved["model"]
        state.load({**saved, "model": {name: torch.full_like(t, 5.0) for name, t in saved["model"].items()}})
        assert all(bool((copy.get_parameter("0.weight") == 5).all()) for copy in copies.values())


@pytest.mark.parametrize(
    ("average", "words"),
    [
        ({"bias": torch.ones(3)}, "averages['a'] has bias, which is not a tensor in the shape of a parameter"),
        ({BIAS: torch.ones(4)}, f"averages['a'] has {BIAS}, which is not a tensor in the shape of a parameter"),
        ({BIAS: 0.5}, f"averages['a'] has {BIAS}, which is not a tensor in the shape of a parameter"),
        ({7: stage(0, 1)}, "averages['a'] has 7: give tensors by the names of pipe.named_parameters(), or modules"),
        ({0: torch.ones(3)}, "averages['a'] has 0: give tensors by the names of pipe.named_parameters(), or modules"),
        (
            {0: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))},
            "has the parameter 2.weight of stage 0",
        ),
    ],
)
def test_what_is_no_average_of_the_pipeline_is_named(pipe: Pipeline, average: Any, words: str) -> None:
    with pytest.raises(Misuse) as refused:
        pipe.average_state(average, "averages['a']")
    assert words in str(refused.value)
