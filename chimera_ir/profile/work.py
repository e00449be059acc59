"""A profile that counts work instead of time, and the device that turns work into time."""

from dataclasses import dataclass, replace

from chimera_ir.ir.kinds import KINDS
from chimera_ir.profile.costs import RECOMPUTING, ModelProfile, StageCosts, Timing


@dataclass(frozen=True, slots=True)
class Device:
    """The processor of a worker: ``peak`` in FLOP/s, of which large micro-batches reach the share ``efficiency``.

    A micro-batch of ``half_at`` positions reaches half that rate (Hockney's half-performance length). The length in a
    profile is the number of positions of an item, 1 by default. ``operation`` is the overhead in seconds of each
    forward, each backward, and each half of a split backward; a backward that runs the forward again has it twice.
    """

    peak: float
    efficiency: float
    half_at: float
    operation: float = 0.0

    def rate(self, positions: float) -> float:
        """FLOP/s for a micro-batch of n positions: peak * efficiency * n / (n + half_at)."""
        return self.peak * self.efficiency * positions / (positions + self.half_at)


@dataclass(frozen=True, slots=True)
class WorkProfile:
    """A profile that counts work: the times in ``counts`` are in FLOP instead of seconds."""

    counts: ModelProfile

    def on(self, device: Device) -> ModelProfile:
        """The profile in seconds, on a device."""
        overhead = {**dict.fromkeys(KINDS, device.operation), RECOMPUTING: 2 * device.operation}

        def timed(size: int, counted: Timing) -> Timing:
            slices = tuple(at(size * self.counts.length / len(counted.slices), part) for part in counted.slices)
            return replace(at(size * self.counts.length, counted), slices=slices)

        def at(positions: float, counted: Timing) -> Timing:
            rate = device.rate(positions)
            return counted.with_times(lambda _, flop: flop / rate).plus(overhead, 1)

        def on(stage: StageCosts) -> StageCosts:
            return replace(stage, at={size: timed(size, at) for size, at in stage.at.items()}, overhead=overhead)

        return self.counts.mapped(on)
