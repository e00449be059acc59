"""``--rehearse``: stages whose compute is a sleep."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from chimera_runtime.numbering import Micros
from chimera_runtime.stage import Stage
from chimera_runtime.tensors import Tensors, join


class RehearsedStage(Stage):
    """A stage whose compute is a sleep; its messages and sums have the real stage's sizes."""

    def __init__(self, *arguments: Any, forward_seconds: float, backward_seconds: float) -> None:
        super().__init__(*arguments)
        for group in self.groups:
            group.rehearse()
        self._forward_seconds = forward_seconds
        self._backward_seconds = backward_seconds
        self._made: Tensors = ()
        self._made_gradients: Tensors = ()

    def reserve(self, inputs: Sequence[int], gradients: Sequence[int], device: torch.device) -> None:
        """Allocates the receive buffers and what is sent instead of results."""
        super().reserve(inputs, gradients, device)
        after = self._ending.after
        self._made = after.buffers(device) if after else ()
        self._made_gradients = self._before.gradient_buffers(device) if self._before else ()

    def forward(self, micros: Micros, _inputs: Any, _targets: Any = None) -> None:
        """Sleeps as long as the forward takes."""
        outputs = self._slept(micros, self._forward_seconds, self._made)
        if self._ending.after is not None:
            self._outputs[micros] = outputs

    def backward(self, micros: Micros, _gradients: Tensors = ()) -> None:
        """Sleeps as long as the backward takes, the forward that it may run again included."""
        gradients = self._slept(micros, self._backward_seconds, self._made_gradients)
        if self._before is not None:
            self._input_gradients[micros] = gradients

    def _slept(self, micros: Micros, seconds: float, made: Tensors) -> Tensors:
        """What is handed on after the sleeps, one for each micro-batch."""
        count = len(micros) if isinstance(micros, tuple) else 1
        for _ in range(count):
            time.sleep(seconds)
        return made if count == 1 else join([made] * count)


def rehearsed(seconds: Mapping[str, float], parts: int) -> Callable[..., Stage]:
    """Makes stages that sleep: seconds of F and of B for a micro-batch, which is cut into so many parts."""
    slack = overshoot()
    return partial(
        RehearsedStage,
        forward_seconds=max(0.0, seconds["F"] / parts - slack),
        backward_seconds=max(0.0, seconds["B"] / parts - slack),
    )


def overshoot() -> float:
    """By how much a sleep of 2 ms lasts longer than that on this machine, the median of 21."""
    samples = []
    for _ in range(21):
        start = time.perf_counter()
        time.sleep(0.002)
        samples.append(time.perf_counter() - start - 0.002)
    return sorted(samples)[10]
