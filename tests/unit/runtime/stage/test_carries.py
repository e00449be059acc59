"""A stage that looks back over slices: its gradients are those of the whole sequence, however its backwards run."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from chimera_runtime.errors import BadModel
from chimera_runtime.program.numbering import Numbering
from chimera_runtime.ranks.messages import Names
from chimera_runtime.stage import saved_tensors
from chimera_runtime.stage.gradient_sums import GradientSum
from chimera_runtime.stage.stage import Stage
from chimera_runtime.stage.stage_output import LossOutput, SendOutput, StageOutput
from chimera_runtime.stage.weight_versions import Unstepped
from chimera_runtime.values.boundary import Boundary, SliceArguments, Traits, slice_arguments
from chimera_runtime.values.nested import ONE_TENSOR
from tests.unit.runtime.carrying import CARRYING, WIDTH, Dropping, Listing
from tests.unit.runtime.staged import assert_close

ROWS, MICROS, SLICES, LENGTH = 2, 2, 3, 2
ALL = range(MICROS * SLICES)
BOUNDARY = Boundary(ONE_TENSOR, ((ROWS, LENGTH, WIDTH),), (torch.float32,), (True,), (True,))


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def stage(module: nn.Module, *, recomputed: bool = False, whole: str = "", output: StageOutput | None = None) -> Stage:
    takes = slice_arguments(module)
    assert takes == SliceArguments(carry=True, start=True)
    return Stage(
        number=1,
        module=module,
        weights=Unstepped(),
        before=BOUNDARY,
        output=output or SendOutput(1, BOUNDARY),
        gradient_sum=GradientSum("s1", list(module.parameters()), None, (0,), Names(0, 0, 3, 1.0), lambda w: w.wait()),
        traits=Traits((), "", whole=whole, takes=takes),
        numbering=Numbering(5, 0, len(ALL), len(ALL), slices=SLICES),
        recomputed=frozenset(ALL if recomputed else ()),
    )


def data(seed: int) -> torch.Tensor:
    """A sequence for each micro-batch."""
    return torch.randn(MICROS, ROWS, SLICES * LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed))


def cut(sequences: torch.Tensor) -> list[tuple[torch.Tensor]]:
    """The slices of all micro-batches, as messages."""
    return [(s.contiguous(),) for sequence in sequences for s in sequence.split(LENGTH, 1)]


def joined(slices: list[torch.Tensor]) -> torch.Tensor:
    """The sequences again; undoes `cut`."""
    return torch.stack([torch.cat(slices[i : i + SLICES], 1) for i in ALL[::SLICES]])


def by_hand(module: nn.Module) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor | None]]:
    """Outputs, gradients of the inputs and of the weights, from whole sequences by plain autograd."""
    inputs = data(1).requires_grad_()
    outputs = torch.stack([module(x)[0] for x in inputs])
    outputs.backward(data(2))
    assert inputs.grad is not None
    return outputs.detach(), inputs.grad, [p.grad for p in module.parameters()]


def backwards() -> Iterator[int]:
    """Micro-batches in order, the slices of each in reverse."""
    for first in ALL[::SLICES]:
        yield from reversed(range(first, first + SLICES))


def run(of: Stage, kind: str) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor | None]]:
    inputs, handed_back = cut(data(1)), cut(data(2))
    outputs: dict[int, torch.Tensor] = {}
    gradients: dict[int, torch.Tensor] = {}
    for n in ALL:
        of.forward(n, inputs[n])
        (outputs[n],) = of.outputs(n)
        if kind == "moved":
            of.offload(n)
            of.wait_offload(n)
    for n in backwards():
        if kind == "recompute":
            of.recompute(n)
        if kind == "moved":
            of.reload(n)
            of.wait_reload(n)
        (of.backward_input if kind == "halves" else of.backward)(n, handed_back[n])
        (gradients[n],) = of.input_gradients(n)
    for n in ALL if kind == "halves" else ():
        of.backward_weights(n)
    weights = [p.grad for p in of.module.parameters()]
    return joined([outputs[n] for n in ALL]), joined([gradients[n] for n in ALL]), weights


@pytest.mark.parametrize("kind", CARRYING)
@pytest.mark.parametrize("how", ["plain", "halves", "halves of a whole backward", "recomputed", "recompute", "moved"])
def test_slices_give_the_outputs_and_gradients_of_whole_sequences(
    monkeypatch: pytest.MonkeyPatch, kind: Callable[[], nn.Module], how: str
) -> None:
    monkeypatch.setattr(saved_tensors, "SMALLEST", 1)
    whole = "a reason" if how == "halves of a whole backward" else ""
    of = stage(made(kind), recomputed=how.startswith("recompute"), whole=whole)
    mine, theirs = run(of, how.split()[0]), by_hand(made(kind))
    assert_close([*mine[:2], *mine[2]], [*theirs[:2], *theirs[2]])


@pytest.mark.parametrize("how", ["plain", "halves", "recomputed"])
def test_nothing_of_a_micro_batch_is_kept_when_its_backwards_have_run(how: str) -> None:
    of = stage(made(Listing), recomputed=how == "recomputed")
    run(of, how)
    assert [*of.carries._left, *of.carries._gradients, *of._saved, *of._half_backwards] == []
    assert of.carries.held == 0 < of.carries.peak


def test_a_tensor_that_is_passed_on_is_neither_copied_nor_a_root() -> None:
    of = stage(made(Listing))
    inputs = cut(data(1))
    of.forward(0, inputs[0])
    first = of.carries._left[0].tensors
    of.forward(1, inputs[1])
    second = of.carries._left[1].tensors
    assert [t.data_ptr() for t in second[:2]] == [t.data_ptr() for t in first]
    assert of.carries.held == of.carries.peak == sum(t.nbytes for t in second)
    graph = of._saved[1]
    assert [*graph.carries.roots] == [2, 3]  # type: ignore[union-attr]
    assert [*graph.carries.passed] == [(0, 0), (1, 1)]  # type: ignore[union-attr]


def test_each_slice_draws_numbers_of_its_own_and_the_same_when_it_runs_again() -> None:
    kept, again = (run(stage(made(Dropping), recomputed=recomputed), "plain") for recomputed in (False, True))
    for mine, theirs in zip([*kept[:2], *kept[2]], [*again[:2], *again[2]], strict=True):
        assert torch.equal(mine, theirs)
    alone = stage(made(Dropping))
    same = cut(data(1))[0]
    drawn = []
    for n in range(2):
        alone.runs.forward = lambda x, **_: (x * torch.rand_like(x), [x])
        alone.forward(n, same)
        drawn.append(alone.outputs(n)[0])
    assert not torch.equal(*drawn)


class Paired(Listing):
    """Has a method for a forward and a backward at once."""

    def forward_and_backward(self, x: torch.Tensor, backward: Callable[[], None], **slices: Any) -> Any:
        backward()
        return self(x, **slices)


@pytest.mark.parametrize("kind", [Listing, Paired])
def test_a_slice_may_run_in_a_pair_with_the_backward_of_another_micro_batch(kind: Callable[[], nn.Module]) -> None:
    of, inputs, handed_back = stage(made(kind)), cut(data(1)), cut(data(2))
    outputs: dict[int, torch.Tensor] = {}
    gradients: dict[int, torch.Tensor] = {}
    for n in range(SLICES):
        of.forward(n, inputs[n])
    for n, back in zip(range(SLICES, 2 * SLICES), reversed(range(SLICES)), strict=True):
        of.pair((n, inputs[n]), of, (back, handed_back[back]))
        (gradients[back],) = of.input_gradients(back)
    for back in reversed(range(SLICES, 2 * SLICES)):
        of.backward(back, handed_back[back])
        (gradients[back],) = of.input_gradients(back)
    outputs = {n: of.outputs(n)[0] for n in ALL}
    theirs = by_hand(made(kind))
    mine = joined([outputs[n] for n in ALL]), joined([gradients[n] for n in ALL])
    assert_close([*mine, *(p.grad for p in of.module.parameters())], [*theirs[:2], *theirs[2]])


def loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (output - target).square().sum(), output.size(1)


@pytest.mark.parametrize("counted", [False, True])
def test_the_losses_of_slices_add_up_to_that_of_the_whole_sequence(counted: bool) -> None:
    def judge(output: torch.Tensor, target: torch.Tensor) -> Any:
        total, count = loss(output, target)
        return (total, count) if counted else total / count

    numbering = Numbering(5, 0, len(ALL), len(ALL), slices=SLICES)
    share = 1 / len(ALL) if not counted else 1.0
    module = made(Listing)
    of = stage(module, output=LossOutput(judge, share, numbering, counted=counted))
    inputs, targets = cut(data(1)), cut(data(3))
    for n in ALL:
        of.forward(n, inputs[n], targets[n][0])
    for n in backwards():
        of.backward(n)
    whole = made(Listing)
    total, count = loss(torch.cat([whole(x)[0] for x in data(1)], 1), torch.cat([*data(3)], 1))
    (total / (1 if counted else count)).backward()
    assert of.take_loss(0).mean == pytest.approx(total.item() / count, rel=1e-5)
    assert_close([p.grad for p in module.parameters()], [p.grad for p in whole.parameters()])


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda x: x, "stage 1 has a parameter carry and returned a Tensor; return a pair"),
        (lambda x: (x, None), "a carry without tensors for slice 0, and slice 1 needs one"),
    ],
)
def test_a_forward_without_a_carry_is_refused(returned: Callable[[torch.Tensor], Any], said: str) -> None:
    of = stage(made(Listing))
    of.runs.forward = lambda x, **_: returned(x)
    with pytest.raises(BadModel, match=said):
        of.forward(0, cut(data(1))[0])


def test_a_carry_whose_shape_changes_is_refused() -> None:
    of = stage(made(Listing))
    carries = iter([torch.ones(1), torch.ones(2)])
    of.runs.forward = lambda x, **_: (x * 1, [next(carries)])
    of.forward(0, cut(data(1))[0])
    with pytest.raises(BadModel, match=r"stage 1 returned for slice 0 the carry .*\(2,\).*which was .*\(1,\)"):
        of.forward(SLICES, cut(data(1))[0])


def test_the_last_slice_may_return_nothing_for_a_next_one() -> None:
    of = stage(made(Listing))
    for n, inputs in zip(range(SLICES), cut(data(1)), strict=False):
        of.runs.forward = lambda x, n=n, **_: (x * 1, None if n == SLICES - 1 else [x])
        of.forward(n, inputs)
    for n in reversed(range(SLICES)):
        of.backward(n, cut(data(2))[n])
    assert_close(of.input_gradients(0), cut(data(2))[0])
