"""What a program runs on: its stages' costs, its links, and how often it is replicated."""

from dataclasses import dataclass
from fractions import Fraction

from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import Compute
from chimera_ir.profile.cluster import FREE, Cluster, Link
from chimera_ir.profile.costs import StageCosts, Timing


@dataclass(frozen=True, slots=True)
class Setting:
    """A program's stages on a cluster, in ``copies`` W, with micro-batches of ``micro_batch_size`` B items.

    ``replica_layout`` places rank = worker * W + copy, else rank = copy * workers + worker (CONTRACT: ``--layout``).
    """

    stages: tuple[StageCosts, ...]
    cluster: Cluster
    copies: int
    micro_batch_size: int
    replica_layout: bool = False

    @property
    def noisy(self) -> bool:
        """Whether any of the times is known to scatter."""
        return any(one.step_noise or any(each.noise for each in one.at.values()) for one in self.stages)

    def timing(self, stage: int) -> Timing:
        """What a micro-batch costs on a stage."""
        return self.stages[stage].at[self.micro_batch_size]

    def over(self, stage: int, micros: int, parts: int) -> tuple[Timing, Fraction]:
        """What an operation over so many parts of a micro-batch costs on a stage: a timing, taken so many times.

        That of micro-batches of as many items as it has, where the profile has them: a large operation uses a device
        better than two small ones. Else that of a micro-batch, in proportion.
        """
        share = Fraction(micros, parts)
        items = self.micro_batch_size * share
        known = self.stages[stage].at.get(int(items)) if items.denominator == 1 else None
        return (self.timing(stage), share) if known is None else (known, Fraction(1))

    def compute(self, stage: int, operation: Compute, header: Header) -> tuple[float, Fraction]:
        """How long an operation takes on a stage: F_t or B_t in seconds, and the factor by which its size differs."""
        timing, times = self.over(stage, len(operation.micros), header.parts)
        again = header.recomputes(operation.micros[0], operation.stage)
        return timing.seconds(operation.kind.letter, recomputing=again), times

    def link(self, workers: int, source: int, target: int) -> Link:
        """What a message between two of so many workers of a copy travels over; the slowest of all copies."""
        if source == target:
            return FREE
        nodes = ((self._node(workers, w, source), self._node(workers, w, target)) for w in range(self.copies))
        return self.cluster.within if all(a == b for a, b in nodes) else self.cluster.between

    def _node(self, workers: int, copy: int, worker: int) -> int:
        rank = worker * self.copies + copy if self.replica_layout else copy * workers + worker
        return rank // self.cluster.per_node
