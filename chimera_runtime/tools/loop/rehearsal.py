"""``--rehearse``: stages whose compute is a sleep."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from chimera_runtime.program.job import Job
from chimera_runtime.program.numbering import Micros
from chimera_runtime.stage.stage import Stage
from chimera_runtime.values.aliases import versions
from chimera_runtime.values.tensors import Tensors, join


class RehearsedStage(Stage):
    """A stage whose compute is a sleep; its messages and sums have the real stage's sizes."""

    def __init__(self, *, seconds: Mapping[str, float], **arguments: Any) -> None:
        super().__init__(**arguments)
        for group in self.groups:
            group.rehearse()
        self._seconds = seconds
        self._made: Tensors = ()
        self._made_gradients: Tensors = ()

    def reserve(self, inputs: Sequence[int], gradients: Sequence[int], device: torch.device) -> None:
        """Allocates the receive buffers and what is sent instead of results."""
        super().reserve(inputs, gradients, device)
        after = self._output.after
        self._made = after.buffers(device) if after else ()
        before = self._input.before
        self._made_gradients = before.gradient_buffers(device) if before else ()

    def forward(self, micros: Micros, _inputs: Any, _targets: Any = None) -> None:
        """Sleeps as long as the forward takes."""
        outputs = self._slept(micros, "F", self._made)
        if self._output.after is not None:
            self._outputs[micros] = outputs, versions(outputs)

    def backward(self, micros: Micros, _gradients: Tensors = ()) -> None:
        """Sleeps as long as the backward takes, the forward that it may run again included."""
        self._sleep_and_hand_back(micros, "B")

    def pair(self, forward: tuple[Any, ...], other: Stage, backward: tuple[Any, ...]) -> None:
        """Sleeps as long as both take together."""
        assert isinstance(other, RehearsedStage)
        outputs = self._slept(forward[0], "pair", self._made)
        if self._output.after is not None:
            self._outputs[forward[0]] = outputs, versions(outputs)
        if other._input.before is not None:
            other._input_gradients[backward[0]] = made_of(backward[0], other._made_gradients)

    def backward_input(self, micros: Micros, _gradients: Tensors = ()) -> None:
        """Sleeps as long as the first half of a backward takes."""
        self._sleep_and_hand_back(micros, "I")

    def backward_weights(self, micros: Micros) -> None:
        """Sleeps as long as the second half of a backward takes."""
        self._slept(micros, "W", ())

    def _sleep_and_hand_back(self, micros: Micros, kind: str) -> None:
        gradients = self._slept(micros, kind, self._made_gradients)
        if self._input.before is not None:
            self._input_gradients[micros] = gradients

    def _slept(self, micros: Micros, kind: str, made: Tensors) -> Tensors:
        """What is handed on after the sleeps, one for each micro-batch."""
        for _ in micros if isinstance(micros, tuple) else (micros,):
            time.sleep(self._seconds[kind])
        return made_of(micros, made)


def made_of(micros: Micros, made: Tensors) -> Tensors:
    """What is handed on for some micro-batches, if ``made`` is for one."""
    return join([made] * len(micros)) if isinstance(micros, tuple) and len(micros) > 1 else made


def rehearsed(seconds: Mapping[str, float], job: Job) -> Callable[..., Stage]:
    """Makes stages that sleep: so many seconds for a micro-batch, by the letter of the kind of operation."""
    slack = overshoot()
    return partial(
        RehearsedStage, seconds={kind: max(0.0, value / job.parts - slack) for kind, value in seconds.items()}
    )


def overshoot() -> float:
    """By how much a sleep of 2 ms lasts longer than that on this machine, whatever else runs: of 21 the third shortest.

    A machine that is busy now may be idle later; with the median, sleeps would then be shorter than asked for.
    """
    samples = []
    for _ in range(21):
        start = time.perf_counter()
        time.sleep(0.002)
        samples.append(time.perf_counter() - start - 0.002)
    return sorted(samples)[2]
