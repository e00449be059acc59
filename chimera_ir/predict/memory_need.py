"""Memory that each worker needs, in bytes, from the sizes of each stage."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

from chimera_ir.ir.ids import Stage
from chimera_ir.ir.kinds import ACTIVATIONS, GRADIENTS, Value
from chimera_ir.ir.levels import Header, Program
from chimera_ir.predict.setting import Setting
from chimera_ir.profile.costs import Timing
from chimera_ir.verify.holdings import Holdings, Moment, OnHost, Receiving, holdings


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
    host
        Activations in the memory of the worker's host, which are no part of the total.
    """

    weights: int
    gradients: int
    optimizer: int
    messages: int
    activations: int
    host: int = 0

    @property
    def total(self) -> int:
        """Bytes of all parts together."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of the worker's memory by the name of their purpose."""
        return {name: count for name, count in asdict(self).items() if name != "host"}


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
        sending = sum(self._bytes(sent.micros, self._setting.message(sent.edge)) for sent in held.sending)
        return MemoryNeed(
            weights=sum(copies * stages[stage].weights for stage, copies in held.copies),
            gradients=sum(stages[stage].gradients for stage, _ in held.copies),
            optimizer=sum(self._setting.optimizer(self._header, stage) for stage, _ in held.copies),
            messages=sending + sum(map(self._receive_buffers, held.receiving)),
            activations=max(map(self._moment, held.fullest), default=0),
            host=max(map(self._on_host, held.on_host), default=0),
        )

    def _receive_buffers(self, received: Receiving) -> int:
        size = self._setting.message(received.edge)
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

    def _on_host(self, moment: Iterable[OnHost]) -> int:
        return sum(self._bytes(micros, self._stage_sizes(stage).activations) for stage, micros in moment)

    def _stage_sizes(self, stage: Stage) -> Timing:
        """Costs of a micro-batch on a stage, without the bytes that it keeps in receive buffers."""
        if stage not in self._sizes:
            timing, received = self._setting.timing(stage), self._received(ACTIVATIONS, stage)
            activations = max(0, timing.activations - received)
            self._sizes[stage] = replace(
                timing,
                activations=activations,
                input=max(0, timing.input - received),
                released=min(activations, timing.released),
                operands=max(0, timing.operands - self._received(GRADIENTS, stage)),
            )
        return self._sizes[stage]

    def _received(self, value: Value, stage: Stage) -> int:
        """Bytes of a micro-batch in receive buffers for a value that a stage reads.

        The value of a stage that the worker also runs, in some pipe, does not count.
        """
        makers = self._header.makers(value, stage)
        return sum(self._setting.message((maker, stage, value)) for maker in makers if not self._has_both(maker, stage))

    def _has_both(self, maker: Stage, reader: Stage) -> bool:
        """Whether the worker has two stages in the same pipe."""
        return any(pipe.workers[maker] == pipe.workers[reader] == self._worker for pipe in self._header.pipes)

    def _bytes(self, count: int, size: int) -> int:
        """Bytes of ``count`` micro-batches of the program, which may be halves; ``size`` is that of a whole one."""
        return -(-count * size // self._header.parts)
