"""Python statements for the instructions of a lane.

recv m2 s0->s1 from w0 into 0     in_s0_s1.irecv(2, into=0)
wait recv m2 s0->s1               in_s0_s1.wait(2)
F m2 s1                           stage1.forward(2, in_s0_s1.take(2))
send m2 s1->s2 to w2              out_s1_s2.isend(2, stage1.outputs(2))
wait send m2 s1->s2               out_s1_s2.wait(2)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, assert_never

from chimera_ir.codegen.notation import Notation
from chimera_ir.ir.ids import Micro, Stage, WeightGroup, Worker
from chimera_ir.ir.kinds import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Kind
from chimera_ir.ir.levels import Header, LaneParts
from chimera_ir.ir.ops import (
    AllReduce,
    Compute,
    Drop,
    Instruction,
    Message,
    Pair,
    Recv,
    Send,
    Stash,
    Step,
    WaitAllReduce,
    WaitRecv,
    WaitSend,
)


class Route(NamedTuple):
    """A link of a worker: the stage that sends, the stage that receives, and the other worker."""

    source: int
    target: int
    worker: int


@dataclass(frozen=True, slots=True)
class LinkVariables:
    """The variables of a worker's incoming and outgoing links, by route."""

    incoming: Mapping[Route, str]
    outgoing: Mapping[Route, str]


def weights(group: WeightGroup) -> str:
    """The variable of a weight group: ``stage1``, or ``tie_s0_s3`` of a tie."""
    return f"stage{group[0]}" if len(group) == 1 else f"tie_{'_'.join(f's{stage}' for stage in group)}"


def links(parts: LaneParts) -> LinkVariables:
    """The links that a lane uses, ascending.

    A link is named after its stages, as in ``in_s0_s1``; if it shares them with another link, also after the other
    worker, as in ``in_s0_s1_w2``.
    """
    incoming = {_route(recv.message, recv.source) for recv in parts.recvs.lines}
    outgoing = {_route(send.message, send.to) for send in parts.sends.lines}
    return LinkVariables(_named("in", incoming), _named("out", outgoing))


def _route(message: Message, worker: Worker) -> Route:
    return Route(int(message.source), int(message.target), int(worker))


def _named(prefix: str, routes: set[Route]) -> dict[Route, str]:
    stages = [route[:2] for route in routes]
    return {
        route: f"{prefix}_s{route.source}_s{route.target}{f'_w{route.worker}' if stages.count(route[:2]) > 1 else ''}"
        for route in sorted(routes)
    }


