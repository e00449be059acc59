"""Random carries: a stage that detaches them between slices has the gradients of one graph over all slices."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from chimera_runtime.program.numbering import Numbering
from chimera_runtime.ranks.messages import Names
from chimera_runtime.stage.gradient_sums import GradientSum
from chimera_runtime.stage.stage import Stage
from chimera_runtime.stage.stage_output import SendOutput
from chimera_runtime.stage.weight_versions import Unstepped
from chimera_runtime.values.boundary import Boundary, Traits, slice_arguments
from chimera_runtime.values.nested import ONE_TENSOR

SLICES, SHAPE = 3, (2, 2, 3)
BOUNDARY = Boundary(ONE_TENSOR, (SHAPE,), (torch.float64,), (True,), (True,))
WAYS = ("pass", "view", "add", "mix", "input", "output", "weight", "detached", "constant", "whole")
"""How a tensor of the carry is made: from an earlier one, the input or a weight, with or without a graph."""

Spec = list[list[tuple[str, int]]]


class Drawn(nn.Module):
    """Makes the carry of each slice as the spec says; its output depends on all that it has read."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.spec, self.linear, self.other = spec, nn.Linear(3, 3).double(), nn.Linear(3, 3).double()

    def forward(self, x: torch.Tensor, carry: Any = None, start: int = 0) -> tuple[torch.Tensor, Any]:
        read = [] if carry is None else [*carry["of"], carry["last"]]
        y = self.linear(x).view(SHAPE)
        for number, tensor in enumerate(read[::2]):
            y = y * tensor.cos() if number % 2 else y + tensor.view(SHAPE)  # views share memory with gradients received
        made = [self._made(way, read[number % len(read)] if read else x, x, y) for way, number in self.spec[start // 2]]
        return y, {"of": tuple(made[:-1]), "last": made[-1], "start": start}

    def _made(self, way: str, earlier: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        match way:
            case "pass":
                return earlier
            case "view":
                return earlier.view_as(earlier)
            case "add":
                return earlier + y
            case "mix":
                return self.other(x).tanh()
            case "input":
                return x
            case "output":
                return y
            case "weight":
                return self.linear.weight[:2].expand(SHAPE)
            case "detached":
                return y.detach()
            case "constant":
                return torch.ones(SHAPE, dtype=torch.float64)
            case _:
                return self.linear(x).chunk(1, 2)[0]


def data(seed: int) -> list[torch.Tensor]:
    return list(torch.randn(SLICES, *SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))


def in_one_graph(module: nn.Module) -> list[torch.Tensor | None]:
    inputs, carry, outputs = [x.requires_grad_() for x in data(1)], None, []
    for number, x in enumerate(inputs):
        y, carry = module(x, carry, 2 * number)
        outputs.append(y)
    torch.autograd.backward(outputs, data(2))
    return [*(x.grad for x in inputs), *(p.grad for p in module.parameters())]


def in_slices(module: nn.Module, *, recomputed: bool, halves: bool, late: bool) -> list[torch.Tensor | None]:
    parameters = list(module.parameters())
    stage = Stage(
        number=1,
        module=module,
        weights=Unstepped(),
        before=BOUNDARY,
        output=SendOutput(1, BOUNDARY),
        gradient_sum=GradientSum("s1", parameters, None, (0,), Names(0, 0, 3, 1.0), lambda work: work.wait()),
        traits=Traits((), "", takes=slice_arguments(module)),
        numbering=Numbering(0, 0, SLICES, SLICES, slices=SLICES),
        recomputed=frozenset(range(SLICES)) if recomputed else frozenset(),
    )
    gradients: dict[int, torch.Tensor] = {}
    for n, x in enumerate(data(1)):
        stage.forward(n, (x,))
        stage.outputs(n)
    for n, gradient in reversed([*enumerate(data(2))]):
        (stage.backward_input if halves else stage.backward)(n, (gradient,))
        (gradients[n],) = stage.input_gradients(n)
        if halves and not late:
            stage.backward_weights(n)
    for n in range(SLICES if halves and late else 0):
        stage.backward_weights(n)
    return [*(gradients[n] for n in range(SLICES)), *(p.grad for p in parameters)]


@given(
    spec=st.lists(
        st.lists(st.tuples(st.sampled_from(WAYS), st.integers(0, 5)), min_size=1, max_size=5),
        min_size=SLICES,
        max_size=SLICES,
    ),
    recomputed=st.booleans(),
    halves=st.booleans(),
    late=st.booleans(),
)
def test_gradients_of_random_carries_are_those_of_one_graph(
    spec: Spec, recomputed: bool, halves: bool, late: bool
) -> None:
    mine = in_slices(Drawn(spec), recomputed=recomputed, halves=halves, late=late)
    for gradient, expected in zip(mine, in_one_graph(Drawn(spec)), strict=True):
        zeros = (
            torch.zeros(())
            if gradient is None and expected is None
            else torch.zeros_like(next(g for g in (gradient, expected) if g is not None))
        )
        torch.testing.assert_close(zeros if gradient is None else gradient, zeros if expected is None else expected)
