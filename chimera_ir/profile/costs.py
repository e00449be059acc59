"""A model's profile: the costs of each of its stages at each micro-batch size."""

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Timing:
    """The costs of a micro-batch on a stage, at one micro-batch size.

    ``forward``, ``backward`` and ``recomputing`` (a backward that runs the forward again) are F_t and B_t of section
    3.4, in seconds. ``activations`` is M_a, ``input`` what is kept instead where the stage recomputes, ``output`` the
    message to the next stage and ``gradient`` the one that comes back, all in bytes; the last stage sends nothing on.
    ``noise`` is the spread of the measured times as a share of the median, None where nothing was measured.
    """

    forward: float
    backward: float
    recomputing: float
    activations: int
    input: int
    output: int
    gradient: int
    noise: float | None = None

    def seconds(self, kind: str, *, recomputing: bool) -> float:
        """The time of an operation by the letter of its kind; ``recomputing`` says whether its stage recomputes."""
        times = {"F": self.forward, "B": self.recomputing if recomputing else self.backward}
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

    def slept(self, size: int, forward: float, backward: float) -> "StageCosts":
        """The stage in a rehearsal: it sleeps F and B seconds, recomputing or not, without noise, and makes no steps.

        An operation over k micro-batches sleeps k times as long, whatever the profile has for that size.
        """
        timing = replace(self.at[size], forward=forward, backward=backward, recomputing=backward, noise=None)
        return replace(self, at={size: timing}, step=0.0, step_noise=None)


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """A model: ``depths[D]`` are its D stages, in order, and ``length`` the positions (words, pixels) of an item.

    Or ``layers`` are its layers, in order, all at the same micro-batch sizes: then it has no depths, and a split makes
    stages of any number of them.
    """

    name: str
    depths: Mapping[int, tuple[StageCosts, ...]]
    note: str = ""
    length: int = 1
    layers: tuple[StageCosts, ...] = ()

    @property
    def sizes(self) -> frozenset[int]:
        """The micro-batch sizes of the layers."""
        return frozenset(self.layers[0].at) if self.layers else frozenset()
