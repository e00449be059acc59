"""``--rehearse``: stages whose compute is a sleep."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from runtime import Tensors, join
from support.compute import Kept, Pass, Stage


@dataclass(frozen=True)
class Rehearsal:
    """Seconds that a forward and a backward of one micro-batch take."""

    forward: float
    backward: float


class RehearsedStage(Stage):
    """A stage whose compute is a sleep; its messages and sums have the real stage's sizes."""

    def __init__(self, *arguments: Any, forward_seconds: float, backward_seconds: float, overshoot: float) -> None:
        super().__init__(*arguments)
        self._sum.rehearse()
        self._forward_seconds = max(0.0, forward_seconds - overshoot)
        self._backward_seconds = max(0.0, backward_seconds - overshoot)
        self._outputs: Tensors = ()
        self._input_gradients: Tensors = ()

    def reserve(self, inputs: Sequence[int], gradients: Sequence[int], device: torch.device) -> None:
        """Allocates the receive buffers and what is sent instead of results."""
        super().reserve(inputs, gradients, device)
        self._outputs = self._after.buffers(device) if self._after else ()
        self._input_gradients = self._before.gradient_buffers(device) if self._before else ()

    def forward(self, micro: int, inputs: Any) -> Pass:
        """Sleeps as long as the forward takes."""
        time.sleep(self._forward_seconds)
        return Pass((), self._outputs, ())

    def forward_keep_inputs(self, micros: Sequence[int], inputs: Any) -> tuple[tuple[Kept, ...], Tensors]:
        """Sleeps as long as the forwards take."""
        for _ in micros:
            time.sleep(self._forward_seconds)
        states = tuple(Kept(micro, 0, None, None, {}) for micro in micros)
        return states, self._outputs if len(micros) == 1 else join([self._outputs] * len(micros))

    def backward(self, state: Pass | Kept, gradients: Tensors) -> Tensors:
        """Sleeps as long as the backward takes."""
        time.sleep(self._backward_seconds)
        return self._input_gradients

    def forward_loss(self, micro: int, inputs: Any, target: Any) -> Pass:
        """As ``forward``: the loss is part of the last stage."""
        return self.forward(micro, inputs)

    def forward_loss_keep_input(self, micro: int, inputs: Any, target: Any) -> Kept:
        """As ``forward``."""
        return self.forward_keep_input(micro, inputs)[0]

    def forward_loss_keep_inputs(self, micros: Sequence[int], inputs: Any, targets: Sequence[Any]) -> tuple[Kept, ...]:
        """As ``forward_keep_inputs``."""
        return self.forward_keep_inputs(micros, inputs)[0]

    def backward_recompute(self, state: Kept, gradients: Tensors) -> Tensors:
        """As ``backward``, which is given with what is computed again."""
        return self.backward(state, gradients)

    def backward_loss(self, state: Pass) -> Tensors:
        """As ``backward``."""
        return self.backward(state, ())

    def backward_loss_recompute(self, state: Kept) -> Tensors:
        """As ``backward``."""
        return self.backward(state, ())

    def step(self) -> None:
        """Leaves the weights alone."""
        self._stepped()


def overshoot() -> float:
    """By how much a sleep of 2 ms lasts longer than that on this machine, the median of 21."""
    samples = []
    for _ in range(21):
        start = time.perf_counter()
        time.sleep(0.002)
        samples.append(time.perf_counter() - start - 0.002)
    return sorted(samples)[10]
