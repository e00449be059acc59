"""A model's profile: the costs of each of its stages at each micro-batch size."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from chimera_ir.ir.kinds import COSTED, KINDS, RECOMPUTATION, Kind
from chimera_runtime.program.kept_bytes import MicroBatchBytes

LEAST = 1e-9
"""The least time of an operation, a nanosecond; where work is counted, the least work in FLOP."""

RECOMPUTING = "recomputing"
"""The key of the time of a backward that runs the forward again."""

Times = Mapping[str, float]
"""Seconds of operations, keyed by the letter of their kind; pairs by ``pair``, a backward that recomputes as below.

There are at least F, B and `RECOMPUTING`, which are F_t and B_t of section 3.4. `time_of` gives the time of a kind that
is left out.
"""

ENTRIES = {"F": "forward", "B": "backward", RECOMPUTING: RECOMPUTING} | {
    letter: kind.noun.replace(" ", "_") for letter, kind in KINDS.items()
}
"""The names of times in a file, by the keys of `Times`."""


def time_of(times: Times, key: str) -> float:
    """The time under a key: the letter of a kind, or `RECOMPUTING` for a backward that runs the forward again.

    If ``times`` lacks the key, the time follows from others. A pair takes as long as its two operations one after the
    other, and a recomputation as long as `RECOMPUTING` less B. Any other kind takes a part of F if it opens the
    micro-batch, as forwards do, else a part of B: in proportion to the costs in the table of kinds.
    """
    return times[key] if key in times else sum(_derived(times, kind) for kind in COSTED[key].kinds)


def _derived(times: Times, kind: Kind) -> float:
    if kind.letter in times:
        return times[kind.letter]
    if kind is RECOMPUTATION:
        return max(0.0, round(times[RECOMPUTING] - times["B"], 12))
    reference = KINDS["F" if kind.opens else "B"]
    return times[reference.letter] * kind.cost / reference.cost


@dataclass(frozen=True, slots=True)
class Timing:
    """The costs of a micro-batch on a stage, at one micro-batch size.

    ``activations`` is M_a, ``input`` what is kept instead where the stage recomputes, ``output`` the message to the
    next stage and ``gradient`` the one that comes back, all in bytes; the last stage sends nothing on. ``noise`` is the
    spread of the measured times as a share of the median, None where nothing was measured. The first half of a split
    backward frees ``released`` bytes of the activations; the second half needs the rest and ``operands``: bytes of
    gradients that are kept between the halves, received ones included. ``resident`` bytes of the activations, such as
    the stage's input and output, stay on the worker when the rest is off-loaded, ``resident_operands`` bytes of what is
    kept between the halves.

    ``slices`` has the costs of each slice, if the micro-batch was also measured in slices of equal length. A slice
    leaves a ``carry`` for the next ones, in bytes beyond those of earlier slices; ``carry_gradient`` has the bytes of
    the gradients of all that it leaves.
    """

    times: Times
    activations: int
    input: int
    output: int
    gradient: int
    noise: float | None = None
    released: int = 0
    operands: int = 0
    resident: int = 0
    resident_operands: int = 0
    carry: int = 0
    carry_gradient: int = 0
    slices: tuple["Timing", ...] = ()

    @property
    def kept(self) -> MicroBatchBytes:
        """The bytes that the stage keeps, received inputs and gradients included."""
        resident = self.resident, self.resident_operands
        of_slices = self.carry, self.carry_gradient
        return MicroBatchBytes(self.activations, self.input, self.released, self.operands, *of_slices, *resident)

    def plus(self, overhead: Times, times: float) -> "Timing":
        """Returns the costs with longer times: each by ``times`` times the overhead of its operation."""
        return self.with_times(lambda key, seconds: seconds + times * time_of(overhead, key))

    def with_times(self, change: Callable[[str, float], float]) -> "Timing":
        """The costs with each time replaced by what ``change`` makes of its key and the time."""
        return replace(self, times={key: change(key, seconds) for key, seconds in self.times.items()})

    def seconds(self, kind: str) -> float:
        """The time of an operation (`time_of`); at least `LEAST` for half a backward without work."""
        seconds = time_of(self.times, kind)
        return seconds if kind in ("F", "B", RECOMPUTATION.letter) else seconds or LEAST


NO_OVERHEAD: Times = {"F": 0.0, "B": 0.0, RECOMPUTING: 0.0}


@dataclass(frozen=True, slots=True)
class StageCosts:
    """The costs of a stage: bytes of parameters (M_theta), of the gradients that are summed, of optimizer state.

    ``at[b]`` has the costs of a micro-batch of b items. ``step`` is how long the optimizer's step takes, in seconds; 0
    where a profile does not say. ``step_noise`` is the spread of its measured times as a share of the median.
    ``overhead`` has the seconds that an operation takes on any stage, even an empty one; the times of a `Timing`
    include them. It is the work of a rank around the stage's own: seeds, hooks, autograd's start, the launch of the
    first kernel.
    """

    weights: int
    gradients: int
    optimizer: int
    at: Mapping[int, Timing]
    step: float = 0.0
    step_noise: float | None = None
    overhead: Times = field(default_factory=lambda: NO_OVERHEAD)

    @property
    def first_gradients(self) -> int:
        """Bytes of the gradients that the first backward of an update makes, beside the flat tensors that are summed.

        They have the dtypes of the weights, and are freed when they have been copied into the flat tensors.
        """
        return min(self.gradients, self.weights)

    def slept(self, size: int, seconds: Mapping[str, float]) -> "StageCosts":
        """The costs in a rehearsal, in which a stage sleeps instead of computing or recomputing, and has no steps.

        ``seconds`` are given by the letters of the kinds that the schedule has. An operation over k micro-batches
        sleeps k times as long, and a slice its share, whatever the profile has for these.
        """
        backward = seconds["B"] if "B" in seconds else seconds["I"] + seconds["W"]
        recomputing = backward + seconds.get(RECOMPUTATION.letter, 0.0)
        times = {**seconds, "B": backward, RECOMPUTING: recomputing}
        timing = replace(self.at[size], times=times, noise=None, slices=())
        return replace(self, at={size: timing}, step=0.0, step_noise=None, overhead=NO_OVERHEAD)


UNKNOWN_LENGTH = 1_000
"""The length of an item in positions, which its slices divide among them, if a profile does not say it."""


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """Costs of a model: ``depths[D]`` has its D stages in order; an item has ``length`` positions (words, pixels).

    A profile of layers has ``layers`` in order, all at the same micro-batch sizes, in place of depths; a split makes
    stages of any number of layers. If stages made of layers were measured, ``splits[D]`` has the first layer of each
    stage. ``file`` is the model file that was measured, as its user named it.
    """

    name: str
    depths: Mapping[int, tuple[StageCosts, ...]]
    note: str = ""
    length: int = 1
    layers: tuple[StageCosts, ...] = ()
    splits: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    file: str = ""

    def with_overhead(self, overhead: Times) -> "ModelProfile":
        """The profile with this overhead of an operation; its times, which include it, do not change."""
        return self.mapped(lambda part: replace(part, overhead=overhead))

    def mapped(self, change: Callable[[StageCosts], StageCosts]) -> "ModelProfile":
        """The profile with ``change`` applied to every stage and every layer."""
        depths = {depth: tuple(map(change, stages)) for depth, stages in self.depths.items()}
        return replace(self, depths=depths, layers=tuple(map(change, self.layers)))

    @property
    def overhead(self) -> Times:
        """The overhead of an operation, which is the same on every stage."""
        return next((part.overhead for parts in (self.layers, *self.depths.values()) for part in parts), NO_OVERHEAD)

    @property
    def positions(self) -> int:
        """The length of an item, which its slices divide among them; a round number if the profile lacks it."""
        return self.length if self.length > 1 else UNKNOWN_LENGTH

    @property
    def has_slices(self) -> bool:
        """Whether the slices of any micro-batch were measured."""
        parts = (part for parts in (self.layers, *self.depths.values()) for part in parts)
        return any(timing.slices for part in parts for timing in part.at.values())

    @property
    def sizes(self) -> frozenset[int]:
        """The micro-batch sizes at which the layers were measured; none if the profile is not one of layers."""
        return frozenset(self.layers[0].at) if self.layers else frozenset()
