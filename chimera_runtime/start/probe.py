"""Probe: runs a forward and a backward of each stage on one micro-batch, to learn what stages hand to one another.

It runs in the first pipe, once, before the first update. Random generators, gradients, and the parameters, buffers and
attributes of modules are restored afterwards.
"""

import json
import os
import pickle
import re
import resource
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from operator import attrgetter
from typing import Any

import torch

from chimera_runtime.blame import UserCode
from chimera_runtime.data.feed import Feed
from chimera_runtime.data.micro_batch_source import MicroBatchSource
from chimera_runtime.errors import FAILED, Misuse
from chimera_runtime.errors import start as mistakes
from chimera_runtime.errors.stage import carry_is_empty, forward_begins_to_write
from chimera_runtime.model.model import Model
from chimera_runtime.program.job import Job
from chimera_runtime.program.kept_bytes import MovedBytes
from chimera_runtime.program.rank_facts import KeptMicros, RankFacts
from chimera_runtime.ranks.agreement import largest_of_rows
from chimera_runtime.ranks.world import World
from chimera_runtime.stage.module_state import ModuleState, StateSnapshot, Writes, state_of
from chimera_runtime.stage.saved_tensors import Footprint, footprint_of_slices, largest_mean
from chimera_runtime.stage.stage import Stage
from chimera_runtime.stage.stage_output import Auxiliary, collecting
from chimera_runtime.start import stage_probe
from chimera_runtime.start.stage_probe import ProbedForward, StageCall
from chimera_runtime.values.boundary import (
    NO_CARRY,
    Boundary,
    Keywords,
    Traits,
    accepted,
    cut_alone,
    require_unused,
    traits_of_slices,
    with_shared,
)
from chimera_runtime.values.byte_text import byte_text
from chimera_runtime.values.losses import expected_count
from chimera_runtime.values.mesh_tensors import rest
from chimera_runtime.values.nested import (
    Tensors,
    all_generators_kept,
    draw_seed,
    fresh,
    generators_kept,
    is_rows,
    leaves,
    mapped,
    require_here,
    require_sendable,
    taken_apart,
    to_device,
)
from chimera_runtime.values.shared_memory import ReleasedTensors

# Note on an error for lack of memory: how much there is, how much was used, and how much the schedule keeps.


def memory_report(device: torch.device, facts: RankFacts | None, slices: int = 1, units: int = 1) -> str:
    """Describes in one line the memory that this process uses and, with ``facts``, how much the schedule keeps. They
    count a whole micro-batch, of ``slices``, as ``units``.
    """
    used = _on_gpu(device) if device.type == "cuda" else _on_host()
    if facts is None:
        return f"memory: {used}"
    fullest = max(facts.kept, key=_activations, default=())
    copies = ", ".join(f"stage {stage}: {of_stage.copies}" for stage, of_stage in sorted(facts.stages.items()))
    words = [
        f"stage {micros.stage}: {(micros.activations + micros.begun) / units:g}"
        f"{f' and {micros.inputs / units:g} x inputs alone' if micros.inputs else ''}"
        f"{f' and {micros.carries * slices / units:g} carries' if micros.carries else ''}"
        for micros in fullest
    ]
    host = max((sum(of_stage.activations for of_stage in moment) for moment in facts.on_host), default=0)
    host_part = f", of up to {host / units:g} more on the host" if host else ""
    return (
        f"memory: {used}; the schedule keeps {sum(f.copies for f in facts.stages.values())} x M_theta of weights here "
        f"({copies}) and up to {_activations(fullest) / units:g} x M_a of activations ({', '.join(words) or 'none'})"
        f"{host_part}; "
        "--memory-limit of train.py says how many bytes that is"
    )


def wanted_bytes(error: BaseException | None) -> str:
    """The bytes that an allocation of torch lacked, as text; empty if the error for lack of memory does not say."""
    match = re.search(r"[Tt]ried to allocate ([\d.]+) (bytes|[KMGT]iB)", f"{error}")
    if match is None:
        return ""
    return byte_text(int(match[1])) if match[2] == "bytes" else f"{match[1]} {match[2]}"


