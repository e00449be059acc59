"""A model as a list of layers: how a split cuts it, what it trains, and which splits and lists are refused."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import chimera_ir
from chimera_ir import Options
from chimera_runtime import Pipeline
from chimera_runtime.blame import ModelError
from chimera_runtime.errors import Misuse
from chimera_runtime.model.model import Layers, ModelFile, load
from chimera_runtime.model.model_text import require_plausible
from chimera_runtime.model.ties import Tie, declared, refuse_undeclared
from chimera_runtime.ranks.world import World
from chimera_runtime.start.assemble import modules
from chimera_runtime.values.nested import draw_seed
from tests.unit.runtime.models import CPU, model
from tests.unit.runtime.thread_ranks import alone_job, worlds

COUNT, WIDTH, B, N, RATE = 6, 3, 2, 4, 0.1


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH, dtype=torch.float64)


LISTED = [linear] * COUNT


# Where the stages begin.


@pytest.mark.parametrize(
    ("layers", "stages", "first"),
    [(6, 2, [0, 3]), (6, 4, [0, 1, 3, 4]), (6, 6, [0, 1, 2, 3, 4, 5]), (7, 3, [0, 2, 4]), (1, 1, [0])],
)
def test_without_a_split_stages_have_equal_numbers_of_layers_or_one_more(
    layers: int, stages: int, first: list[int]
) -> None:
    assert Layers([linear] * layers).first(stages) == first


@pytest.mark.parametrize("split", [None, (0, 1, 2), (0, 3, 5), (0, 1, 5)])
def test_every_layer_is_in_one_stage(split: Any) -> None:
    layers = Layers(LISTED, split)
    ranges = layers.ranges(3)
    assert [layer for held in ranges for layer in held] == [*range(COUNT)]
    assert [layers.stage_of(layer, 3) for layer in range(COUNT)] == [
        next(stage for stage, held in enumerate(ranges) if layer in held) for layer in range(COUNT)
    ]


@pytest.mark.parametrize(
    ("split", "words"),
    [
        ((), r"split : it lists the first layer of each stage, so it begins with 0"),
        ((1, 3), r"split 1,3: it lists the first layer of each stage, so it begins with 0"),
        ((0, 3, 3), r"split 0,3,3: 3 is not behind the layer before it; every stage has one layer at least"),
        ((0, 3, 2), r"split 0,3,2: 2 is not behind the layer before it"),
        (
            (0.0, 3.0),
            r"split=: it lists the number of the first layer of each stage, .* 0\.0 of type float is no number",
        ),
        (("0", "3"), r".* '0' of type str is no number of a layer"),
        ((False, True), r".*False of type bool is no number"),
        ((0, None), r".*None of type NoneType is no number"),
        ((-1, 2), r".*so it begins with 0"),
        ("0,3", r"split=: .* is of type str"),
        (3, r"split=: .* is of type int"),
        ((0, 6), r"split 0,6: there is no layer 6; there are the layers 0 to 5"),
    ],
)
def test_a_split_that_is_none_of_the_layers_is_one_message(split: Any, words: str) -> None:
    with pytest.raises(Misuse, match=f"^{words}"):
        Layers(LISTED, split)


def test_a_split_for_another_number_of_stages_and_too_many_stages_are_one_message_each() -> None:
    with pytest.raises(Misuse, match=r"^split 0,3: it begins the stages 0 to 1, .* the stages 0 to 2; list the"):
        Layers(LISTED, (0, 3)).ranges(3)
    with pytest.raises(Misuse, match=r"^layers: the schedule has the stages 0 to 6, and there are the layers 0 to 5: "):
        Layers(LISTED).ranges(7)


@pytest.mark.parametrize(
    ("listed", "words"),
    [
        ([], "layers: the list is empty"),
        ([linear, nn.Linear(1, 1)], r"layer 1 is a Linear itself; list functions .* \[lambda: Linear\(..\)\]"),
        ([3], "layer 0 is a int itself"),
    ],
)
def test_what_is_no_list_of_functions_is_refused(listed: Any, words: str) -> None:
    with pytest.raises(Misuse, match=words):
        Layers(listed)


def test_what_a_function_makes_must_be_a_layer_and_its_errors_are_the_models() -> None:
    def failing() -> nn.Module:
        raise ValueError

    with pytest.raises(Misuse, match=r"model.py: layer 1 returned None, not a torch.nn.Module"):
        replace(model(), build_stage=Layers([linear, lambda: None])).stage(0, 1, 0, CPU)  # type: ignore[list-item, return-value]
    with pytest.raises(ModelError, match="layer 1"):
        replace(model(), build_stage=Layers([linear, failing])).stage(1, 2, 0, CPU)


# A model file.

FILE = """\
from torch import nn

def layers():
    return [lambda: nn.Linear(1, 1)] * 4

