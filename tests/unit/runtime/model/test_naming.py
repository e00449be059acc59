"""What parameters are called in the model as a whole."""

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from chimera_runtime.errors import Misuse
from chimera_runtime.model.model import Layers
from chimera_runtime.model.naming import name_in_model, names_in_model, parameters_by_name
from chimera_runtime.model.ties import Tie
from tests.unit.runtime.models import CPU, model

STAGED = model(lambda _stage, _stages: nn.BatchNorm1d(2))
LAYERED = replace(model(), build_stage=Layers([lambda: nn.BatchNorm1d(2)] * 5, (0, 3)))


def test_of_stages_names_have_the_stage_and_of_layers_the_layer() -> None:
    assert name_in_model(STAGED, 1, "0.weight") == "stages.1.0.weight"
    assert name_in_model(LAYERED, 1, "4.0.weight") == "layers.4.0.weight"


def test_the_function_of_the_model_file_is_given_the_stage_or_the_layer() -> None:
    def name(number: int, parameter: str) -> str:
        return f"h.{number}/{parameter}"

    assert name_in_model(replace(STAGED, name=name), 1, "0.weight") == "h.1/0.weight"
    assert name_in_model(replace(LAYERED, name=name), 1, "4.0.weight") == "h.4/0.weight"


def test_buffers_have_names_too() -> None:
    module = LAYERED.stage(1, 2, 0, CPU)
    assert names_in_model(LAYERED, 1, module)["4.running_mean"] == "layers.4.running_mean"
    assert len(names_in_model(LAYERED, 1, module)) == 2 * 5


@pytest.mark.parametrize("split", [None, (0, 1), (0, 4)])
def test_names_of_layers_are_the_same_for_every_split(split: Any) -> None:
    of = replace(LAYERED, build_stage=Layers([lambda: nn.Linear(1, 1)] * 5, split))
    built = {stage: of.stage(stage, 2, 0, CPU) for stage in range(2)}
    assert [*parameters_by_name(of, built, ())] == [f"layers.{i}.{p}" for i in range(5) for p in ("weight", "bias")]


def test_what_is_shared_has_one_name_that_of_its_first_end() -> None:
    first, last = nn.Linear(2, 2), nn.Linear(2, 2)
    last.weight = first.weight
    tie = Tie((0, 1), (((1, "weight"), (0, "weight")),))
    named = parameters_by_name(STAGED, {0: first, 1: last}, [tie])
    assert [*named] == ["stages.1.weight", "stages.0.bias", "stages.1.bias"]


def test_what_is_no_name_is_refused() -> None:
    with pytest.raises(Misuse, match=r"name\(1, 'weight'\) returned a int, not the name of a parameter"):
        name_in_model(replace(STAGED, name=lambda _stage, _parameter: 3), 1, "weight")
    with pytest.raises(Misuse, match=r"name\(4, 'weight'\) returned a int"):
        name_in_model(replace(LAYERED, name=lambda _stage, _parameter: 3), 1, "4.weight")
