"""Which stages look back, and the carry of a stack of layers."""

from typing import Any

import pytest
import torch
from torch import nn

from chimera_runtime.errors import BadModel
from chimera_runtime.values.boundary import NO_CARRY, Carry, SliceArguments, Stack, slice_arguments, slice_length
from tests.unit.runtime.carrying import WIDTH, Joining, Listing


class Placed(nn.Module):
    def forward(self, x: torch.Tensor, start: int = 0) -> torch.Tensor:
        return x + start


class Taking(nn.Module):
    def forward(self, x: torch.Tensor, **_others: Any) -> torch.Tensor:
        assert not _others
        return x


@pytest.mark.parametrize(
    ("module", "takes"),
    [
        (Listing(), SliceArguments(carry=True, start=True)),
        (Placed(), SliceArguments(start=True)),
        (Taking(), SliceArguments()),
        (nn.Linear(2, 2), SliceArguments()),
        (Stack({"0": nn.Identity(), "1": Placed()}), SliceArguments(start=True, by_layer=True)),
        (Stack({"0": Placed(), "1": Joining()}), SliceArguments(carry=True, start=True, by_layer=True)),
        (torch.compile(Listing(), backend="eager"), SliceArguments(carry=True, start=True)),
    ],
)
def test_a_stage_says_by_its_signature_that_it_looks_back(module: nn.Module, takes: SliceArguments) -> None:
    assert slice_arguments(module) == takes


def test_keyword_arguments_of_micro_batches_go_before_those_of_slices() -> None:
    assert slice_arguments(Listing()).without({"start"}) == SliceArguments(carry=True)


def test_a_stack_of_layers_gives_each_layer_its_own_carry() -> None:
    """In two slices the layers return what they return, one after the other, for the whole sequence."""
    layers = Stack({"3": Taking(), "4": Listing(), "5": nn.Identity(), "6": Joining()})
    x = torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(3))
    takes = slice_arguments(layers)
    first, left = layers(x[:, :2], **NO_CARRY.arguments(takes, ()))
    assert [*left] == ["4", "6"]
    carry = Carry.of(left, 2)
    second, _ = layers(x[:, 2:], **carry.arguments(takes, carry.tensors))
    whole = layers["6"](layers["4"](x)[0])[0]
    torch.testing.assert_close(torch.cat([first, second], 1), whole)


def test_a_stack_gives_its_layers_keyword_arguments_that_are_called_as_those_of_slices() -> None:
    class Adding(nn.Module):
        def forward(self, x: torch.Tensor, carry: torch.Tensor) -> torch.Tensor:
            return x + carry

    class Shifting(nn.Module):
        def forward(self, x: torch.Tensor, **others: torch.Tensor) -> torch.Tensor:
            return x + others["start"]

    layers, keywords = Stack({"0": Adding(), "1": Shifting()}), {"carry": torch.ones(2), "start": torch.full((2,), 5.0)}
    slice_values = NO_CARRY.arguments(slice_arguments(layers).without(keywords), ())
    assert layers(torch.zeros(2), **keywords, **slice_values).tolist() == [6.0, 6.0]


@pytest.mark.parametrize("returned", [torch.ones(1), (1, 2, 3), [1, 2]])
def test_only_a_pair_is_an_output_with_a_carry(returned: Any) -> None:
    with pytest.raises(BadModel, match="the forward of layer 4 has a parameter carry and returned a"):
        SliceArguments(carry=True).split_result("layer 4", returned)


def test_a_carry_that_may_hide_tensors_is_opaque() -> None:
    assert Carry.of([torch.ones(1), (2, None, "a")], 0).opaque is None
    assert Carry.of([torch.ones(1), nn.Identity()], 0).opaque == "Identity"


def test_the_length_of_a_slice_is_dimension_1_of_its_first_tensor_that_has_one() -> None:
    assert slice_length({"a": torch.ones(3), "b": [torch.ones(3, 5), torch.ones(3, 7)]}) == 5
    assert slice_length(torch.ones(3)) == 0