loss = dataset = optimizer = print
"""


def written(folder: Path, text: str) -> Path:
    (folder / "m.py").write_text(text)
    return folder / "m.py"


def test_a_model_file_may_have_layers_in_place_of_stages_and_takes_a_split(tmp_path: Path) -> None:
    path = written(tmp_path, FILE)
    assert [*load(path).stage(1, 2, 0, CPU).state_dict()] == ["2.weight", "2.bias", "3.weight", "3.bias"]
    assert [*load(path, split=(0, 3)).stage(1, 2, 0, CPU).state_dict()] == ["3.weight", "3.bias"]
    sized = written(tmp_path, FILE.replace("layers()", "layers(args)").replace("* 4", "* int(args[0])"))
    assert len(load(sized, {"args": ["7"]}).build_stage.layers) == 7  # type: ignore[union-attr]


def test_a_number_of_layers_is_no_list_of_them(tmp_path: Path) -> None:
    text = FILE.replace("layers()", "build_stage(stage, num_stages)") + "\nlayers = 24\n"
    assert load(written(tmp_path, text)).layers is None


@pytest.mark.parametrize(
    ("text", "split", "words"),
    [
        (FILE + "build_stage = print", None, "has both layers and build_stage: .* keep one, or"),
        (FILE.replace("layers()", "build_stage(s, n)"), (0, 1), "^--split: the build_stage of .*m.py decides"),
        (FILE + "layers = [1]", None, r"layers is a list, not a function: def layers\(\)"),
        (FILE + "layers = lambda: 3", None, r"layers\(\) returned a int, not a list of functions"),
        (FILE, (0, 4), "^split 0,4: there is no layer 4"),
    ],
)
def test_what_does_not_fit_together_is_one_message(tmp_path: Path, text: str, split: Any, words: str) -> None:
    with pytest.raises(Misuse, match=words):
        load(written(tmp_path, text), split=split)


# What it trains, beside one process.


class Block(nn.Module):
    """Hands a tuple on, and takes a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, state: Any, gain: torch.Tensor) -> Any:
        x, first = state if isinstance(state, tuple) else (state, state)
        return torch.tanh(self.linear(x)) * gain + 0.1 * first, first


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, state: Any) -> torch.Tensor:
        return self.linear(state[0] + state[1])


