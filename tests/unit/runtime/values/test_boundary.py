"""What stages hand to one another: buffers for it, and what differs from it."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from chimera_runtime.errors import BadModel, Misuse
from chimera_runtime.values.boundary import (
    NO_CARRY,
    Boundary,
    Carry,
    FeedingBoundary,
    KeywordNames,
    SliceArguments,
    Stack,
    accepted,
    called,
    joined_boundary,
    require_unused,
    slice_arguments,
    slice_length,
)
from chimera_runtime.values.nested import ONE_TENSOR, taken_apart
from tests.unit.runtime.carrying import WIDTH, Joining, Listing
from tests.unit.runtime.staged import tuple_of

CPU = torch.device("cpu")
PAIR = Boundary(
    form=tuple_of(2),
    shapes=((2, 3), (2,)),
    dtypes=(torch.float32, torch.int64),
    recorded=(True, False),
    differentiable=(True, False),
)


def outputs(rows: int = 2) -> list[Any]:
    return [torch.ones(rows, 3, requires_grad=True), torch.ones(rows, dtype=torch.int64)]


def test_a_message_of_several_micro_batches_has_their_rows_one_after_another() -> None:
    assert [tuple(t.shape) for t in PAIR.buffers(CPU)] == [(2, 3), (2,)]
    assert [tuple(t.shape) for t in PAIR.buffers(CPU, 3)] == [(6, 3), (6,)]
    assert [t.dtype for t in PAIR.buffers(CPU, 3)] == [torch.float32, torch.int64]


def test_a_tensor_without_dimensions_has_room_for_one_micro_batch() -> None:
    scalar = Boundary(ONE_TENSOR, ((),), (torch.float32,), (True,), (True,))
    assert scalar.shape(0, 1) == ()


def test_gradients_come_back_of_the_differentiable_tensors_alone() -> None:
    assert [tuple(t.shape) for t in PAIR.gradient_buffers(CPU, 2)] == [(4, 3)]


# Stages that several stages feed.

ONE = Boundary(ONE_TENSOR, ((2, 3),), (torch.float32,), (True,), (True,))
SLICED = replace(ONE, of_micros=(((2, 3),), ((2, 1),)))


def feed(source: int, boundary: Boundary, keyword: str = "", backs: bool = True) -> FeedingBoundary:
    return FeedingBoundary(source, keyword, boundary, backs)


def test_a_joined_boundary_has_the_tensors_of_all_feeds_in_their_order() -> None:
    before = joined_boundary([feed(2, PAIR), feed(0, ONE, "pixels")])
    assert before is not None
    assert before.shapes == (*PAIR.shapes, *ONE.shapes)
    assert before.dtypes == (torch.float32, torch.int64, torch.float32)
    assert before.recorded == before.differentiable == (True, False, True)
    assert before.apart == (PAIR, ONE)
    (first, second, third), form = taken_apart(((torch.ones(2, 3), torch.ones(2)), torch.zeros(2, 3)))
    assert form == before.form
    filled = before.form.filled((first, second, third))
    assert called(lambda *values, **named: (values, named), before)(filled, start=4) == (
        (filled[0],),
        {"pixels": third, "start": 4},
    )


def test_a_single_feed_stays_as_it_is_unless_it_has_a_keyword() -> None:
    assert joined_boundary([]) is None
    assert joined_boundary([feed(0, PAIR)]) is PAIR
    assert PAIR.apart == (PAIR,)
    before = joined_boundary([feed(0, ONE, "pixels")])
    assert before is not None
    assert called(lambda **named: named, before)(before.form.filled([7])) == {"pixels": 7}
    for plain in (None, PAIR):
        assert called(len, plain) is len, "a chain is called as ever"


def test_joined_shapes_are_those_of_each_slice() -> None:
    before = joined_boundary([feed(0, SLICED), feed(1, SLICED)])
    assert before is not None
    assert before.at(1).shapes == ((2, 1), (2, 1))


@pytest.mark.parametrize(
    ("counted", "backs", "places"),
    [
        (False, (True, True), [(2, (0,)), (0, (1,))]),
        (True, (True, True), [(2, (0, -1)), (0, (1, -1))]),
        (True, (False, True), [(0, (1, -1))]),
        (False, (True, False), [(2, (0,))]),
    ],
)
def test_each_feed_that_backs_gets_its_own_gradients_and_the_count(
    counted: bool, backs: tuple[bool, bool], places: list[tuple[int, tuple[int, ...]]]
) -> None:
    pair, one = (replace(boundary, counted=counted) for boundary in (PAIR, ONE))
    before = joined_boundary([feed(2, pair, backs=backs[0]), feed(0, one, "pixels", backs=backs[1])])
    assert before is not None
    assert before.gradient_places() == places


def test_a_stage_takes_no_keyword_argument_of_a_batch_by_the_name_of_a_feed() -> None:
    class Taking(nn.Module):
        def forward(self, first: Any, second: Any, pixels: Any, mask: Any = None) -> Any:
            return first, second, pixels, mask

    before = joined_boundary([feed(0, ONE), feed(1, ONE), feed(2, ONE, "pixels")])
    assert accepted(Taking(), ["second", "pixels", "mask"], before) == ("mask",)
    assert accepted(Taking(), ["second", "pixels", "mask"]) == ("second", "pixels", "mask")


@pytest.mark.parametrize("micros", [1, 2])
def test_tensors_as_at_start_match(micros: int) -> None:
    assert PAIR.mismatch(tuple(outputs(2 * micros)), PAIR.form, micros) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors[:1], "1 tensor instead of 2"),
        (lambda tensors: [tensors[0][:1], tensors[1]], "tensor 0 is (1, 3) torch.float32 and was (2, 3) torch.float32"),
        (lambda tensors: [tensors[0], tensors[1].int()], "tensor 1 is (2,) torch.int32 and was (2,) torch.int64 for"),
        (lambda tensors: [tensors[0].detach(), tensors[1]], "tensor 0 requires a gradient for one micro-batch and"),
        (lambda tensors: [tensors[0], None], "1 tensor instead of 2"),
        (lambda tensors: [[tensors[0]], tensors[1]], "([tensor], tensor) and was (tensor, tensor) for the first"),
        (lambda tensors: [*tensors, None], "(tensor, tensor, None) and was (tensor, tensor) for the first micro-batch"),
    ],
)
def test_what_differs_is_named(change: Any, words: str) -> None:
    mismatch = PAIR.mismatch(*taken_apart(tuple(change(outputs()))), 1)
    assert mismatch is not None
    assert mismatch.startswith(words)


def test_gradients_do_not_count_where_none_are_recorded() -> None:
    """As in the first of two forwards."""
    with torch.no_grad():
        assert PAIR.mismatch(tuple(tensor.detach() for tensor in outputs()), PAIR.form, 1) is None


def test_a_smaller_message_takes_the_first_part_of_the_memory() -> None:
    wide = Boundary(tuple_of(2), ((2, 4), (2,)), (torch.float32,) * 2, (True, True), (True, True), counted=True)
    small = replace(wide, shapes=((2, 3), (2,)))
    memory = wide.gradient_buffers(CPU, 2)
    views = small.gradient_views(memory, 2)
    assert [tuple(t.shape) for t in views] == [(4, 3), (4,), (2,)]
    assert all(t.is_contiguous() and t.data_ptr() == m.data_ptr() for t, m in zip(views, memory, strict=True))
    assert [tuple(t.shape) for t in small.views(wide.buffers(CPU), 1)] == [(2, 3), (2,)]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ((torch.ones(2, 2), torch.ones(2, dtype=torch.int64)), None),
        ((torch.ones(1, 6), torch.ones(1, dtype=torch.int64)), None),
        ((torch.ones(2, 4), torch.ones(2, dtype=torch.int64)), "a tensor (2, 4) torch.float32, and (2, 3)"),
        ((torch.ones(2, 3), torch.ones(2)), "a tensor (2,) torch.float32, and (2,) torch.int64 for the example"),
        ([torch.ones(2, 3), torch.ones(2)], "[tensor, tensor], and (tensor, tensor) for the example"),
    ],
)
def test_what_does_not_fit_into_the_memory_is_named(value: Any, words: str | None) -> None:
    excess = PAIR.excess(*taken_apart(value))
    assert excess is None if words is None else excess is not None and excess.startswith(words)


def test_slices_of_unequal_lengths_have_shapes_of_their_own_in_buffers_for_the_largest() -> None:
    first = Boundary(tuple_of(1), ((2, 1, 3),), (torch.float32,), (True,), (True,), counted=True)
    other = replace(first, shapes=((2, 4, 3),))
    boundary = first.with_slices([other])
    assert boundary is not None
    memory, back = boundary.buffers(CPU), boundary.gradient_buffers(CPU)
    assert [tuple(t.shape) for t in memory] == [(2, 4, 3)]
    for micro, shape in ((0, (2, 1, 3)), (1, (2, 4, 3)), (2, (2, 1, 3)), (5, (2, 4, 3))):
        assert boundary.at(micro).shapes == (shape,)
        (view,), (gradient, _) = boundary.views(memory, 1, micro), boundary.gradient_views(back, 1, micro)
        assert (tuple(view.shape), tuple(gradient.shape), view.data_ptr()) == (shape, shape, memory[0].data_ptr())
    assert first.with_slices([replace(other, dtypes=(torch.float64,))]) is None
    assert first.at(3) is first


# Which stages look back, and the carry of a stack of layers.


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


# Which keyword arguments a stage takes.


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


class Reading(nn.Module):
    def forward(self, pixels: torch.Tensor, waves: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return pixels + 10 * waves + 100 * words


@pytest.mark.parametrize(("feeds", "values"), [(("pixels", "waves"), ()), (("", "waves"), (1,)), (("", ""), (1, 2))])
def test_the_first_layer_takes_what_stages_feed_by_name_or_in_order(
    feeds: tuple[str, ...], values: tuple[int, ...]
) -> None:
    layers, one = Stack({"0": Reading(), "1": nn.Identity()}), torch.ones(())
    named = {"pixels": one, "waves": 2 * one}
    by_name = {name: named[name] for name in feeds if name}
    assert layers(*[value * one for value in values], **by_name, words=3 * one) == 321
    before: Any = SimpleNamespace(feeds=[SimpleNamespace(keyword=name) for name in feeds])
    assert accepted(layers, ("words", "waves", "pixels"), before) == ("words",)


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
