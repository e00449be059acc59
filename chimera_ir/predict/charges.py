"""Costs of a program's instructions, in seconds on a cluster, or of its operations alone, in any unit.

A profile has the parameters of each stage, but not which of them stages share. So the sum and the step of a stage are
charged for all its parameters. The sum of a tie is charged as if it were as large as possible, with all gradients of
the smallest of its stages: T may be too high, but is never too low. The step of a tie is part of its stages' steps.
"""

from dataclasses import dataclass, field

from chimera_ir.cost.durations import Durations
from chimera_ir.ir.ids import WeightGroup, Worker
from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import AllReduce, Compute, Instruction, Message, Operation, Pair, Recv, Send, Step
from chimera_ir.predict.setting import Setting
from chimera_ir.profile.cluster import FREE, Cluster, Link
from chimera_ir.profile.costs import NO_OVERHEAD, StageCosts, Timing


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
        """The first of the workers that share a worker's link to the host, and a factor on the seconds of transfers.

        The factor says how much longer transfers take because ranks of other copies use the link as well.
        """
        if worker not in self._host_links:
            self._host_links[worker] = self.setting.host_link(self.header.workers, worker)
        return self._host_links[worker]

    @property
    def host_is_shared(self) -> bool:
        """Whether several workers have one link to the host."""
        return self.setting.host.workers > 1

    def step(self, group: WeightGroup) -> float:
        """Seconds of the optimizer step of a weight group; 0 for a tie, whose step is part of its stages' steps."""
        return self.setting.step(self.header, group[0]) if len(group) == 1 else 0.0

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

    def all_reduce(self, group: WeightGroup) -> float:
        """Comm_allreduce of a group's gradients over its r ranks."""
        return self.setting.all_reduce(self.header, group)


@dataclass(frozen=True, slots=True)
class OperationCharges(Charges):
    """Costs of a program whose operations take the times of ``durations``, in any unit."""

    durations: Durations

    def compute(self, operation: Operation) -> float:
        """The time of an operation, in the unit of the durations."""
        return float(self.durations.duration(operation, self.header))


def operations_alone(header: Header, durations: Durations) -> OperationCharges:
    """Costs of a program whose operations alone take time, as in a timeline: messages, sums and steps are free."""
    free_stage = StageCosts(0, 0, 0, {1: Timing(NO_OVERHEAD, 0, 0, 0, 0)})
    cluster = Cluster("free messages", header.workers, header.workers, 0, 0, FREE, FREE, FREE)
    setting = Setting((free_stage,) * header.stages, cluster, copies=1, micro_batch_size=1)
    return OperationCharges(header, setting, durations)
