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

    def rate(self, positions: int) -> float:
        """FLOP/s for a micro-batch of n positions: peak * efficiency * n / (n + half_at)."""
        return self.peak * self.efficiency * positions / (positions + self.half_at)


@dataclass(frozen=True, slots=True)
class WorkProfile:
    """A profile that counts work: the times in ``counts`` are in FLOP instead of seconds."""

    counts: ModelProfile

    def on(self, device: Device) -> ModelProfile:
        """The profile in seconds, on a device."""
        return self.counts.mapped(lambda part: _on(device, part, self.counts.length))


def _on(device: Device, stage: StageCosts, length: int) -> StageCosts:
    once = device.operation
    overhead = {**dict.fromkeys(KINDS, once), RECOMPUTING: 2 * once}
    at = {size: _timed(counted, device.rate(size * length)).plus(overhead, 1) for size, counted in stage.at.items()}
    return replace(stage, at=at, overhead=overhead)


def _timed(counted: Timing, rate: float) -> Timing:
    return replace(counted, times={key: flop / rate for key, flop in counted.times.items()})
