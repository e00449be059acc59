"""``--rehearse``: stages that sleep instead of computing."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import mean
from typing import Any

import torch

from chimera_runtime.program.job import Job
from chimera_runtime.program.numbering import Micros
from chimera_runtime.program.operations import MAKES, MOVES, OPERATIONS, PAIRED
from chimera_runtime.program.stage_graph import VALUES
from chimera_runtime.stage.stage import Stage
from chimera_runtime.values.tensors import Tensors, join


class RehearsedLink:
    """Link to the host, which runs one move at a time; busy until ``free_at``, a time of `time.perf_counter`."""

    def __init__(self) -> None:
        self.free_at = 0.0

    def launch(self, seconds: float) -> float:
        """Launches a move; returns the time of its end."""
        self.free_at = max(self.free_at, time.perf_counter()) + seconds
        return self.free_at


class RehearsedStage(Stage):
    """Stage that sleeps instead of computing; its messages and sums have the sizes of the real stage.

    Nothing moves to the host either, but waits for moves last as long as over ``rehearsed_link``, which all stages
    of a rank share.
    """

    def __init__(
        self,
        *,
        seconds: Mapping[str, float],
        slack: float,
        cost_weights: Sequence[float],
        sizes: Sequence[float],
        rehearsed_link: RehearsedLink,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        for group in self.groups:
            group.rehearse()
        self._seconds, self._slack, self._weights, self._sizes = seconds, slack, cost_weights, sizes
        self._fake: dict[str, list[Tensors]] = {}
        for letter, method in OPERATIONS.items():
            setattr(self, method, partial(self._sleep, letter))
        self._link = rehearsed_link
        self._ends: dict[tuple[str, Micros], float] = {}
        for letter, method in MOVES.items():
            setattr(self, method, partial(self._launch, letter))
            setattr(self, f"wait_{method}", partial(self._wait, letter))

    def reserve(self, rooms: Mapping[str, Sequence[int]], device: torch.device) -> None:
        """Allocates the receive buffers, and tensors that are sent instead of results."""
        super().reserve(rooms, device)
        for letter, value in VALUES.items():
            boundary = self._output.after if value.onward else self._input.before
            slices = range(self._numbering.slices if boundary and boundary.of_slices else 1)
            self._fake[letter] = [
                getattr(boundary.at(place), value.buffers)(device) if boundary else () for place in slices
            ]

    def pair(self, forward: tuple[Any, ...], other: Stage, backward: tuple[Any, ...]) -> None:
        """Sleeps for the time of a pair; hands on tensors of the shapes of its forward and its backward."""
        assert isinstance(other, RehearsedStage)
        weights = [
            mean(pair) for pair in zip(_of(forward[0], self._weights), _of(backward[0], self._weights), strict=True)
        ]
        self._sleep_for(PAIRED, weights)
        self._hand_on_fakes("F", forward[0])
        other._hand_on_fakes("B", backward[0])

    def _sleep(self, letter: str, micros: Micros, *_values: Any) -> None:
        """Sleeps as long as operation ``letter`` takes, for each micro-batch; hands on tensors of the right shapes."""
        self._sleep_for(letter, _of(micros, self._weights))
        self._hand_on_fakes(letter, micros)

    def _sleep_for(self, letter: str, weights: Iterable[float]) -> None:
        for weight in weights:
            time.sleep(max(0.0, self._seconds.get(letter, 0.0) * weight - self._slack))

    def _launch(self, letter: str, micros: Micros) -> None:
        """Launches a rehearsed move of ``micros``; it takes longer for a longer slice."""
        seconds = sum(_of(micros, self._sizes)) * self._seconds.get(letter, 0.0)
        self._ends[letter, micros] = self._link.launch(seconds)

    def _wait(self, letter: str, micros: Micros) -> None:
        """Sleeps until a move ends."""
        time.sleep(max(0.0, self._ends.pop((letter, micros)) - time.perf_counter()))

    def _hand_on_fakes(self, letter: str, micros: Micros) -> None:
        for value in MAKES.get(letter, ()):
            fakes = self._fake[value]
            first = micros[0] if isinstance(micros, tuple) else micros
            self._hand_on(value, micros, repeated(micros, fakes[first % len(fakes)]))


def _of(micros: Micros, weights: Sequence[float]) -> list[float]:
    """The weight of each of ``micros``, a factor of its time; ``weights`` repeat, and are all 1 if there are none."""
    several = micros if isinstance(micros, tuple) else (micros,)
    return [weights[micro % len(weights)] if weights else 1 for micro in several]


def repeated(micros: Micros, fake: Tensors) -> Tensors:
    """Returns the tensors of one micro-batch, repeated for each micro-batch of an operation and joined."""
    return join([fake] * len(micros)) if isinstance(micros, tuple) and len(micros) > 1 else fake


def rehearsed(seconds: Mapping[str, float], job: Job) -> Callable[..., Stage]:
    """Returns a function that makes stages which sleep; ``seconds`` has each kind's time for a whole micro-batch."""
    of_part = {kind: value / job.parts for kind, value in seconds.items()}
    made = partial(RehearsedStage, seconds=of_part, slack=overshoot(), cost_weights=cost_weights(job))
    return partial(made, sizes=slice_sizes(job), rehearsed_link=RehearsedLink())


def cost_weights(job: Job) -> Sequence[float]:
    """Returns factors for the time of consecutive parts, which repeat: a slice longer than the mean takes longer."""
    sizes = slice_sizes(job)
    if not sizes:
        return job.weights
    weights = job.weights or (1,) * len(sizes)
    return [weight * sizes[place % len(sizes)] for place, weight in enumerate(weights)]


def slice_sizes(job: Job) -> Sequence[float]:
    """The length of each slice of a micro-batch, divided by their mean; empty if all are equal."""
    return [length * len(job.lengths) / sum(job.lengths) for length in job.lengths]


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
