"""Memory that is saved for a backward: every piece counts once, weights never, and for as long as it is kept."""

import torch
from torch import nn

from chimera_runtime.stage.saved_tensors import Footprint, SavedTensors

ROWS, WIDTH = 3, 4
TENSOR = ROWS * WIDTH * 4


def test_weights_are_left_out_and_memory_counts_once() -> None:
    """A linear layer saves its input and a view of its weight; the tanh its result, which the next layer saves too."""
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    saved = SavedTensors(module.parameters)
    x = torch.ones(ROWS, WIDTH)
    with saved.counting():
        y = module(x)
    found = saved.footprint((x,), (y,), None)
    assert found == Footprint(2 * TENSOR, TENSOR, TENSOR, TENSOR, 0, 0)


def test_what_a_backward_has_used_is_no_longer_saved() -> None:
    saved = SavedTensors(list)
    with saved.counting():
        y = torch.ones(ROWS, WIDTH, requires_grad=True).tanh()
        assert sum(saved.sizes.values()) == TENSOR
        y.sum().backward()
    assert saved.sizes == {}
    assert saved.peak == TENSOR


def test_a_graph_that_nobody_runs_backward_goes_with_its_result() -> None:
    saved = SavedTensors(list)
    with saved.counting():
        y = torch.ones(ROWS, WIDTH, requires_grad=True).tanh()
        z = y * y
    assert saved.sizes
    del y, z
    assert saved.sizes == {}


def test_gradients_are_those_of_tensors_that_nobody_watches() -> None:
    gradients = []
    for watched in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), nn.Dropout(0.5))
        saved = SavedTensors(module.parameters)
        if watched:
            with saved.counting():
                result = module(torch.ones(ROWS, WIDTH))
        else:
            result = module(torch.ones(ROWS, WIDTH))
        result.sum().backward()
        gradients.append([p.grad for p in module.parameters()])
    assert all(map(torch.equal, *gradients))
