"""Writes the Python statement for each instruction of a lane.

recv m2 s0->s1 from w0 into 0     in_s0_s1.irecv(2, into=0)
wait recv m2 s0->s1               in_s0_s1.wait(2)
F m2 s1                           stage1.forward(2, in_s0_s1.take(2))
send m2 s1->s2 to w2              out_s1_s2.isend(2, stage1.outputs(2))
wait send m2 s1->s2               out_s1_s2.wait(2)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, assert_never

from chimera_ir.ir import ops
from chimera_ir.ir.kinds import Value, implied
from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import Blocks, LaneParts, Message, Micro, Slot, Stage, Version, WeightGroup, Worker
from chimera_ir.ir.turns import Ring

# Writes the numbers in scripts: as they are where a lane is written out, relative to the round in a loop.
#
# In a loop over m, ``m - 3`` is the third micro-batch before that of the round; slots and versions are written
# likewise.


@dataclass(frozen=True, slots=True)
class Notation:
    """Writes the numbers of an instruction as Python expressions: micro-batches, versions, slots.

    In a loop the expressions are relative to the round. ``variable`` is the name of the loop's variable; in the round
    that the instruction is taken from, its value stands for micro-batch ``micro``, and it grows by ``step`` from round
    to round. ``counter`` is the name of the variable of the turn, which stands for update ``update`` there. ``rings``
    has, by its message, the circle of slots of each receive. Without ``variable`` the numbers are written as they are.
    """

    micro: int = 0
    step: int = 1
    rings: Mapping[Message, Ring] = field(default_factory=dict)
    variable: str = ""
    counter: str = ""
    update: int = 0

    def micros(self, micros: Sequence[Micro]) -> str:
        """The expression for one micro-batch, as in ``m - 3``, or a tuple for several."""
        texts = [_offset(self.variable, micro - self.micro) for micro in micros]
        return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"

    def version(self, version: Version | None) -> str:
        """The expression for a version, as in ``k - 1``; empty if the instruction names no version."""
        return "" if version is None else _offset(self.counter, version - self.update)

    def slot(self, message: Message, slot: Slot) -> str:
        """The expression for the slot that a message is received into, as in ``(m + 1) % 4``."""
        if not self.variable:
            return str(slot)
        ring = self.rings[message]
        step, micro = ring.step % ring.slots, self.micro
        if not step:
            return str(slot)
        # The variable is the number of the round, times a step; the slot is ``first`` plus a remainder by the slots.
        number = self.variable
        if step != self.step % ring.slots:
            micro = micro // self.step * step
            number += (f" // {self.step}" if self.step > 1 else "") + (f" * {step}" if step > 1 else "")
        start = (slot - ring.first - micro) % ring.slots
        place = f"{number} % {ring.slots}" if start == 0 else f"({_offset(number, start)}) % {ring.slots}"
        return f"{ring.first} + {place}" if ring.first else place


def _offset(name: str, by: int) -> str:
    if not name:
        return str(by)
    if by == 0:
        return name
    return f"{name} + {by}" if by > 0 else f"{name} - {-by}"


Route = tuple[int, int, int, *tuple[str, ...]]
"""A link of a worker: the stage that sends, the stage that receives, the other worker, and the letter of the value.

The letter is left out if the stages imply the value.
"""


class LinkVariables(NamedTuple):
    """The variables for a worker's incoming and outgoing links: a name for each route."""

    incoming: Mapping[Route, str]
    outgoing: Mapping[Route, str]


def weights(group: WeightGroup) -> str:
    """The variable of a weight group: ``stage1``, or ``tie_s0_s3`` of a tie."""
    return f"stage{group[0]}" if len(group) == 1 else f"tie_{'_'.join(f's{stage}' for stage in group)}"


def links(parts: LaneParts) -> LinkVariables:
    """Returns the names of the links that a lane uses, in ascending order of their routes.

    A link is named after its stages, as in ``in_s0_s1``, and after its value if they do not imply it, as in
    ``in_z_s0_s1``. Links with the same stages and value are also named after the other worker, as in ``in_s0_s1_w2``.
    """
    incoming = {_route(recv.message, recv.source) for recv in parts.recvs.lines}
    outgoing = {_route(send.message, send.to) for send in parts.sends.lines}
    return LinkVariables(_named("in", incoming), _named("out", outgoing))


def _route(message: ops.Message, worker: Worker) -> Route:
    value = () if implied(message.value) else (message.value.letter,)
    return int(message.source), int(message.target), int(worker), *value


def _named(prefix: str, routes: set[Route]) -> dict[Route, str]:
    edges = [(source, target, *value) for source, target, _, *value in routes]
    names: dict[Route, str] = {}
    for route in sorted(routes):
        source, target, worker, *value = route
        shared = edges.count((source, target, *value)) > 1
        names[route] = "_".join([prefix, *value, f"s{source}", f"s{target}", *([f"w{worker}"] if shared else [])])
    return names


_CALLS: dict[type[ops.Instruction], str] = {
    ops.AllReduce: "all_reduce",
    ops.WaitAllReduce: "wait_all_reduce",
    ops.Step: "step",
    ops.Stash: "stash",
    ops.Drop: "drop",
}
"""Maps each line about sums, steps and versions to the method of a weight group that does it."""


