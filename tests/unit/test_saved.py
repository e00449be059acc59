"""What is counted as saved for a backward: every piece of memory once, weights never, and for as long as it is kept."""

import pytest
import torch
from torch import nn

from support.faults import Misuse
from support.memory import shown
from support.options import parse
from support.saved import Footprint, Saved

ROWS, WIDTH = 3, 4
TENSOR = ROWS * WIDTH * 4


def test_weights_are_left_out_and_memory_counts_once() -> None:
    """A linear layer saves its input and a view of its weight; the tanh its result, which the next layer saves too."""
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    saved = Saved(module.parameters)
    x = torch.ones(ROWS, WIDTH)
    with saved.watching():
        y = module(x)
    found = saved.footprint((x,), (y,), None)
    assert found == Footprint(2 * TENSOR, TENSOR, TENSOR, TENSOR, 0, 0)


def test_what_a_backward_has_used_is_no_longer_saved() -> None:
    saved = Saved(list)
    with saved.watching():
        y = torch.ones(ROWS, WIDTH, requires_grad=True).tanh()
        assert sum(saved.sizes.values()) == TENSOR
        y.sum().backward()
    assert saved.sizes == {}
    assert saved.peak == TENSOR


def test_a_graph_that_nobody_runs_backward_goes_with_its_result() -> None:
    saved = Saved(list)
    with saved.watching():
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
        saved = Saved(module.parameters)
        if watched:
            with saved.watching():
                result = module(torch.ones(ROWS, WIDTH))
        else:
            result = module(torch.ones(ROWS, WIDTH))
        result.sum().backward()
        gradients.append([p.grad for p in module.parameters()])
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize(
    ("text", "size"), [("4096", 4096), ("1.5KiB", 1536), ("16GiB", 2**34), ("2 MiB", 2**21), ("0.5TiB", 2**39)]
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse(["--model", "m.py", "--memory-limit", text], "scheme").memory_limit == size


@pytest.mark.parametrize("text", ["16GB", "-1", "0", "0.4", "GiB", "1e9", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(Misuse, match="--memory-limit"):
        parse(["--model", "m.py", "--memory-limit", text], "scheme")


def test_sizes_are_shown_with_three_digits() -> None:
    assert [shown(size) for size in (12, 4096, 16 * 2**30, 1234567)] == ["12 B", "4 KiB", "16 GiB", "1.18 MiB"]
