"""What each worker needs, in bytes, where every stage has its own sizes."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import astuple, dataclass

from chimera_ir.ir.ids import Slot, Stage
from chimera_ir.ir.levels import Parts, Program
from chimera_ir.ir.ops import Message, Recv
from chimera_ir.predict.setting import Setting
from chimera_ir.verify.holdings import Holdings, Moment, holdings


@dataclass(frozen=True, slots=True)
class Memory:
    """What a worker needs at most, in bytes, by what it is for; each part at its own maximum.

    ``weights`` are all copies, versions included; ``messages`` the receive buffers and what is on its way to others;
    ``activations`` what waits for a backward, inputs of stages that recompute included. An input that was received lies
    in its receive buffer, and counts there.
    """

    weights: int
    gradients: int
    optimizer: int
    messages: int
    activations: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(astuple(self))


def memory(program: Program, setting: Setting, known: Iterable[Holdings] | None = None) -> tuple[Memory, ...]:
    """What each worker of a verified program needs; what it holds may be known from another setting."""
    return tuple(
        _Worker(program, setting, worker).need(held, program.parts[worker])
        for worker, held in enumerate(holdings(program) if known is None else known)
    )


class _Worker:
    """Adds up what one worker needs; sizes are those of whole micro-batches, of which the program may count halves."""

    def __init__(self, program: Program, setting: Setting, worker: int) -> None:
        self._header = program.header
        self._setting = setting
        self._worker = worker
        self._sizes: dict[Stage, tuple[int, int]] = {}

    def need(self, held: Holdings, parts: Parts) -> Memory:
        """The need, by what it is for."""
        stages = self._setting.stages
        sending = sum(
            self._bytes(each.activations, self._message(each.stage, each.stage + 1))
            + self._bytes(each.gradients, self._message(each.stage, each.stage - 1))
            for each in held.sending
        )
        return Memory(
            weights=sum(copies * stages[stage].weights for stage, copies in held.copies),
            gradients=sum(stages[stage].gradients for stage, _ in held.copies),
            optimizer=sum(stages[stage].optimizer for stage, _ in held.copies),
            messages=sending + self._receive_buffers(parts.recvs.lines),
            activations=max(map(self._moment, held.fullest), default=0),
        )

    def _receive_buffers(self, receives: Iterable[Recv]) -> int:
        room: dict[tuple[Stage, Stage, Slot], int] = defaultdict(int)
        for each in receives:
            key = each.message.source, each.message.target, each.slot
            room[key] = max(room[key], self._received(each.message))
        return sum(room.values())

    def _received(self, message: Message) -> int:
        return self._bytes(len(message.micros), self._message(message.source, message.target))

    def _moment(self, moment: Moment) -> int:
        total = 0
        for stage, activations, inputs in moment:
            of_activations, of_input = self._kept(stage)
            total += self._bytes(activations, of_activations) + self._bytes(inputs, of_input)
        return total

    def _kept(self, stage: Stage) -> tuple[int, int]:
        """What of a micro-batch is kept beside the receive buffers: all activations, or the input alone."""
        if stage not in self._sizes:
            timing, there = self._setting.timing(stage), self._there(stage)
            self._sizes[stage] = max(0, timing.activations - there), max(0, timing.input - there)
        return self._sizes[stage]

    def _there(self, stage: Stage) -> int:
        """What of a micro-batch lies in a receive buffer: the input of a stage that only other workers feed."""
        fed_here = any(pipe.workers[stage] == pipe.workers[stage - 1] == self._worker for pipe in self._header.pipes)
        return self._message(stage - 1, stage) if stage > 0 and not fed_here else 0

    def _message(self, source: int, target: int) -> int:
        """The activations that a stage hands on of one micro-batch, or the gradients that it hands back."""
        if target < 0 or target >= self._header.stages or source < 0:
            return 0
        return self._setting.timing(source).output if source < target else self._setting.timing(target).gradient

    def _bytes(self, count: int, size: int) -> int:
        """So many of what the program counts as micro-batches."""
        return -(-count * size // self._header.parts)
