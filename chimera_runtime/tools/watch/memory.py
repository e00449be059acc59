"""``--memory-limit``: bytes that each rank needs, computed before training and compared with the limit.

The schedule gives the number of micro-batches of each stage that a rank keeps at once (`RankFacts`); the memory of one
is measured on the first micro-batch. Memory that operators allocate while they run is not counted.
"""

import gc
import math
import os
import re
import resource
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from chimera_runtime.blame import UserCode
from chimera_runtime.errors import FAILED, Misuse
from chimera_runtime.errors import tools as mistakes
from chimera_runtime.errors.tools import peak_is_unknown
from chimera_runtime.model.ties import by_group
from chimera_runtime.optimizer.sharding import Sharding
from chimera_runtime.program.kept_bytes import MicroBatchBytes, MovedBytes, hosted_bytes, kept_bytes, on_other_workers
from chimera_runtime.program.rank_facts import VALUES, Group, KeptMicros
from chimera_runtime.ranks.agreement import ControlGroup
from chimera_runtime.ranks.devices import give_back
from chimera_runtime.stage.module_state import ModuleSnapshot
from chimera_runtime.stage.saved_tensors import Footprint
from chimera_runtime.start.assemble import RankContext
from chimera_runtime.start.stage_probe import StageProbe
from chimera_runtime.values.boundary import Traits
from chimera_runtime.values.byte_text import byte_text
from chimera_runtime.values.nested import all_generators_kept, generators_kept, to_device

# ``--device-peak``: share of the peak speed of the devices that an update uses.
#
# The "model FLOPs utilization" of Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022, appendix B:
# it counts the floating-point operations of the model, and not those of a forward that recomputation repeats.

_TERA = 1e12

_HALF = {torch.bfloat16, torch.float16}

_PEAKS = {
    "GB200": (2500.0, 1250.0, 80.0, 40.0),
    "B200": (2250.0, 1100.0, 75.0, 37.0),
    "H200 NVL": (835.5, 417.5, 60.0, 60.0),
    "GH200": (989.5, 494.5, 67.0, 67.0),
    "H200": (989.5, 494.5, 67.0, 67.0),
    "H100 NVL": (835.5, 417.5, 60.0, 60.0),
    "H100 PCIe": (756.5, 378.0, 51.0, 51.0),
    "H100": (989.5, 494.5, 67.0, 67.0),
    "A100": (312.0, 156.0, 19.5, 19.5),
    "A30": (165.0, 82.0, 10.3, 10.3),
    "A40": (149.7, 74.8, 37.4, None),
    "A10": (125.0, 62.5, 31.2, None),
    "L40S": (362.0, 183.0, 91.6, None),
    "L4": (121.0, 60.0, 30.3, None),
}
"""Peak speeds of devices: dense TFLOPS in bfloat16 or float16, TF32, float32 and float64, with tensor cores; None if
the data sheet does not say. Of several keys that are words of CUDA's name of a device, the first counts.

From NVIDIA's data sheets of these devices, and for B200 and GB200 from that of the Blackwell architecture; half of the
number if the sheet gives only that with sparsity.
"""


def peak_of(device: str, dtype: torch.dtype, tensor_float: bool) -> float | None:
    """Floating-point operations per second of a device by its name, in TF32 if ``tensor_float``; None if not known, as
    for a part of a device (MIG).
    """
    peaks = next((peaks for name, peaks in _PEAKS.items() if re.search(rf"\b{name}\b", device)), None)
    if peaks is None or "MIG" in device:
        return None
    half, tf32, single, double = peaks
    by_dtype = {torch.float32: tf32 if tensor_float else single, torch.float64: double}
    peak = half if dtype in _HALF else by_dtype.get(dtype)
    return None if peak is None else peak * _TERA


