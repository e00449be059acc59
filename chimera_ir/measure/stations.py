"""The stages of a model, one at a time, each ready to run micro-batches as a rank of a generated program runs them."""

import operator
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from itertools import islice
from pathlib import Path, PurePosixPath
from types import BuiltinFunctionType, CellType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch

from chimera_runtime.blame import ModelError, ran_out
from chimera_runtime.data.micro_batch_source import Batches
from chimera_runtime.errors import Misuse
from chimera_runtime.model.model import ModelFile
from chimera_runtime.program.job import Job
from chimera_runtime.program.kept_bytes import MicroBatchBytes
from chimera_runtime.program.numbering import Numbering
from chimera_runtime.ranks.messages import BlockingWait, Names, Reader
from chimera_runtime.ranks.world import reader_of
from chimera_runtime.stage.gradient_sums import GradientSum
from chimera_runtime.stage.saved_tensors import Footprint
from chimera_runtime.stage.stage import Stage
from chimera_runtime.stage.stage_output import LossOutput, SendOutput, StageOutput
from chimera_runtime.stage.weight_versions import Weights
from chimera_runtime.start.assemble import require_frozen, require_losses
from chimera_runtime.start.probe import boundary_before, memory_report, wanted_bytes
from chimera_runtime.start.stage_probe import ProbedForward, StageProbe
from chimera_runtime.tools.watch.memory import bytes_of, input_bytes
from chimera_runtime.values.boundary import Boundary, Traits, accepted, traits_of_slices
from chimera_runtime.values.nested import Tensors, draw_seed, to_device

# Memory of the machine that a rank runs on.

_ROOT = Path("/")


def memory(root: Path = _ROOT) -> int:
    """Bytes that all processes of this machine may use: its memory, or the lowest limit of a control group."""
    limits = [limit for limit in map(_limit, _control_files(root)) if limit is not None]
    return min([_physical(root), *limits])


def _physical(root: Path) -> int:
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemTotal:"))


def _control_files(root: Path) -> list[Path]:
    """Files with the limits of this process's control group and of all groups above it, of versions 1 and 2."""
    groups = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    files = [groups / "memory.max", groups / "memory/memory.limit_in_bytes"]
    for line in lines:
        number, controllers, path = line.split(":", 2)
        relative = PurePosixPath(path.lstrip("/"))
        folders = [relative, *relative.parents][:-1]
        if number == "0":
            files += [groups / folder / "memory.max" for folder in folders]
        elif "memory" in controllers.split(","):
            files += [groups / "memory" / folder / "memory.limit_in_bytes" for folder in folders]
    return files


def _limit(file: Path) -> int | None:
    """The limit in a control file; None if the file says "max" or does not exist."""
    try:
        text = file.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


# Measurement of transfers between a rank's device and the memory of its host.


def round_trips(device: torch.device, size: int) -> Callable[[int], list[float]]:
    """Returns a function that moves ``size`` bytes to the host and back, in as many rounds as it is told.

    It returns half of the seconds of each round. Host memory is pinned if the device is a GPU. On a CPU both copies are
    within its memory, as in training there.
    """
    on_gpu = device.type == "cuda"
    here = torch.zeros(size, dtype=torch.uint8, device=device)
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=on_gpu)

    def measure(rounds: int) -> list[float]:
        seconds = []
        for _ in range(rounds):
            start = time.perf_counter()
            host.copy_(here, non_blocking=on_gpu)
            here.copy_(host, non_blocking=on_gpu)
            if on_gpu:
                torch.cuda.current_stream(device).synchronize()
            seconds.append((time.perf_counter() - start) / 2)
        return seconds

    return measure


_TIMEOUT = 60.0


class MeasuredTurn(NamedTuple):
    """The micro-batches of a round of measurement: one with an ordinary backward, one recomputed, one in halves."""

    ordinary: int
    recomputed: int
    halved: int

    @staticmethod
    def of(number: int) -> "MeasuredTurn":
        """The micro-batches of round ``number``."""
        return MeasuredTurn(*(number * len(_FIRST) + micro for micro in _FIRST))


_FIRST = MeasuredTurn(0, 1, 2)


class MeasuredShape(NamedTuple):
    """The items of a micro-batch, and the slices that it is cut into; 1 for a whole one."""

    size: int
    slices: int


