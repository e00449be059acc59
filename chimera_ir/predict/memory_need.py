"""Memory that each worker needs, in bytes, from the sizes of each stage."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import cache
from math import ceil

from chimera_ir.cost.simulate import WorkerBytes
from chimera_ir.flow import live
from chimera_ir.flow.live import activations, whole
from chimera_ir.ir.kinds import ACTIVATIONS, GRADIENTS, Counted, Value
from chimera_ir.ir.levels import Bound, Header, Program, Quantity, Schedule
from chimera_ir.ir.ops import Stage, Worker
from chimera_ir.predict.setting import Setting
from chimera_ir.verify.holdings import Holdings, OnHost, holdings
from chimera_runtime.program.kept_bytes import MicroBatchBytes, hosted_bytes, kept_bytes, on_other_workers, share

# Bounds on the activations of workers, from the bytes that they have free.
#
# A search for orders counts activations in M_a, not bytes. Each worker may keep as many more as its free bytes hold.


def bounded(schedule: Schedule, setting: Setting, free: Iterable[int]) -> Schedule:
    """The schedule with a bound on each worker's activations: its peak, and as many more as its ``free`` bytes hold.

    A bound that the schedule declares stays where it is smaller.
    """
    header, limits = schedule.header, list[Fraction]()
    shares = header.shares or (Fraction(1),) * header.stages
    parts = header.units_of_m_a if header.shares else 1  # limits are multiples of 1 / parts
    for worker, (peak, room) in enumerate(zip(whole(header, activations(schedule)), free, strict=True)):
        held = ((pipe, stage) for pipe in header.pipes for stage, w in enumerate(pipe.workers) if w == worker)
        most = ceil(sum(len(pipe.micros) * shares[stage] for pipe, stage in held))
        sizes = [setting.as_cut(s, header).kept.activations / shares[s] for s in header.stages_of[worker]]
        free_parts = max(0, room) * parts // max(1, max(sizes, default=1))
        limits.append(max(Fraction(1), min(Fraction(most), Fraction(ceil(peak * parts) + free_parts, parts))))
    declared = next((bound.limits for bound in header.bounds if bound.quantity is Quantity.ACTIVATIONS), limits)
    least = map(Fraction, map(min, limits, declared))
    bound = Bound(Quantity.ACTIVATIONS, tuple(limit.numerator if limit.denominator == 1 else limit for limit in least))
    others = tuple(other for other in header.bounds if other.quantity is not Quantity.ACTIVATIONS)
    return replace(schedule, header=replace(header, bounds=(*others, bound)))


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Memory that a worker needs at most, in bytes, by purpose; the parts need not be largest at the same time.

    ``weights`` are one copy for each version, ``gradients`` the tensors that are summed and those that the first
    backward of the largest stage makes, ``optimizer`` is the worker's share of the state. ``messages`` are receive
    buffers, with the values in them, and messages under way; ``activations`` all else that waits for a backward: inputs
    of stages that recompute, and values between the halves of a backward. ``host`` is memory of the host, and no part
    of the total.
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
    """Memory that each worker needs; ``held`` has what each keeps at its fullest moments, and its messages."""
    return tuple(_Worker(header, setting, worker).need(holding) for worker, holding in enumerate(held))


def carry_bytes(program: Program, setting: Setting) -> Iterator[tuple[Worker, Stage, int]]:
    """Yields, for each worker and each of its stages that has carries, the most bytes of carries that it keeps."""
    header = program.header
    for worker, parts in enumerate(program.parts):
        carries = live.changes(header, parts.steps, (Counted.CARRIES,))
        for stage, peak in live.highest_by_key((step.stage, amount) for step, _, amount in carries).items():
            size = setting.as_cut(stage, header).kept.carry
            yield Worker(worker), stage, share(peak.amount, size, header.units)


def worker_bytes(header: Header, setting: Setting, worker: int, need: MemoryNeed) -> WorkerBytes:
    """Bytes of a worker: all but activations, and those that a micro-batch takes on a stage, by what is kept.

    Received values count in the first part, with their buffers. What the first half of a split backward needs only
    while it runs is in neither.
    """
    sizes = _Worker(header, setting, worker)

    @cache
    def by_unit(stage: int) -> Mapping[Counted, int]:
        of_stage = sizes.bytes_of(stage)
        return {
            Counted.ACTIVATIONS: of_stage.activations,
            Counted.INPUT: of_stage.input,
            Counted.OPERANDS: of_stage.halfway,
            Counted.CARRIES: of_stage.carry,
            Counted.CARRY_GRADIENTS: of_stage.carry_gradients,
            Counted.HOST: of_stage.resident,
            Counted.HOST_OPERANDS: of_stage.resident_operands,
        }

    return WorkerBytes(need.total - need.activations, by_unit)


class _Worker:
    """The memory of a worker: sizes in bytes of whole micro-batches, counts in `Header.units` of a micro-batch."""

    def __init__(self, header: Header, setting: Setting, worker: int) -> None:
        self._header = header
        self._setting = setting
        self._worker = worker
        self._placement = [pipe.workers for pipe in header.pipes]
        self._sizes: dict[int, MicroBatchBytes] = {}

    def need(self, held: Holdings) -> MemoryNeed:
        stages, units = self._setting.stages, self._header.units
        longest = max(self._header.slice_lengths)
        trained = [stage for stage, _ in held.copies if stage not in self._header.frozen]
        messages = [*held.sending, *((edge, micros) for edge, slots in held.receiving for micros in slots)]
        return MemoryNeed(
            weights=sum(copies * stages[stage].weights for stage, copies in held.copies),
            gradients=sum(stages[stage].gradients for stage in trained)
            + max((stages[stage].first_gradients for stage in trained), default=0),
            optimizer=sum(self._setting.optimizer(self._header, stage) for stage in trained),
            messages=sum(share(micros * longest, self._setting.message(edge), units) for edge, micros in messages),
            activations=max((kept_bytes(moment, self.bytes_of, units) for moment in held.fullest), default=0),
            host=max(map(self._on_host, held.on_host), default=0),
        )

    def _on_host(self, moment: Iterable[OnHost]) -> int:
        return hosted_bytes(moment, lambda stage: self.bytes_of(stage).moved, self._header.units)

    def bytes_of(self, stage: int) -> MicroBatchBytes:
        """The bytes of a micro-batch on a stage, without those in receive buffers."""
        if stage not in self._sizes:
            received = (self._received(value, Stage(stage)) for value in (ACTIVATIONS, GRADIENTS))
            self._sizes[stage] = self._setting.as_cut(stage, self._header).kept.without_received(*received)
        return self._sizes[stage]

    def _received(self, value: Value, stage: Stage) -> int:
        """Bytes of a micro-batch in receive buffers: ``value``, which a stage reads from other workers."""
        makers = on_other_workers(self._header.makers(value, stage), stage, self._worker, self._placement)
        return sum(self._setting.message((Stage(maker), stage, value)) for maker in makers)