@dataclass(frozen=True, slots=True)
class Scribe:
    """Writer of the statements of a worker's lane, whose numbers are written by ``notation``."""

    header: Header
    worker: Worker
    links: LinkVariables
    notation: Notation

    def statement(self, instruction: Instruction) -> str:
        """The statement for an instruction."""
        numbers = self.notation
        match instruction:
            case Compute(kind):
                return _COMPUTED[kind](self, instruction)
            case Pair(forward, backward):
                return self._pair(forward, backward)
            case Send(message=message):
                micros = numbers.micros(message.micros)
                return f"{self._outgoing(message)}.isend({micros}, {self._payload(message)})"
            case Recv(message=message, slot=slot):
                micros, into = numbers.micros(message.micros), numbers.slot(message, slot)
                return f"{self._incoming(message)}.irecv({micros}, into={into})"
            case WaitRecv(message=message):
                return f"{self._incoming(message)}.wait({numbers.micros(message.micros)})"
            case WaitSend(message=message):
                return f"{self._outgoing(message)}.wait({numbers.micros(message.micros)})"
            case AllReduce(group=group, version=version):
                return f"{weights(group)}.all_reduce({numbers.version(version)})"
            case WaitAllReduce(group=group, version=version):
                return f"{weights(group)}.wait_all_reduce({numbers.version(version)})"
            case Step(group=group, version=version):
                return f"{weights(group)}.step({numbers.version(version)})"
            case Stash(group=group, version=version):
                return f"{weights(group)}.stash({numbers.version(version)})"
            case Drop(group=group, version=version):
                return f"{weights(group)}.drop({numbers.version(version)})"
            case _:
                assert_never(instruction)

    def _incoming(self, message: Message) -> str:
        return self.links.incoming[_route(message, self.header.worker(message.micros[0], message.source))]

    def _outgoing(self, message: Message) -> str:
        return self.links.outgoing[_route(message, self.header.worker(message.micros[0], message.target))]

    def _payload(self, message: Message) -> str:
        if message.source < message.target:
            return self._outputs(message.micros, message.source)
        return self._input_gradients(message.micros, message.source)

    def _outputs(self, micros: Sequence[Micro], stage: Stage) -> str:
        return f"stage{stage}.outputs({self.notation.micros(micros)})"

    def _input_gradients(self, micros: Sequence[Micro], stage: Stage) -> str:
        return f"stage{stage}.input_gradients({self.notation.micros(micros)})"

    def _stage(self, operation: Compute) -> str:
        """The stage with the version of its weights that the operation reads."""
        stage = f"stage{operation.stage}"
        return stage if operation.version is None else f"{stage}.at({self.notation.version(operation.version)})"

    def _pair(self, forward: Compute, backward: Compute) -> str:
        arguments = self._backward_arguments(backward)
        only = "," if backward.stage == self.header.stages - 1 else ""  # a tuple of one
        behind = f"{self._stage(backward)}, ({arguments}{only})"
        return f"{self._stage(forward)}.pair(({self._forward_arguments(forward)}), {behind})"

    def _forward(self, forward: Compute) -> str:
        return f"{self._stage(forward)}.forward({self._forward_arguments(forward)})"

    def _forward_arguments(self, forward: Compute) -> str:
        """The arguments of a forward: micro-batches, inputs and, on the last stage, targets."""
        micros, stage = forward.micros, forward.stage
        numbers = self.notation.micros(micros)
        arguments = [numbers, f"lane.input({numbers})" if stage == 0 else self._handed_on(micros, stage)]
        if stage == self.header.stages - 1:
            arguments.append(f"lane.target({numbers})")
        return ", ".join(arguments)

    def _handed_on(self, micros: Sequence[Micro], stage: Stage) -> str:
        """The inputs of a stage that is not the first: from the same worker, or from a message."""
        before = Stage(stage - 1)
        if self.header.worker(micros[0], before) == self.worker:
            return self._outputs(micros, before)
        return self._received(Message(tuple(micros), before, stage))

    def _backward(self, backward: Compute) -> str:
        return f"{self._stage(backward)}.backward({self._backward_arguments(backward)})"

    def _input_gradient(self, half: Compute) -> str:
        return f"{self._stage(half)}.backward_input({self._backward_arguments(half)})"

    def _weight_gradient(self, half: Compute) -> str:
        return f"{self._stage(half)}.backward_weights({self.notation.micros(half.micros)})"

    def _backward_arguments(self, backward: Compute) -> str:
        """The arguments of a backward, or of its first half: micro-batches and, before the last stage, gradients."""
        micros, stage = backward.micros, backward.stage
        arguments = [self.notation.micros(micros)]
        if stage < self.header.stages - 1:
            arguments.append(self._handed_back(micros, stage))
        return ", ".join(arguments)

    def _handed_back(self, micros: Sequence[Micro], stage: Stage) -> str:
        """The gradients of the outputs of a stage: from the same worker, or from a message."""
        after = Stage(stage + 1)
        if self.header.worker(micros[0], after) == self.worker:
            return self._input_gradients(micros, after)
        return self._received(Message(tuple(micros), after, stage))

    def _received(self, message: Message) -> str:
        return f"{self._incoming(message)}.take({self.notation.micros(message.micros)})"


_COMPUTED: dict[Kind, Callable[[Scribe, Compute], str]] = {
    FORWARD: Scribe._forward,
    BACKWARD: Scribe._backward,
    INPUT_GRADIENT: Scribe._input_gradient,
    WEIGHT_GRADIENT: Scribe._weight_gradient,
}
"""The writer of the operations of each kind."""
