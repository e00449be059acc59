"""Stages come to the device of their rank, whole; where they are from another one, that is said."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from chimera_runtime.blame import ModelError
from chimera_runtime.errors import Misuse
from chimera_runtime.model.model import _on_device

CPU, META = torch.device("cpu"), torch.device("meta")
FILE = Path("model.py")


class Scale(nn.Module):
    """A factor that is made on a device."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(2, device=device))


class Staying(nn.Linear):
    """A layer that stays where it is, as one that is spread over devices does."""

    def to(self, *_: object, **__: object) -> "Staying":
        return self


class Refusing(nn.Linear):
    """A layer that cannot be moved."""

    def to(self, *_: object, **__: object) -> "Refusing":
        raise RuntimeError("offloaded")


def test_a_stage_comes_to_its_device_with_all_it_has() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    placed = _on_device(module, META, 1, FILE)
    assert placed is module
    assert {tensor.device for tensor in (*placed.parameters(), *placed.buffers())} == {META}


@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
def test_a_stage_that_was_built_on_another_gpu_is_refused_with_both_devices(device: str) -> None:
    with FakeTensorMode():
        module = nn.Sequential(nn.Linear(2, 2), Scale("cuda:1"))
    with pytest.raises(Misuse) as error:
        _on_device(module, torch.device(device), 1, FILE)
    assert str(error.value).startswith(
        f"model.py: stage 1 has 1.factor on cuda:1, and its rank computes on {device}: build it on the CPU"
    )


def test_a_part_that_stays_behind_is_named() -> None:
    with pytest.raises(Misuse) as error:
        _on_device(Staying(2, 2), META, 1, FILE)
    assert str(error.value) == (
        "model.py: stage 1 has weight on cpu, also after module.to('meta'): a stage has to be one that moves as a whole"
    )


def test_an_error_of_the_stage_that_moves_is_the_model_files() -> None:
    with pytest.raises(ModelError, match="placing stage 1 on cpu"):
        _on_device(Refusing(2, 2), CPU, 1, FILE)