MODEL: Sequence[Callable[[], nn.Module]] = [*[Block] * (COUNT - 1), Head]


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    x, y, gain = torch.randn(3, B * N, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x, y, {"gain": gain}


def one_process(tied: bool, updates: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights, from the seeds of docs/explanation/runtime.md and plain autograd."""
    made = []
    for index, make in enumerate(MODEL):
        torch.manual_seed(draw_seed("weights", 5, index))
        made.append(make())
    if tied:
        for other in (1, COUNT - 1):
            made[other].linear.weight = made[0].linear.weight
    parameters = {f"layers.{i}.{name}": p for i, layer in enumerate(made) for name, p in layer.named_parameters()}
    if tied:
        parameters = {name: p for name, p in parameters.items() if p is not made[0].linear.weight or "layers.0" in name}
    optimizer, losses = torch.optim.SGD(parameters.values(), lr=RATE), []
    for update in range(updates):
        x, y, named = batch(update)
        state: Any = x
        for layer in made[:-1]:
            state = layer(state, **named)
        value = loss(made[-1](state), y)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses, parameters


@contextmanager
def pipeline(folder: Path, stages: int, split: Any, tied: bool) -> Iterator[Pipeline]:
    layers = Layers(MODEL, split)
    ends = [(0, "linear.weight"), (1, "linear.weight"), (COUNT - 1, "linear.weight")]
    shared = sorted({layers.stage_of(layer, stages) for layer, _ in ends})
    ties = [shared] if tied and len(shared) > 1 else []
    chimera_ir.compile("interleaved", options=Options(tied=ties), P=1, v=stages, N=N).write(folder / "out")
    x, y, named = batch(0)
    example = (x[:B], y[:B], {name: value[:B] for name, value in named.items()})
    with Pipeline(folder / "out", layers, loss, example, seed=5, tied=[ends] if tied else ()) as made:
        yield made


@pytest.mark.full
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("stages", "split"), [(2, None), (2, (0, 1)), (3, None), (4, None), (4, (0, 2, 3, 5))])
def test_any_number_of_stages_and_any_split_trains_the_model_of_one_process(
    alone: World, tmp_path: Path, stages: int, split: Any, tied: bool
) -> None:
    losses, weights = one_process(tied, 3)
    with pipeline(tmp_path, stages, split, tied) as pipe:
        assert {name for name, _ in pipe.named_parameters()} == {*weights}
        optimizer = torch.optim.SGD(pipe.parameters(), lr=RATE)
        for update, expected in enumerate(losses):
            assert pipe.step(batch(update)).loss == pytest.approx(expected, rel=1e-12)  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter, weights[name], rtol=1e-11, atol=1e-13)


def test_a_layer_keeps_its_initial_value_wherever_it_is() -> None:
    values = []
    for stages, split in ((1, None), (2, None), (6, None), (3, (0, 1, 5))):
        of = replace(model(), build_stage=Layers(LISTED, split))
        whole = [of.stage(stage, stages, 7, CPU).state_dict() for stage in range(stages)]
        values.append({name: value.tolist() for held in whole for name, value in held.items()})
    assert values[0] == values[1] == values[2] == values[3]
    assert len(values[0]) == 2 * COUNT
    assert len({str(values[0][f"{index}.weight"]) for index in range(COUNT)}) == COUNT


# What layers share.


def tying(*parameters: Any, split: Any = None) -> ModelFile:
    return replace(model(), build_stage=Layers(LISTED, split), tied=lambda _stages: [*parameters])


def test_ends_are_layers_and_what_two_of_one_stage_share_is_no_tie_of_the_program() -> None:
    across, within = [(0, "weight"), (5, "weight")], [(3, "bias"), (4, "bias")]
    assert declared(tying(within, across), alone_job(ties=((0, 1),))) == (
        Tie((0, 1), (((0, "0.weight"), (1, "5.weight")),)),
        Tie((1,), (((1, "3.bias"), (1, "4.bias")),)),
    )
    with pytest.raises(Misuse, match=r"ties stages 0 and 1, .* compile it again with --tied 0,1$"):
        declared(tying(within, split=(0, 4)), alone_job())


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (None, r"tied\(2\) returned \[None\]: return lists of ends, .*\(5, \"head.weight\"\)"),
        ([(0, "a"), (6, "a")], "names layer 6; there are the layers 0 to 5"),
        ([(0, "a"), (0, "b")], "are not in two layers; tie parameters of one where it is made"),
    ],
)
def test_ends_that_there_cannot_be_are_told_in_layers(said: Any, words: str) -> None:
    with pytest.raises(Misuse, match=words):
        declared(tying(said), alone_job())


def test_a_name_that_a_layer_does_not_have_gets_a_suggestion(alone: World) -> None:
    of = tying([(0, "weight"), (4, "wheight")])
    with (
        worlds(alone, alone_job(ties=((0, 1),))) as (world,),
        pytest.raises(Misuse, match=r"tied names 'wheight' in layer 4, .* \(did you mean weight\?\)"),
    ):
        modules(world, of, 0)


@pytest.mark.parametrize(
    ("split", "option"), [((0, 5), ""), ((0, 2), " and compile with --tied 0,1")], ids=["one stage", "two stages"]
)
def test_layers_that_share_an_object_are_refused_with_the_line_to_write(split: Any, option: str) -> None:
    same = linear()
    of = replace(model(), build_stage=Layers([linear, lambda: same, linear, lambda: same, linear, linear], split))
    built = {stage: of.stage(stage, 2, 0, CPU) for stage in range(2)}
    with pytest.raises(Misuse) as refused:
        refuse_undeclared(built, (), of)
    assert str(refused.value) == (
        "model.py: layers 1 and 3 share the parameter weight, and nothing says so: write `def tied(num_stages): return "
        f'[[(1, "weight"), (3, "weight")]]`{option}; or let the functions of layers() make new modules every time'
    )


# What can be told of a model file by its text: mistakes that are certain, and nothing else.

COMPLETE = """
from elsewhere import layers, loss
optimizer = None
if True:
    def dataset(): ...
"""
LACKING = "model.py lacks the functions build_stage(stage: int, num_stages: int) -> torch.nn.Module, or in its place"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def loss(a, b)\n    pass\n", "model.py:1: SyntaxError: expected ':'\n  def loss(a, b)\n                ^"),
        ("def loss():\nreturn 1", "model.py:2: IndentationError: expected an indented block"),
        ("x = 1\nreturn x", "model.py:2: SyntaxError: 'return' outside function"),
        ("", LACKING),
        ("loss\0", "model.py: SyntaxError: source code string cannot contain null bytes"),
        ("def main():\n    loss = layers\n\nclass A:\n    def dataset(self): ...\n", LACKING),
        (COMPLETE.replace("dataset", "data"), "model.py lacks the function dataset() -> torch.utils.data.Dataset"),
        (COMPLETE.replace("layers", "blocks"), "model.py lacks the function build_stage("),
    ],
)
def test_a_text_that_is_certain_to_fail_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "model.py").write_text(text)
    with pytest.raises(Misuse) as refused:
        require_plausible(tmp_path / "model.py")
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        COMPLETE,
        "from elsewhere import *",
        "exec('loss = dataset = layers = optimizer = print')",
        "import sys\nsys.modules[__name__] = 1",
        "globals().update(other)",
        "def __getattr__(name): ...",
        "def define():\n    global loss, dataset, layers, optimizer\n    loss = dataset = layers = optimizer = 1",
        "for loss, dataset in pairs:\n    with a as layers, b as optimizer: ...",
        "loss = '\\d'; import dataset, layers.optimizer as optimizer, a as layers",
    ],
)
def test_a_text_that_may_define_its_functions_is_left_to_the_ranks(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.py").write_text(text)
    require_plausible(tmp_path / "model.py")


def test_what_is_no_python_file_is_left_to_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "model.txt").write_text("def")
    require_plausible(tmp_path / "model.txt")
    require_plausible(tmp_path / "none.py")