@dataclass(frozen=True)
class ModelCut:
    """A model cut into the stages of ``job``, the sizes of its micro-batches, and the device that it runs on.

    ``kind`` is the noun for a stage in messages: ``"layer"`` where each stage has one layer. Micro-batches of each size
    run whole, and in ``slices`` if these are several.
    """

    model: ModelFile
    dataset: Any
    job: Job
    sizes: tuple[int, ...]
    device: torch.device
    seed: int
    kind: str = "stage"
    slices: int = 1

    @property
    def stages(self) -> int:
        """The number of stages."""
        return self.job.stages

    @property
    def shapes(self) -> tuple[MeasuredShape, ...]:
        """All shapes of micro-batches, whole ones first."""
        counts = (1, self.slices) if self.slices > 1 else (1,)
        return tuple(MeasuredShape(size, count) for count in counts for size in self.sizes)

    def part(self, number: int) -> str:
        """Words for stage ``number``, such as ``stage 0 of 2`` or ``stage image[0]``."""
        name = self.job.stage_name(number)
        return f"{self.kind} {name}" if self.job.named else f"{self.kind} {name} of {self.stages}"

    def of_stage(self, number: int) -> ModelFile:
        """The model with the loss of a stage, if it has one of its own."""
        return self.model if self.job.fed[number] else self.model.of_sink(self.job.end_name(number))

    def load_input(self, batches: Batches, stage: int) -> Callable[[int, int], Any]:
        """Returns a function that loads the input of a micro-batch's slice; it raises `Misuse` if there is none."""

        def load(micro: int, place: int) -> Any:
            value = self.job.of_end(batches.input(micro, place), stage, self.job.sources)
            if value is None:
                name = self.job.end_name(stage)
                raise Misuse(
                    f"micro-batch {micro} has no input for {name}: measure on items that have one for each group"
                )
            return value

        return load

    def load_target(self, batches: Batches, stage: int) -> Callable[[int, int], Any]:
        """Returns a function that loads the target of a micro-batch's slice."""
        return lambda micro, place: self.job.of_end(batches.target(micro, place), stage, self.job.sinks)

    def batches(self, shape: MeasuredShape) -> Batches:
        """Micro-batches of a shape, one for each update; raises `Misuse` if there are too few items."""
        sampler, (size, slices) = self.model.order(self.dataset), shape
        rest = self.seed, self.model.collate, sampler, slices, self.model.cut_slice
        batches = Batches(self.dataset, size, 1, slices, 1, 0, *rest)
        batches.check()
        return batches

    def module(self, stage: int) -> torch.nn.Module:
        """Builds a stage with its initial weights; raises `Misuse` if it is frozen otherwise than in the scheme."""
        with self.here():
            module = self.of_stage(stage).stage(
                stage, self.stages, self.seed, self.device, is_sink=not self.job.fed[stage]
            )
        require_frozen(self.job, {stage: module})
        return module

    def here(self) -> AbstractContextManager[object]:
        """The context for the model's own code: on the meta device, tensors made in it have no memory."""
        return self.device if self.device.type == "meta" else nullcontext()


def graph(stages: int, name: str = "", **facts: Any) -> Job:
    """The stages of a graph on one worker, without ``feeds`` a chain; ``facts`` are fields of `Job`."""
    placement = ((0,) * stages,)
    return Job(name, "", 1, stages, 1, 1, 1, (), (), placement, links=(), period=0, reads=(), lag=0, **facts)


@dataclass(frozen=True)
class _Trace:
    """The forward as it was seen, see `ProbedForward`."""

    traits: Traits
    footprint: Footprint
    count: float | None


@dataclass(frozen=True)
class _FirstPass:
    """Results of the first pass through a stage.

    ``handed`` has for each slice the tensors from the stages before. ``before`` and ``after`` describe what the stage
    receives and sends; each is None where it does neither; ``feeding`` has what each stage before hands on. ``traces``
    has what was seen of the forward of each slice.
    """

    handed: Sequence[Any]
    feeding: Mapping[int, Boundary]
    before: Boundary | None
    after: Boundary | None
    traces: Sequence[_Trace]