def _activations(kept: tuple[KeptMicros, ...]) -> int:
    return sum(of_stage.activations + of_stage.begun for of_stage in kept)


def _on_gpu(device: torch.device) -> str:
    free, total = torch.cuda.mem_get_info(device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    return (
        f"{byte_text(allocated)} of tensors in {byte_text(reserved)} that torch holds, {byte_text(free)} free "
        f"of {byte_text(total)} on {device}; at most {byte_text(torch.cuda.max_memory_allocated(device))} of tensors "
        "before"
    )


def _on_host() -> str:
    """Describes the peak memory of this process (``ru_maxrss``, in bytes on macOS), and what there is for it."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    limited = "" if limit == resource.RLIM_INFINITY else f", limited to {byte_text(limit)} of addresses (ulimit -v)"
    return f"this process has used at most {byte_text(peak)}, of {byte_text(total)} in the machine{limited}"


@dataclass(frozen=True)
class ProbeResult:
    """Facts about all stages that the probe has learned, the same on every rank.

    ``boundaries`` describe what each stage hands on, ``traits`` how it behaves, ``footprints``, if they were measured,
    what a forward keeps. ``expected_count`` is that of `losses.expected_count`, None if ``loss`` returns a mean.
    ``auxiliary`` and ``reports`` are names of all stages. ``bent`` are the stages whose backward is not linear, looked
    for if there are counts. ``moved_bytes`` has the bytes of a micro-batch that go to the host, for each stage of which
    anything moves.
    """

    boundaries: list[Boundary]
    traits: list[Traits]
    footprints: list[Footprint]
    expected_count: float | None
    auxiliary: tuple[str, ...] = ()
    reports: tuple[str, ...] = ()
    bent: tuple[int, ...] = ()
    moved_bytes: Mapping[int, MovedBytes] = field(default_factory=dict)

    def before(self, stage: int, job: Job) -> Boundary | None:
        """The tensors that a stage gets from the stage before it; None if its input comes from the dataset."""
        return next((self.boundaries[feeding] for feeding in job.feeding[stage]), None)

    @property
    def generators_kept(self) -> Callable[[], AbstractContextManager[None]]:
        """Function that makes a context which, at its end, restores all random generators that the stages draw from."""
        return all_generators_kept if any(t.seeds_all for t in self.traits) else generators_kept


def probe_stages(
    world: World,
    model: Model,
    batches: MicroBatchSource,
    built: dict[int, torch.nn.Module],
    *,
    seed: int,
    measures: bool,
) -> ProbeResult:
    """Probes all stages; every rank calls it. If it ``measures``, the result has footprints. Raises `Misuse` if a stage
    returns what cannot be handed on, or no stage takes one of the keyword arguments.
    """
    probe = _Probe(world, model, batches, built, seed=seed, measures=measures)
    # Forwards: shapes and traits. A tensor that requires a gradient may still get none back.
    boundaries, traits = probe.forward()
    expected = expected_count(probe.count(), world.job.passes * world.place.copies)
    bent = [] if expected is None else probe.bent(boundaries)
    # Backwards: which tensors get a gradient. Then outputs are released: memory that is not freed belongs to a stage.
    boundaries = probe.backward(boundaries)
    moved_bytes = probe.measure_moved(boundaries)
    boundaries = probe.release(boundaries)
    if expected is not None:
        boundaries = [replace(boundary, counted=True) for boundary in boundaries]
        expected = largest_of_rows(world.control_group, built.values(), expected, world.device)
    names, reports = (
        tuple(sorted({name for of_stage in traits for name in told(of_stage)}))
        for told in (attrgetter("auxiliary"), attrgetter("reports"))
    )
    return ProbeResult(
        boundaries,
        with_shared(traits),
        probe.footprints,
        expected,
        auxiliary=names,
        reports=reports,
        moved_bytes=moved_bytes,
        bent=tuple(bent),
    )


@dataclass
class _Probe:
    """A rank's part of the probe: runs the stages of the first pipe that this rank holds.

    Facts about a stage go through the store, under a key with the number of the stage; tensors go from rank to rank.
    """

    world: World
    model: Model
    batches: MicroBatchSource
    built: dict[int, torch.nn.Module]
    seed: int
    measures: bool
    footprints: list[Footprint] = field(default_factory=list)
    _calls: dict[int, list[StageCall]] = field(default_factory=dict)  # one for each slice
    _probed: dict[int, list[ProbedForward]] = field(default_factory=dict)
    _states: dict[int, tuple[ModuleState, StateSnapshot]] = field(default_factory=dict)  # from before the forwards

    # ---- passes over all stages

    def forward(self) -> tuple[list[Boundary], list[Traits]]:
        """Runs all forwards; returns boundaries and traits. `backward` will correct ``differentiable``, here equal to
        ``recorded``.
        """
        job = self.world.job
        boundaries: list[Boundary] = []
        traits: list[Traits] = []
        names = self._keyword_names()
        require_unused(self.model.loss, names)
        for stage in range(job.stages):
            if self._is_mine(stage):
                state, before = self._states[stage] = state_of(self.built[stage], None)
                with all_generators_kept():
                    torch.manual_seed(draw_seed("shapes", self.seed, stage))
                    self._run_slices(stage, next((boundaries[s] for s in job.feeding[stage]), None), names)
                writes = state.writes(before)
                assert before.parameters is not None
                before.parameters.restore()  # copies of all others are freed, before there are gradients
                self._publish_forward(stage, writes)
            facts = self._read(f"forward/{stage}", stage)
            if isinstance(facts, Exception):
                raise facts
            boundary, of_stage, footprint = facts
            traits.append(of_stage)
            self.footprints += [footprint] if self.measures else []
            boundaries += [boundary] if job.fed[stage] else []
        if unknown := sorted(set(names) - {name for of_stage in traits for name in of_stage.keywords}):
            raise mistakes.no_stage_takes_keyword(name=unknown[0])
        return boundaries, traits

    def count(self) -> float | None:
        *_, last = self.world.job.sinks
        if self._is_mine(last):
            counts = [probed.count for probed in self._probed[last] if probed.count is not None]
            if self.world.job.lengths and not counts:
                raise Misuse(mistakes.MEAN_OF_UNEQUAL_SLICES)
            self._publish("count", sum(counts) / len(counts) if counts else None)
        count: float | None = self._read("count", last)
        return count

    def bent(self, boundaries: list[Boundary]) -> list[int]:
        job, mine = self.world.job, list[int]()
        for stage, of_slices in self._probed.items():
            differentiable = boundaries[stage].recorded if job.fed[stage] else None
            with all_generators_kept():
                of_stage = [stage_probe.is_linear(self.built[stage], probed, differentiable) for probed in of_slices]
            mine += [] if all(of_stage) else [stage]
        everywhere = self.world.control_group.collect("bent", mine, "for how its backwards treat gradients")
        return sorted({stage for of_rank in everywhere for stage in of_rank})

    def backward(self, boundaries: list[Boundary]) -> list[Boundary]:
        job = self.world.job
        differentiated: list[Boundary] = []  # the boundaries from the last one seen so far on
        differentiable: tuple[bool, ...] | None = None
        for stage, feeding in reversed([(stage, s) for stage, several in enumerate(job.feeding) for s in several]):
            if self._is_mine(stage):
                with all_generators_kept():
                    with_gradient = [
                        stage_probe.probe_backward(stage, self.built[stage], probed, differentiable)
                        for probed in self._probed[stage]
                    ]
                self._publish(f"gradients/{feeding}", [any(has) for has in zip(*with_gradient, strict=True)])
            before = boundaries[feeding]
            has_gradient = self._read(f"gradients/{feeding}", stage)  # for each tensor of the boundary
            # A stage may call requires_grad_() on a tensor that comes without a graph: nothing takes that gradient.
            differentiable = tuple(has and wants for has, wants in zip(has_gradient, before.recorded, strict=True))
            differentiated.insert(0, replace(before, differentiable=differentiable))
        if self.measures:
            self._measure_halves(differentiated)
        return differentiated

    def measure_moved(self, boundaries: list[Boundary]) -> dict[int, MovedBytes]:
        """Returns the bytes of a micro-batch that move to the host, by stage; of slices the `largest_mean`."""
        job = self.world.job
        sizes_of: dict[int, MovedBytes] = {}
        for stage in sorted({*job.moving, *job.moving_operands}):
            if self._is_mine(stage):
                differentiable = boundaries[stage].differentiable if job.fed[stage] else None
                with all_generators_kept():
                    sizes = [self._moved(stage, call, differentiable) for call in self._calls[stage]]
                self._publish(
                    f"moved/{stage}", [largest_mean(of_kind, job.lengths) for of_kind in zip(*sizes, strict=True)]
                )
            sizes_of[stage] = MovedBytes(*self._read(f"moved/{stage}", stage))
        return sizes_of

    def _moved(self, stage: int, call: StageCall, differentiable: tuple[bool, ...] | None) -> MovedBytes:
        job, arguments = self.world.job, (self.model, stage, self.built[stage], call, differentiable)
        return MovedBytes(
            stage_probe.measure_moved(*arguments) if stage in job.moving else 0,
            stage_probe.measure_moved_operands(*arguments, apart=bool(job.period))
            if stage in job.moving_operands
            else 0,
        )

    def release(self, boundaries: list[Boundary]) -> list[Boundary]:
        """Frees all graphs and restores the modules; returns the boundaries with ``owned_by_stage``: outputs whose
        memory something still holds then. Raises `Misuse`, on all ranks, if a stage or the loss trains or writes what
        the pipeline does not know.
        """
        outputs_of = {stage: ReleasedTensors(probed[-1].outputs) for stage, probed in self._probed.items()}
        strangers = {stage: [each.strangers for each in probed] for stage, probed in self._probed.items()}
        self._probed.clear()
        self._calls.clear()
        for stage, outputs in outputs_of.items():
            of_stage = (each.complaint() for each in strangers[stage])
            self._publish(f"kept/{stage}", (outputs.are_kept(), next(filter(None, of_stage), None)))
        for stage, (state, contents) in self._states.items():
            state.restore(contents)
            rest(self.built[stage])
        self._states.clear()
        kept, complaints = zip(*(self._read(f"kept/{s}", s) for s in range(self.world.job.stages)), strict=True)
        if complaint := next(filter(None, complaints), None):
            raise complaint
        return [replace(b, owned_by_stage=tuple(kept[stage])) for stage, b in enumerate(boundaries)]

    # ---- one stage

    def _run_slices(self, stage: int, before: Boundary | None, names: tuple[str, ...]) -> None:
        """Runs the forward of a stage of this rank on each slice. Raises `Misuse` if the schedule cannot run such a
        stage.
        """
        world, job, module = self.world, self.world.job, self.built[stage]
        is_last, accepted_names = not job.fed[stage], accepted(module, names)

        def load(micro: int) -> tuple[Any, Any, Keywords]:
            inputs = self._inputs_of(stage, micro, before)
            target = _copied(self.batches.target(0, micro), world.device) if is_last else None
            loaded = _copied(self.batches.keywords(0, micro), world.device) if accepted_names else {}
            return inputs, target, {name: loaded[name] for name in accepted_names}

        forwards = stage_probe.probe_slices(
            *(self.model, stage, module, load, job.slices), before=before, is_last=is_last, measures=self.measures
        )
        self._calls[stage], self._probed[stage] = [], []
        for micro, (call, forward) in enumerate(forwards):
            probed = stage_probe.with_obstacle(forward) if stage in job.split_backward else forward
            self._require_fitting(stage, probed)
            self._calls[stage].append(call)
            self._probed[stage].append(probed)
            carry = probed.next_carry(call)
            if carry.opaque is not None:
                raise mistakes.carry_is_opaque(stage=stage, kind=carry.opaque)
            if probed.traits.takes.carry and call.leaves_carry and not carry.tensors:
                raise carry_is_empty(stage, micro)

    def _require_fitting(self, stage: int, probed: ProbedForward) -> None:
        world, job = self.world, self.world.job
        if job.fed[stage]:
            require_here(stage, probed.outputs, world.device)
            if any(path[stage] != path[fed] for path in job.placement for fed in job.fed[stage]):
                require_sendable(stage, probed.outputs, world.backend)
        if probed.traits.in_place and stage in job.recomputing:
            raise mistakes.recomputed_stage_changes_input(stage=stage, what=probed.traits.in_place)
        if stage in job.grouped and job.fed[stage] and not is_rows(probed.outputs):
            raise mistakes.output_without_dimensions(stage=stage)

    def _publish_forward(self, stage: int, writes: Writes) -> None:
        """Publishes the facts of a forward, or an error about its ``writes``, and sends its outputs."""
        if writes.replaced or writes.lost:
            refusal = (
                mistakes.forward_replaces_parameter if writes.replaced else mistakes.forward_writes_large_parameter
            )
            self._publish(f"forward/{stage}", refusal(stage=stage, name=(writes.replaced or writes.lost)[0]))
            return
        of_slices = self._probed[stage]
        boundary, *others = [Boundary.of(probed.form, probed.outputs) for probed in of_slices]
        job = self.world.job
        if job.lengths and job.fed[stage]:
            together = boundary.with_slices(others)
            if together is None:
                raise mistakes.slices_differ_in_form(stage=stage)
            boundary, others = together, []
        for number, other in enumerate(others, start=1):
            if job.fed[stage] and (other.form, other.shapes) != (boundary.form, boundary.shapes):
                raise mistakes.slices_differ(stage=stage, number=number, shapes=other.shapes, first=boundary.shapes)
        traits = traits_of_slices([probed.traits for probed in of_slices])
        traits = replace(traits, changed=writes.changed, touched=writes.touched)
        footprint = footprint_of_slices([probed.footprint for probed in of_slices], job.lengths)
        self._publish(f"forward/{stage}", (boundary, traits, footprint))
        for fed in job.fed[stage]:
            for tensor in () if self._is_mine(fed) else [t for probed in of_slices for t in probed.outputs]:
                what = f"for stage {fed} to take the first micro-batch"
                self.world.control_group.send(tensor, self._rank_of(fed), what)

    def _inputs_of(self, stage: int, micro: int, before: Boundary | None) -> Any:
        device = self.world.device
        if before is None:
            return _copied(self.batches.input(0, micro), device)
        (feeding,) = self.world.job.feeding[stage]
        if self._is_mine(feeding):
            return self._probed[feeding][micro].outputs
        buffers = before.at(micro).buffers(torch.device("cpu"))
        for tensor in buffers:
            what = f"for the first micro-batch of stage {feeding}"
            self.world.control_group.recv(tensor, self._rank_of(feeding), what)
        return tuple(t.to(device) for t in buffers)

    def _measure_halves(self, boundaries: list[Boundary]) -> None:
        for stage in self.world.job.split_backward:
            if self._is_mine(stage):
                with all_generators_kept():
                    measured = [
                        stage_probe.measure_halves(
                            self.model,
                            stage,
                            self.built[stage],
                            call,
                            differentiable=boundaries[stage].differentiable if self.world.job.fed[stage] else None,
                            is_whole=bool(probed.traits.whole),
                        )
                        for call, probed in zip(self._calls[stage], self._probed[stage], strict=True)
                    ]
                of_slices = zip(self._probed[stage], measured, strict=True)
                halved = [replace(probed.footprint, **halves) for probed, halves in of_slices]
                footprint = footprint_of_slices(halved, self.world.job.lengths)
                self._publish(f"halves/{stage}", footprint)
            self.footprints[stage] = self._read(f"halves/{stage}", stage)

    # ---- from rank to rank

    def _rank_of(self, stage: int) -> int:
        return self.world.place.rank_of(0, self.world.job.placement[0][stage])

    def _is_mine(self, stage: int) -> bool:
        return self.world.place.rank == self._rank_of(stage)

    def _keyword_names(self) -> tuple[str, ...]:
        if self._is_mine(0):
            with all_generators_kept():
                self._publish("keywords", list(self.batches.keywords(0, 0)))
        return tuple(self._read("keywords", 0))

    def _publish(self, key: str, fact: object) -> None:
        """Publishes a fact, pickled: the structure of an output may have classes of the user."""
        self.world.control_group.store.set(key, pickle.dumps(fact).hex())

    def _read(self, key: str, stage: int) -> Any:
        what = f"for what stage {stage} does with the first micro-batch"
        text = self.world.control_group.wait_for_key(key, self._rank_of(stage), what).decode()
        return pickle.loads(bytes.fromhex(text))


def _copied(value: Any, device: torch.device) -> Any:
    """Copies data to a device, because a stage may change its input in place."""
    return mapped(to_device(value, device), torch.clone)


# Updates of several shapes: when new shapes come, each stage runs one forward, which shows the shapes of its outputs.
#
# The example has the largest shapes. Memory is reserved for these, and messages of a smaller update use its first part.

Shapes = tuple[tuple[int, ...], ...]

FirstInputs = tuple[Any, Keywords]
"""Inputs and keyword arguments of a micro-batch that is as large as the example in dimension 0."""


@dataclass(eq=False)
class VaryingShapes:
    """Fits the stages of this rank to the shapes of each update; other copies may have other shapes.

    Make it while the feed still holds the example. All ranks of a copy look at the input of the first micro-batch of
    each update, so they know the shapes without a message.
    """

    world: World
    feed: Feed
    modules: Mapping[int, torch.nn.Module]
    stages: Mapping[int, Stage]
    probed: ProbeResult

    def __post_init__(self) -> None:
        if self.world.job.period:
            raise mistakes.shapes_vary_without_flush(scheme=self.world.job.name)
        if self.world.job.lengths:
            raise Misuse(mistakes.VARYING_IN_UNEQUAL_SLICES)
        example = self._first_inputs(0)
        self._largest, self._current = _shapes_by_item(example), _shapes(example)
        self._boundaries = {self._current: list(self.probed.boundaries)}
        self._first: Shapes = ()
        self.feed.require_input = self._require_input

    def begin(self, update: int) -> None:
        """Resizes the stages for an update, after `check`; every rank calls it. Raises `BadModel` if a stage returns
        more numbers than for the example, `ModelError` if its forward fails, `PeerLost` if another rank does not
        answer.
        """
        inputs = self._first_inputs(update)
        if _shapes(inputs) == self._current:
            return
        boundaries = self.boundaries(inputs)
        for number, stage in self.stages.items():
            before = next((boundaries[feeding] for feeding in self.world.job.feeding[number]), None)
            stage.resize(before, boundaries[number] if self.world.job.fed[number] else None)
        self._current = _shapes(inputs)

    def boundaries(self, inputs: FirstInputs) -> list[Boundary]:
        """Returns the boundaries between stages for inputs of these shapes; all ranks call it. Errors as in `begin`."""
        shapes = _shapes(inputs)
        if shapes not in self._boundaries:
            with all_generators_kept():
                self._boundaries[shapes] = self._probe(inputs, shapes)
        return self._boundaries[shapes]

    def check(self, update: int) -> None:
        """Raises `Misuse`, as `require_fitting`, if a tensor of the update does not fit, or micro-batches in a list
        differ in shape.
        """
        self._first = ()
        inputs = self._first_inputs(update)
        self.require_fitting(inputs)
        if self.world.job.slices == 1:  # else these are of a slice
            self._first = _shapes(inputs[0])
        for micro, pair in enumerate(self.feed.listed(update)):
            self._require_input(micro, pair[0])

    def _require_input(self, micro: int, inputs: Any) -> None:
        shapes = _shapes(inputs)
        is_given = any(shape[:1] != (0,) for shape in shapes)  # a rank may give empty tensors where it uses none
        if is_given:
            self._first = self._first or shapes
            if shapes != self._first:
                raise mistakes.micro_batches_differ_in_shape(micro=micro, here=shapes, first=self._first)

    def require_fitting(self, inputs: FirstInputs) -> None:
        """Raises `Misuse` if a tensor is larger than in the example in any dimension, or their number differs; whole
        keyword arguments may have any shape. Call it before any rank has sent a message.
        """
        shapes = _shapes_by_item(inputs)
        if len(shapes) != len(self._largest):
            raise mistakes.number_of_tensors_differs(here=len(shapes), in_example=len(self._largest))
        for shape, largest in zip(shapes, self._largest, strict=True):
            if len(shape) != len(largest) or any(a > b for a, b in zip(shape, largest, strict=True)):
                raise mistakes.tensor_is_larger_than_example(here=shape, in_example=largest)

    def _first_inputs(self, update: int) -> FirstInputs:
        return self.feed.input(update, 0), self.feed.keywords(update, 0)

    def _rank_of(self, stage: int) -> int:
        place = self.world.place
        return place.rank_of(place.copy, self.world.job.placement[0][stage])

    def _probe(self, inputs: FirstInputs, shapes: Shapes) -> list[Boundary]:
        world = self.world
        name = f"shapes/{world.place.copy}/{blake2b(repr(shapes).encode(), digest_size=8).hexdigest()}"
        boundaries: list[Boundary] = []
        outputs: dict[int, Tensors] = {}
        for number, largest in enumerate(self.probed.boundaries):
            if self._rank_of(number) == world.place.rank:
                argument = self._argument_of(number, boundaries, outputs, inputs)
                outputs[number] = self._run(number, argument, inputs)
                world.control_group.store.set(f"{name}/{number}", json.dumps([list(t.shape) for t in outputs[number]]))
                for fed in (s for s in world.job.fed[number] if world.job.fed[s]):  # the last stage is not run
                    for tensor in () if self._rank_of(fed) == world.place.rank else outputs[number]:
                        world.control_group.send(tensor, self._rank_of(fed), f"for stage {fed} to see new shapes")
            what = f"for the shapes of what stage {number} hands on"
            answer = json.loads(world.control_group.wait_for_key(f"{name}/{number}", self._rank_of(number), what))
            boundaries.append(replace(largest, shapes=tuple(map(tuple, answer))))
        return boundaries

    def _argument_of(
        self, number: int, boundaries: list[Boundary], outputs: dict[int, Tensors], inputs: FirstInputs
    ) -> Any:
        world = self.world
        if not world.job.feeding[number]:
            return mapped(to_device(inputs[0], world.device), torch.clone)  # the stage may change them in place
        (feeding,) = world.job.feeding[number]
        before = boundaries[feeding]
        if feeding in outputs:
            return before.form.filled(outputs[feeding])
        buffers = before.buffers(torch.device("cpu"))
        for tensor in buffers:
            world.control_group.recv(tensor, self._rank_of(feeding), f"for new shapes of stage {feeding}")
        return before.form.filled([t.to(world.device) for t in buffers])

    @torch.no_grad()
    def _run(self, number: int, argument: Any, inputs: FirstInputs) -> Tensors:
        module, largest = self.modules[number], self.probed.boundaries[number]
        traits = self.probed.traits[number]
        loaded = to_device(inputs[1], self.world.device) if traits.keywords else {}
        keywords = fresh({name: loaded[name] for name in traits.keywords})
        state, contents = state_of(module, traits.touched)
        torch.manual_seed(draw_seed("shapes", number))
        with UserCode(f"the forward of stage {number}", FAILED), collecting(Auxiliary(takes=False)):
            returned = module(argument, **keywords, **NO_CARRY.arguments(traits.takes, ()))
        tensors, form = taken_apart(traits.takes.split_result(f"stage {number}", returned)[0])
        lost = state.writes(contents).lost
        state.restore(contents)
        rest(module)
        if lost:
            raise forward_begins_to_write(stage=number, name=lost[0])
        if excess := largest.excess(tensors, form):
            raise mistakes.output_is_larger_than_for_example(stage=number, excess=excess)
        return tensors


def _shapes_by_item(inputs: FirstInputs) -> Shapes:
    return _shapes((inputs[0], cut_alone(inputs[1])))


def _shapes(inputs: FirstInputs) -> Shapes:
    return tuple(tuple(leaf.shape) for leaf in leaves(inputs) if isinstance(leaf, torch.Tensor))
