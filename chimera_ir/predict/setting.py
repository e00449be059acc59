"""Setting of a program: the costs of its stages, the cluster, the number of copies, the size of a micro-batch."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from itertools import chain
from math import lcm
from typing import NamedTuple

from chimera_ir.cost.durations import DurationKey, Durations, StagePart, Unit, duration_key, mean_costs, stage_shares
from chimera_ir.ir.kinds import ACTIVATIONS, COSTED, KINDS, PAIR, Kind, Pairing
from chimera_ir.ir.levels import Header, Schedule, extents, normalized, weighed
from chimera_ir.ir.ops import (
    AllReduce,
    Compute,
    Crossing,
    Instruction,
    Message,
    Operation,
    Pair,
    Recv,
    Send,
    Stage,
    Step,
    WeightGroup,
    Worker,
    singles,
)
from chimera_ir.profile.cluster import FREE, Cluster, HostLink, Link, ranks_on_node
from chimera_ir.profile.costs import (
    FREE_TIMING,
    StageCosts,
    Timing,
    equal_times,
    slice_terms,
    sliced,
    slowest_stage,
    time_of,
)

_WHOLE = Fraction(1)
_DIGITS = 12
"""Digits of a transfer's seconds after the point: a fraction of a nanosecond has no meaning, and long sums are slow."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The setting of a program: the costs of its stages, the cluster, ``copies`` (W) and ``micro_batch_size`` (B).

    With ``replica_layout`` (``--layout replica``) a worker of a copy is rank worker * W + copy, else it is rank copy *
    workers + worker. With ``sharded_optimizer`` replicas of a stage share the optimizer's state if there is a flush.
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
        """The lengths of ``slices`` slices, ``length`` in all, whose slowest takes least; empty if they are equal.

        The time of a slice is that on its slowest stage. The costs of slices are known; ``length`` is at least their
        number.
        """
        stages = [(self.timing(stage), costs.overhead) for stage, costs in enumerate(self.stages)]
        return normalized(equal_times(slices, length, slowest_stage(stages, length)))

    def timing(self, stage: int) -> Timing:
        """Costs of a micro-batch on a stage, at the micro-batch size of this setting."""
        return self.stages[stage].at[self.micro_batch_size]

    def as_cut(self, stage: int, header: Header) -> Timing:
        """Costs of a micro-batch on a stage, added up over the slices of the schedule if the profile has them."""
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

        A whole micro-batch has ``parts`` parts. Costs of as many items in the profile have the factor 1: a large
        operation uses a device better than two small ones. Otherwise a micro-batch's timing counts as many times.
        """
        if micros == parts:
            return self.timing(stage), _WHOLE
        share = Fraction(micros, parts)
        items = self.micro_batch_size * share
        timing = self.stages[stage].at.get(int(items)) if items.denominator == 1 else None
        return (self.timing(stage), share) if timing is None else (timing, _WHOLE)

    def compute(self, stage: int, operation: Compute, header: Header) -> tuple[tuple[float, Fraction], ...]:
        """Time of an operation outside a pair, as terms to be added: each is seconds, such as F_t, and a factor on it.

        An operation over a part of a micro-batch takes that part of the time, but all of the overhead of an operation:
        a second term adds the rest of it. A slice takes the time that the profile has for it, or for the measured
        slices that it overlaps. Weights of micro-batches multiply times without overheads. A move takes the latency of
        the host link and the time of its bytes, as if no other move were on the link.
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
        """Seconds of a micro-batch's move to the host or back: the latency of the link, and the time of the bytes."""
        link, sizes = self.host.link, self.timing(stage).kept.moved
        size = sizes.operands if move.moves_operands else sizes.activations
        return link.alpha, round(link.beta * size, _DIGITS)

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

    def link(self, workers: int, source: int, target: int) -> Link:
        """The link between two of the ``workers`` workers of a copy, in the copy where it is slowest."""
        if source == target:
            return FREE
        nodes = ((self._node(workers, w, source), self._node(workers, w, target)) for w in range(self.copies))
        return self.cluster.within if all(a == b for a, b in nodes) else self.cluster.between

    def _node(self, workers: int, copy: int, worker: int) -> int:
        return self.rank(workers, copy, worker) // ranks_on_node(workers * self.copies, self.cluster.per_node)

    def rank(self, workers: int, copy: int, worker: int) -> int:
        """The rank of a worker of a copy that has ``workers`` workers."""
        return worker * self.copies + copy if self.replica_layout else copy * workers + worker


# Costs of a program's instructions, in seconds on a cluster, or of its operations alone, in any unit.
#
# A profile has the parameters of each stage, but not which of them stages share. So the sum and the step of a stage are
# charged for all its parameters. The sum of a tie is charged as if it were as large as possible, with all gradients of
# the smallest of its stages: T may be too high, but is never too low. The step of a tie is part of its stages' steps.


