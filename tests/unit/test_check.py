"""A check leaves no trace: what it shares with the training that follows is put back."""

import random

import numpy
import pytest
import torch
from torch import nn

from support.check import Kept, random_numbers_restored, shared
from support.versions import Versions, masters


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def test_modules_that_are_made_anew_share_nothing() -> None:
    assert shared({0: Normed(), 1: Normed()}, {0: Normed(), 1: Normed()}) == []


@pytest.mark.parametrize("wrapped", [nn.Sequential, lambda module: nn.ModuleList(module.children())])
def test_modules_that_are_made_once_are_put_back_with_their_buffers(wrapped: type[nn.Module]) -> None:
    """Also where weights had versions since: the parameters then show other memory."""
    module = Normed()
    before, places = state(module), [p.data_ptr() for p in module.parameters()]
    kept = [Kept(tensor) for tensor in shared({3: module}, {3: wrapped(module)})]
    parameters = list(module.parameters())
    stepped = masters(parameters)
    versions = Versions(parameters, stepped, torch.optim.SGD(stepped, lr=0.1))
    versions.stash(0)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    versions.step()
    versions.select(1)
    module.norm.running_mean.add_(1)  # type: ignore[operator,union-attr]
    module.norm.num_batches_tracked.add_(1)  # type: ignore[operator,union-attr]
    assert any(not torch.equal(tensor, before[name]) for name, tensor in state(module).items())
    for tensor in kept:
        tensor.restore()
    assert all(torch.equal(tensor, before[name]) for name, tensor in state(module).items())
    assert [p.data_ptr() for p in module.parameters()] == places
    assert all(p.grad is None for p in module.parameters())


def test_a_weight_in_the_same_memory_is_put_back() -> None:
    table = torch.ones(4)
    first, second = nn.ParameterList([nn.Parameter(table)]), nn.ParameterList([nn.Parameter(table)])
    (kept,) = [Kept(tensor) for tensor in shared({0: first}, {0: second})]
    with torch.no_grad():
        second[0].zero_()
    kept.restore()
    assert torch.equal(first[0], torch.ones(4))


def test_every_generator_goes_on_where_it_was() -> None:
    def draw() -> tuple[float, float, float]:
        return torch.rand(()).item(), random.random(), numpy.random.rand()

    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)
    with random_numbers_restored():
        inside = draw()
    assert draw() == inside
