"""A profile that counts work instead of time, and the device that tells how long the work takes."""

from dataclasses import dataclass, replace

from chimera_ir.profile.costs import ModelProfile, StageCosts, Timing


@dataclass(frozen=True, slots=True)
class Device:
    """What a worker computes with: ``peak`` in FLOP/s, of which large micro-batches reach the share ``efficiency``.

    A micro-batch of ``half_at`` positions reaches half of that (Hockney's half-performance length); a profile says how
    many an item has, one if it does not.
    """

    peak: float
    efficiency: float
    half_at: float

    def rate(self, positions: int) -> float:
        """FLOP/s that a micro-batch of so many positions reaches: peak * efficiency * n / (n + half_at)."""
        return self.peak * self.efficiency * positions / (positions + self.half_at)


@dataclass(frozen=True, slots=True)
class WorkProfile:
    """A model whose forwards and backwards are counted: in ``counts``, what a profile has in seconds is in FLOP."""

    counts: ModelProfile

    def on(self, device: Device) -> ModelProfile:
        """The profile in seconds, as the device would take them."""
        length = self.counts.length
        depths = {
            depth: tuple(_on(device, stage, length) for stage in stages) for depth, stages in self.counts.depths.items()
        }
        return replace(self.counts, depths=depths)


def _on(device: Device, stage: StageCosts, length: int) -> StageCosts:
    return replace(stage, at={size: _timed(counted, device.rate(size * length)) for size, counted in stage.at.items()})


def _timed(counted: Timing, rate: float) -> Timing:
    return replace(
        counted,
        forward=counted.forward / rate,
        backward=counted.backward / rate,
        recomputing=counted.recomputing / rate,
    )
