"""Which keyword arguments a stage takes."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from chimera_runtime.errors import Misuse
from chimera_runtime.values.boundary import KeywordNames, Stack, accepted, require_unused

NAMES = ("x", "mask", "index")


class Masked(nn.Module):
    def forward(self, x: torch.Tensor, mask: Any = None, *, flag: bool = False) -> torch.Tensor:
        return x


class Everything(nn.Module):
    def forward(self, x: torch.Tensor, **others: Any) -> torch.Tensor:
        return x


class Bare(nn.Module):
    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return tensors[0]


class Behind(nn.Module):
    def forward(self, x: torch.Tensor, mask: Any, /, index: Any) -> torch.Tensor:
        return x


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (nn.Linear(2, 2), ()),
        (nn.Sequential(Masked()), ()),
        (Masked(), ("mask",)),
        (Everything(), NAMES),
        (Bare(), ()),
        (Behind(), ("index",)),
        (Stack({"0": Behind(), "1": nn.Linear(2, 2), "2": Masked()}), ("mask", "index")),
    ],
)
def test_a_stage_takes_the_names_of_its_parameters_but_the_first(module: nn.Module, names: tuple[str, ...]) -> None:
    assert accepted(module, NAMES) == names


def test_a_compiled_stage_takes_what_it_took_before() -> None:
    class Compiled(nn.Module):
        """As what torch.compile returns."""

        def __init__(self) -> None:
            super().__init__()
            self._orig_mod = Masked()

        def forward(self, *arguments: Any, **named: Any) -> Any:
            return self._orig_mod(*arguments, **named)

    assert accepted(Compiled(), NAMES) == ("mask",)


def test_layers_in_a_row_are_given_what_each_knows() -> None:
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor, *, by: float) -> torch.Tensor:
            return x * by

    class Shifted(nn.Module):
        def forward(self, x: torch.Tensor, by: float, further: float) -> torch.Tensor:
            return x + by + further

    rows = Stack({"0": Scaled(), "1": nn.Identity(), "2": Shifted(), "3": Scaled()})
    assert rows(torch.tensor(5.0), by=2.0, further=10.0) == (5 * 2 + 2 + 10) * 2


def test_a_mini_batch_has_the_names_of_the_example_or_those_that_a_rank_needs() -> None:
    names = KeywordNames(frozenset({"mask", "index"}), frozenset({"mask"}))
    names.declared({"mask": 1, "index": 2}, "it")
    names.declared({"mask": 1}, "it")
    with pytest.raises(Misuse, match="it has no keyword argument mask, and the example of the pipeline has one"):
        names.declared({"index": 1}, "it")
    with pytest.raises(Misuse, match="it has the keyword argument bias and the example of the pipeline has none"):
        names.declared({"mask": 1, "index": 2, "bias": 3}, "it")


def test_a_loss_that_waits_for_a_keyword_argument_of_stages_is_refused() -> None:
    def loss(output: Any, target: Any, mask: Any = None) -> None: ...

    with pytest.raises(Misuse, match=r"loss has a parameter mask, but keyword arguments are for stages"):
        require_unused(loss, ["mask"])
    require_unused(loss, ["index"])
    require_unused(partial(loss, mask=1), ["mask"])
    require_unused(min, ["mask"])
