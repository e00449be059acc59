"""Tensors that autograd saved move to the host and back: gradients stay exact, and device memory is really free."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from chimera_runtime.blame import ModelError
from chimera_runtime.ranks.devices import CpuAccelerator
from chimera_runtime.ranks.messages import LinkToHost
from chimera_runtime.stage import saved_tensors
from chimera_runtime.stage.engine import edge_of
from chimera_runtime.stage.splitting import reachable, saved_tensors_of
from chimera_runtime.stage.stage import Stage
from chimera_runtime.stage.stage_output import SendOutput
from chimera_runtime.values.shared_memory import ReleasedTensors
from tests.unit.runtime.staged import MICROS, ONE, ROWS, WIDTH, data, loss_output, rows, stage

BYTES = ROWS * WIDTH * 4


@pytest.fixture(autouse=True)
def _small_storages_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_tensors, "SMALLEST", 1)


class Doubling(torch.autograd.Function):
    """Saves its input, its output and a tensor of its own; the last is a view of the first."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * x
        context.save_for_backward(x, y, x[1:])
        return y

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        x, y, rest = context.saved_tensors
        assert torch.equal(rest, x[1:])
        assert torch.equal(y, x * x)
        assert rest.data_ptr() == x[1:].data_ptr(), "views of one storage lie in one storage again"
        return 2 * gradient * x


class Attending(nn.Linear):
    """Saves views of one storage, transposed and at offsets, and tensors of several dtypes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (super().forward(x) * torch.ones(3, 1, 1)).sin().unbind()
        mixed = torch.softmax(q @ k.t(), 0) @ v
        return torch.dropout(mixed, 0.5, True)[:, torch.tensor([3, 2, 1, 0])].tanh()


class Custom(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        doubled: torch.Tensor = Doubling.apply(super().forward(x))  # type: ignore[no-untyped-call]
        return doubled.cos()


class Checkpointing(nn.Linear):
    """Has a part that torch runs again, whose tensors have hooks of their own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        again = checkpoint(lambda t: super(Checkpointing, self).forward(t).sin(), x.exp(), use_reentrant=False)
        return again.cos()