@dataclass(frozen=True)
class Station:
    """A stage that is ready to run micro-batches of a shape, in any number of rounds (`MeasuredTurn`).

    Methods take the number of a slice; a whole micro-batch has one. ``handed`` are the outputs of the stages before,
    None where there is none. ``before`` and ``after`` describe what the stage receives and sends for a slice,
    ``footprints`` what the forward of each slice leaves in memory, ``traits`` what the stage was seen to do in its
    first pass.
    """

    shape: MeasuredShape
    module: torch.nn.Module
    stage: Stage
    before: Boundary | None
    after: Boundary | None
    footprints: Sequence[Footprint]
    traits: Traits
    optimizer: Any
    handed: Sequence[Tensors] | None
    load_input: Callable[[int], Any]
    load_target: Callable[[int], Any]

    def refill(self) -> None:
        """Fills the receive buffers again, because a stage may have changed its input in place."""
        for place, handed in enumerate(self.handed or ()):
            for slot, tensor in zip(self._received(place) if handed else (), handed, strict=True):
                slot.copy_(tensor)

    def _received(self, place: int) -> Tensors:
        return tuple([tensor for slots in self.stage.inputs for tensor in slots[place]])

    def slices_of(self, micro_batch: int) -> range:
        """The numbers of the slices of a micro-batch."""
        return range(micro_batch * self.shape.slices, (micro_batch + 1) * self.shape.slices)

    def forward(self, micro: int) -> None:
        """Runs a forward; a stage that no other feeds loads the input, one that feeds no other computes the loss."""
        loaded = self.load_input(micro) if self.handed is None else self._received(micro % self.shape.slices)
        self.stage.forward(micro, loaded, self.load_target(micro) if self.after is None else None)
        if self.after is not None:
            self.stage.outputs(micro)

    def backward(self, micro: int) -> None:
        """Runs a whole backward, which runs the forward again for the recomputed micro-batch of a round."""
        self._backward(self.stage.backward, micro)

    def backward_input(self, micro: int) -> None:
        """Runs the first half of a backward."""
        self._backward(self.stage.backward_input, micro)

    def _backward(self, run: Callable[[int, Tensors], None], micro: int) -> None:
        run(micro, () if self.after is None else self.stage.gradients[0][0])
        backing = [feed.source for feed in self.before.feeds if feed.backs] if self.before is not None else []
        if len(backing) > 1:
            for source in backing:
                self.stage.input_gradients(micro, source)
        elif self.before is not None and (backing or not self.before.feeds):
            self.stage.input_gradients(micro)

    def forget_losses(self, turn: MeasuredTurn) -> None:
        """Frees the losses of the micro-batches of a round."""
        for micro in turn:
            self.stage.take_loss(micro)

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        """The parameters that have gradients."""
        return _trained(self.module)

    @property
    def kept(self) -> Iterator[MicroBatchBytes]:
        """Yields the bytes that the stage keeps of each slice, all received inputs and gradients included."""
        for footprint in self.footprints:
            yield MicroBatchBytes(
                activations=footprint.activations_with_inputs(self.before is not None),
                input=input_bytes(self.module, self.traits, footprint),
                released=footprint.released,
                operands=footprint.operands + self.gradient_bytes - footprint.received_operands,
                resident=footprint.resident(self.before is not None),
                resident_operands=footprint.resident_operands(self.before is not None, self.gradient_bytes),
                carry=footprint.carry,
                carry_gradients=footprint.carry_gradients,
            )

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients that come back for the output of a slice."""
        return message_bytes(self.after, None if self.after is None else self.after.differentiable)


def stations(cut: ModelCut, progress: Callable[[str], None]) -> Iterator[tuple[int, tuple[Station, ...]]]:
    """Yields each stage's number, and the stage ready to run (a station) for each shape, from the last to the first.

    At most one stage is in memory. A pass from the first stage to the last finds what each hands on, and calls
    ``progress`` with a few words after it; the pass back finds for which of these tensors gradients come back.

    Raises `Misuse` if a stage does what the model file's interface does not allow. Raises `ModelError` if the model
    file's code raises an error.
    """
    require_losses(cut.job, cut.model)
    # Way down: the output of every stage. Only descriptions and the tensors handed on are kept, no stage.
    first_pass = _way_down(cut, progress)
    used: dict[tuple[int, MeasuredShape], tuple[bool, ...]] = {}
    # Way back: each stage is made again, and its backward shows for which inputs gradients come back.
    for stage in reversed(range(cut.stages)):
        yield stage, _ready(cut, stage, first_pass, used)


def _ready(
    cut: ModelCut,
    stage: int,
    first_pass: dict[tuple[int, MeasuredShape], _FirstPass],
    used: dict[tuple[int, MeasuredShape], tuple[bool, ...]],
) -> tuple[Station, ...]:
    """Makes a stage ready for each shape; marks in ``used`` which outputs of the stages before get gradients back."""
    with running(cut, stage, min(cut.sizes)):
        module = cut.module(stage)
    ready: list[Station] = []
    for shape in cut.shapes:
        first_look = first_pass.pop((stage, shape))
        wanted = used.get((stage, shape))
        after = None if first_look.after is None else replace(first_look.after, differentiable=wanted or ())
        traces: list[_Trace] = []
        with_gradient: list[list[bool]] = []
        with running(cut, stage, shape.size):
            probe = StageProbe(
                cut.of_stage(stage), stage, module, first_look.before, first_look.after is None, splits=True
            )
            forwards = _forwards(cut, shape, probe, first_look.handed, measures=False)
            for first, probed in zip(first_look.traces, forwards, strict=True):
                with cut.here():
                    halves = probe.halves(probed.call, wanted)
                    with_gradient.append(probe.backward(probed, wanted))
                footprint = replace(first.footprint, **halves)
                traces.append(replace(first, traits=probed.traits, footprint=footprint))
            has_gradient = iter([any(has) for has in zip(*with_gradient, strict=True)])
            feeding = dict[int, Boundary]()
            for source, boundary in first_look.feeding.items():
                marks = tuple(islice(has_gradient, len(boundary.shapes)))
                feeding[source] = replace(boundary, differentiable=marks)
                others = used.get((source, shape), (False,) * len(marks))
                used[source, shape] = tuple(map(operator.or_, marks, others))
            before = boundary_before(stage, cut.job, feeding)
            ready.append(
                _station(cut, stage, shape, module, _FirstPass(first_look.handed, feeding, before, after, traces))
            )
    return tuple(ready)


def _way_down(cut: ModelCut, progress: Callable[[str], None]) -> dict[tuple[int, MeasuredShape], _FirstPass]:
    first_pass: dict[tuple[int, MeasuredShape], _FirstPass] = {}
    boundaries: dict[MeasuredShape, dict[int, Boundary]] = {shape: {} for shape in cut.shapes}
    outputs: dict[tuple[int, MeasuredShape], list[Tensors]] = {}
    for stage in range(cut.stages):
        with running(cut, stage, min(cut.sizes)):
            module = cut.module(stage)
        for shape in cut.shapes:
            feeding = {source: boundaries[shape][source] for source in cut.job.feeding[stage]}
            before, is_last = boundary_before(stage, cut.job, feeding), not cut.job.fed[stage]
            of_slices = zip(*(outputs[source, shape] for source in feeding), strict=True)
            handed: list[Any] = [sum(together, ()) for together in of_slices] or [None] * shape.slices
            with running(cut, stage, shape.size):
                probe = StageProbe(cut.of_stage(stage), stage, module, before, is_last)
                forwards = _forwards(cut, shape, probe, handed, measures=True)
            if forwards[0].traits.in_place:
                raise Misuse(
                    f"{cut.kind} {stage} changes its input in place, so that it could not run again on it; "
                    "let it work on a copy"
                )
            after = None if is_last else Boundary.of(forwards[0].form, forwards[0].outputs)
            traces = [_Trace(probed.traits, probed.footprint, probed.count) for probed in forwards]
            first_pass[stage, shape] = _FirstPass(handed, feeding, before, after, traces)
            if after is not None:
                boundaries[shape][stage] = after
                outputs[stage, shape] = [_handed_on(cut, probed) for probed in forwards]
        del module, probe, forwards  # before the next stage is made
        progress(f"looked at {cut.part(stage)}")
    return first_pass


@contextmanager
def running(cut: ModelCut, stage: int, size: int) -> Iterator[None]:
    """Context in which an error for lack of memory becomes one line that names stage, micro-batch size and memory."""
    try:
        yield
    except Exception as error:
        cause = error.__cause__ if isinstance(error, ModelError) else error
        if not ran_out(cause):
            raise
        wanted = wanted_bytes(cause)
        raise Misuse(
            f"{cut.part(stage)} does not fit into memory with a micro-batch of {size}: "
            f"{f'{wanted} more are needed; ' if wanted else ''}{memory_report(cut.device, None)}. Take smaller "
            "micro-batches or more stages, or --count, which needs no memory"
        ) from error


def _handed_on(cut: ModelCut, probed: ProbedForward) -> Tensors:
    return tuple(t.detach() if cut.device.type == "meta" else t.detach().cpu() for t in probed.outputs)


def _forwards(
    cut: ModelCut, shape: MeasuredShape, probe: StageProbe, handed: Sequence[Any], measures: bool
) -> list[ProbedForward]:
    """Runs a stage on each slice of the first micro-batch."""
    batches = cut.batches(shape)
    load_input, load_target = cut.load_input(batches, probe.stage), cut.load_target(batches, probe.stage)

    def load(place: int) -> Any:
        argument = load_input(0, place) if probe.before is None else handed[place]
        target = load_target(0, place) if probe.is_last else None
        loaded = batches.keywords(0, place)
        keywords = {name: loaded[name] for name in accepted(probe.module, loaded, probe.before)}
        return to_device((argument, target, keywords), cut.device)

    loaded = [*map(load, range(shape.slices))]

    def loaded_and_seeded(place: int) -> Any:
        torch.manual_seed(draw_seed("shapes", cut.seed, probe.stage))
        return loaded[place]

    with cut.here():
        return [*probe.slices(loaded_and_seeded, shape.slices, measures=measures)]


def _station(
    cut: ModelCut, stage: int, shape: MeasuredShape, module: torch.nn.Module, first_pass: _FirstPass
) -> Station:
    # The stage as a rank would have it, with one micro-batch at a time and without other ranks.
    batches, device, slices = cut.batches(shape), cut.device, shape.slices
    names = Names(0, 0, cut.stages, _TIMEOUT)
    numbering = Numbering(cut.seed, copy=0, passes=slices, cycle=len(_FIRST) * slices, slices=slices)
    traits = traits_of_slices([trace.traits for trace in first_pass.traces])
    # Losses are read as a rank reads them; those on the meta device have no values.
    read: Reader = reader_of(device) if device.type != "meta" else lambda _update, _losses: list
    counted = first_pass.traces[0].count is not None
    ending: StageOutput = LossOutput(cut.of_stage(stage).judge, 1.0, numbering, counted, read)
    if first_pass.after:
        ending = SendOutput(stage, first_pass.after)
    load_keywords = _loader(batches.keywords, slices, device, wanted=bool(traits.keywords))
    # A step makes the optimizer's state; tensors on the meta device have none, and no step.
    optimizer = None if device.type == "meta" else cut.model.steps(_trained(module))
    runnable = Stage(
        stage,
        module,
        Weights(optimizer),
        first_pass.before,
        ending,
        GradientSum(f"s{stage}", _trained(module), None, (0,), names, BlockingWait(_TIMEOUT)),
        traits,
        numbering,
        recomputed={_FIRST.recomputed * slices + place for place in range(slices)},
        load_keywords=lambda _, micro: load_keywords(micro),
        read=read,
        is_compared=lambda _update: False,  # the second run may get other inputs than the first
    )
    # Receive buffers, with random gradients in place of received ones.
    runnable.reserve({"y": ((1,) * slices,) * len(first_pass.feeding), "dx": ((1,),)}, device)
    for gradient in runnable.gradients[0][0] if runnable.gradients else ():
        with cut.here():
            gradient.copy_(torch.randn_like(gradient))
    return Station(
        shape=shape,
        module=module,
        stage=runnable,
        before=first_pass.before,
        after=first_pass.after,
        footprints=tuple(trace.footprint for trace in first_pass.traces),
        traits=traits,
        optimizer=optimizer,
        handed=None if first_pass.before is None else first_pass.handed,
        load_input=_loader(cut.load_input(batches, stage), slices, device, wanted=first_pass.before is None),
        load_target=_loader(cut.load_target(batches, stage), slices, device, wanted=first_pass.after is None),
    )


def _loader(load: Callable[[int, int], Any], slices: int, device: torch.device, wanted: bool) -> Callable[[int], Any]:
    """Returns a function that calls ``load`` for a slice and moves the result to ``device``.

    On the meta device the function always returns slices of the first micro-batch, loaded here, or None if not
    ``wanted``, that is, if the stage takes no such input.
    """
    if device.type != "meta":
        return lambda micro: to_device(load(*divmod(micro, slices)), device)
    first = [to_device(load(0, place), device) if wanted else None for place in range(slices)]
    return lambda micro: first[micro % slices]


def _trained(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def message_bytes(boundary: Boundary | None, kinds: Sequence[bool] | None = None) -> int:
    """Bytes of a stage's output for a micro-batch, or of its tensors that ``kinds`` marks; 0 for the last stage."""
    if boundary is None:
        return 0
    tensors = boundary.buffers(torch.device("meta"))
    return bytes_of(t for t, wanted in zip(tensors, kinds or [True] * len(tensors), strict=True) if wanted)


