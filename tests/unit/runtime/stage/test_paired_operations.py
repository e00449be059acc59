"""Pairs: by the module's own method where it has one, else one after the other; the same numbers either way."""

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from chimera_runtime import auxiliary_loss
from chimera_runtime.blame import ModelError
from chimera_runtime.program.numbering import Micros
from chimera_runtime.stage.module_runs import Backward
from chimera_runtime.stage.stage import Stage
from chimera_runtime.values.boundary import Traits
from tests.unit.runtime.staged import WIDTH, assert_close, by_hand, data, linear, loss_output, rows, stage


class JointRun(nn.Module):
    """A module with a method for both; ``how`` is what the method does with the backward."""

    def __init__(self, how: str = "before") -> None:
        super().__init__()
        self.inner = linear()
        self.how = how
        self.met: list[nn.Module] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)

    def forward_and_backward(self, x: torch.Tensor, backward: Backward) -> torch.Tensor:
        self.met.append(backward.module)
        if self.how == "before":
            backward()
        y = self.inner(x)
        if self.how == "behind":
            backward()
        if self.how == "by hand":
            torch.autograd.backward(backward.roots, backward.gradients)
        if self.how == "twice":
            backward()
            backward()
        if self.how == "fails":
            raise RuntimeError("no room")
        return y


def interleaved(ahead: Stage, behind: Stage, micros: list[Micros]) -> tuple[list[Any], list[Any]]:
    """The forwards of one stage, each but the first with the backward of the other's micro-batch before it."""
    outputs, gradients = [], []
    first, *rest = micros
    for one in {ahead, behind}:
        one.forward(first, rows(data(1), first))
        outputs += one.outputs(first)[0].split(3)
    before = first
    for micro in rest:
        if behind is not ahead:
            behind.forward(micro, rows(data(1), micro))
            behind.outputs(micro)
        ahead.pair((micro, rows(data(1), micro)), behind, (before, rows(data(2), before)))
        outputs += ahead.outputs(micro)[0].split(3)
        gradients += behind.input_gradients(before)[0].split(3)
        before = micro
    behind.backward(before, rows(data(2), before))
    gradients += behind.input_gradients(before)[0].split(3)
    return outputs, gradients


@pytest.mark.parametrize("recomputed", [set(), {0, 1, 2, 3}, {1}])
@pytest.mark.parametrize("how", ["before", "behind", "by hand", None])
def test_a_pair_gives_what_autograd_gives(how: str | None, recomputed: set[int]) -> None:
    expected_outputs, expected_back, expected = by_hand(linear())
    one = stage(linear() if how is None else JointRun(how), recomputed=recomputed)
    outputs, back = interleaved(one, one, [0, 1, 2, 3])
    assert_close(outputs, expected_outputs)
    assert_close(back, expected_back)
    assert_close([p.grad for p in one.module.parameters()], expected)


def test_the_method_of_the_forward_s_module_runs_the_backward_of_another_stage() -> None:
    ahead, behind = stage(JointRun(), number=1), stage(linear(), number=2)
    interleaved(ahead, behind, [0, 1, 2, 3])
    assert isinstance(ahead.module, JointRun)
    assert ahead.module.met == [behind.module] * 3
    _, _, expected = by_hand(linear())
    assert_close([p.grad for p in behind.module.parameters()], expected)
    assert all(p.grad is None for p in ahead.module.parameters())


def test_a_group_and_a_forward_that_keeps_its_input_alone_run_before_the_backward() -> None:
    groups: list[Micros] = [(0, 1), (2, 3)]
    for recomputed in (set(), {0, 1, 2, 3}):
        one = stage(JointRun(), recomputed=recomputed)
        interleaved(one, one, groups if not recomputed else [0, 1, 2, 3])
        assert isinstance(one.module, JointRun)
        assert one.module.met == []


def test_the_last_stage_has_a_loss_with_the_method_too() -> None:
    torch.manual_seed(0)
    one, other = stage(JointRun(), output=loss_output()), stage(linear(), output=loss_output())
    for of in (one, other):
        of.forward(0, rows(data(1), 0), data(3)[0])
        of.pair((1, rows(data(1), 1), data(3)[1]), of, (0,))
        of.backward(1)
    assert_close([p.grad for p in one.module.parameters()], [p.grad for p in other.module.parameters()])
    assert one.take_loss(0) == other.take_loss(0)


class Noisy(JointRun):
    """Draws random numbers in its forward."""

    def __init__(self, joint: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
        if not joint:
            self.forward_and_backward = None  # type: ignore[assignment]


def test_random_numbers_are_those_of_the_micro_batch_with_the_method_or_without() -> None:
    made = []
    for joint in (True, False):
        torch.manual_seed(0)
        one = stage(Noisy(joint))
        made.append(interleaved(one, one, [0, 1, 2, 3]))
    for mine, theirs in zip(*made, strict=True):
        assert all(map(torch.equal, mine, theirs))


class Checkpointed(JointRun):
    """Runs its forward again in its backward, with what it draws at random and an auxiliary loss."""

    def __init__(self, joint: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
        if not joint:
            self.forward_and_backward = None  # type: ignore[assignment]

    def part(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        auxiliary_loss("balance", y.square().mean())
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(self.part, x, use_reentrant=False)
        return y

    def forward_and_backward(self, x: torch.Tensor, backward: Backward) -> torch.Tensor:
        backward()
        return self(x)  # type: ignore[no-any-return]


def test_what_a_checkpoint_runs_again_in_a_pair_is_no_part_of_the_other_micro_batch() -> None:
    """Neither its auxiliary losses nor its random numbers."""
    made = []
    for joint in (True, False):
        torch.manual_seed(0)
        one = stage(Checkpointed(joint), traits=Traits((), "has auxiliary losses", (), ("balance",)))
        outputs, gradients = interleaved(one, one, [0, 1, 2, 3])
        sums = [torch.tensor(number) for number in one.take_loss(0).auxiliary.values()]
        assert len(sums) == 1
        made.append([*outputs, *gradients, *(p.grad for p in one.module.parameters()), *sums])
    assert all(map(torch.equal, *made))


@pytest.mark.parametrize(
    ("how", "words", "operation"),
    [
        ("never", "forward_and_backward of stage 1 returned without its backward", "B"),
        ("twice", "the backward of a pair runs once", "F"),
        ("fails", "no room", "F"),
    ],
)
def test_a_method_that_does_wrong_is_named(how: str, words: str, operation: str) -> None:
    one = stage(JointRun(how))
    one.forward(0, rows(data(1), 0))
    with pytest.raises(ModelError) as raised:
        one.pair((1, rows(data(1), 1)), one, (0, rows(data(2), 0)))
    assert re.search(words, str(raised.value))
    assert raised.value.operation is not None
    assert raised.value.operation.kind == operation
