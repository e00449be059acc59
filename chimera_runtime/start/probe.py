"""Probe: runs a forward and a backward of each stage on one micro-batch, to learn what stages hand to one another.

It runs in the first pipe, once, before the first update. Random generators, gradients, and the parameters, buffers and
attributes of modules are restored afterwards.
"""

import operator
import os
import pickle
import re
import resource
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from chimera_runtime.data.micro_batch_source import MicroBatchSource
from chimera_runtime.errors import Misuse
from chimera_runtime.errors import start as mistakes
from chimera_runtime.errors.data import example_lacks_inputs
from chimera_runtime.errors.stage import carry_is_empty
from chimera_runtime.model.model import Model
from chimera_runtime.program.job import Job
from chimera_runtime.program.kept_bytes import MovedBytes, largest_mean
from chimera_runtime.program.rank_facts import KeptMicros, RankFacts
from chimera_runtime.ranks.agreement import largest_of_rows
from chimera_runtime.ranks.world import World
from chimera_runtime.stage.module_state import ModuleSnapshot
from chimera_runtime.stage.saved_tensors import Footprint, footprint_of_slices
from chimera_runtime.start.stage_probe import ProbedForward, StageProbe
from chimera_runtime.values.boundary import (
    Boundary,
    FeedingBoundary,
    Keywords,
    Traits,
    accepted,
    joined_boundary,
    require_unused,
    traits_of_slices,
    with_shared,
)
from chimera_runtime.values.byte_text import byte_text
from chimera_runtime.values.losses import CountedLoss, expected_count, loss_name
from chimera_runtime.values.mesh_tensors import rest
from chimera_runtime.values.nested import (
    Tensors,
    all_generators_kept,
    draw_seed,
    generators_kept,
    is_rows,
    mapped,
    require_here,
    require_sendable,
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

    ``boundaries`` describe what each stage hands on, by its number, ``traits`` how a stage behaves, ``footprints``, if
    they were measured, what a forward keeps. ``expected_count`` is that of `losses.expected_count`, None if ``loss``
    returns a mean. ``auxiliary`` and ``reports`` are names of all stages. ``bent`` are the stages whose backward is not
    linear, looked for if there are counts. ``moved_bytes`` has the bytes of a micro-batch that go to the host, for each
    stage of which anything moves. ``by_source`` says that inputs are dicts with an entry for each source, and ``first``
    is the part of the example with which the stages were run.
    """

    boundaries: Mapping[int, Boundary]
    traits: list[Traits]
    footprints: list[Footprint]
    expected_count: float | None
    auxiliary: tuple[str, ...] = ()
    reports: tuple[str, ...] = ()
    bent: tuple[int, ...] = ()
    moved_bytes: Mapping[int, MovedBytes] = field(default_factory=dict)
    by_source: bool = False
    first: int = 0

    def before(self, stage: int, job: Job) -> Boundary | None:
        """The tensors that a stage gets from the stages that feed it; None if its input comes from the dataset."""
        return boundary_before(stage, job, self.boundaries)

    @property
    def generators_kept(self) -> Callable[[], AbstractContextManager[None]]:
        """Function that makes a context which, at its end, restores all random generators that the stages draw from."""
        return all_generators_kept if any(t.seeds_all for t in self.traits) else generators_kept


def boundary_before(stage: int, job: Job, boundaries: Mapping[int, Boundary]) -> Boundary | None:
    """Joins what a stage gets, of the ``boundaries`` of what each stage hands on; None if no stage feeds it."""
    feeds = [edge for edge in job.edges if edge.target == stage]
    return joined_boundary(
        [
            FeedingBoundary(feed.source, feed.keyword, boundaries[feed.source], job.backwards[feed.source].has)
            for feed in feeds
        ],
        at_times=any(feed.source in job.at_times and not job.are_of_one_group(*feed[:2]) for feed in feeds),
    )


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
    chain = Chain(
        *(world, 0, "", "for what stage {} does with the first micro-batch"),
        sends="for stage {} to take the first micro-batch",
        receives="for the first micro-batch of stage {}",
    )
    probe = _Probe(chain, model, batches, built, seed, measures)
    # Forwards: shapes and traits. A tensor that requires a gradient may still get none back.
    probe.forward()
    expected = expected_count(probe.count(), world.job.passes * world.place.copies)
    bent = () if expected is None else probe.bent()
    # Backwards: which tensors get a gradient. Then outputs are released: memory that is not freed belongs to a stage.
    probe.backward()
    probe.measure_halves()
    moved_bytes = probe.measure_moved()
    probe.release()
    if expected is not None:
        probe.boundaries = {stage: replace(each, counted=True) for stage, each in probe.boundaries.items()}
        expected = largest_of_rows(world.control_group, built.values(), expected, world.device)
    job = world.job
    losses = [loss_name(job.end_name(stage)) for stage in job.sinks] if len(job.sinks) > 1 else []
    return ProbeResult(
        probe.boundaries,
        with_shared(probe.traits),
        probe.footprints,
        expected,
        auxiliary=tuple(sorted({name for of_stage in probe.traits for name in of_stage.auxiliary})),
        reports=tuple(sorted({name for of_stage in probe.traits for name in of_stage.reports}.union(losses))),
        bent=bent,
        moved_bytes=moved_bytes,
        by_source=probe.by_source,
        first=probe.first,
    )


class Chain(NamedTuple):
    """The stages of a ``pipe`` of a ``copy``, which its ranks run one after the other: facts about a stage go through
    the store, under a key with the number of the stage and the ``prefix``, tensors from rank to rank.

    ``reads``, ``sends`` and ``receives`` say of a stage what a rank waits for, if that fails.
    """

    world: World
    copy: int
    prefix: str
    reads: str
    sends: str
    receives: str
    pipe: int = 0

    def rank_of(self, stage: int) -> int:
        """The rank that holds a stage of the pipe."""
        return self.world.place.rank_of(self.copy, self.world.job.placement[self.pipe][stage])

    def is_mine(self, stage: int) -> bool:
        """Whether this rank holds a stage of the pipe."""
        return self.world.place.rank == self.rank_of(stage)

    def publish(self, key: str, stage: int, fact: object) -> None:
        """Publishes a fact, pickled: the structure of an output may have classes of the user."""
        self.world.control_group.store.set(f"{self.prefix}{key}/{stage}", pickle.dumps(fact).hex())

    def read(self, key: str, stage: int) -> Any:
        """Returns a fact that the rank of a stage publishes."""
        key = f"{self.prefix}{key}/{stage}"
        text = self.world.control_group.wait_for_key(key, self.rank_of(stage), self.reads.format(stage))
        return pickle.loads(bytes.fromhex(text.decode()))

    def of_stage(self, key: str, stage: int, observe: Callable[[], object]) -> Any:
        """Returns on every rank what ``observe`` returns on the rank of a stage, where random generators are restored
        afterwards.
        """
        if self.is_mine(stage):
            with all_generators_kept():
                self.publish(key, stage, observe())
        return self.read(key, stage)

    def send(self, fed: int, tensors: Iterable[torch.Tensor]) -> None:
        """Sends tensors to the rank of the stage that they are for, if that is another one."""
        for tensor in () if self.is_mine(fed) else tensors:
            self.world.control_group.send(tensor, self.rank_of(fed), self.sends.format(fed))

    def receive(self, feeding: int, boundary: Boundary) -> Tensors:
        """Receives what a stage hands on, in the shapes of ``boundary``."""
        buffers = boundary.buffers(torch.device("cpu"))
        for tensor in buffers:
            self.world.control_group.recv(tensor, self.rank_of(feeding), self.receives.format(feeding))
        return tuple(tensor.to(self.world.device) for tensor in buffers)


@dataclass
class _Probe:
    """A rank's part of the probe, see `probe_stages`: runs the stages of the first pipe that this rank holds.

    ``boundaries``, ``traits`` and ``footprints`` are those of all stages, as far as they are known.
    """

    chain: Chain
    model: Model
    batches: MicroBatchSource
    built: dict[int, torch.nn.Module]
    seed: int
    measures: bool
    boundaries: dict[int, Boundary] = field(default_factory=dict)
    traits: list[Traits] = field(default_factory=list)
    footprints: list[Footprint] = field(default_factory=list)
    _probes: dict[int, StageProbe] = field(default_factory=dict)
    _probed: dict[int, list[ProbedForward]] = field(default_factory=dict)  # one for each slice
    _arrived: dict[tuple[int, int], list[Tensors]] = field(default_factory=dict)  # by edge, for each slice
    _states: dict[int, ModuleSnapshot] = field(default_factory=dict)  # from before the forwards

    def __post_init__(self) -> None:
        self._world = self.chain.world
        self._job = self._world.job
        self.first, self.by_source = 0, False
        if len(self._job.sources) > 1:
            first = self.chain.of_stage("example", 0, partial(_first_whole, self._job, self.batches))
            if isinstance(first, Misuse):
                raise first
            self.first, self.by_source = first

    # ---- passes over all stages

    def forward(self) -> None:
        """Runs all forwards. Until `backward` ``differentiable`` of a boundary is equal to ``recorded``."""
        chain, fed = self.chain, self._job.fed
        names = tuple(chain.of_stage("keywords", 0, lambda: [*self.batches.keywords(0, self.first)]))
        for stage in self._job.sinks:
            require_unused(self.model.of_sink(self._job.end_name(stage)).loss, names)
        for stage in range(self._job.stages):
            for feeding in filter(chain.is_mine, self._job.feeding[stage]):
                chain.send(stage, [tensor for probed in self._probed[feeding] for tensor in probed.outputs])
            facts = chain.of_stage("forward", stage, partial(self._forward, stage, names))
            if isinstance(facts, Exception):
                raise facts
            boundary, traits, footprint = facts
            self.traits.append(traits)
            self.footprints += [footprint] if self.measures else []
            self.boundaries |= {stage: boundary} if fed[stage] else {}
        if unknown := sorted(set(names) - {name for of_stage in self.traits for name in of_stage.keywords}):
            raise mistakes.no_stage_takes_keyword(name=unknown[0])

    def count(self) -> float | None:
        """Returns the mean count of the loss of a slice; None if ``loss`` returns no counts, or they are known before
        an update, as those of several losses are.
        """
        job = self._job

        def mean(stage: int) -> float | None:
            counts = [probed.count for probed in self._probed[stage] if probed.count is not None]
            return sum(counts) / len(counts) if counts else None

        of_sinks: dict[int, float | None] = {
            stage: self.chain.of_stage("count", stage, partial(mean, stage)) for stage in job.sinks
        }
        if len(of_sinks) == 1:
            (count,) = of_sinks.values()
            if job.lengths and count is None:
                raise Misuse(mistakes.MEAN_OF_UNEQUAL_SLICES)
            return count
        for stage, count in of_sinks.items():
            name = job.end_name(stage)
            if count is None and job.lengths:
                raise mistakes.several_means_of_unequal_slices(name=name)
            if count is not None and not isinstance(self.model.of_sink(name).loss, CountedLoss):
                raise mistakes.count_is_known_too_late(name=name)
        return None

    def bent(self) -> tuple[int, ...]:
        """Returns the stages whose backward is not linear."""
        mine: list[int] = []
        for stage, of_slices in self._probed.items():
            probe, differentiable = self._probes[stage], self._differentiable(stage)
            with all_generators_kept():
                of_stage = [probe.is_linear(probed, differentiable) for probed in of_slices]
            mine += [] if all(of_stage) else [stage]
        everywhere = self._world.control_group.collect("bent", mine, "for how its backwards treat gradients")
        return tuple(sorted({stage for of_rank in everywhere for stage in of_rank}))

    def backward(self) -> None:
        """Runs all backwards, from the last stage to the first."""

        def with_gradient(stage: int) -> list[bool]:
            probe, differentiable = self._probes[stage], self._differentiable(stage)
            of_slices = [probe.backward(probed, differentiable) for probed in self._probed[stage]]
            return [any(has) for has in zip(*of_slices, strict=True)]

        # A tensor is differentiable if any of the stages that get it uses it; at first none is known to.
        used = {stage: (False,) * len(each.shapes) for stage, each in self.boundaries.items()}
        for stage in reversed(range(self._job.stages)):
            if stage in used:
                # A stage may call requires_grad_() on a tensor that comes without a graph: nothing takes that gradient.
                boundary = self.boundaries[stage]
                differentiable = tuple(map(operator.and_, used[stage], boundary.recorded))
                self.boundaries[stage] = replace(boundary, differentiable=differentiable)
            if not self._job.feeding[stage]:
                continue
            has_gradient = iter(self.chain.of_stage("gradients", stage, partial(with_gradient, stage)))  # by tensor
            for feeding in self._job.feeding[stage]:
                used[feeding] = tuple([is_used | next(has_gradient) for is_used in used[feeding]])

    def measure_halves(self) -> None:
        """Adds to the footprints what is kept between the halves of backwards."""

        def measured(stage: int) -> Footprint:
            probe, differentiable = self._probes[stage], self._differentiable(stage)
            of_slices = [
                replace(probed.footprint, **probe.halves(probed.call, differentiable)) for probed in self._probed[stage]
            ]
            return footprint_of_slices(of_slices, self._job.lengths)

        for stage in self._job.split_backward if self.measures else ():
            self.footprints[stage] = self.chain.of_stage("halves", stage, partial(measured, stage))

    def measure_moved(self) -> dict[int, MovedBytes]:
        """Returns the bytes of a micro-batch that move to the host, by stage; of slices the `largest_mean`."""
        job = self._job

        def measured(stage: int) -> MovedBytes:
            probe, differentiable = self._probes[stage], self._differentiable(stage)
            calls = [probed.call for probed in self._probed[stage]]
            activations, operands = [0], [0]
            if stage in job.moving:
                activations = [probe.moved(call, differentiable) for call in calls]
            if stage in job.moving_operands:
                operands = [probe.moved_operands(call, differentiable, apart=bool(job.period)) for call in calls]
            return MovedBytes(*(largest_mean(sizes, job.lengths) for sizes in (activations, operands)))

        moving = sorted({*job.moving, *job.moving_operands})
        return {stage: self.chain.of_stage("moved", stage, partial(measured, stage)) for stage in moving}

    def release(self) -> None:
        """Frees all graphs and restores the modules; boundaries get ``owned_by_stage``: outputs whose memory something
        still holds then. Raises `Misuse`, on all ranks, if a stage or the loss trains or writes what the pipeline does
        not know.
        """
        outputs_of = {stage: ReleasedTensors(probed[-1].outputs) for stage, probed in self._probed.items()}
        strangers = {stage: [each.strangers for each in probed] for stage, probed in self._probed.items()}
        self._probed.clear()
        self._arrived.clear()
        for stage, outputs in outputs_of.items():
            complaints = (each.complaint() for each in strangers[stage])
            self.chain.publish("kept", stage, (outputs.are_kept(), next(filter(None, complaints), None)))
        for stage, state in self._states.items():
            state.restore()
            rest(self.built[stage])
        self._states.clear()
        of_stages = [self.chain.read("kept", stage) for stage in range(self._job.stages)]
        if complaint := next((complaint for _, complaint in of_stages if complaint), None):
            raise complaint
        self.boundaries = {
            stage: replace(boundary, owned_by_stage=tuple(of_stages[stage][0]))
            for stage, boundary in self.boundaries.items()
        }

    # ---- one stage

    def _differentiable(self, stage: int) -> tuple[bool, ...] | None:
        return self.boundaries[stage].differentiable if self._job.fed[stage] else None

    def _forward(self, stage: int, names: tuple[str, ...]) -> tuple[Boundary, Traits, Footprint] | Misuse:
        """Runs the forward of a stage of this rank; returns the facts about it, or an error about what it writes."""
        job = self._job
        self._states[stage] = ModuleSnapshot(self.built[stage], None)
        torch.manual_seed(draw_seed("shapes", self.seed, stage))
        self._run_slices(stage, names)
        parameters = self._states[stage].parameters
        writes = parameters.writes()
        parameters.restore()  # copies of all others are freed, before there are gradients
        if writes.replaced:
            return mistakes.forward_replaces_parameter(stage=stage, name=writes.replaced[0])
        if writes.lost:
            return mistakes.forward_writes_large_parameter(stage=stage, name=writes.lost[0])
        # The facts of all slices become those of the stage.
        of_slices = self._probed[stage]
        boundary, *others = [Boundary.of(probed.form, probed.outputs) for probed in of_slices]
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
        return boundary, traits, footprint_of_slices([probed.footprint for probed in of_slices], job.lengths)

    def _run_slices(self, stage: int, names: tuple[str, ...]) -> None:
        """Runs the forward of a stage of this rank on each slice. Raises `Misuse` if the schedule cannot run such a
        stage.
        """
        world, job, module = self._world, self._job, self.built[stage]
        before = boundary_before(stage, job, self.boundaries)
        is_last, accepted_names = not job.fed[stage], accepted(module, names, before)
        is_sent = any(path[stage] != path[fed] for path in job.placement for fed in job.fed[stage])

        def load(micro: int) -> tuple[Any, Any, Keywords]:
            inputs = self._inputs_of(stage, micro)
            target = job.of_end(self.batches.target(0, self.first + micro), stage, job.sinks) if is_last else None
            target = copied(target, world.device)
            loaded = copied(self.batches.keywords(0, self.first + micro), world.device) if accepted_names else {}
            return inputs, target, {name: loaded[name] for name in accepted_names}

        model = self.model.of_sink(job.end_name(stage)) if is_last else self.model
        probe = StageProbe(model, stage, module, before, is_last, splits=stage in job.split_backward)
        self._probes[stage], self._probed[stage] = probe, []
        for micro, probed in enumerate(probe.slices(load, job.slices, measures=self.measures)):
            if not is_last:
                require_here(stage, probed.outputs, world.device)
            if is_sent:
                require_sendable(stage, probed.outputs, world.backend)
            if probed.traits.in_place and stage in job.recomputing:
                raise mistakes.recomputed_stage_changes_input(stage=stage, what=probed.traits.in_place)
            is_grouped = not {stage, *job.fed[stage]}.isdisjoint(job.grouped)
            if is_grouped and not is_last and not is_rows(probed.outputs):
                raise mistakes.output_without_dimensions(stage=stage)
            self._probed[stage].append(probed)
            carry = probed.next_carry
            if carry.opaque is not None:
                raise mistakes.carry_is_opaque(stage=stage, kind=carry.opaque)
            if probed.traits.takes.carry and probed.call.leaves_carry and not carry.tensors:
                raise carry_is_empty(stage, micro)

    def _inputs_of(self, stage: int, micro: int) -> Any:
        job = self._job
        if not job.feeding[stage]:
            inputs = job.of_end(self.batches.input(0, self.first + micro), stage, job.sources)
            return copied(inputs, self._world.device)
        return tuple([tensor for feeding in job.feeding[stage] for tensor in self._received(feeding, stage, micro)])

    def _received(self, feeding: int, stage: int, micro: int) -> Tensors:
        if self.chain.is_mine(feeding):
            return self._probed[feeding][micro].outputs
        edge, boundary = (feeding, stage), self.boundaries[feeding]
        if edge not in self._arrived:  # its rank sends all slices one after the other
            slices = range(self._job.slices)
            self._arrived[edge] = [self.chain.receive(feeding, boundary.at(place)) for place in slices]
        return self._arrived[edge][micro]


def _first_whole(job: Job, source: MicroBatchSource) -> tuple[int, bool] | Misuse:
    """Returns the number of the example's first micro-batch, in parts, that has an input for each source, and whether
    inputs are dicts by source; the error if no micro-batch has all.
    """
    by_source = job.is_by_end(source.input(0, 0), job.sources)
    for micro in range(0, job.passes, job.parts) if by_source else [0]:
        value = source.input(0, micro)
        if not by_source or all(job.of_end(value, stage, job.sources) is not None for stage in job.sources):
            return micro, by_source
    return example_lacks_inputs(names=[*map(job.end_name, job.sources)])


def copied(value: Any, device: torch.device) -> Any:
    """Copies data to a device, because a stage may change its input in place."""
    return mapped(to_device(value, device), torch.clone)