class Sharing(nn.Linear):
    """Keeps a tensor that all micro-batches use, and a complex one."""

    def __init__(self, *widths: int) -> None:
        super().__init__(*widths)
        self.mask = torch.arange(float(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = torch.complex(super().forward(x), x).conj() * self.mask
        return (turned * turned).real


class Mixed(nn.Linear):
    """Computes in another dtype under autocast, in which all micro-batches share the weights that were cast."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(super().forward(x).relu()).float()


class Nothing(nn.Module):
    """Saves nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def made(kind: Callable[..., nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind() if kind is Nothing else kind(WIDTH, WIDTH)


def trained(of: Stage, *, moves: bool, halves: bool = False, operands: bool = False) -> list[Any]:
    """Runs all forwards, then all backwards; returns what is handed on, and the gradients of the weights.

    With ``moves`` activations move, with ``operands`` what the second halves need.
    """
    results: list[Any] = []
    for micro in range(MICROS):
        of.forward(micro, rows(data(1), micro))
        results += of.outputs(micro)
        run(of, micro, ["offload", "wait_offload"] if moves else [])
    for micro in range(MICROS):
        run(of, micro, ["reload", "wait_reload"] if moves else [])
        (of.backward_input if halves else of.backward)(micro, rows(data(2), micro))
        results += of.input_gradients(micro)
        run(of, micro, ["offload_operands", "wait_offload_operands"] if operands else [])
    for micro in range(MICROS) if halves else ():
        run(of, micro, ["reload_operands", "wait_reload_operands"] if operands else [])
        of.backward_weights(micro)
    return [*results, *[p.grad for p in of.module.parameters()]]


def run(of: Stage, micro: int, methods: list[str]) -> None:
    for method in methods:
        getattr(of, method)(micro)


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("kind", [Attending, Custom, Checkpointing, Sharing, Mixed, Nothing])
def test_gradients_are_bitwise_those_of_a_stage_whose_tensors_stay(
    kind: Callable[..., nn.Module], halves: bool
) -> None:
    stays, moves = [trained(stage(made(kind)), moves=moves, halves=halves) for moves in (False, True)]
    assert all(map(torch.equal, stays, moves))
    for moved in (False, True) if halves else ():
        of, link = linked(made(kind))
        assert all(map(torch.equal, stays, trained(of, moves=moved, halves=True, operands=True)))
        assert link.held == 0


# What moves.


def saved(of: Stage, micro: int) -> list[torch.Tensor]:
    """The tensors that the graph of a micro-batch has saved."""
    waiting: Any = of._saved[micro]
    nodes = reachable(edge_of(root).node for root in waiting.all_roots)
    unpacked = [unpack() for node in nodes for _, unpack in saved_tensors_of(node)]
    return [tensor for tensor in unpacked if tensor is not None]


def sizes(of: Stage, micro: int) -> list[int]:
    return sorted(storage.size for storage in of._moves._under_way[micro].storages)


def linked(module: nn.Module, **options: Any) -> tuple[Stage, LinkToHost]:
    link = LinkToHost(CpuAccelerator())
    return stage(module, host_link=link, **options), link


def test_device_memory_is_free_between_the_moves_and_host_memory_after_them() -> None:
    """Tensors that are handed on, weights and inputs stay; the next micro-batch uses the same memory of the host."""
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    of, link = linked(module)
    for micro in range(2):
        of.forward(micro, rows(data(1), micro))
        of.outputs(micro)
        hidden, before = module[:2](data(1)[micro]).detach(), saved(of, micro)
        stay, freed = [not torch.equal(t, hidden) for t in before], ReleasedTensors(before)
        assert (len(stay), sum(stay)) == (6, 4)
        del before
        of.offload(micro)
        assert link.held == BYTES
        of.wait_offload(micro)
        assert freed.are_kept() == stay
        of.reload(micro)
        of.wait_reload(micro)
        assert link.held == 0
        assert sum(torch.equal(t, hidden) for t in saved(of, micro)) == 2
        of.backward(micro, rows(data(2), micro))
    assert (link.peak, link.pinned) == (BYTES, 512)


INDICES, NOISE, FACTORS, SCORES, CAST, IN_HALF = WIDTH * 8, BYTES, 3 * 4, ROWS * ROWS * 4, WIDTH * WIDTH * 2, BYTES // 2


@pytest.mark.parametrize(
    ("kind", "moving"),
    [
        (Attending, [FACTORS, INDICES, SCORES, NOISE, 3 * BYTES, 3 * BYTES]),
        (Custom, [BYTES, BYTES]),
        (Checkpointing, [BYTES]),
        (Sharing, [BYTES, 2 * BYTES]),
        (Mixed, [IN_HALF, IN_HALF, CAST]),
        (Nothing, []),
    ],
)
def test_a_storage_that_only_the_graph_holds_moves_once(kind: Callable[..., nn.Module], moving: list[int]) -> None:
    """Queries, keys and values are one. What a module keeps, the input of a checkpoint and the like stay."""
    of, _ = linked(made(kind))
    for micro in (0, 1):
        of.forward(micro, rows(data(1), micro))
    for micro in (0, 1):
        of.offload(micro)
        assert sorted(storage.size for storage in of._moves._under_way[micro].storages) == moving


def test_a_small_storage_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_tensors, "SMALLEST", BYTES + 1)
    of, link = linked(made(Attending))
    of.forward(0, rows(data(1), 0))
    of.offload(0)
    assert link.held == 6 * BYTES


def test_data_and_what_is_handed_on_stay_even_if_nothing_else_holds_them() -> None:
    """The output of the last stage moves, and so does what the loss saves."""
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    for number, before, output, moving in (
        (0, None, SendOutput(0, ONE, moves_operands=True), 0),
        (1, ONE, loss_output(), 2 * BYTES),
    ):
        of, link = linked(module, number=number, before=before, output=output)
        of.forward(0, data(1)[0] if before is None else rows(data(1), 0), data(3)[0])
        if not moving:
            of.outputs(0)
        of.offload(0)
        assert link.held == moving


def test_micro_batches_that_share_a_tensor_keep_it_where_it_is() -> None:
    class Keeping(nn.Linear):
        """Computes a tensor once for two micro-batches."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "once"):
                self.once = [torch.arange(float(WIDTH)).exp()] * 2
            return (super().forward(x) * self.once.pop()).cos()

    of, link = linked(made(Keeping))
    for micro in (0, 1):
        of.forward(micro, rows(data(1), micro))
        of.outputs(micro)
    del of.module.once
    held = []
    for micro in (0, 1):
        of.offload(micro)
        of.wait_offload(micro)
        held.append(link.held)
    assert held == [BYTES, 2 * BYTES]
    for micro in (1, 0):
        of.reload(micro)
        of.wait_reload(micro)
        of.backward(micro, rows(data(2), micro))
    assert torch.isfinite(of.module.weight.grad).all()


def test_of_a_forward_that_runs_again_nothing_moves() -> None:
    of, link = linked(made(Custom), recomputed={0, 1, 2, 3})
    moves = trained(of, moves=True)
    assert link.peak == 0
    assert all(map(torch.equal, moves, trained(stage(made(Custom)), moves=False)))


# Errors.


class Writing(nn.Linear):
    """Keeps a tensor that its graph has saved."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden = super().forward(x)
        y = self.hidden.cos()
        self.view = self.hidden.detach()
        del self.hidden
        return y


@pytest.mark.parametrize(
    ("before", "operation", "said"),
    [
        ("offload", "offload m0 s1", "modified by an inplace operation"),
        ("backward", "B m0 s1", "stage 1 saved a tensor of shape (3, 4) for its backward that was written since"),
    ],
)
def test_a_tensor_that_was_written_since_it_was_saved_is_an_error_of_the_model(
    before: str, operation: str, said: str
) -> None:
    """Before it is to move; later that is found of a tensor that stays, because something else holds it."""
    of = stage(made(Writing))
    of.forward(0, rows(data(1), 0))
    if before == "backward":
        for method in ("offload", "wait_offload", "reload", "wait_reload"):
            getattr(of, method)(0)
    of.module.view.zero_()
    with pytest.raises(ModelError) as raised:
        getattr(of, before)(0, *[rows(data(2), 0)] * (before == "backward"))
    assert f"(micro-batch 0 of update 1, {operation})" in str(raised.value)
    assert said in str(raised.value)


def test_memory_that_is_written_while_it_is_copied_is_an_error() -> None:
    of, _ = linked(made(Custom))
    of.forward(0, rows(data(1), 0))
    of.offload(0)
    storage, *_ = of._moves._under_way[0].storages
    assert storage.views[0].tensor is not None
    storage.views[0].tensor.zero_()
    with pytest.raises(ModelError, match=r"wait offload m0 s1\): stage 1 saved a tensor"):
        of.wait_offload(0)


def test_a_backward_while_tensors_are_on_the_host_is_an_error() -> None:
    """No program has it; a module can go back into the graph of an earlier forward."""
    of, _ = linked(made(Custom))
    of.forward(0, rows(data(1), 0))
    of.offload(0)
    of.wait_offload(0)
    with pytest.raises(ModelError, match="whose tensors are on the host until its backward; detach what the module"):
        of.backward(0, rows(data(2), 0))
