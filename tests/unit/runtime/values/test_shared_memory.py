"""Memory that something else holds: slots move away from it, copies are made of it, writes to it are noticed."""

from typing import Any

import pytest
import torch
from torch import nn

from chimera_runtime.errors import BadModel
from chimera_runtime.ranks.world import World
from chimera_runtime.stage.stage import Stage
from chimera_runtime.stage.stage_output import SendOutput
from chimera_runtime.values import shared_memory
from chimera_runtime.values.boundary import Boundary
from chimera_runtime.values.nested import ONE_TENSOR, Tensors
from chimera_runtime.values.shared_memory import ReleasedTensors, Slots, is_shared, lend, unshared, versions
from tests.unit.runtime.models import model, setting
from tests.unit.runtime.staged import MICROS, ONE, ROWS, WIDTH, data, groups, rows, stage
from tests.unit.runtime.thread_ranks import alone_job, worlds


def message(room: int) -> Tensors:
    return torch.zeros(room, 2), torch.zeros(room)


# What holds memory.


def test_memory_is_shared_while_anything_else_holds_it() -> None:
    tensor = torch.zeros(4)
    assert not is_shared(tensor)
    view = tensor[:2]
    assert is_shared(tensor)
    assert is_shared(view)
    del view
    assert not is_shared(tensor)
    graph = (tensor.detach() * torch.ones(4, requires_grad=True)).sum()
    assert is_shared(tensor), "for the backward"
    graph.backward()
    assert not is_shared(tensor)


def test_what_is_shared_is_copied_and_nothing_else() -> None:
    tensor = torch.ones(4)
    assert unshared(tensor) is tensor
    part = tensor[1:]
    copy = unshared(part)
    tensor.zero_()
    assert copy.tolist() == [1.0] * 3


def test_where_torch_does_not_count_everything_may_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_COUNT", None)
    tensor = torch.ones(4)
    assert is_shared(tensor)
    slots = Slots((1,), message)
    assert slots.vacant(0) is not slots.vacant(0), "each message gets new memory"


def test_tensors_of_inference_mode_have_no_versions() -> None:
    with torch.inference_mode():
        frozen = torch.ones(1)
    counted = torch.ones(1).add_(1)
    assert versions((frozen, counted)) == [0, 1]
    assert versions((counted,)) == [1]


# Slots.


def test_a_slot_keeps_its_memory_while_nobody_else_holds_it() -> None:
    slots = Slots((1, 2), message)
    places = [tensor.data_ptr() for tensor in slots.vacant(1)]
    used = slots.vacant(1)[0].detach().requires_grad_()
    (used * 2).sum().backward()
    del used
    assert [tensor.data_ptr() for tensor in slots.vacant(1)] == places
    assert slots.rooms == (1, 2)


@pytest.mark.parametrize("hold", [torch.Tensor.detach, lambda t: t[:1]])
def test_a_slot_that_is_held_moves_to_new_memory_once(hold: Any) -> None:
    slots = Slots((2,), message)
    slots[0][0].fill_(3.0)
    held = hold(slots[0][0])
    moved = slots.vacant(0)
    moved[0].fill_(7.0)
    assert (held == 3.0).all()
    assert [tensor.shape for tensor in moved] == [(2, 2), (2,)]
    place = moved[0].data_ptr()
    del moved
    assert slots.vacant(0)[0].data_ptr() == place


