"""Costs of a program's instructions: all of them in seconds, in a setting, or its operations alone, in any unit.

A profile has the parameters of each stage, but not which of them stages share. So the sum and the step of a stage are
charged for all its parameters. The sum of a tie is charged as if it were as large as possible, with all gradients of
the smallest of its stages: T may be too high, but is never too low. The step of a tie is part of its stages' steps.
"""

from dataclasses import dataclass, field
from typing import assert_never

from chimera_ir.cost.durations import Durations
from chimera_ir.ir.ids import WeightGroup, Worker
from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import (
    AllReduce,
    Compute,
    Drop,
    Instruction,
    Message,
    Operation,
    Pair,
    Recv,
    Send,
    Stash,
    Step,
    WaitAllReduce,
    WaitRecv,
    WaitSend,
)
from chimera_ir.predict.setting import Setting
from chimera_ir.profile.cluster import FREE, Link


@dataclass(frozen=True, slots=True)
class FreeMessages:
    """Costs of a program whose operations alone take time, as in a timeline."""

    header: Header
    durations: Durations

    def compute(self, operation: Operation) -> float:
        """The time of an operation."""
        return float(self.durations.duration(operation, self.header))

    def step(self, _: WeightGroup) -> float:
        """The time of an optimizer step."""
        return 0.0

    def size(self, _: Message) -> float:
        """The bytes of a message."""
        return 0.0

    def link(self, _: Worker, __: Worker) -> Link:
        """The link from a worker to another."""
        return FREE

    def overhead(self, _: Worker, __: Instruction) -> float:
        """The time for which posting an instruction occupies its lane."""
        return 0.0

    def ranks(self, group: WeightGroup) -> int:
        """The number of ranks that sum the gradients of a group."""
        return len(self.header.members(group))

    def all_reduce(self, _: WeightGroup) -> float:
        """The time of a sum of gradients."""
        return 0.0


@dataclass(frozen=True, slots=True)
class Charges:
    """Costs of a program's instructions on the stages and links of a setting."""

    header: Header
    setting: Setting
    _links: dict[tuple[Worker, Worker], Link] = field(default_factory=dict, init=False, repr=False, compare=False)

    def compute(self, operation: Operation) -> float:
        """Seconds of an operation: F_t or B_t of its stage, for all its micro-batches; of a pair, for both together."""
        if isinstance(operation, Pair):
            joint = self.setting.joint(operation, self.header)
            return sum(map(self.compute, operation.parts)) if joint is None else joint[0] * float(joint[1])
        terms = self.setting.compute(operation.stage, operation, self.header)
        return sum(seconds * times.numerator / times.denominator for seconds, times in terms)

    def step(self, group: WeightGroup) -> float:
        """Seconds of a stage's optimizer step; 0 for a tie, whose step is part of its stages' steps."""
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
            case Send() | Recv() | WaitSend() | WaitRecv() | AllReduce() | WaitAllReduce() | Step() | Stash() | Drop():
                return 0.0
            case _:
                assert_never(instruction)

    def size(self, message: Message) -> float:
        """Bytes of a message: a stage's output to the next stage, or the gradient of that output back."""
        forwards = message.source < message.target
        timing = self.setting.timing(message.source if forwards else message.target)
        micro_batch = timing.output if forwards else timing.gradient
        return micro_batch * len(message.micros) / self.header.parts

    def link(self, source: Worker, target: Worker) -> Link:
        """The link that a message from one worker to another takes."""
        if (source, target) not in self._links:
            self._links[source, target] = self.setting.link(self.header.workers, source, target)
        return self._links[source, target]

    def overhead(self, worker: Worker, instruction: Instruction) -> float:
        """Seconds for which posting an instruction occupies its lane."""
        match instruction:
            case Send(to=other) | Recv(source=other):
                return self.link(worker, other).overhead
            case AllReduce(group):
                return self.setting.cluster.sums.overhead if self.ranks(group) > 1 else 0.0
            case Compute() | Pair() | WaitSend() | WaitRecv() | WaitAllReduce() | Step() | Stash() | Drop():
                return 0.0
            case _:
                assert_never(instruction)

    def ranks(self, group: WeightGroup) -> int:
        """r: the number of ranks, of all copies, that sum the gradients of a group."""
        return self.setting.ranks(self.header, group)

    def all_reduce(self, group: WeightGroup) -> float:
        """Comm_allreduce of a group's gradients over its r ranks."""
        return self.setting.all_reduce(self.header, group)