@dataclass(frozen=True, slots=True)
class Scribe:
    """Writer of the statements of a worker's lane, whose numbers are written by ``notation``."""

    header: Header
    worker: Worker
    links: LinkVariables
    notation: Notation
    blocks: Blocks

    def statement(self, instruction: ops.Instruction) -> str:
        """The statement for an instruction."""
        numbers = self.notation
        match instruction:
            case ops.Compute(kind):
                return f"{self._stage(instruction)}.{kind.method}({', '.join(self._arguments(instruction))})"
            case ops.Pair(forward, backward):
                first, second = self._arguments(forward), self._arguments(backward)
                only = "," if len(second) == 1 else ""  # a tuple of one
                behind = f"{self._stage(backward)}, ({', '.join(second)}{only})"
                return f"{self._stage(forward)}.pair(({', '.join(first)}), {behind})"
            case ops.Send(message=message):
                return f"{self._outgoing(message)}.isend({numbers.micros(message.micros)}, {self._made(message)})"
            case ops.Recv(message=message, slot=slot):
                micros, into = numbers.micros(message.micros), numbers.slot(message, slot)
                return f"{self._incoming(message)}.irecv({micros}, into={into})"
            case ops.WaitRecv(message=message):
                return f"{self._incoming(message)}.wait({numbers.micros(message.micros)})"
            case ops.WaitSend(message=message):
                return f"{self._outgoing(message)}.wait({numbers.micros(message.micros)})"
            case ops.WaitMove(kind, micros, stage):
                return f"stage{stage}.wait_{kind.method}({numbers.micros(micros)})"
            case ops.AllReduce() | ops.WaitAllReduce() | ops.Step() | ops.Stash() | ops.Drop():
                call = _CALLS[type(instruction)]
                return f"{weights(instruction.group)}.{call}({numbers.version(instruction.version)})"
            case _:
                assert_never(instruction)

    def _incoming(self, message: ops.Message) -> str:
        return self.links.incoming[_route(message, self.header.worker(message.micros[0], message.source))]

    def _outgoing(self, message: ops.Message) -> str:
        return self.links.outgoing[_route(message, self.header.worker(message.micros[0], message.target))]

    def _stage(self, operation: ops.Compute) -> str:
        stage = f"stage{operation.stage}"
        return stage if operation.version is None else f"{stage}.at({self.notation.version(operation.version)})"

    def _arguments(self, operation: ops.Compute) -> list[str]:
        """The micro-batches, then what an operation needs of the dataset and of neighbouring stages.

        A stage that feeds no other takes targets with a forward, and makes the gradients of its outputs itself.
        """
        header, stage = self.header, operation.stage
        micros = self.notation.micros(operation.micros)
        crossing = [value for value in operation.kind.reads if value.crosses]
        values = [text for value in crossing if (text := self._values(value, operation))]
        if not operation.kind.opens:
            return [micros, *values]
        inputs = values if header.feeding[stage] else [f"lane.input({micros}{_one_of(stage, header.feeding)})"]
        targets = [] if header.fed[stage] else [f"lane.target({micros}{_one_of(stage, header.fed)})"]
        return [micros, *inputs, *targets]

    def _values(self, value: Value, operation: ops.Compute) -> str:
        """The expression for a value where an operation reads it: from several stages the tensors of all in a tuple."""
        stage = operation.stage
        makers = self.header.makers(value, stage, operation.micros[0])
        texts = [self._joined(operation, maker, value) for maker in makers]
        none = "()" if self.header.makers(value, stage) else ""
        return f"({', '.join(f'*{text}' for text in texts)})" if len(texts) > 1 else "".join(texts) or none

    def _joined(self, operation: ops.Compute, maker: Stage, value: Value) -> str:
        """The expression for a value of one stage: where that made it in several operations, all their parts joined."""
        sharing = self.header.sharing(value, maker, operation.stage, operation.micros[0])
        together = self.blocks.of(operation.micros, value, maker, *sharing)
        texts = [self._value(ops.Message(micros, maker, sharing[0], value)) for micros in together]
        return f"lane.join({', '.join(texts)})" if len(texts) > 1 else texts[0]

    def _value(self, message: ops.Message) -> str:
        """The expression for a message's value where it is read: made on this worker, or received."""
        if self.header.worker(message.micros[0], message.source) == self.worker:
            return self._made(message)
        return f"{self._incoming(message)}.take({self.notation.micros(message.micros)})"

    def _made(self, message: ops.Message) -> str:
        micros, source, target, value = message
        several = len(self.header.readers(value, source)) > 1
        sharing = self.header.sharing(value, source, target, micros[0]) if several else ()
        return f"stage{source}.{value.made}({', '.join([self.notation.micros(micros), *map(str, sharing)])})"


def _one_of(stage: Stage, neighbours: Sequence[Sequence[Stage]]) -> str:
    """The further argument that names a stage without ``neighbours``, if there are several such stages."""
    return f", {stage}" if sum(not others for others in neighbours) > 1 else ""
