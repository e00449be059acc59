"""A profile that counts work instead of time, and the device that tells how long the work takes."""

from dataclasses import dataclass, replace

from chimera_ir.profile.costs import ModelProfile, StageCosts, Timing


@dataclass(frozen=True, slots=True)
class Device:
    """What a worker computes with: ``peak`` in FLOP/s, of which large micro-batches reach the share ``efficiency``.

    A micro-batch of ``half_at`` items reaches half of that.
    """

    peak: float
    efficiency: float
    half_at: float

    def rate(self, micro_batch_size: int) -> float:
        """FLOP/s that a micro-batch of so many items reaches: peak * efficiency * b / (b + half_at)."""
        return self.peak * self.efficiency * micro_batch_size / (micro_batch_size + self.half_at)


@dataclass(frozen=True, slots=True)
class WorkProfile:
    """A model whose forwards and backwards are counted: in ``counts``, what a profile has in seconds is in FLOP."""

    counts: ModelProfile

    def on(self, device: Device) -> ModelProfile:
        """The profile in seconds, as the device would take them."""
        depths = {depth: tuple(_on(device, stage) for stage in stages) for depth, stages in self.counts.depths.items()}
        return replace(self.counts, depths=depths)


def _on(device: Device, stage: StageCosts) -> StageCosts:
    return replace(stage, at={size: _timed(counted, device.rate(size)) for size, counted in stage.at.items()})


def _timed(counted: Timing, rate: float) -> Timing:
    return replace(
        counted,
        forward=counted.forward / rate,
        backward=counted.backward / rate,
        recomputing=counted.recomputing / rate,
    )
