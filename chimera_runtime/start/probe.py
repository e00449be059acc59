"""Probe: runs a forward and a backward of each stage on one micro-batch, to learn what stages hand to one another.

It runs in the first pipe, once, before the first update. Random generators, gradients, and the parameters, buffers and
attributes of modules are restored afterwards.
"""

import pickle
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch

from chimera_runtime.data.micro_batch_source import MicroBatchSource
from chimera_runtime.errors import Misuse
from chimera_runtime.errors import start as mistakes
from chimera_runtime.errors.stage import carry_is_empty
from chimera_runtime.model.model import Model
from chimera_runtime.program.job import Job
from chimera_runtime.program.kept_bytes import MovedBytes
from chimera_runtime.ranks.gathering import largest_of_rows
from chimera_runtime.ranks.world import World
from chimera_runtime.stage.module_state import ModuleState, StateSnapshot, Writes, state_of
from chimera_runtime.stage.saved_tensors import Footprint, footprint_of_slices, largest_mean
from chimera_runtime.start import stage_probe
from chimera_runtime.start.stage_probe import ProbedForward, StageCall
from chimera_runtime.values.boundary import Boundary, Traits, traits_of_slices, with_shared
from chimera_runtime.values.carries import NO_CARRY, Carry
from chimera_runtime.values.keywords import accepted, require_unused
from chimera_runtime.values.losses import expected_count
from chimera_runtime.values.mesh_tensors import rest
from chimera_runtime.values.nested import is_rows, mapped, to_device
from chimera_runtime.values.sendable import require_here, require_sendable
from chimera_runtime.values.shared_memory import ReleasedTensors
from chimera_runtime.values.tensors import all_generators_kept, draw_seed, generators_kept


