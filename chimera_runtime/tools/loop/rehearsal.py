"""``--rehearse``: stages that sleep instead of computing."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from chimera_runtime.program.job import Job
from chimera_runtime.program.numbering import Micros
from chimera_runtime.stage.stage import Stage
from chimera_runtime.values.shared_memory import versions
from chimera_runtime.values.tensors import Tensors, join


class RehearsedStage(Stage):
    """Stage that sleeps instead of computing; its messages and sums have the sizes of the real stage."""

    def __init__(self, *, seconds: Mapping[str, float], **arguments: Any) -> None:
        super().__init__(**arguments)
        for group in self.groups:
            group.rehearse()
        self._seconds = seconds
        self._fake_outputs: Tensors = ()
        self._fake_gradients: Tensors = ()

    def reserve(self, inputs: Sequence[int], gradients: Sequence[int], device: torch.device) -> None:
        """Allocates the receive buffers, and tensors that are sent instead of results."""
        super().reserve(inputs, gradients, device)
        after = self._output.after
        self._fake_outputs = after.buffers(device) if after else ()
        before = self._input.before
        self._fake_gradients = before.gradient_buffers(device) if before else ()

    def forward(self, micros: Micros, _inputs: Any, _targets: Any = None) -> None:
        """Sleeps as long as the forward takes."""
        outputs = self._slept(micros, "F", self._fake_outputs)
        if self._output.after is not None:
            self._outputs[micros] = outputs, versions(outputs)

    def recompute(self, micros: Micros) -> None:
        """Sleeps as long as the recomputation takes; not at all if it is in the time of a backward."""
        self._slept(micros, "recompute", ())

    def backward(self, micros: Micros, _gradients: Tensors = ()) -> None:
        """Sleeps as long as the backward takes."""
        self._sleep_and_hand_back(micros, "B")

    def pair(self, forward: tuple[Any, ...], other: Stage, backward: tuple[Any, ...]) -> None:
        """Sleeps as long as both take together."""
        assert isinstance(other, RehearsedStage)
        outputs = self._slept(forward[0], "pair", self._fake_outputs)
        if self._output.after is not None:
            self._outputs[forward[0]] = outputs, versions(outputs)
        if other._input.before is not None:
            other._input_gradients[backward[0]] = repeated(backward[0], other._fake_gradients)

    def backward_input(self, micros: Micros, _gradients: Tensors = ()) -> None:
        """Sleeps as long as the first half of a backward takes."""
        self._sleep_and_hand_back(micros, "I")

    def backward_weights(self, micros: Micros) -> None:
        """Sleeps as long as the second half of a backward takes."""
        self._slept(micros, "W", ())

    def _sleep_and_hand_back(self, micros: Micros, kind: str) -> None:
        gradients = self._slept(micros, kind, self._fake_gradients)
        if self._input.before is not None:
            self._input_gradients[micros] = gradients

    def _slept(self, micros: Micros, kind: str, fake: Tensors) -> Tensors:
        """Sleeps for each micro-batch, then returns the tensors to send; ``fake`` are those of one micro-batch."""
        for _ in micros if isinstance(micros, tuple) else (micros,):
            time.sleep(self._seconds.get(kind, 0.0))
        return repeated(micros, fake)


def repeated(micros: Micros, fake: Tensors) -> Tensors:
    """Returns the tensors of one micro-batch, repeated for each micro-batch of an operation and joined."""
    return join([fake] * len(micros)) if isinstance(micros, tuple) and len(micros) > 1 else fake


def rehearsed(seconds: Mapping[str, float], job: Job) -> Callable[..., Stage]:
    """Returns a function that makes stages which sleep; ``seconds`` has the time of each kind of operation."""
    slack = overshoot()
    return partial(
        RehearsedStage, seconds={kind: max(0.0, value / job.parts - slack) for kind, value in seconds.items()}
    )


def overshoot() -> float:
    """Seconds by which a sleep of 2 ms is too long on this machine: the third shortest of 21 samples.

    A busy machine may become idle later; with the median, sleeps would then be too short.
    """
    samples = []
    for _ in range(21):
        start = time.perf_counter()
        time.sleep(0.002)
        samples.append(time.perf_counter() - start - 0.002)
    return sorted(samples)[2]