# Comparison of layers from outside: layers with equal keys take equally long, so one of them is measured.
#
# A key has classes, hyper-parameters, the code of functions, the shapes and dtypes of parameters, the contents of
# buffers, the optimizer, and all that was recorded of a layer on its first micro-batch, but no values of
# parameters. A value that cannot be compared equals itself alone, so that in doubt a layer is measured.

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type(None))


@dataclass(frozen=True, eq=False)
class _Compared:
    """A value in a signature, with the function that compares two values: by default, whether they are one object."""

    value: Any
    are_equal: Callable[[Any, Any], bool] = operator.is_

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Compared) and self.are_equal(self.value, other.value)


def passes_key(station: Station) -> object:
    """Key that is equal for two stations (stages, ready to run) only if passes through them take equally long."""
    recorded = station.shape, station.before, station.after, station.traits, station.footprints
    return "passes", recorded, _Signature().layers(station)


def step_key(station: Station) -> object:
    """Key that is equal for two stations only if the steps of their optimizers take equally long."""
    optimizer = station.optimizer
    signature = _Signature()
    if not isinstance(optimizer, torch.optim.Optimizer):
        return "step", signature.layers(station), _Compared(optimizer)
    groups = [signature.of(group) for group in optimizer.param_groups]
    return "step", signature.layers(station), type(optimizer), groups


