"""``chimera profile layers`` measures equal layers once: which layers are equal, and what the others get."""

import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from chimera_ir import progress
from chimera_ir.commands.profile_command import profile_command
from chimera_ir.measure import stages, stations
from chimera_ir.measure.stages import StageRequest, noise
from chimera_ir.profile.costs import ModelProfile
from tests.unit.test_measure import spread_samples

HEAD = """\
import torch
from torch import nn

def loss(output, target):
    return output.mean()

def dataset():
    return [(torch.zeros(8), 0)] * 16
"""
SGD = """
def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
"""


def signature(value: object) -> object:
    return stations._Signature().of(value)


class Scaled(nn.Module):
    """A layer with whatever it is given."""

    def __init__(self, what: object) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.what = what

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.linear(x))


def closure(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x * factor


def hooked() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.register_forward_hook(lambda *_: None)
    return layer


def frozen() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.weight.requires_grad_(False)
    return layer


def masked(*values: float) -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.register_buffer("mask", torch.tensor(values))
    return layer


CONFIG = object()


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(4, 4),
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1)),
        lambda: nn.TransformerEncoderLayer(8, 2, 16),
        lambda: nn.GELU("tanh"),
        lambda: Scaled({"rates": [1, 2.5, None], "name": "x"}),
        lambda: Scaled(closure(2.0)),
        lambda: Scaled(functools.partial(torch.sum, dim=1)),
        lambda: Scaled(torch.relu),
        lambda: Scaled(torch.arange(3)),
        lambda: Scaled(CONFIG),
        lambda: masked(1, 0),
    ],
)
def test_what_one_function_makes_twice_is_equal(make: Callable[[], nn.Module]) -> None:
    assert signature(make()) == signature(make())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (nn.Linear(4, 4), nn.Linear(4, 4, bias=False)),
        (nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.float64)),
        (nn.Linear(4, 4), frozen()),
        (nn.Linear(4, 4), hooked()),
        (nn.Linear(4, 4), nn.Linear(4, 4).eval()),
        (nn.Dropout(0.1), nn.Dropout(0.2)),
        (nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3, groups=3)),
        (nn.Sequential(nn.ReLU()), nn.Sequential(nn.Tanh())),
        (Scaled(closure(2.0)), Scaled(closure(3.0))),
        (Scaled(functools.partial(torch.sum, dim=1)), Scaled(functools.partial(torch.sum, dim=0))),
        (Scaled(torch.arange(3)), Scaled(torch.arange(1, 4))),
        (Scaled(object()), Scaled(object())),
        (Scaled(1), Scaled(True)),
        (masked(1, 0), masked(1, 1)),
    ],
)
def test_what_differs_in_anything_that_may_take_time_is_not(one: nn.Module, other: nn.Module) -> None:
    assert signature(one) != signature(other)


def test_a_module_that_names_itself_has_a_signature() -> None:
    one, other = Scaled(None), Scaled(None)
    one.what, other.what = [one], [other]
    assert signature(one) == signature(other)


def measured(
    monkeypatch: pytest.MonkeyPatch, path: Path, text: str, once: bool
) -> tuple[ModelProfile, list[tuple[int, str]]]:
    """The profile of the layers of a file, and which of them were measured."""
    (path / "m.py").write_text(HEAD + text)
    monkeypatch.setattr(sys, "path", list(sys.path))
    calls: list[tuple[int, str]] = []
    for name in ("passes", "step"):

        def counted(self: object, cut: object, number: int, *rest: object, name: str = name) -> object:
            calls.append((number, name))
            return real[name](self, cut, number, *rest)

        monkeypatch.setattr(stages._StageClock, name, counted)
    request = StageRequest((), (2,), 5, 0, once=once)
    return stages.timed(stages.of_file(path / "m.py"), request, "cpu", 1, lambda *_: None).profile, calls


real = {name: getattr(stages._StageClock, name) for name in ("passes", "step")}

EQUAL = "def layers():\n    return [lambda: nn.Linear(8, 8)] * 5 + [lambda: nn.Linear(8, 4)]\n"


def test_of_equal_layers_one_is_measured_and_the_first_and_the_last_of_the_model_by_themselves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    profile, calls = measured(monkeypatch, tmp_path, EQUAL + SGD, once=True)
    assert sorted(number for number, name in calls if name == "passes") == [0, 4, 5]
    assert profile.note.endswith("; of equal layers one was measured: 0 to 4"), (
        "the step of the first is the others', too"
    )
    assert len({layer.at[2].times["F"] for layer in profile.layers[1:5]}) == 1
    every, calls = measured(monkeypatch, tmp_path, EQUAL + SGD, once=False)
    assert len(calls) == 12
    assert "equal" not in every.note
    bytes_of = [
        [(layer.weights, layer.optimizer, layer.at[2].kept.activations) for layer in p.layers] for p in (profile, every)
    ]
    assert bytes_of[0] == bytes_of[1]


def test_equal_layers_with_other_optimizers_have_steps_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The model file gives every optimizer a momentum of its own."""
    changing = """
made = []
def optimizer(parameters):
    made.append(0)
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.1 + len(made) / 100)
"""
    _, calls = measured(monkeypatch, tmp_path, EQUAL + changing, once=True)
    assert sorted(number for number, name in calls if name == "step") == [0, 1, 2, 3, 4, 5]
    assert sorted(number for number, name in calls if name == "passes") == [0, 4, 5]


def test_the_option_every_measures_every_layer() -> None:
    (layers,) = (command for name, command in profile_command.commands.items() if name == "layers")
    assert "--every" in {option for parameter in layers.params for option in parameter.opts}


def test_noise_is_one_warning_and_a_line_for_each_figure_the_worst_first() -> None:
    figures = [
        ("forward of layer 2", spread_samples(16, 0.02)),
        ("backward of layer 2", spread_samples(16, 0.4)),
        ("step of layer 2", spread_samples(16, 0.9)),
    ]
    warning, *lines = noise(figures)
    assert warning.startswith(
        "too noisy to use: 2 of 3 figures, whose medians may be off by more than 5 % after 16 rounds"
    )
    step, backward = (stages.percent(quantity.uncertainty) for _, quantity in (figures[2], figures[1]))
    assert f"the step of layer 2 by {step}" in warning
    assert lines == [f"step of layer 2: {step}", f"backward of layer 2: {backward}"]
    assert noise(figures[:1]) == ()


def test_a_log_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with progress.logged() as log:
        log("nothing yet")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "EVERY", 0.02)
    with progress.logged() as log:
        log("measured 1 of 9: layer 3 of 4")
        time.sleep(0.3)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 2
    assert {*lines} == {"measured 1 of 9: layer 3 of 4 (0 s)"}
