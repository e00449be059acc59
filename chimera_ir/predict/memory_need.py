"""Memory that each worker needs, in bytes, from the sizes of each stage."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

from chimera_ir.ir.ids import Stage
from chimera_ir.ir.levels import Header, Program
from chimera_ir.predict.setting import Setting
from chimera_ir.profile.costs import Timing
from chimera_ir.verify.holdings import Holdings, Moment, Receiving, holdings


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Memory that a worker needs at most, in bytes, by purpose; the parts need not be largest at the same time.

    Attributes
    ----------
    weights
        All copies of the weights of the worker's stages, one for each version.
    optimizer
        The optimizer's state, or this worker's share of it.
    messages
        Receive buffers, and messages on their way to other workers.
    activations
        Activations that wait for a backward, the inputs of stages that recompute, and values between the halves of a
        backward. Received values are in their receive buffers and count as messages.
    """

    weights: int
    gradients: int
    optimizer: int
    messages: int
    activations: int

    @property
    def total(self) -> int:
        """Bytes of all parts together."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by the name of their purpose."""
        return asdict(self)


def memory(program: Program, setting: Setting) -> tuple[MemoryNeed, ...]:
    """Memory that each worker of a verified program needs."""
    return memory_of(program.header, setting, holdings(program))


def memory_of(header: Header, setting: Setting, held: Iterable[Holdings]) -> tuple[MemoryNeed, ...]:
    """Memory that each worker needs; ``held`` has the holdings of each."""
    return tuple(_Worker(header, setting, worker).need(holding) for worker, holding in enumerate(held))


class _Worker:
    """Computes the memory of a worker; sizes are of whole micro-batches, while the program may count halves."""

    def __init__(self, header: Header, setting: Setting, worker: int) -> None:
        self._header = header
        self._setting = setting
        self._worker = worker
        self._sizes: dict[Stage, Timing] = {}

    def need(self, held: Holdings) -> MemoryNeed:
        """The worker's memory, by purpose."""
        stages = self._setting.stages
        sending = sum(
            self._bytes(sent.activations, self._message(sent.stage, sent.stage + 1))
            + self._bytes(sent.gradients, self._message(sent.stage, sent.stage - 1))
            for sent in held.sending
        )
        return MemoryNeed(
            weights=sum(copies * stages[stage].weights for stage, copies in held.copies),
            gradients=sum(stages[stage].gradients for stage, _ in held.copies),
            optimizer=sum(self._setting.optimizer(self._header, stage) for stage, _ in held.copies),
            messages=sending + sum(map(self._receive_buffers, held.receiving)),
            activations=max(map(self._moment, held.fullest), default=0),
        )

    def _receive_buffers(self, received: Receiving) -> int:
        size = self._message(received.source, received.target)
        return sum(self._bytes(micros, size) for micros in received.slots)

    def _moment(self, moment: Moment) -> int:
        """Bytes at a moment, plus the most that a first half of a backward adds before it frees anything."""
        total = most = 0
        for stage, activations, inputs, begun in moment:
            sizes = self._stage_sizes(stage)
            total += self._bytes(activations, sizes.activations) + self._bytes(inputs, sizes.input)
            total += self._bytes(begun, sizes.halfway)
            most = max(most, sizes.halving * (begun > 0))
        return total + most

    def _stage_sizes(self, stage: Stage) -> Timing:
        """Costs of a micro-batch on a stage, without the bytes that it keeps in receive buffers."""
        if stage not in self._sizes:
            timing, received = self._setting.timing(stage), self._received_input(stage)
            activations = max(0, timing.activations - received)
            self._sizes[stage] = replace(
                timing,
                activations=activations,
                input=max(0, timing.input - received),
                released=min(activations, timing.released),
                operands=max(0, timing.operands - self._received_gradient(stage)),
            )
        return self._sizes[stage]

    def _received_input(self, stage: Stage) -> int:
        """Bytes of a micro-batch's input in a receive buffer; 0 if the worker also runs the stage before in a pipe."""
        return self._message(stage - 1, stage) if stage > 0 and not self._has_both(stage - 1) else 0

    def _received_gradient(self, stage: Stage) -> int:
        """Bytes of a micro-batch's gradient in a receive buffer; 0 if the worker also runs the next stage in a pipe."""
        return self._message(stage + 1, stage) if stage < self._header.stages - 1 and not self._has_both(stage) else 0

    def _has_both(self, stage: int) -> bool:
        """Whether the worker has a stage and the next one in the same pipe."""
        return any(pipe.workers[stage] == pipe.workers[stage + 1] == self._worker for pipe in self._header.pipes)

    def _message(self, source: int, target: int) -> int:
        """Bytes of a micro-batch's message from stage ``source`` to stage ``target``; 0 if one does not exist."""
        if target < 0 or target >= self._header.stages or source < 0:
            return 0
        return self._setting.timing(source).output if source < target else self._setting.timing(target).gradient

    def _bytes(self, count: int, size: int) -> int:
        """Bytes of ``count`` micro-batches of the program, which may be halves; ``size`` is that of a whole one."""
        return -(-count * size // self._header.parts)