def peak_seconds(
    context: RankContext, modules: dict[int, torch.nn.Module], peak: float | None, dtype: torch.dtype
) -> float:
    """Seconds that an update would take if all ranks computed at their peak all the time; every rank calls it. ``peak``
    is that of each device in TFLOPS, None to look it up for products in ``dtype``. Raises `Misuse` if the device is
    unknown.
    """
    world = context.world
    if peak is None:
        device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu"
        per_second = peak_of(device, dtype, torch.backends.cuda.matmul.fp32_precision == "tf32")
        if per_second is None:
            raise peak_is_unknown(device=device, dtype=str(dtype).removeprefix("torch."))
    else:
        per_second = peak * _TERA
    mine = [s for s in modules if world.place.rank == world.place.rank_of(0, world.job.placement[0][s])]
    figures = sum(of_stage(context, modules[s], s) for s in mine), per_second
    of_ranks = world.control_group.collect("flops", figures, "for the floating-point operations of its stages")
    operations, peaks = map(sum, zip(*of_ranks, strict=True))
    return float(operations * world.job.passes // world.job.slices * world.place.copies / peaks)


def of_stage(context: RankContext, module: torch.nn.Module, stage: int) -> int:
    """Floating-point operations of a forward and a backward of one micro-batch; a sum and a product are two.

    `torch.utils.flop_counter` counts products of matrices, convolutions and attention while both run, after the first
    stage on zeros. The state of the stage is restored.
    """
    job, source, device = context.world.job, context.source, context.world.device
    assert source is not None, "options.parse refuses that in a rehearsal"
    is_last, before, traits = not job.fed[stage], context.probed.before(stage, job), context.probed.traits[stage]

    def load(micro: int) -> Any:
        inputs = before.at(micro).buffers(device) if before is not None else None
        if before is None:
            inputs = job.of_end(source.input(0, micro), stage, job.sources)
        target = job.of_end(source.target(0, micro), stage, job.sinks) if is_last else None
        loaded = source.keywords(0, micro) if traits.keywords else {}
        keywords = {name: value for name, value in loaded.items() if name in traits.keywords}
        return to_device((inputs, target, keywords), device)

    differentiable = None if is_last else context.probed.boundaries[stage].differentiable
    model = context.model.of_sink(job.end_name(stage)) if is_last else context.model
    probe = StageProbe(model, stage, module, before, is_last)
    state = ModuleSnapshot(module, traits.touched)
    with all_generators_kept():
        loaded = [*map(load, range(job.slices))]
        with FlopCounterMode(display=False) as counter:
            for forward in probe.slices(loaded.__getitem__, job.slices):
                probe.backward(forward, differentiable)
    state.restore()
    return int(counter.get_total_flops())


def computing_dtype(modules: dict[int, torch.nn.Module], autocast: torch.dtype | None) -> torch.dtype:
    """Type in which products of matrices are computed: that of autocast or, without autocast, that of most weights."""
    if autocast is not None:
        return autocast
    sizes: dict[torch.dtype, int] = {}
    for module in modules.values():
        for parameter in module.parameters():
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    return max(sizes, key=sizes.__getitem__, default=torch.float32)


@dataclass(frozen=True)
class RankBytes:
    """Bytes that a rank needs, by purpose: all versions of weights and buffers; flat buffers of gradients, and those
    that the first backward of the largest stage makes; the optimizer's state; receive buffers and tensors that are
    being sent and not saved as well; and all other tensors that are kept for a backward.
    """

    weights: int
    gradients: int
    optimizer: int
    messages: int
    activations: int

    @property
    def total(self) -> int:
        """Bytes for all purposes."""
        return sum(asdict(self).values())


def refuse_beyond(limit: int, mine: "RankNeed") -> str:
    """Returns the need of the fullest rank, in words. All ranks call it with what each needs; raises `Misuse` on every
    rank if one needs more than ``limit`` bytes.
    """
    world = mine.context.world
    need = mine.need()
    needs = world.control_group.collect("memory", (need.total, mine.words(need)), "for the memory that it needs")
    total, words = max(needs, key=lambda need: need[0])
    if total <= limit:
        return f"memory: of {byte_text(limit)}, {words}"
    others = sum(total > limit for total, _ in needs) - 1
    job = world.job
    replicated = any(len(world.ranks_of(stage)) > 1 for stage in range(job.stages))
    can_shard = replicated and not job.period and not mine.is_sharded
    raise mistakes.memory_is_too_little(byte_text(limit), words, others, can_shard)


class RankNeed:
    """Adds up the bytes that this rank needs, from the schedule and the first micro-batch. ``is_sharded`` says that the
    replicas of a stage share the state of the ``optimizer``.
    """

    def __init__(
        self,
        context: RankContext,
        optimizer: Callable[[list[torch.nn.Parameter]], Any],
        built: dict[int, torch.nn.Module],
        is_sharded: bool = False,
    ) -> None:
        self.context = context
        self.is_sharded = is_sharded
        self._optimizer = optimizer
        self._facts = context.facts
        self._built = built
        groups = by_group(built, context.ties)
        self._trained = {group: [p for p in all_ if p.requires_grad] for group, all_ in groups.items()}

    def need(self) -> RankBytes:
        """Returns the bytes that this rank needs on its device when it needs the most, by what they are for."""
        return RankBytes(
            weights=self._weights(),
            gradients=self._gradients(),
            optimizer=sum(state_bytes(self._optimizer, stepped) for stepped in self._stepped()),
            messages=sum(self._slots(stage) + self._sending(stage) for stage in self._built),
            activations=max((self._moment(moment) for moment in self._facts.kept), default=0),
        )

    def on_host(self) -> int:
        """Returns the bytes that moves need on the host, at most."""
        sizes, moments = self.context.probed.moved_bytes, self._facts.on_host
        return max((hosted_bytes(moment, sizes.__getitem__, self._whole) for moment in moments), default=0)

    @property
    def _whole(self) -> int:
        """Units of the schedule in a measured size: more than 1 for slices of unequal lengths, measured together."""
        job = self.context.world.job
        return job.units if job.lengths else 1

    def _share(self, units: float, size: int) -> int:
        return math.ceil(Fraction(units) * size / self._whole)

    def _stepped(self) -> Iterator[list[torch.nn.Parameter]]:
        for group, trained in self._trained.items():
            yield Sharding(self.context.world, group, trained).shards if self.is_sharded else trained

    def words(self, need: RankBytes) -> str:
        """Describes a need, with the figures of the stages at the fullest moment."""
        place = self.context.world.place
        parts = ", ".join(f"{name} {byte_text(count)}" for name, count in asdict(need).items())
        fullest = max(self._facts.kept, key=self._moment, default=())
        stages = "; ".join(map(self._stage_in_words, fullest))
        host = f", and {byte_text(self.on_host())} of host memory" if self._facts.on_host else ""
        return f"rank {place.rank} (worker {place.worker}) needs {byte_text(need.total)}: {parts} ({stages}){host}"

    def _stage_in_words(self, micros: KeptMicros) -> str:
        stage = micros.stage
        footprint, weights = self.context.probed.footprints[stage], self._weights_of(stage)
        job, whole = self.context.world.job, self._whole
        unit = "slices of" if job.slices > 1 and not job.lengths else "x M_a ="
        activations = f"{micros.activations / whole:g} {unit} {byte_text(footprint.activations)}"
        figures = [activations] if micros.activations else []
        figures += [f"{micros.inputs / whole:g} inputs of {byte_text(footprint.inputs)}"] if micros.inputs else []
        halfway = footprint.activations - footprint.released + footprint.operands
        figures += [f"{micros.begun / whole:g} between I and W of {byte_text(halfway)}"] if micros.begun else []
        carries = f"{micros.carries / whole:g} carries of {byte_text(footprint.carry)}"
        figures += [carries] if micros.carries and footprint.carry else []
        copies = self._facts.stages[stage].copies
        return f"stage {stage}: {copies} x M_theta = {byte_text(weights)}{''.join(f', {part}' for part in figures)}"

    def _weights(self) -> int:
        """Bytes of all versions of trained weights, other weights, and buffers (twice if a stage recomputes)."""
        parameters = {parameter for module in self._built.values() for parameter in module.parameters()}
        copies = {stage: 2 if stage in self.context.world.job.recomputing else 1 for stage in self._built}
        total = bytes_of(parameters)
        total += sum(copies[stage] * bytes_of(module.buffers()) for stage, module in self._built.items())
        stashed: dict[Group, int] = {(stage,): facts.copies - 1 for stage, facts in self._facts.stages.items()}
        stashed |= {tie.stages: tie.copies - 1 for tie in self._facts.ties}
        return total + sum(stashed[group] * bytes_of(trained) for group, trained in self._trained.items())

    def _weights_of(self, stage: int) -> int:
        return sum(bytes_of(trained) for group, trained in self._trained.items() if stage in group)

    def _gradients(self) -> int:
        largest = max(map(self._weights_of, self._built), default=0)
        counts = sum(p.element_size() for trained in self._trained.values() for p in trained)
        return sum(map(bytes_of, self._trained.values())) + counts + largest

    def _slots(self, stage: int) -> int:
        slots = self._facts.stages[stage].slots.items()
        rooms = ((letter, place, sum(sizes)) for letter, of_makers in slots for place, sizes in enumerate(of_makers))
        return sum(room * self._message(letter, stage, VALUES[letter].onward, place) for letter, place, room in rooms)

    def _sending(self, stage: int) -> int:
        """Bytes of tensors that a stage is sending, without results that it saves: these count as activations."""
        facts, footprint = self._facts.stages[stage], self.context.probed.footprints[stage]
        saved = 0 if stage in self.context.world.job.recomputing else footprint.saved_results
        sizes = {letter: self._message(letter, stage, not VALUES[letter].onward) for letter in facts.sending}
        longest = max(self.context.world.job.lengths, default=1)
        sizes["y"] = self._share(longest, footprint.results - saved)
        return sum(micros * sizes[letter] for letter, micros in facts.sending.items())

    def _message(self, letter: str, stage: int, is_before: bool, place: int | None = None) -> int:
        """Bytes of a value of a micro-batch in a message with a stage before, if ``is_before``, or after: with the one
        at a ``place`` among these, or the largest.
        """
        job = self.context.world.job
        ends = job.feeding[stage] if is_before else (stage,) if job.fed[stage] else ()
        if is_before and place is not None:
            ends = ends[place : place + 1]
        boundaries = [self.context.probed.boundaries[end] for end in ends]
        sizes = (bytes_of(getattr(b, VALUES[letter].buffers)(torch.device("meta"))) for b in boundaries)
        return max(sizes, default=0)

    def _moment(self, micros: Iterable[KeptMicros]) -> int:
        return kept_bytes(micros, self._bytes_of, self._whole)

    def _bytes_of(self, stage: int) -> MicroBatchBytes:
        probed, job = self.context.probed, self.context.world.job
        footprint, traits = probed.footprints[stage], probed.traits[stage]
        activations = footprint.activations_with_inputs(bool(job.feeding[stage]))
        apart = self._weights_of(stage) if traits.whole and job.period else 0
        operands = footprint.operands + apart
        to_host = probed.moved_bytes.get(stage, MovedBytes(0))
        return MicroBatchBytes(
            activations=activations,
            input=input_bytes(self._built[stage], traits, footprint),
            released=footprint.released,
            operands=operands,
            carry=footprint.carry,
            carry_gradients=footprint.carry_gradients,
            resident=activations - to_host.activations,
            resident_operands=activations - footprint.released + operands - to_host.operands,
        ).without_received(
            inputs=footprint.inputs if self._are_elsewhere(stage, job.feeding[stage]) else 0,
            gradients=footprint.received_operands if self._are_elsewhere(stage, job.fed[stage]) else 0,
        )

    def _are_elsewhere(self, stage: int, neighbours: tuple[int, ...]) -> bool:
        place, job = self.context.world.place, self.context.world.job
        return bool(neighbours) and on_other_workers(neighbours, stage, place.worker, job.placement) == [*neighbours]


def input_bytes(module: torch.nn.Module, traits: Traits, footprint: Footprint) -> int:
    """Bytes kept for a micro-batch where a stage recomputes: input, target, and the buffers that it updates."""
    return footprint.inputs + footprint.targets + bytes_of(module.get_buffer(name) for name in traits.buffers)


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Sum of the bytes of tensors."""
    return sum(t.numel() * t.element_size() for t in tensors)


def state_bytes(make: Callable[[list[torch.nn.Parameter]], Any], parameters: list[torch.nn.Parameter]) -> int:
    """Bytes of an optimizer's state, measured by a step on the meta device; twice the weights if the step fails."""
    try:
        with generators_kept():
            steps = make([_stand_in(parameter) for parameter in parameters])
            with UserCode("a step to measure the state of the optimizer", FAILED):
                steps.step()
        states = getattr(steps, "state", {}).values()
        return bytes_of(t for state in states for t in state.values() if isinstance(t, torch.Tensor))
    except Exception:
        return 2 * bytes_of(parameters)


def smallest_share(control_group: ControlGroup, device: torch.device) -> int:
    """Bytes that every rank may have, for ``--memory-limit device``: the smallest share in a GPU; every rank calls it.
    Raises `Misuse` if a rank is on the CPU.
    """
    if device.type != "cuda":
        raise Misuse(mistakes.DEVICE_HAS_NO_MEMORY_OF_ITS_OWN)
    return int(min(control_group.collect("memory/share", share_of(device), "for the memory of its device")))


def share_of(device: torch.device) -> int:
    """Bytes of a GPU divided by the number of ranks that use it; the ranks of a machine take its GPUs in turn."""
    _, total = torch.cuda.mem_get_info(device)
    ranks = range(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return total // max(1, sum(rank % torch.cuda.device_count() == device.index for rank in ranks))


def _stand_in(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    made = torch.nn.Parameter(torch.empty_like(parameter, device="meta"))
    made.__dict__.update(parameter.__dict__)
    made.grad = torch.empty_like(made)
    return made


# ``--peak-memory``: peak memory of every rank, next to the need that the report predicts.

_STATUS = Path("/proc/self/status")
_PEAK, _NOW = "VmHWM", "VmRSS"

_CLEAR = Path("/proc/self/clear_refs")
"""File of Linux to which a 5 is written to begin a new peak: proc(5)."""

ON_HOST = "resident memory of the process, above what it had before its stages were built"
ON_GPU = "of tensors on the GPU, by torch's allocator"


class PeakMemory:
    """Compares the memory that this rank needs with its peak from now on; ``before`` are the `resident` bytes without
    stages.
    """

    def __init__(self, need: RankNeed, before: int) -> None:
        self._world = need.context.world
        self._before = before
        facts = need.context.facts
        self._copies = sum(of_stage.copies for of_stage in facts.stages.values())
        self._activations = max((sum(k.activations + k.begun for k in moment) for moment in facts.kept), default=0)
        self._need = need.need().total
        self._on_host = need.on_host()
        if self._world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._world.device)
        else:
            gc.collect()
            give_back()
            with suppress(OSError):
                _CLEAR.write_text("5", encoding="ascii")

    def lines(self) -> list[str]:
        """Returns on rank 0 the lines of a table: M_theta, M_a, bytes needed and used by each rank, also on the host if
        tensors move there. Every rank calls it, before any of them ends.
        """
        host = (self._on_host, self._world.host_link.peak) if self._world.job.moves else ()
        mine = self._copies, self._activations, (self._need, self._used(), *host)
        of_ranks = self._world.control_group.collect("peak", mine, "for the memory that it has used")
        if self._world.place.rank:
            return []
        units = self._world.job.units
        rows = [("rank", "M_theta", "M_a", "needs", "used", *(("needs on host", "used on host") if host else ()))]
        for rank, (copies, activations, sizes) in enumerate(of_ranks):
            rows.append((str(rank), str(copies), f"{activations / units:g}", *map(byte_text, sizes)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        measured = ON_GPU if self._world.device.type == "cuda" else ON_HOST
        measured += "; what is on the host apart" if host else ""
        return [f"peak memory ({measured})", *(f"  {line}" for line in table)]

    def _used(self) -> int:
        if self._world.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._world.device)
        return max(0, _read(_PEAK) - self._before - self._world.host_link.pinned)


def resident() -> int:
    """Bytes of this process that are in memory."""
    return _read(_NOW)


def _read(name: str) -> int:
    """Bytes in the line ``name`` of this process's status on Linux; on other systems always the peak."""
    with suppress(OSError, StopIteration):
        lines = _STATUS.read_text(encoding="ascii").splitlines()
        return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