@dataclass(frozen=True)
class ProbeResult:
    """Facts about all stages that the probe has learned, the same on every rank.

    ``boundaries`` describe the tensors that each stage but the last hands to the next, ``traits`` the behaviour of each
    stage. ``footprints`` have the memory that a forward of each stage keeps; they are empty unless it was measured.
    ``expected_count`` estimates the count of an update, see `losses.expected_count`; it is None if ``loss`` returns a
    mean. ``auxiliary`` are the names of the auxiliary losses of all stages, ``reports`` of what they report. ``bent``
    are the stages whose backward is not linear, looked for if there are counts. ``moved_bytes`` has the bytes of a
    micro-batch that go to the host, for each stage of which anything moves.
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
    """Probes all stages; every rank calls it. If ``measures`` is true, the result has footprints.

    Raises `Misuse` if a stage returns something that cannot be handed on, or no stage takes one of the keyword
    arguments.
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

    A rank publishes what it learns about a stage in the store, for all ranks, under a key with the number of the stage.
    Tensors go from rank to rank.
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
        """Runs all forwards; returns the boundaries and the traits of the stages.

        Which gradients come back is not known yet: `backward` corrects ``differentiable``, here equal to ``recorded``.
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
            raise mistakes.no_stage_takes_keyword(unknown[0])
        return boundaries, traits

    def count(self) -> float | None:
        """The count that ``loss`` returned next to a sum, or None if it returned a mean."""
        *_, last = self.world.job.sinks
        if self._is_mine(last):
            counts = [probed.count for probed in self._probed[last] if probed.count is not None]
            if self.world.job.lengths and not counts:
                raise Misuse(mistakes.MEAN_OF_UNEQUAL_SLICES)
            self._publish("count", sum(counts) / len(counts) if counts else None)
        count: float | None = self._read("count", last)
        return count

    def bent(self, boundaries: list[Boundary]) -> list[int]:
        """The stages whose backward is not linear in the gradients with which it begins."""
        job, mine = self.world.job, list[int]()
        for stage, of_slices in self._probed.items():
            differentiable = boundaries[stage].recorded if job.fed[stage] else None
            with all_generators_kept():
                of_stage = [stage_probe.is_linear(self.built[stage], probed, differentiable) for probed in of_slices]
            mine += [] if all(of_stage) else [stage]
        everywhere = self.world.control_group.collect("bent", mine, "for how its backwards treat gradients")
        return sorted({stage for of_rank in everywhere for stage in of_rank})

    def backward(self, boundaries: list[Boundary]) -> list[Boundary]:
        """Runs all backwards; returns the boundaries with ``differentiable``: whether each tensor has a gradient."""
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
        """Returns the bytes of a micro-batch that move to the host, by stage.

        If there are slices, the bytes are the largest mean of the first k slices, see `largest_mean`.
        """
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
        """The bytes that move to the host of one call of a stage: activations, and operands of the second half."""
        job, arguments = self.world.job, (self.model, stage, self.built[stage], call, differentiable)
        return MovedBytes(
            stage_probe.measure_moved(*arguments) if stage in job.moving else 0,
            stage_probe.measure_moved_operands(*arguments, apart=bool(job.period))
            if stage in job.moving_operands
            else 0,
        )

    def release(self, boundaries: list[Boundary]) -> list[Boundary]:
        """Frees all graphs and restores the modules; returns the boundaries with ``owned_by_stage``.

        An output counts as owned by its stage if something still holds its memory then, such as a buffer of the module.

        Raises `Misuse`, on all ranks, if a stage or the loss trains or writes what the pipeline does not know.
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
        """Runs the forward of a stage of this rank on each slice; errors as of `_run`."""
        self._calls[stage], self._probed[stage] = [], []
        carry = NO_CARRY
        for micro in range(self.world.job.slices):
            call, probed = self._run(stage, micro, before, names, carry)
            self._calls[stage].append(call)
            self._probed[stage].append(probed)
            carry = probed.next_carry(call)
            if carry.opaque is not None:
                raise mistakes.carry_is_opaque(stage, carry.opaque)
            if probed.traits.takes.carry and micro + 1 < self.world.job.slices and not carry.tensors:
                raise carry_is_empty(stage, micro)

    def _run(
        self, stage: int, micro: int, before: Boundary | None, names: tuple[str, ...], carry: Carry
    ) -> tuple[StageCall, ProbedForward]:
        """Runs the forward of a stage of this rank; raises `Misuse` if the schedule cannot run such a stage."""
        world, module, is_last = self.world, self.built[stage], not self.world.job.fed[stage]
        inputs = self._inputs_of(stage, micro, before)
        target = _copied(self.batches.target(0, micro), world.device) if is_last else None
        accepted_names = accepted(module, names)
        loaded = _copied(self.batches.keywords(0, micro), world.device) if accepted_names else {}
        keywords = {name: loaded[name] for name in accepted_names}
        leaves_carry = micro + 1 < world.job.slices
        call = StageCall(before, inputs, target, is_last, keywords=keywords, carry=carry, leaves_carry=leaves_carry)
        probed = stage_probe.probe_forward(self.model, stage, module, call, measures=self.measures)
        if stage in world.job.split_backward:
            probed = stage_probe.with_obstacle(probed)
        if not is_last:
            require_here(stage, probed.outputs, world.device)
            if any(path[stage] != path[fed] for path in world.job.placement for fed in world.job.fed[stage]):
                require_sendable(stage, probed.outputs, world.backend)
        if probed.traits.in_place and stage in world.job.recomputing:
            raise mistakes.recomputed_stage_changes_input(stage, probed.traits.in_place)
        if stage in world.job.grouped and not is_last and not is_rows(probed.outputs):
            raise mistakes.output_without_dimensions(stage)
        return call, probed

    def _publish_forward(self, stage: int, writes: Writes) -> None:
        """Publishes the facts of a forward, and sends its outputs to the ranks of the stages that it feeds.

        If the forward has done to parameters what cannot be undone, it publishes an error.
        """
        if writes.replaced or writes.lost:
            refusal = (
                mistakes.forward_replaces_parameter if writes.replaced else mistakes.forward_writes_large_parameter
            )
            self._publish(f"forward/{stage}", refusal(stage, *(writes.replaced or writes.lost)[:1]))
            return
        of_slices = self._probed[stage]
        boundary, *others = [Boundary.of(probed.form, probed.outputs) for probed in of_slices]
        job = self.world.job
        if job.lengths and job.fed[stage]:
            together = boundary.with_slices(others)
            if together is None:
                raise mistakes.slices_differ_in_form(stage)
            boundary, others = together, []
        for number, other in enumerate(others, start=1):
            if job.fed[stage] and (other.form, other.shapes) != (boundary.form, boundary.shapes):
                raise mistakes.slices_differ(stage, number, other.shapes, boundary.shapes)
        traits = traits_of_slices([probed.traits for probed in of_slices])
        traits = replace(traits, changed=writes.changed, touched=writes.touched)
        footprint = footprint_of_slices([probed.footprint for probed in of_slices], job.lengths)
        self._publish(f"forward/{stage}", (boundary, traits, footprint))
        for fed in job.fed[stage]:
            for tensor in () if self._is_mine(fed) else [t for probed in of_slices for t in probed.outputs]:
                what = f"for stage {fed} to take the first micro-batch"
                self.world.control_group.send(tensor, self._rank_of(fed), what)

    def _inputs_of(self, stage: int, micro: int, before: Boundary | None) -> Any:
        """The input of a stage: a micro-batch or slice of the dataset, or the outputs of the stage before it."""
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
        """Adds to the footprints the memory that each split backward keeps between its halves."""
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
        """The rank that runs a stage of the first pipe."""
        return self.world.place.rank_of(0, self.world.job.placement[0][stage])

    def _is_mine(self, stage: int) -> bool:
        return self.world.place.rank == self._rank_of(stage)

    def _keyword_names(self) -> tuple[str, ...]:
        """The names of the keyword arguments of the first micro-batch."""
        if self._is_mine(0):
            with all_generators_kept():
                self._publish("keywords", list(self.batches.keywords(0, 0)))
        return tuple(self._read("keywords", 0))

    def _publish(self, key: str, fact: object) -> None:
        """Publishes a fact, pickled: the structure of an output may have classes of the user."""
        self.world.control_group.store.set(key, pickle.dumps(fact).hex())

    def _read(self, key: str, stage: int) -> Any:
        """Reads a fact about a stage, once the rank of the stage has published it."""
        what = f"for what stage {stage} does with the first micro-batch"
        text = self.world.control_group.wait_for_key(key, self._rank_of(stage), what).decode()
        return pickle.loads(bytes.fromhex(text))


def _copied(value: Any, device: torch.device) -> Any:
    """Copies data to a device, because a stage may change its input in place."""
    return mapped(to_device(value, device), torch.clone)
