"""A weight group: two stages use one parameter, whose gradients are one sum and which steps once."""

import torch
from torch import nn

from chimera_runtime.check.reference import seed_of
from chimera_runtime.program.numbering import Numbering
from chimera_runtime.ranks.messages import Names
from chimera_runtime.stage.gradient_sums import GradientSum
from chimera_runtime.stage.weight_versions import Unstepped, Versions, WeightGroup, Weights, masters


def group(weights: Weights, parameter: nn.Parameter, *stages: int) -> WeightGroup:
    gradients = GradientSum("s0+s3", [parameter], None, (0,), Names(0, 0, 4, 1.0), lambda work: work.wait())
    return WeightGroup(stages, weights, gradients, Numbering(7, 0, 2, 2))


class Noting:
    """An optimizer that notes the gradient, and what a step draws at random."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.seen: list[tuple[float, float]] = []

    def step(self) -> None:
        assert self.parameter.grad is not None
        self.seen.append((self.parameter.grad.item(), torch.rand(()).item()))


def drawn(*seed: int) -> float:
    torch.manual_seed(seed_of("step", *seed))
    return torch.rand(()).item()


def test_every_use_adds_to_one_gradient_and_the_step_has_a_seed_of_its_stages() -> None:
    parameter = nn.Parameter(torch.tensor([2.0]))
    optimizer = Noting(parameter)
    shared = group(Weights(optimizer), parameter, 0, 3)
    for _ in range(2):
        for factor in (3.0, 5.0, 7.0):
            (parameter * factor).sum().backward()
            shared.gradient_sum.collect()
        shared.all_reduce()
        shared.wait_all_reduce()
        shared.step()
        assert parameter.grad is None
    assert optimizer.seen == [(15.0, drawn(7, 0, 0, 3)), (15.0, drawn(7, 1, 0, 3))]
    assert shared.updates == 2


def test_gradients_of_weights_that_somebody_else_steps_stay_until_they_are_cleared() -> None:
    parameter = nn.Parameter(torch.tensor([2.0]))
    shared = group(Unstepped(), parameter, 0, 3)
    parameter.sum().backward()
    shared.gradient_sum.collect()
    shared.step()
    assert parameter.grad is not None
    shared.gradient_sum.clear()
    assert parameter.grad is None


def test_an_older_version_is_there_while_it_is_stashed() -> None:
    parameter = nn.Parameter(torch.tensor([2.0]))
    stepped = masters([parameter])
    shared = group(Versions([parameter], stepped, torch.optim.SGD(stepped, lr=1.0)), parameter, 0, 3)
    parameter.sum().backward()
    shared.gradient_sum.collect()
    shared.stash(0)
    shared.step()
    for version, value in ((1, 1.0), (0, 2.0), (1, 1.0)):
        shared.weights.select(version)
        assert parameter.item() == value
    shared.drop(0)


def test_a_rehearsal_leaves_the_weights_alone() -> None:
    parameter = nn.Parameter(torch.tensor([2.0]))
    optimizer = Noting(parameter)
    shared = group(Weights(optimizer), parameter, 0, 3)
    shared.rehearse()
    shared.stash(0)
    shared.all_reduce()
    shared.wait_all_reduce()
    shared.step()
    shared.drop(0)
    assert (optimizer.seen, shared.updates, parameter.item()) == ([], 1, 2.0)
