"""A model's profile: the costs of each of its stages at each micro-batch size."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

LEAST = 1e-9
"""The least time of an operation, a nanosecond; where work is counted, the least work in FLOP."""


@dataclass(frozen=True, slots=True)
class Timing:
    """The costs of a micro-batch on a stage, at one micro-batch size.

    ``forward``, ``backward`` and ``recomputing`` (a backward that runs the forward again) are F_t and B_t of section
    3.4, in seconds. ``activations`` is M_a, ``input`` what is kept instead where the stage recomputes, ``output`` the
    message to the next stage and ``gradient`` the one that comes back, all in bytes; the last stage sends nothing on.
    ``noise`` is the spread of the measured times as a share of the median, None where nothing was measured. ``halves``
    are the seconds of the two halves of a split backward; where they are not known, each counts as half a backward. The
    first half frees ``released`` bytes of the activations; the second half needs the rest and ``operands``: bytes of
    gradients that are kept between the halves, received ones included.
    ``pair`` is the time of a forward and a backward that run as one; if it is not known, it is the sum of both.
    """

    forward: float
    backward: float
    recomputing: float
    activations: int
    input: int
    output: int
    gradient: int
    noise: float | None = None
    halves: tuple[float, float] | None = None
    released: int = 0
    operands: int = 0
    pair: float | None = None

    @property
    def halfway(self) -> int:
        """Bytes that are kept between the halves of a split backward, received gradients included."""
        return self.activations - self.released + self.operands

    @property
    def halving(self) -> int:
        """Bytes that the first half of a split backward may need in addition while it runs."""
        return min(self.released, self.operands)

    def plus(self, overhead: "Overhead", times: float) -> "Timing":
        """The costs with the overhead of ``times`` further operations added to the time of each operation."""
        return replace(
            self,
            forward=self.forward + times * overhead.forward,
            backward=self.backward + times * overhead.backward,
            recomputing=self.recomputing + times * overhead.recomputing,
            halves=self.halves
            and (self.halves[0] + times * overhead.each_half[0], self.halves[1] + times * overhead.each_half[1]),
        )

    def seconds(self, kind: str, *, recomputing: bool) -> float:
        """The time of an operation by the letter of its kind; ``recomputing`` says whether its stage recomputes.

        Half a backward without work, such as the first half on the first stage, takes `LEAST`.
        """
        first, second = self.halves or (self.backward / 2, self.backward / 2)
        if recomputing:
            first = round(first + self.recomputing - self.backward, 12)
        halves = {"I": first or LEAST, "W": second or LEAST}
        return (halves | {"F": self.forward, "B": self.recomputing if recomputing else self.backward})[kind]


@dataclass(frozen=True, slots=True)
class Overhead:
    """Seconds that an operation takes on any stage, even an empty one; the times of a `Timing` include them.

    It is the work of a rank around the stage's own: seeds, hooks, autograd's start, the launch of the first kernel.
    """

    forward: float = 0.0
    backward: float = 0.0
    recomputing: float = 0.0
    halves: tuple[float, float] | None = None

    @property
    def each_half(self) -> tuple[float, float]:
        """The overhead of each half of a split backward; where that is not known, half of a backward's."""
        return self.halves or (self.backward / 2, self.backward / 2)

    def seconds(self, kind: str, *, recomputing: bool) -> float:
        """The part of `Timing.seconds` that is overhead."""
        first, second = self.each_half
        if recomputing:
            first = first + self.recomputing - self.backward
        times = {"F": self.forward, "B": self.recomputing if recomputing else self.backward, "I": first, "W": second}
        return times[kind]


@dataclass(frozen=True, slots=True)
class StageCosts:
    """The costs of a stage: bytes of parameters (M_theta), of the gradients that are summed, of optimizer state.

    ``at[b]`` has the costs of a micro-batch of b items. ``step`` is how long the optimizer's step takes, in seconds; 0
    where a profile does not say. ``step_noise`` is the spread of its measured times as a share of the median.
    """

    weights: int
    gradients: int
    optimizer: int
    at: Mapping[int, Timing]
    step: float = 0.0
    step_noise: float | None = None
    overhead: Overhead = Overhead()

    def slept(self, size: int, seconds: Mapping[str, float]) -> "StageCosts":
        """The costs in a rehearsal, in which a stage sleeps instead of computing or recomputing, and has no steps.

        ``seconds`` are given by the letters of the kinds that the schedule has. An operation over k micro-batches
        sleeps k times as long, whatever the profile has for that size.
        """
        halves = (seconds["I"], seconds["W"]) if "I" in seconds else None
        backward = seconds.get("B", sum(halves or ()))
        timing = replace(
            self.at[size],
            forward=seconds["F"],
            backward=backward,
            recomputing=backward,
            noise=None,
            halves=halves,
            pair=seconds.get("pair"),
        )
        return replace(self, at={size: timing}, step=0.0, step_noise=None, overhead=Overhead())


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

    def with_overhead(self, overhead: Overhead) -> "ModelProfile":
        """The profile with unchanged times, of which this overhead is a part."""
        return self.mapped(lambda part: replace(part, overhead=overhead))

    def mapped(self, change: Callable[[StageCosts], StageCosts]) -> "ModelProfile":
        """The profile with ``change`` applied to every stage and every layer."""
        depths = {depth: tuple(map(change, stages)) for depth, stages in self.depths.items()}
        return replace(self, depths=depths, layers=tuple(map(change, self.layers)))

    @property
    def overhead(self) -> Overhead:
        """The overhead of an operation, which is the same on every stage."""
        return next((part.overhead for parts in (self.layers, *self.depths.values()) for part in parts), Overhead())

    @property
    def sizes(self) -> frozenset[int]:
        """The micro-batch sizes of the layers."""
        return frozenset(self.layers[0].at) if self.layers else frozenset()