def test_a_slot_whose_messages_are_smaller_moves_as_well() -> None:
    slots = Slots((2,), message)
    slots.resize(lambda memory, room, _first: tuple(tensor[: room // 2] for tensor in memory))
    held = slots.vacant(0)
    held[0].fill_(3.0)
    moved = slots.vacant(0)
    moved[0].fill_(7.0)
    assert held[0].tolist() == [[3.0, 3.0]]
    assert moved[0].shape == (1, 2)


# What is handed on.


class Kept(nn.Module):
    """Hands on its own memory: a buffer, a parameter, a part of an attribute, or nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1, 1))
        self.weight = nn.Parameter(torch.ones(1, 2))
        self.attribute: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> Any:
        self.attribute = self.attribute or [torch.zeros(2, *x.shape, dtype=x.dtype)]
        y = torch.tanh(x @ self.weight.mT)
        return y, self.seen.add_(1), self.weight, self.attribute[0][0], x, y.detach()


class Next(nn.Module):
    def forward(self, given: Any) -> torch.Tensor:
        y, seen, weight, attribute, *_ = given
        return y * seen + weight.sum() + attribute.sum()


def test_the_micro_batch_at_start_shows_what_memory_a_stage_keeps(alone: World) -> None:
    used = model(lambda number, _stages: (Kept, Next)[number]().double())
    with worlds(alone, alone_job()) as (world,):
        findings = setting(world, of_model=used)[0].probed
    assert findings.boundaries[0].owned_by_stage == (False, True, True, True, False, False)


def test_memory_that_nothing_holds_any_more_is_not_kept() -> None:
    tensors = [torch.ones(1) for _ in range(2)]
    circle: list[Any] = [torch.ones(1)]
    circle.append(circle)
    dropped = ReleasedTensors([*tensors, circle[0]])
    del tensors[0], circle
    assert dropped.are_kept() == [False, True, False]


class Hooked(nn.Linear):
    """Keeps the gradients of its outputs."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        y.register_hook(self.kept.append)
        return y


def test_a_received_gradient_that_a_stage_keeps_stays_as_it_was() -> None:
    one = stage(Hooked())
    one.reserve({"y": ((1,),), "dx": ((1,),)}, torch.device("cpu"))
    for micro, gradient in enumerate(data(2)):
        one.forward(micro, rows(data(1), micro))
        buffers = one.gradients[0].vacant(0)
        buffers[0].copy_(gradient)
        one.backward(micro, buffers)
    kept: Any = one.module.kept
    assert all(map(torch.equal, kept, data(2)))


class Counting(nn.Module):
    """Returns a buffer that it counts up."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(ROWS, WIDTH))

    def forward(self, _x: torch.Tensor) -> Any:
        return self.get_buffer("seen").add_(1)


def counting(kept: bool) -> Stage:
    plain = Boundary(ONE_TENSOR, ONE.shapes, ONE.dtypes, (False,), (False,), owned_by_stage=(kept,))
    return stage(Counting(), output=SendOutput(1, plain))


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 2), (3, 1)])
def test_a_copy_is_handed_on_of_memory_that_a_stage_keeps(sizes: tuple[int, ...]) -> None:
    one = counting(kept=True)
    for micros in groups(*sizes):
        one.forward(micros, rows(data(1), micros))
    outputs = [row for micros in groups(*sizes) for row in one.outputs(micros)[0].split(ROWS)]
    assert [row[0, 0].item() for row in outputs] == [float(micro + 1) for micro in range(MICROS)]


def test_memory_that_a_stage_begins_to_keep_later_is_refused() -> None:
    one = counting(kept=False)
    one.forward(0, rows(data(1), 0))
    with pytest.raises(BadModel, match=r"stage 1 returned the same memory for micro-batches 0 and 1, .*\.clone\(\)"):
        one.forward(1, rows(data(1), 1))
    one = counting(kept=False)
    one.forward(0, rows(data(1), 0))
    one.module.get_buffer("seen").add_(1)
    with pytest.raises(BadModel, match="stage 1 handed on memory for micro-batch 0 that was written again"):
        one.outputs(0)


def test_one_memory_at_two_times_or_of_the_input_may_be_handed_on() -> None:
    given, own = torch.ones(4), torch.ones(4)
    waiting = {0, 1}
    for micro in waiting:
        lend(0, micro, (given[:2], torch.ones(0)), waiting, lambda: {"mask": given})
    lend(0, 0, (own[:2],), {0}, tuple)
    lend(0, 0, (own[:2],), {0}, tuple)
    lend(0, 1, (own[2:],), waiting, tuple)
    lend(0, 2, (own[2:],), {2}, tuple)
    with pytest.raises(BadModel, match="stage 0 returned the same memory for micro-batches 2 and 3"):
        lend(0, 3, (own[2:],), {2, 3}, tuple)
