"""Memory that is saved for a backward: every piece counts once, weights never, and for as long as it is kept."""

import random
from dataclasses import replace

import torch
from torch import nn

from chimera_runtime.program.kept_bytes import share
from chimera_runtime.stage.saved_tensors import Footprint, SavedTensors, footprint_of_slices

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


def test_an_input_that_is_handed_on_stays_on_the_device_once() -> None:
    """The product saves both factors: one is the input, and the stage returns it as well; the other is a result."""
    x = torch.ones(ROWS, WIDTH)
    saved = SavedTensors(list)
    with saved.counting():
        y = torch.ones(ROWS, WIDTH, requires_grad=True).tanh()
        z = y * x
    found = saved.footprint((x,), (z, y, x.view(-1)), None)
    assert (found.activations, found.saved_results, found.made_results) == (2 * TENSOR, 2 * TENSOR, TENSOR)
    for is_fed in (False, True):
        assert found.resident(is_fed) == found.activations_with_inputs(is_fed) == 2 * TENSOR


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


def test_a_carry_is_counted_apart_and_what_passes_on_only_once() -> None:
    """The weight gradient keeps the input; the carry is a view of the queries, keys and values, kept as a whole."""
    project = nn.Linear(WIDTH, 3 * WIDTH)
    earlier = torch.ones(ROWS, WIDTH, requires_grad=True)
    saved = SavedTensors(project.parameters)
    x = torch.ones(ROWS, WIDTH, requires_grad=True)
    with saved.counting():
        queries, *now = project(x).chunk(3, 1)
        y = queries * earlier + now[0] * now[1]
    footprint = saved.footprint((x,), (y,), None, before=(earlier,), left=(earlier, *now))
    assert (footprint.activations, footprint.carry, footprint.carry_gradients) == (TENSOR, 3 * TENSOR, 3 * TENSOR)


def test_an_input_or_a_result_that_is_left_as_the_carry_counts_once() -> None:
    """The product saves the input and a result; the stage leaves both as its carry, and returns the result."""
    x = torch.ones(ROWS, WIDTH, requires_grad=True)
    saved = SavedTensors(list)
    with saved.counting():
        y = x.exp()
        z = y * x
    found = saved.footprint((x,), (y, z), None, left=(x, y))
    assert (found.activations, found.saved_inputs, found.carry) == (TENSOR, TENSOR, TENSOR)
    assert found.activations_with_inputs(is_fed=True) == found.resident(is_fed=True) == TENSOR
    # The next slice gets the same tensors as its carry, and one of them as its input: nothing new is kept.
    again = saved.footprint((x,), (y,), None, before=(x, y), left=(x, y))
    assert (again.activations, again.carry) == (0, 0)
    assert again.resident(is_fed=True) <= again.activations_with_inputs(is_fed=True)


def test_slices_count_as_the_largest_mean_of_the_first_ones() -> None:
    """As many as are kept at any time are the first slices of their micro-batches."""
    growing = [Footprint(a, 1, 1, 2, 1, 3, released=a, operands=a, carry=a, carry_gradients=a) for a in (10, 20, 40)]
    assert footprint_of_slices(growing) == Footprint(
        24, 1, 1, 2, 1, 3, released=10, operands=40, carry=24, carry_gradients=40
    )
    assert footprint_of_slices(growing[::-1]).activations == 40
    # Of lengths 1, 1, 2 a whole is 4: 10 and 30 and 70 bytes by 4/1, 4/2 and 4/4, and the gradients by their makers.
    unequal = footprint_of_slices([*growing[:2], replace(growing[2], carry_gradients=0)], (1, 1, 2))
    assert (unequal.activations, unequal.operands, unequal.released) == (70, 80, 40)
    assert unequal.carry_gradients == max(10 * 4, 20 * 4 // 2)
    assert footprint_of_slices(growing[:1]) == growing[0]


def test_no_first_slices_of_unequal_length_keep_more_than_their_share_counts() -> None:
    rng = random.Random(3)
    for _ in range(100):
        lengths = [rng.randint(1, 9) for _ in range(rng.randint(2, 5))]
        sizes = [(rng.randint(0, 99), rng.randint(0, 99)) for _ in lengths]
        counted = footprint_of_slices([Footprint(a, 1, 1, 1, 1, 1, carry=c) for a, c in sizes], lengths)
        for count in range(1, len(lengths) + 1):
            units, whole = sum(lengths[:count]), sum(lengths)
            assert sum(a for a, _ in sizes[:count]) <= share(units, counted.activations, whole)
            assert sum(c for _, c in sizes[:count]) <= share(units, counted.carry, whole)