class _Signature:
    """Values as nested lists, equal if the values are; an object that occurs again is its number."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._kept: list[object] = []

    def layers(self, station: Station) -> list[object]:
        return [self.of(layer) for layer in station.module.children()]

    def of(self, value: object) -> object:
        if isinstance(value, (Enum, type)) or type(value) in _PLAIN:
            return type(value), value
        if id(value) in self._places:
            return "the same as", self._places[id(value)]
        self._places[id(value)] = len(self._places)
        self._kept.append(value)
        return [type(value), *self._parts(value)]

    def _parts(self, value: object) -> Iterator[object]:
        match value:
            case torch.nn.Module():
                yield self._pairs(vars(value))
            case torch.Tensor():
                yield value.shape, value.dtype, value.device, value.layout, value.requires_grad
                yield value.stride() if value.layout is torch.strided else _Compared(value)
                if not isinstance(value, torch.nn.Parameter):
                    yield _Compared(value, torch.equal)
            case dict() if type(value) in (dict, OrderedDict):
                yield self._pairs(value)
            case list() | tuple():
                yield [self.of(entry) for entry in value]
            case set() | frozenset() if all(type(entry) in _PLAIN for entry in value):
                yield frozenset(value)
            case partial():
                yield [self.of(part) for part in (value.func, value.args, value.keywords)]
            case FunctionType():
                yield value.__code__, _Compared(value.__globals__)
                yield [self.of(part) for part in (value.__defaults__, value.__kwdefaults__, value.__closure__)]
            case MethodType():
                yield [self.of(part) for part in (value.__func__, value.__self__)]
            case CellType():
                yield self.of(value.cell_contents)
            case BuiltinFunctionType():
                yield value
            case _:
                yield _Compared(value)

    def _pairs(self, pairs: Mapping[Any, object]) -> list[object]:
        return [(self.of(name), self.of(value)) for name, value in pairs.items()]
