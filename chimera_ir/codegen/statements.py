"""Each instruction of a lane as Python statements, in a `notation`.

The state that waits for a backward, as in ``f_m0_s1``, is always that of a single micro-batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

from chimera_ir.codegen.notation import Notation
from chimera_ir.ir.ids import Micro, Stage, Worker
from chimera_ir.ir.kinds import BACKWARD, FORWARD, Kind
from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import (
    AllReduce,
    Compute,
    Drop,
    Instruction,
    Message,
    Recv,
    Send,
    Stash,
    Step,
    WaitAllReduce,
    WaitRecv,
    WaitSend,
)

Rooms = Mapping[tuple[int, bool], tuple[int, ...]]
"""By receiving stage, and whether it receives activations: the micro-batches that each slot has room for."""

Statements = tuple[tuple[str, ...], tuple[str, ...]]
"""The statements of an instruction, and the names that no later instruction of the lane reads."""


def _all(items: Sequence[str]) -> str:
    return f"({', '.join(items)})"


def _apart(tensors: str, count: int) -> list[str]:
    return [f"part({tensors}, {i}, {i + 1}, {count})" for i in range(count)]


@dataclass(frozen=True, slots=True)
class Scribe:
    """Writes the statements of a worker's lane."""

    header: Header
    worker: Worker
    rooms: Rooms
    notation: Notation

    def statements(self, instruction: Instruction) -> Statements:
        """The statements for an instruction."""
        call = self.notation
        match instruction:
            case Compute(kind):
                return _COMPUTED[kind](self, instruction)
            case Send():
                return self._send(instruction)
            case Recv():
                return (self._recv(instruction),), ()
            case WaitRecv(message=message):
                return (f"{self._received(message)}.wait()",), ()
            case WaitSend(message=message):
                return (f"{call.last(self._sent(message))}.wait()",), ()
            case AllReduce(stage=stage, version=version):
                return (f"{call.sum(stage, version)} = stage{stage}.all_reduce()",), ()
            case WaitAllReduce(stage=stage, version=version):
                return (f"{call.last(call.sum(stage, version))}.wait()",), ()
            case Step(stage=stage):
                return (f"stage{stage}.step()",), ()
            case Stash(stage=stage, version=version):
                return (f"stage{stage}.stash({call.kept(stage, version)})",), ()
            case Drop(stage=stage, version=version):
                return (f"stage{stage}.drop({call.kept(stage, version)})",), ()
            case _:
                assert_never(instruction)

    def _is_local(self, micro: Micro, stage: int) -> bool:
        """Whether a stage of a micro-batch's pipe exists and lies on this worker."""
        return 0 <= stage < self.header.stages and self.header.worker(micro, Stage(stage)) == self.worker

    def _hands_on_apart(self, micros: Sequence[Micro], stage: Stage) -> bool:
        """Whether the outputs of a forward have a name of their own, and are not part of the state that is kept."""
        return len(micros) > 1 or self.header.recomputes(micros[0], stage)

    # ---- messages

    def _send(self, send: Send) -> Statements:
        message = send.message
        apart = message.source > message.target or self._hands_on_apart(message.micros, message.source)
        payload, tag = self._payload(message), self.notation.tag(self.header, message)
        return (f"{self._sent(message)} = peer{send.to}.isend({payload}, tag={tag})",), (payload,) if apart else ()

    def _recv(self, recv: Recv) -> str:
        message, forward = recv.message, recv.message.source < recv.message.target
        slot = self.notation.slot(message, recv.slot)
        buffers = f"stage{message.target}.{'inputs' if forward else 'gradients'}[{slot}]"
        room = self.rooms[int(message.target), forward][recv.slot]
        if room > len(message.micros):
            buffers = f"part({buffers}, 0, {len(message.micros)}, {room})"
        tag = self.notation.tag(self.header, message)
        return f"{self._received(message)} = peer{recv.source}.irecv({buffers}, tag={tag})"

    def _received(self, message: Message) -> str:
        return self.notation.name("x" if message.source < message.target else "dy", message.micros, message.target)

    def _sent(self, message: Message) -> str:
        prefix = "y_sent" if message.source < message.target else "dx_sent"
        return self.notation.name(prefix, message.micros, message.source)

    def _payload(self, message: Message) -> str:
        if message.source > message.target:
            return self.notation.name("dx", message.micros, message.source)
        return self._outputs(message.micros, message.source)

    def _outputs(self, micros: Sequence[Micro], stage: Stage) -> str:
        """The expression for the outputs of a forward."""
        if self._hands_on_apart(micros, stage):
            return self.notation.name("y", micros, stage)
        return f"{self.notation.name('f', micros, stage)}.take()"

    # ---- forward

    def _forward(self, forward: Compute) -> Statements:
        micros, stage = forward.micros, forward.stage
        states = [self.notation.name("f", [micro], stage) for micro in micros]
        if self.header.recomputes(micros[0], stage):
            inputs, spent = self._inputs(forward)
            return self._keeping(forward, states, inputs), spent
        if len(micros) == 1:
            inputs, spent = self._inputs(forward)
            return (self._plain(forward, micros[0], states[0], inputs),), spent
        parts, spent = self._inputs_apart(forward)
        lines = [self._plain(forward, *arguments) for arguments in zip(micros, states, parts, strict=True)]
        if stage < self.header.stages - 1:
            outputs = self.notation.name("y", micros, stage)
            lines.append(f"{outputs} = join({_all([f'{state}.take()' for state in states])})")
        return tuple(lines), spent

    def _stage(self, operation: Compute) -> str:
        return self.notation.stage(operation.stage, operation.version)

    def _plain(self, forward: Compute, micro: Micro, state: str, inputs: str) -> str:
        number = self.notation.micro(micro)
        if forward.stage == self.header.stages - 1:
            return f"{state} = {self._stage(forward)}.forward_loss({number}, {inputs}, lane.target({number}))"
        return f"{state} = {self._stage(forward)}.forward({number}, {inputs})"

    def _keeping(self, forward: Compute, states: list[str], inputs: str) -> tuple[str, ...]:
        """A forward that keeps only its input, over one micro-batch or several at once."""
        stage, outputs = self._stage(forward), self.notation.name("y", forward.micros, forward.stage)
        numbers = [self.notation.micro(micro) for micro in forward.micros]
        targets = [f"lane.target({number})" for number in numbers]
        last = forward.stage == self.header.stages - 1
        if len(numbers) == 1:
            if last:
                return (f"{states[0]} = {stage}.forward_loss_keep_input({numbers[0]}, {inputs}, {targets[0]})",)
            return (f"{states[0]}, {outputs} = {stage}.forward_keep_input({numbers[0]}, {inputs})",)
        if last:
            opening = f"{', '.join(states)} = {stage}.forward_loss_keep_inputs("
            return (opening, f"    {_all(numbers)}, {inputs}, {_all(targets)}", ")")
        return (
            f"{_all(states)}, {outputs} = {stage}.forward_keep_inputs(",
            f"    {_all(numbers)}, {inputs}",
            ")",
        )

    def _inputs(self, forward: Compute) -> tuple[str, tuple[str, ...]]:
        """The inputs of a forward over all its micro-batches, and the names that are not read again."""
        micros, stage = forward.micros, forward.stage
        if stage == 0:
            loaded = [f"lane.input({self.notation.micro(micro)})" for micro in micros]
            return loaded[0] if len(loaded) == 1 else _all(loaded), ()
        if not self._is_local(micros[0], stage - 1):
            return f"{self.notation.last(self.notation.name('x', micros, stage))}.tensors", ()
        before = Stage(stage - 1)
        outputs = self._outputs(micros, before)
        return outputs, (outputs,) if self._hands_on_apart(micros, before) else ()

    def _inputs_apart(self, forward: Compute) -> tuple[list[str], tuple[str, ...]]:
        """The inputs of a forward for each micro-batch, and the names that are not read again."""
        micros, stage = forward.micros, forward.stage
        if stage == 0:
            return [f"lane.input({self.notation.micro(micro)})" for micro in micros], ()
        if self._is_local(micros[0], stage - 1):
            inputs, spent = self._inputs(forward)
            return _apart(inputs, len(micros)), spent
        received = self.notation.name("x", micros, stage)
        return _apart(f"{received}.tensors", len(micros)), self.notation.gone(received)

    # ---- backward

    def _backward(self, backward: Compute) -> Statements:
        micros, stage = backward.micros, backward.stage
        gradients, spent = self._gradients(backward)
        results = [self.notation.name("dx", [micro], stage) for micro in micros] if stage else [""] * len(micros)
        again = "_recompute" if self.header.recomputes(micros[0], stage) else ""
        lines: list[str] = []
        for micro, given, result in zip(micros, gradients, results, strict=True):
            state = self.notation.last(self.notation.name("f", [micro], stage))
            call = f"backward_loss{again}({state})" if not given else f"backward{again}({state}, {given})"
            lines.append(f"{f'{result} = ' if result else ''}{self._stage(backward)}.{call}")
        if len(micros) > 1 and stage > 0:
            lines.append(f"{self.notation.name('dx', micros, stage)} = join({_all(results)})")
            spent = (*spent, *results)
        return tuple(lines), spent

    def _gradients(self, backward: Compute) -> tuple[list[str], tuple[str, ...]]:
        """The gradients that a backward reads of each micro-batch, none on the last stage; and names not read later."""
        micros, stage = backward.micros, backward.stage
        if stage == self.header.stages - 1:
            return [""] * len(micros), ()
        if self._is_local(micros[0], stage + 1):
            given = self.notation.name("dx", micros, stage + 1)
            return [given] if len(micros) == 1 else _apart(given, len(micros)), (given,)
        received = self.notation.name("dy", micros, stage)
        if len(micros) == 1:
            return [f"{self.notation.last(received)}.tensors"], ()
        return _apart(f"{received}.tensors", len(micros)), self.notation.gone(received)


_COMPUTED: dict[Kind, Callable[[Scribe, Compute], Statements]] = {
    FORWARD: Scribe._forward,
    BACKWARD: Scribe._backward,
}
"""The writer of the operations of each kind."""
