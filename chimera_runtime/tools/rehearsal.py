"""``--rehearse``: stages whose compute is a sleep."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from chimera_runtime.errors import Misuse
from chimera_runtime.numbering import Micros
from chimera_runtime.program import Job
from chimera_runtime.stage import Stage
from chimera_runtime.tensors import Tensors, join


class RehearsedStage(Stage):
    """A stage whose compute is a sleep; its messages and sums have the real stage's sizes."""

    def __init__(self, *arguments: Any, seconds: Mapping[str, float]) -> None:
        super().__init__(*arguments)
        for group in self.groups:
            group.rehearse()
        self._seconds = seconds
        self._made: Tensors = ()
        self._made_gradients: Tensors = ()

    def reserve(self, inputs: Sequence[int], gradients: Sequence[int], device: torch.device) -> None:
        """Allocates the receive buffers and what is sent instead of results."""
        super().reserve(inputs, gradients, device)
        after = self._ending.after
        self._made = after.buffers(device) if after else ()
        before = self._beginning.before
        self._made_gradients = before.gradient_buffers(device) if before else ()

    def forward(self, micros: Micros, _inputs: Any, _targets: Any = None) -> None:
        """Sleeps as long as the forward takes."""
        outputs = self._slept(micros, "F", self._made)
        if self._ending.after is not None:
            self._outputs[micros] = outputs

    def backward(self, micros: Micros, _gradients: Tensors = ()) -> None:
        """Sleeps as long as the backward takes, the forward that it may run again included."""
        self._sleep_and_hand_back(micros, "B")

    def backward_input(self, micros: Micros, _gradients: Tensors = ()) -> None:
        """Sleeps as long as the first half of a backward takes."""
        self._sleep_and_hand_back(micros, "I")

    def backward_weights(self, micros: Micros) -> None:
        """Sleeps as long as the second half of a backward takes."""
        self._slept(micros, "W", ())

    def _sleep_and_hand_back(self, micros: Micros, kind: str) -> None:
        gradients = self._slept(micros, kind, self._made_gradients)
        if self._beginning.before is not None:
            self._input_gradients[micros] = gradients

    def _slept(self, micros: Micros, kind: str, made: Tensors) -> Tensors:
        """What is handed on after the sleeps, one for each micro-batch."""
        count = len(micros) if isinstance(micros, tuple) else 1
        for _ in range(count):
            time.sleep(self._seconds[kind])
        return made if count == 1 else join([made] * count)


def rehearsed(seconds: Mapping[str, float], job: Job) -> Callable[..., Stage]:
    """Makes stages that sleep: so many seconds for a micro-batch, by the letter of the kind of operation.

    Raises
    ------
    Misuse
        If a kind of operation that the schedule has is not given.
    """
    lacking = [kind for kind in job.kinds if kind not in seconds]
    if lacking:
        example = ",".join(f"{kind}={seconds.get(kind, 0.005):g}" for kind in job.kinds)
        raise Misuse(f"--rehearse lacks {' and '.join(lacking)}: {job.name} has such operations; give {example}")
    slack = overshoot()
    return partial(
        RehearsedStage, seconds={kind: max(0.0, value / job.parts - slack) for kind, value in seconds.items()}
    )


def overshoot() -> float:
    """By how much a sleep of 2 ms lasts longer than that on this machine, the median of 21."""
    samples = []
    for _ in range(21):
        start = time.perf_counter()
        time.sleep(0.002)
        samples.append(time.perf_counter() - start - 0.002)
    return sorted(samples)[10]
