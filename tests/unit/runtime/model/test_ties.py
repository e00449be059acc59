"""Parameters that stages share: what a model may say of them, and one parameter on each rank."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from chimera_runtime.blame import ModelError
from chimera_runtime.errors import Misuse
from chimera_runtime.model.model import Layers, Model
from chimera_runtime.model.naming import name_in_model, names_in_model, parameters_by_name
from chimera_runtime.model.ties import Tie, by_group, declared, refuse_undeclared, unite
from chimera_runtime.ranks.world import World
from tests.unit.runtime.models import CPU, model
from tests.unit.runtime.thread_ranks import alone_job, job, together, worlds

MODEL = model()
ENDS = ((0, "weight"), (1, "weight"))
TIE = Tie((0, 1), (ENDS,))


def layer(start: float, size: int = 2, dtype: torch.dtype = torch.float64) -> nn.Linear:
    made = nn.Linear(size, 2, bias=True, dtype=dtype)
    nn.init.constant_(made.weight, start)
    return made


# What a model says.


def tying(said: Any) -> Model:
    return replace(MODEL, tied=lambda _: said)


def test_ties_of_the_same_stages_are_one_group_in_the_order_of_the_program() -> None:
    of_job = job(stages=3, placement=((0, 1, 0),), ties=((0, 1), (0, 2)))
    said = [[(2, "c"), (0, "c")], [(1, "a"), (0, "a")], [(0, "b"), (2, "b"), (2, "b2")]]
    assert declared(tying(said), of_job) == (
        Tie((0, 1), (((1, "a"), (0, "a")),)),
        Tie((0, 2), (((2, "c"), (0, "c")), ((0, "b"), (2, "b"), (2, "b2")))),
    )
    assert declared(MODEL, job()) == ()


def test_what_the_ends_of_a_single_stage_share_is_tied_within_it() -> None:
    ends = ((0, "words"), (0, "head"))
    assert declared(tying([ends]), alone_job(stages=1)) == (Tie((0,), (ends,)),)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (None, r"tied\(2\) returned None: return lists of ends"),
        ([(0, "a")], r"tied\(2\) returned \[\(0, 'a'\)\]: return lists of ends"),
        ([[(0, "a"), (2, "a")]], r"names stage 2; there are the stages 0 to 1"),
        ([[(0, "a"), (0, "b")]], r"are not in two stages; tie parameters of one in build_stage"),
        (
            [[(0, "a"), (1, "a")], [(1, "b"), (0, "a")]],
            r"names \(0, 'a'\) twice; list all ends of a parameter together",
        ),
        ([], r"model.py: ties no stages, and two was compiled for a model that ties stages 0 and 1: .* with no --tied"),
    ],
)
def test_what_is_no_tie_of_the_program_is_one_message(said: Any, words: str) -> None:
    with pytest.raises(Misuse, match=words):
        declared(tying(said), job(ties=((0, 1),)))


def test_ties_that_the_program_does_not_have_are_told_with_what_to_compile() -> None:
    with pytest.raises(
        Misuse, match=r"ties stages 0 and 1, and two .* ties no stages: compile it again with --tied 0,1$"
    ):
        declared(tying([[*ENDS]]), job())


def test_an_error_of_the_function_is_the_models() -> None:
    with pytest.raises(ModelError, match=r"tied\(2\)"):
        declared(replace(MODEL, tied=lambda _: 1 // 0), job())


# One parameter on each rank.


def test_on_one_rank_the_first_end_takes_the_place_of_the_others_wherever_they_are(alone: World) -> None:
    first, last = layer(1.0), nn.Sequential(layer(2.0), nn.ReLU(), layer(3.0))
    last[2].weight = last[0].weight
    built: dict[int, nn.Module] = {0: first, 1: last}
    tie = Tie((0, 1), (((0, "weight"), (1, "0.weight")),))
    with worlds(alone, alone_job(ties=((0, 1),))) as (world,):
        unite(world.control_group, world.job, built, (tie,), MODEL)
    assert first.weight is last[0].weight is last[2].weight
    assert first.weight.tolist() == [[1.0, 1.0]] * 2
    assert by_group(built, (tie,)) == {(0, 1): [first.weight], (0,): [first.bias], (1,): [last[0].bias, last[2].bias]}


def test_other_ranks_get_the_value_of_the_first_end(alone: World) -> None:
    """The second end comes first: rank 1 sends."""
    modules: list[dict[int, nn.Module]] = [{0: layer(1.0)}, {1: layer(2.0)}]
    tie = Tie((0, 1), (((1, "weight"), (0, "weight")),))
    with worlds(alone, job(ties=((0, 1),)), 2) as ranks:
        both = [*modules, {0: layer(3.0)}, {1: layer(2.0)}]
        together(
            [
                partial(unite, world.control_group, world.job, built, (tie,), MODEL)
                for world, built in zip(ranks, both, strict=True)
            ]
        )
    assert [module.weight[0, 0].item() for built in both for module in built.values()] == [2.0] * 4


def frozen(module: nn.Linear) -> nn.Linear:
    module.weight.requires_grad_(False)
    return module


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: layer(1.0, size=3), r"which is float64 of shape \(2, 2\), and weight of stage 1, which is .*\(2, 3\)"),
        (lambda: layer(1.0, dtype=torch.float32), r"and weight of stage 1, which is float32 of shape \(2, 2\)"),
        (lambda: frozen(layer(1.0)), r"which is float64 of shape \(2, 2\), frozen; let them be alike"),
    ],
)
def test_ends_that_differ_are_refused(alone: World, other: Any, words: str) -> None:
    with worlds(alone, alone_job(ties=((0, 1),))) as (world,), pytest.raises(Misuse, match=words):
        unite(world.control_group, world.job, {0: layer(1.0), 1: other()}, (TIE,), MODEL)


def test_a_name_that_a_stage_does_not_have_gets_a_suggestion(alone: World) -> None:
    tie = Tie((0, 1), (((0, "weight"), (1, "wheight")),))
    with (
        worlds(alone, alone_job(ties=((0, 1),))) as (world,),
        pytest.raises(Misuse, match=r"tied names 'wheight' in stage 1, .* \(did you mean weight\?\)"),
    ):
        unite(world.control_group, world.job, {0: layer(1.0), 1: layer(1.0)}, (tie,), MODEL)


def test_an_end_that_is_spread_over_ranks_is_refused(alone: World) -> None:
    """The first end or another, and before anything is sent."""
    mesh = DeviceMesh("cpu", [0])
    for spread in (0, 1):
        built = {0: layer(1.0), 1: layer(2.0)}
        built[spread].weight = nn.Parameter(distribute_tensor(built[spread].weight.detach(), mesh, [Shard(0)]))
        words = f"tied names weight of stage {spread}, a DTensor; parameters that are tied cannot be spread"
        with worlds(alone, alone_job(ties=((0, 1),))) as (world,), pytest.raises(Misuse, match=words):
            unite(world.control_group, world.job, built, (TIE,), MODEL)


# What nothing says.


def test_a_shared_object_is_refused_unless_it_is_tied() -> None:
    first, last = layer(1.0), layer(2.0)
    last.weight = first.weight
    refuse_undeclared({0: first, 1: last}, (TIE,), MODEL)
    with pytest.raises(
        Misuse, match=r'write `def tied\(num_stages\): return \[\[\(0, "weight"\), \(1, "weight"\)\]\]`'
    ):
        refuse_undeclared({0: first, 1: last}, (), MODEL)
    refuse_undeclared({0: first, 1: layer(1.0)}, (), MODEL)


def test_shared_memory_is_refused_as_a_shared_object_is_unless_nothing_trains_it() -> None:
    first, last = layer(1.0), layer(2.0)
    last.weight = nn.Parameter(first.weight.detach().t())
    refuse_undeclared({0: first, 1: last}, (TIE,), MODEL)
    for trained in (first, last):
        for module in (first, last):
            module.weight.requires_grad_(module is trained)
        with pytest.raises(Misuse, match="stages 0 and 1 share the parameter weight, and nothing says so"):
            refuse_undeclared({0: first, 1: last}, (), MODEL)
    refuse_undeclared({0: frozen(first), 1: frozen(last)}, (), MODEL)
    pieces = torch.ones(4, 2).split(2)
    refuse_undeclared({stage: nn.ParameterDict({"weight": pieces[stage]}) for stage in range(2)}, (), MODEL)


@pytest.mark.parametrize("keys", [["weight"], {"weight": "words.weight"}, ["wei.*"]])
def test_a_module_that_ties_what_is_elsewhere_is_refused_unless_it_is_tied(keys: Any) -> None:
    head = layer(1.0)
    head._tied_weights_keys = keys
    stage = nn.Sequential(head)
    refuse_undeclared({1: stage}, (Tie((0, 1), (((0, "weight"), (1, "0.weight")),)),), MODEL)
    with pytest.raises(Misuse, match=r"0\.weight of stage 1 is tied by _tied_weights_keys to .* compile with --tied"):
        refuse_undeclared({1: stage}, (), MODEL)


def test_a_module_that_ties_within_a_stage_or_not_at_all_is_no_tie_of_stages() -> None:
    inside = nn.Sequential(layer(1.0), layer(2.0))
    inside[1].weight = inside[0].weight
    inside._tied_weights_keys = ["1.weight"]
    apart = layer(1.0)
    apart._tied_weights_keys = ["weight"]
    apart.config = SimpleNamespace(tie_word_embeddings=False)
    refuse_undeclared({0: inside, 1: apart}, (), MODEL)


# What parameters are called in the model as a whole.

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
