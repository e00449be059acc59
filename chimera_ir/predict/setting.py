"""Setting of a program: the costs of its stages, the cluster, the number of copies, the size of a micro-batch."""

from dataclasses import dataclass
from fractions import Fraction

from chimera_ir.ir.ids import Stage, WeightGroup, Worker
from chimera_ir.ir.kinds import ACTIVATIONS, Kind
from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import Compute, Crossing, Pair
from chimera_ir.ir.slice_lengths import extents, normalized, weighed
from chimera_ir.profile.cluster import FREE, Cluster, HostLink, Link, ranks_on_node
from chimera_ir.profile.costs import StageCosts, Timing, time_of
from chimera_ir.profile.slice_costs import equal_times, slice_terms, sliced, slowest_stage

_WHOLE = Fraction(1)
_DIGITS = 12
"""Digits of a transfer's seconds after the point: a fraction of a nanosecond has no meaning, and long sums are slow."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The setting of a program: the costs of its stages, the cluster, ``copies`` (W) and ``micro_batch_size`` (B).

    With ``replica_layout`` (``--layout replica``) a worker of a copy is rank worker * W + copy, else it is rank copy *
    workers + worker. With ``sharded_optimizer`` each replica of a stage keeps one share of the optimizer's state if the
    schedule has a flush.
    """

    stages: tuple[StageCosts, ...]
    cluster: Cluster
    copies: int
    micro_batch_size: int
    replica_layout: bool = False
    sharded_optimizer: bool = False

    @property
    def noisy(self) -> bool:
        """Whether the profile has noise for any of the times."""
        return any(stage.step_noise or any(timing.noise for timing in stage.at.values()) for stage in self.stages)

    @property
    def halves_known(self) -> bool:
        """Whether the profile has the times of split backwards."""
        return all({"I", "W"} <= timing.times.keys() for stage in self.stages for timing in stage.at.values())

    @property
    def slices_known(self) -> bool:
        """Whether the profile has the costs of slices on every stage, for this micro-batch size."""
        return all(self.timing(stage).slices for stage in range(len(self.stages)))

    def equal_times(self, slices: int, length: int) -> tuple[int, ...]:
        """The lengths of ``slices`` slices, ``length`` in all, for which the slowest slice takes the least time.

        The result is empty if equal lengths are best. The time of a slice is that on the stage where it takes longest.
        The costs of slices are known, and ``length`` is at least their number.
        """
        stages = [(self.timing(stage), costs.overhead) for stage, costs in enumerate(self.stages)]
        return normalized(equal_times(slices, length, slowest_stage(stages, length)))

    def timing(self, stage: int) -> Timing:
        """Costs of a micro-batch on a stage, at the micro-batch size of this setting."""
        return self.stages[stage].at[self.micro_batch_size]

    def as_cut(self, stage: int, header: Header) -> Timing:
        """Costs of a micro-batch on a stage, added up over the slices into which the schedule cuts it.

        If there are no slices, or the profile has no costs of them, they are the costs of the whole micro-batch.
        """
        timing = self.timing(stage)
        if header.slices == 1 or not timing.slices:
            return timing
        return sliced(timing, self.stages[stage].overhead, header.slice_lengths)

    def message(self, edge: Crossing) -> int:
        """Bytes of a micro-batch's message: a stage's output to a stage that it feeds, or the gradient of it back.

        A profile has no sizes of other values: each is taken to be as large as the gradient.
        """
        source, target, value = edge
        return self.timing(source).output if value is ACTIVATIONS else self.timing(target).gradient

    def over(self, stage: int, micros: int, parts: int) -> tuple[Timing, Fraction]:
        """The costs of an operation over ``micros`` parts of micro-batches, as a timing and a factor on its times.

        A whole micro-batch has ``parts`` parts. If the profile has costs for as many items as the operation has, the
        timing is theirs and the factor 1: a large operation uses a device better than two small ones. Otherwise the
        timing is that of a micro-batch, and the factor the operation's number of micro-batches.
        """
        if micros == parts:
            return self.timing(stage), _WHOLE
        share = Fraction(micros, parts)
        items = self.micro_batch_size * share
        timing = self.stages[stage].at.get(int(items)) if items.denominator == 1 else None
        return (self.timing(stage), share) if timing is None else (timing, _WHOLE)

    def compute(self, stage: int, operation: Compute, header: Header) -> tuple[tuple[float, Fraction], ...]:
        """Time of an operation outside a pair, as terms to be added: each is seconds, such as F_t, and a factor on it.

        An operation over a part of a micro-batch takes that part of the time, but all of the overhead that an operation
        of any size has: a second term adds the rest of the overhead. A slice takes the time that the profile has for
        it, or for the measured slices that it overlaps. Weights of micro-batches multiply times without overheads. A
        move takes the latency of the host link and the time of its bytes, as if no other move were on the link.
        """
        if operation.kind.moves:
            share = Fraction(header.length(operation.micros), header.units)
            return tuple(zip(self.transfer(stage, operation.kind), (_WHOLE, share), strict=True))
        measured, letter = self.timing(stage), operation.kind.letter
        if header.slices > 1 and measured.slices:
            extent = extents(header.slice_lengths)[operation.micros[0] % header.slices]
            heavier = Fraction(weighed(operation, header.weights))
            terms = slice_terms(measured, self.stages[stage].overhead, letter, extent)
            return tuple((seconds, times * heavier) for seconds, times in terms)
        heavier = Fraction(header.weight(operation), len(operation.micros))
        timing, times = self.over(stage, len(operation.micros), header.parts)
        if header.lengths:
            times, heavier = times * heavier, _WHOLE
        seconds = timing.seconds(letter), times * heavier
        overhead = time_of(self.stages[stage].overhead, letter)
        return (seconds, (overhead, 1 - times)) if overhead and times < 1 else (seconds,)

    @property
    def host(self) -> HostLink:
        """The link of a worker to its host; free if the cluster has none."""
        return self.cluster.host or HostLink(FREE)

    def transfer(self, stage: int, move: Kind) -> tuple[float, float]:
        """Seconds of a micro-batch's transfer to the host or back: the latency of the link, and the time of the bytes.

        ``move`` is the kind of the operation.
        """
        link, sizes = self.host.link, self.timing(stage).kept.moved
        size = sizes.operands if move.moves_operands else sizes.activations
        return link.alpha, round(link.beta * size, _DIGITS)

    def host_link(self, workers: int, worker: int) -> tuple[Worker, float]:
        """The first of the workers that share a worker's link to the host, and a factor on the seconds of transfers.

        The factor is how many ranks of all copies are on the link, divided by how many workers of this copy are:
        transfers of other copies count as if they were spread evenly. A copy has ``workers`` workers.
        """
        of_node = ranks_on_node(workers * self.copies, self.cluster.per_node)
        ranks = [self._rank(workers, 0, w) for w in range(workers)]
        link = self._host_link_of(ranks[worker], of_node)
        sharing = [w for w in range(workers) if self._host_link_of(ranks[w], of_node) == link]
        every = (self._rank(workers, copy, w) for copy in range(self.copies) for w in range(workers))
        return Worker(sharing[0]), sum(self._host_link_of(rank, of_node) == link for rank in every) / len(sharing)

    def _host_link_of(self, rank: int, of_node: int) -> tuple[int, int]:
        """The node of a rank, and the number of its link to the host among those of the node."""
        node, place = divmod(rank, of_node)
        return node, place // self.host.workers

    def joint(self, pair: Pair, header: Header) -> tuple[float, Fraction] | None:
        """The time of a pair as two factors, seconds and a number of micro-batches; None without one in the profile."""
        times = [self.timing(part.stage).times.get(pair.kind.letter) for part in pair.parts]
        seconds = [time for time in times if time is not None]
        return (max(seconds), Fraction(header.weight(pair), header.parts)) if len(seconds) == len(times) else None

    def all_reduce(self, header: Header, group: WeightGroup) -> float:
        """Comm_allreduce of a group's gradients; for a tie an upper bound, with all gradients of its smallest stage."""
        gradients = min(self.stages[stage].gradients for stage in group)
        return self.cluster.sums.all_reduce(gradients, self.ranks(header, group))

    def ranks(self, header: Header, group: WeightGroup) -> int:
        """The number r of ranks, of all copies together, that hold a group and sum its gradients."""
        return self.copies * len(header.members(group))

    def shares(self, header: Header, stage: Stage) -> int:
        """Number of ranks that share the optimizer's state of a stage in equal parts; 1 if each has all of it."""
        return self.ranks(header, (stage,)) if self.sharded_optimizer and not header.steps_inside else 1

    def optimizer(self, header: Header, stage: Stage) -> int:
        """Bytes of a stage's optimizer state on a rank that holds it."""
        return -(-self.stages[stage].optimizer // self.shares(header, stage))

    def step(self, header: Header, stage: Stage) -> float:
        """Seconds of a stage's optimizer step: to step a rank's share of the parameters, and to gather the weights."""
        shares = self.shares(header, stage)
        return self.stages[stage].step / shares + self.cluster.sums.all_gather(self.stages[stage].gradients, shares)

    def link(self, workers: int, source: int, target: int) -> Link:
        """The link between two of the ``workers`` workers of a copy, in the copy where it is slowest."""
        if source == target:
            return FREE
        nodes = ((self._node(workers, w, source), self._node(workers, w, target)) for w in range(self.copies))
        return self.cluster.within if all(a == b for a, b in nodes) else self.cluster.between

    def _node(self, workers: int, copy: int, worker: int) -> int:
        return self._rank(workers, copy, worker) // ranks_on_node(workers * self.copies, self.cluster.per_node)

    def _rank(self, workers: int, copy: int, worker: int) -> int:
        return worker * self.copies + copy if self.replica_layout else copy * workers + worker