@dataclass(frozen=True, slots=True)
class Charges:
    """Costs of a program's instructions, in seconds, on the stages and links of a setting."""

    header: Header
    setting: Setting
    _links: dict[tuple[Worker, Worker], Link] = field(default_factory=dict, init=False, repr=False, compare=False)
    _host_links: dict[Worker, tuple[Worker, float]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def compute(self, operation: Operation) -> float:
        """Seconds of an operation for all its micro-batches, by F_t or B_t of its stage; of a pair, for both parts."""
        if isinstance(operation, Pair):
            joint = self.setting.joint(operation, self.header)
            return sum(map(self.compute, operation.parts)) if joint is None else joint[0] * float(joint[1])
        terms = self.setting.compute(operation.stage, operation, self.header)
        return sum(seconds * times.numerator / times.denominator for seconds, times in terms)

    def host_link(self, worker: Worker) -> tuple[Worker, float]:
        """The first of the workers that share a worker's link to the host, and a factor on seconds of transfers.

        The factor is how many ranks of all copies are on the link, divided by how many workers of this copy are:
        transfers of other copies count as if they were spread evenly.
        """
        if worker not in self._host_links:
            setting, workers = self.setting, self.header.workers
            of_node = ranks_on_node(workers * setting.copies, setting.cluster.per_node)

            def link_of(copy: int, worker: int) -> tuple[int, int]:
                node, place = divmod(setting.rank(workers, copy, worker), of_node)
                return node, place // setting.host.workers

            link = link_of(0, worker)
            sharing = [w for w in range(workers) if link_of(0, w) == link]
            ranks = sum(link_of(copy, w) == link for copy in range(setting.copies) for w in range(workers))
            self._host_links[worker] = Worker(sharing[0]), ranks / len(sharing)
        return self._host_links[worker]

    def step(self, group: WeightGroup) -> float:
        """Seconds of the optimizer step of a weight group; 0 for a tie, whose step is part of its stages' steps.

        A rank steps its share of the parameters, and gathers the weights of all shares.
        """
        if len(group) > 1:
            return 0.0
        costs, shares = self.setting.stages[group[0]], self.setting.shares(self.header, group[0])
        return costs.step / shares + self.setting.cluster.sums.all_gather(costs.gradients, shares)

    def noise(self, instruction: Instruction) -> float:
        """Spread of the times of an operation or a step, as a share of their median; 0 if the profile has none."""
        match instruction:
            case Compute(_, micros, stage):
                return self.setting.over(stage, len(micros), self.header.parts)[0].noise or 0.0
            case Pair(forward, backward):
                return max(self.noise(forward), self.noise(backward))
            case Step((stage,)):
                return self.setting.stages[stage].step_noise or 0.0
            case _:
                pass
        return 0.0

    def size(self, message: Message) -> float:
        """Bytes of a message."""
        return self.setting.message(message.edge) * self.header.length(message.micros) / self.header.units

    def link(self, source: Worker, target: Worker) -> Link:
        """The link that a message from one worker to another takes."""
        if (source, target) not in self._links:
            self._links[source, target] = self.setting.link(self.header.workers, source, target)
        return self._links[source, target]

    def overhead(self, worker: Worker, instruction: Instruction) -> float:
        """Seconds that posting a send, a receive or a sum occupies ``worker``; 0 for any other instruction."""
        match instruction:
            case Send(to=other) | Recv(source=other):
                return self.link(worker, other).overhead
            case AllReduce(group):
                return self.setting.cluster.sums.overhead if self.ranks(group) > 1 else 0.0
            case Compute(kind) if kind.moves:
                return self.setting.host.link.overhead
            case _:
                pass
        return 0.0

    def ranks(self, group: WeightGroup) -> int:
        """The number r of ranks, of all copies together, that sum the gradients of a group."""
        return self.setting.ranks(self.header, group)


@dataclass(frozen=True, slots=True)
class OperationCharges(Charges):
    """Costs of a program whose operations take the times of ``durations``, in any unit."""

    durations: Durations
    _times: dict[DurationKey, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def compute(self, operation: Operation) -> float:
        """The time of an operation, in the unit of the durations."""
        key = duration_key(operation, self.header)
        if key not in self._times:
            self._times[key] = float(self.durations.duration(operation, self.header))
        return self._times[key]


def operations_alone(header: Header, durations: Durations) -> OperationCharges:
    """Costs of a program whose operations alone take time, as in a timeline: messages, sums and steps are free."""
    free_stage = StageCosts(0, 0, 0, {1: FREE_TIMING})
    cluster = Cluster("free messages", header.workers, header.workers, 0, 0, FREE, FREE, FREE)
    setting = Setting((free_stage,) * header.stages, cluster, copies=1, micro_batch_size=1)
    return OperationCharges(header, setting, durations)


# Durations of operations from a profile. Messages take no time in a timeline (section 2); a replay adds theirs.


class Measured(NamedTuple):
    """Durations of operations in a setting: on a cluster, with the costs that a profile has for its stages.

    ``cut[s]`` lists the stages of the profile that make up stage s, each with the share of it that belongs to s.
    """

    setting: Setting
    cut: tuple[tuple[StagePart, ...], ...]

    @staticmethod
    def of(setting: Setting) -> "Measured":
        """Durations for a schedule that has the stages of the profile."""
        return Measured(setting, stage_shares(len(setting.stages), len(setting.stages)))

    def duration(self, operation: Operation, header: Header) -> Fraction:
        """Seconds of an operation on its stage, for all its micro-batches; for a pair, the time of both together."""
        if isinstance(operation, Pair):
            joint = self.setting.joint(operation, header)
            alone = (self.duration(part, header) for part in operation.parts)
            return sum(alone, _ZERO) if joint is None else _exact(joint[0]) * joint[1]
        parts = self.cut[operation.stage]
        if len(parts) == 1 and parts[0][1] == 1:
            return self._whole(parts[0][0], operation, header)
        return sum((share * self._whole(stage, operation, header) for stage, share in parts), _ZERO)

    def _whole(self, stage: Stage, operation: Compute, header: Header) -> Fraction:
        terms = self.setting.compute(stage, operation, header)
        return sum((_exact(seconds) if times == 1 else _exact(seconds) * times for seconds, times in terms), _ZERO)

    def tick(self, header: Header) -> Fraction:
        """A unit of time of which the durations of all operations, of every size, are multiples."""
        stages = self.setting.stages
        whole = [timing for stage in stages for timing in stage.at.values()]
        timings = [*whole, *(part for timing in whole for part in timing.slices)]
        times = [timing.seconds(kind) for timing in timings for kind in KINDS]
        times += [time_of(stage.overhead, kind) for stage in stages for kind in KINDS]
        moves = [kind for kind in header.kinds if kind.moves]
        transfers = (self.setting.transfer(stage, kind) for stage in range(len(stages)) for kind in moves)
        times += chain.from_iterable(transfers)
        times += [timing.times[PAIR.letter] for timing in timings if PAIR.letter in timing.times]
        second = lcm(*(_exact(time).denominator for time in times))
        stage_size = lcm(*(share.denominator for parts in self.cut for _, share in parts))
        return Fraction(1, second * stage_size * header.parts * header.weight_unit)

    def recut(self, stages: int, into: int) -> "Measured":
        """Durations of the same model if the ``stages`` stages of the profile become ``into`` stages of equal size."""
        return Measured(self.setting, stage_shares(stages, into))

    def report_costs(self, header: Header, path: Sequence[Operation]) -> tuple[tuple[str, Fraction], ...]:
        """The mean cost per micro-batch (of weight 1) of each kind of operation on ``path``, by its letter."""
        return tuple(mean_costs(self, header, path, COSTED).items())

    def for_baseline(self, splits: bool) -> "Measured":
        """These durations, also for the report's baseline: a half that the profile lacks is half a backward."""
        return self

    def summary(self, header: Header, kinds: Collection[str]) -> str:
        """The shortest and the longest time of a micro-batch on all stages, for the letters ``kinds``."""
        micros = next((pipe.micros[: header.parts] for pipe in header.pipes if pipe.micros), ())

        def operation(kind: Kind | Pairing, stage: Stage) -> Operation:
            if isinstance(kind, Pairing):
                forward, backward = (Compute(part, micros, stage) for part in kind.kinds)
                return Pair(forward, backward)
            return Compute(kind, micros, stage)

        def times(kind: Kind | Pairing) -> list[Fraction]:
            return [self.duration(operation(kind, stage), header) for stage in map(Stage, range(header.stages))]

        return ", ".join(
            f"{letter} = {Unit.SECOND.show_range(times(kind))}" for letter, kind in COSTED.items() if letter in kinds
        )

    def remarks(self, schedule: Schedule) -> tuple[str, ...]:
        """Remarks that the profile lacks costs of split backwards or slices, if the schedule has these."""
        remarks = []
        splits = any(operation.kind.splits for lane in schedule.lanes for operation in singles(lane))
        if splits and not self.setting.halves_known:
            entries = "input_gradient and weight_gradient"
            remarks.append(
                f"the profile has no times of split backwards ({entries}): each half counts as half a backward"
            )
        slices = schedule.header.slices
        if slices > 1 and not self.setting.slices_known:
            measure = f"chimera profile stages --slices {slices} measures them"
            remarks.append(
                f"the profile has no costs of slices: each takes 1/{slices} of a micro-batch's time, "
                f"and carries are not counted in memory; {measure}"
            )
        return tuple(remarks)

    @property
    def unit(self) -> Unit:
        """The unit of a profile's times."""
        return Unit.SECOND


_ZERO = Fraction(0)


@lru_cache(maxsize=2**14)
def _exact(seconds: float) -> Fraction:
    """The exact value of a time as it is written in the file: ``0.1`` is one tenth."""
    return Fraction(repr(seconds))
