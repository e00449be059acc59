"""The state of a pipeline by the model's own names: what it names, what may be taken, and what is refused."""

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from chimera_runtime.errors import BadCheckpoint, Misuse
from chimera_runtime.pipeline import Pipeline
from chimera_runtime.ranks.world import World
from chimera_runtime.state.state import State
from tests.unit.runtime.kept import WIDTH, compiled, pipeline, stage

PARAMETERS = [f"stages.{number}.{name}" for number in (0, 1) for name in ("0.weight", "0.bias", "1.weight", "1.bias")]
BUFFERS = [
    f"stages.{number}.1.{name}" for number in (0, 1) for name in ("running_mean", "running_var", "num_batches_tracked")
]


@pytest.fixture
def pipe(alone: World, one_worker: Path) -> Iterator[Pipeline]:
    made = pipeline(one_worker)
    yield made
    made.close()


def state_of(pipe: Pipeline) -> State:
    return pipe._state


def test_it_has_the_tensors_themselves_by_the_names_of_the_model(pipe: Pipeline) -> None:
    saved = state_of(pipe).saved()
    assert [*saved["model"]] == PARAMETERS
    assert [*saved["replicas"]] == [f"0/{name}" for name in BUFFERS]
    assert [*state_of(pipe).saved(replica=4)["replicas"]] == [f"4/{name}" for name in BUFFERS]
    assert state_of(pipe).names == [*PARAMETERS, *BUFFERS]
    for name, tensor in saved["model"].items():
        assert tensor.data_ptr() == dict(pipe.named_parameters())[name].data_ptr()
        assert not tensor.requires_grad


def test_it_takes_other_tensors_and_misses_none(pipe: Pipeline) -> None:
    state = state_of(pipe)
    other = {
        kind: {name: torch.full_like(tensor, place) for place, (name, tensor) in enumerate(tensors.items())}
        for kind, tensors in state.saved(replica=2).items()
    }
    state.load(other, replica=2)
    assert [float(tensor.max()) for tensor in state.saved()["model"].values()] == [*range(8)]
    assert [float(tensor.max()) for tensor in state.saved()["replicas"].values()] == [*range(6)]
    del other["replicas"][f"2/{BUFFERS[3]}"]
    with pytest.raises(BadCheckpoint, match=f"the state has no 2/{BUFFERS[3]}, which this rank holds"):
        state.load(other, replica=2)


def test_buffers_that_a_module_does_not_save_are_not_kept(alone: World, one_worker: Path) -> None:
    class Scratch(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)
            self.register_buffer("saved", torch.ones(1))
            self.register_buffer("scratch", torch.ones(1), persistent=False)

    with pipeline(one_worker, lambda *_: Scratch().double()) as pipe:
        assert [*state_of(pipe).saved()["replicas"]] == ["0/stages.0.saved", "0/stages.1.saved"]


def test_a_file_gives_tensors_by_name_with_or_without_buffers(pipe: Pipeline) -> None:
    state = state_of(pipe)
    whole = state.whole()
    assert sorted(whole) == sorted([*PARAMETERS, *BUFFERS])
    before = dict(whole)
    with torch.no_grad():
        for tensor in (*pipe.parameters(), *state.saved()["replicas"].values()):
            tensor += 1
    assert all(torch.equal(whole[name], before[name]) for name in whole), "they are copies"
    state.take({name: whole[name] for name in PARAMETERS})
    changed = {name for name, tensor in state.whole().items() if not torch.equal(tensor, whole[name])}
    assert changed == set(BUFFERS)
    state.take({**whole, "something.else": torch.ones(1)})
    assert all(torch.equal(tensor, whole[name]) for name, tensor in state.whole().items())
    near = {name.replace("stages.1", "stage.1"): tensor for name, tensor in whole.items()}
    with pytest.raises(BadCheckpoint, match=r"it has no parameter stages.1.0.weight; the nearest is stage.1.0.weight"):
        state.take(near)
    with pytest.raises(BadCheckpoint, match=r"it has no parameter stages.0.0.weight$"):
        state.take({})
    with pytest.raises(BadCheckpoint, match=r"stages.0.0.bias is \(7,\) in it, and \(3,\) in this model"):
        state.take({**whole, "stages.0.0.bias": torch.ones(7)})


def test_what_is_tied_is_taken_under_either_of_its_names(alone: World, tmp_path: Path) -> None:
    directory = compiled(tmp_path / "out", 2, 0, 1)
    with pipeline(directory, tied=[[(0, "0.weight"), (1, "0.weight")]]) as pipe:
        state = state_of(pipe)
        assert state.aliases == {"stages.1.0.weight": "stages.0.0.weight"}
        assert "stages.1.0.weight" not in state.saved()["model"]
        assert {*state.names} == {*PARAMETERS, *BUFFERS}
        whole = state.whole()
        whole["stages.1.0.weight"] = whole.pop("stages.0.0.weight") + 1
        state.take(whole)
        assert torch.equal(state.whole()["stages.0.0.weight"], whole["stages.1.0.weight"])
        for module in pipe.stages.values():
            assert torch.equal(module.get_parameter("0.weight"), whole["stages.1.0.weight"])


def test_parameters_that_the_pipeline_does_not_know_are_named(pipe: Pipeline) -> None:
    pipe._state.require_known()
    stage = pipe.stages[1]
    stage[2] = nn.Linear(3, 3).double()
    with pytest.raises(Misuse, match=r"2\.weight of stage 1 is not a parameter that the pipeline was made with"):
        pipe._state.require_known()
    stage[2] = nn.Tanh()
    stage[0].load_state_dict({name: t.clone() for name, t in stage[0].state_dict().items()})
    pipe._state.require_known()


# Averages of the weights: tensors by name or copies of stages, saved like the pipeline's own; others are named.


BIAS = "stages.0.0.bias"


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
