"""A stage on its own, its data, and what plain autograd makes of them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from chimera_runtime.program.absence import Absence
from chimera_runtime.program.job import WHOLE, Backwards
from chimera_runtime.program.numbering import Micros, Numbering
from chimera_runtime.ranks.messages import LinkToHost, Names
from chimera_runtime.stage.gradient_sums import GradientSum
from chimera_runtime.stage.stage import Stage
from chimera_runtime.stage.stage_output import LossOutput, SendOutput, StageOutput
from chimera_runtime.stage.weight_versions import Weights
from chimera_runtime.values.boundary import Boundary, Traits
from chimera_runtime.values.nested import ONE_TENSOR, Form, taken_apart

ROWS, WIDTH, MICROS, SEED = 3, 4, 4, 5
ONE = Boundary(ONE_TENSOR, ((ROWS, WIDTH),), (torch.float32,), (True,), (True,))
CAN, CANNOT = Traits((), ""), Traits((), "draws random numbers")


def tuple_of(tensors: int) -> Form:
    """The structure of a tuple of so many tensors."""
    return taken_apart((torch.ones(()),) * tensors)[1]


class Steps:
    """An optimizer that notes the gradients, and what a step draws at random."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.gradients: list[list[torch.Tensor | None]] = []
        self.drawn: list[float] = []

    def step(self) -> None:
        self.gradients.append([None if p.grad is None else p.grad.clone() for p in self.parameters])
        self.drawn.append(torch.rand(()).item())


class Then(nn.Linear):
    """A layer, and then a function of what it computes."""

    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(super().forward(x))


def stage(
    module: nn.Module,
    number: int = 1,
    before: Boundary | None = ONE,
    output: StageOutput | None = None,
    traits: Traits = CAN,
    recomputed: set[int] | None = None,
    steps: Any = None,
    host_link: LinkToHost | None = None,
    backwards: Backwards = WHOLE,
    absence: Absence | None = None,
) -> Stage:
    parameters = list(module.parameters())
    names = Names(0, 0, 3, 1.0)
    return Stage(
        number,
        module,
        Weights(Steps(parameters) if steps is None else steps),
        before,
        SendOutput(number, ONE) if output is None else output,
        GradientSum(f"s{number}", parameters, None, (0,), names, lambda work: work.wait()),
        traits,
        Numbering(SEED, 0, MICROS, MICROS),
        recomputed or set(),
        host_link=host_link,
        backwards=backwards,
        absence=absence,
    )


def loss_output() -> LossOutput:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square().mean()

    return LossOutput(loss, 1 / MICROS, Numbering(SEED, 0, MICROS, MICROS))


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def data(seed: int) -> list[torch.Tensor]:
    """A tensor for each micro-batch."""
    return list(torch.randn(MICROS, ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)))


def by_hand(module: nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Outputs, gradients of the inputs and of the weights, by plain autograd."""
    inputs = [x.clone().requires_grad_() for x in data(1)]
    outputs = [module(x) for x in inputs]
    torch.autograd.backward(outputs, data(2))
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    return [y.detach() for y in outputs], [x.grad for x in inputs if x.grad is not None], gradients


def groups(*sizes: int) -> list[Micros]:
    """The micro-batches in groups of some sizes; one alone is a number."""
    numbers = iter(range(MICROS))
    return [tuple(next(numbers) for _ in range(size)) if size > 1 else next(numbers) for size in sizes]


def rows(tensors: list[torch.Tensor], micros: Micros) -> tuple[torch.Tensor]:
    return (torch.cat([tensors[m] for m in micros]) if isinstance(micros, tuple) else tensors[micros],)


def run(
    of: Stage, forwards: list[Micros], backwards: list[Micros], late: list[Micros] | None = None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """All forwards, then all backwards: what they hand on, by micro-batch.

    With ``late``, backwards are input gradients alone, and the weight gradients of these micro-batches follow.
    """
    outputs: list[torch.Tensor] = []
    gradients: list[torch.Tensor] = []
    for micros in forwards:
        of.forward(micros, rows(data(1), micros))
        outputs += of.outputs(micros)[0].split(ROWS)
    for micros in backwards:
        (of.backward if late is None else of.backward_input)(micros, rows(data(2), micros))
        gradients += of.input_gradients(micros)[0].split(ROWS)
    for micros in late or []:
        of.backward_weights(micros)
    return outputs, gradients


def assert_close(found: list[Any], expected: list[Any]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def assert_like_autograd(of: Stage, outputs: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
    """That a stage of `linear` has what plain autograd makes of it: results of `run`, and gradients of the weights."""
    found = [outputs, gradients, [p.grad for p in of.module.parameters()]]
    for mine, theirs in zip(found, by_hand(linear()), strict=True):
        assert_close(mine, theirs)
