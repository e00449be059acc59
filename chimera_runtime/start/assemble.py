"""Makes the stages of a rank: modules with initial weights, then optimizers, gradient sums and receive buffers."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property, partial
from operator import attrgetter
from typing import Any
from weakref import WeakSet

import torch

from chimera_runtime.blame import LaneOperation, Located, ModelError
from chimera_runtime.data.feed import Feed
from chimera_runtime.data.item_order import ItemOrder, Share, is_stream
from chimera_runtime.data.loader import DataWorkers, Loader, Messages, ReaderMessages
from chimera_runtime.data.micro_batch_source import MicroBatchSource
from chimera_runtime.data.mini_batch import ALL, ItemLoading, Uses
from chimera_runtime.errors import Misuse
from chimera_runtime.errors import start as mistakes
from chimera_runtime.errors.data import BATCH_SAMPLER_NEEDS_NUMBERS, input_is_missing, order_of_iterable
from chimera_runtime.errors.start import backward_is_bent, forward_writes_parameter, stages_are_in_evaluation_mode
from chimera_runtime.lane.absence_lane import AbsenceLane, at_times
from chimera_runtime.lane.lane import Incoming, Lane, LaneComponents, Load, Outgoing, shared
from chimera_runtime.lane.profiler_ranges import ranged, ranges_on
from chimera_runtime.lane.stream_lane import Driver, StreamLane, UpdateRange
from chimera_runtime.model.model import Model, label
from chimera_runtime.model.naming import parameters_by_name
from chimera_runtime.model.ties import Tie, by_group, declared, unite
from chimera_runtime.program.absence import Absence
from chimera_runtime.program.compiled_program import RankScript
from chimera_runtime.program.job import Job
from chimera_runtime.program.numbering import Numbering, Round, rounds_of
from chimera_runtime.program.rank_facts import VALUES, Group, RankFacts, Route, group_text, spread
from chimera_runtime.ranks.agreement import ControlGroup, added_over_all
from chimera_runtime.ranks.devices import cuda_warnings
from chimera_runtime.ranks.rendezvous import failures_shared
from chimera_runtime.ranks.world import World
from chimera_runtime.stage.gradient_sums import GradientSum, WideGradientSum
from chimera_runtime.stage.saved_tensors import SMALLEST
from chimera_runtime.stage.stage import Stage
from chimera_runtime.stage.stage_output import LossOutput, SendOutput, SendToSeveral, StageOutput
from chimera_runtime.stage.weight_versions import Unstepped, Versions, WeightGroup, Weights, masters
from chimera_runtime.start.inventory import compare_stages
from chimera_runtime.start.probe import ProbeResult, memory_report, probe_stages
from chimera_runtime.values.boundary import Keywords, Traits, keyword_names
from chimera_runtime.values.last_stage import modules_in
from chimera_runtime.values.losses import Count, CountedLoss, loss_name
from chimera_runtime.values.nested import generators_kept, to_device

# Loaders of a pipeline, and which parts of a mini-batch each worker uses: a rank loads no other parts.

_INPUT, _TARGET, _KEYWORDS = range(3)


def needed_inputs(job: Job, facts: RankFacts, *, takes_keywords: bool) -> Uses:
    """Returns, for each micro-batch that a worker uses, the parts that it uses: input, target, keyword arguments."""
    parts: defaultdict[int, set[int]] = defaultdict(set)
    for part, runs in ((_INPUT, facts.inputs), (_TARGET, facts.targets)):
        for micro in spread(runs):
            parts[micro % job.micro_batches].add(part)
    if takes_keywords:
        for micro in range(job.micro_batches):
            parts[micro].add(_KEYWORDS)
    return {micro: frozenset(parts[micro]) for micro in sorted(parts)}


@dataclass
class LoaderMaker:
    """Makes the loaders of a pipeline; every rank makes the same ones, in the same order.

    ``programs`` has the job, and the facts for each worker, for each number of micro-batches of an update. ``seed`` is
    that of loaders without one.
    """

    control_group: ControlGroup
    programs: Mapping[int, tuple[Job, Sequence[RankFacts]]]
    located: Located
    feed: Feed
    _: KW_ONLY
    traits: Sequence[Traits]
    seed: int
    _messages: Messages = field(default_factory=Messages, init=False)
    _made: int = field(default=0, init=False)
    _loaders: WeakSet[Loader] = field(default_factory=WeakSet, init=False)

    @cached_property
    def _needed(self) -> dict[int, list[Uses]]:
        """The parts of a mini-batch that each worker uses, by the number of micro-batches."""
        return {
            number: [
                needed_inputs(job, facts, takes_keywords=any(self.traits[stage].keywords for stage in facts.stages))
                for facts in workers
            ]
            for number, (job, workers) in self.programs.items()
        }

    @property
    def needed(self) -> Uses:
        """The parts of a mini-batch of N micro-batches that this rank uses, by micro-batch."""
        return self._needed[max(self.programs)][self.control_group.place.worker]

    def _used(self, number: int) -> Uses:
        """The parts of a mini-batch of ``number`` micro-batches that this rank uses in an update, or in an evaluation,
        which runs rounds of the largest program.
        """
        worker, largest = self.control_group.place.worker, max(self.programs)
        rounds = [Round(largest, start) for start in range(0, number, largest)]
        with suppress(Misuse):  # an update refuses such a number
            rounds += rounds_of(number, self.programs)
        parts: defaultdict[int, frozenset[int]] = defaultdict(frozenset)
        for each in filter(attrgetter("number"), rounds):
            for micro, of_micro in self._needed[each.number][worker].items():
                parts[each.start + micro] |= of_micro
        return {micro: parts[micro] for micro in sorted(parts) if micro < number}

    def make(
        self,
        dataset: Any,
        workers: DataWorkers,
        *,
        shuffle: bool,
        sampler: Iterable[Any] | None,
        batch_sampler: Iterable[Any] | None,
        seed: int | None,
        collate_fn: Callable[[list[Any]], Any] | None,
        drop_last: bool,
    ) -> Loader:
        """Makes a loader; arguments and errors are those of `Pipeline.loader`."""
        if workers.count < 0 or workers.ahead < 1:
            raise mistakes.loader_numbers_are_too_small(num_workers=workers.count, prefetch_factor=workers.ahead)
        if batch_sampler is not None:
            if sampler is not None:
                raise Misuse(mistakes.TWO_SAMPLERS)
            if len(self.programs) == 1:
                raise Misuse(BATCH_SAMPLER_NEEDS_NUMBERS)
        sampler, gives_batches = batch_sampler or sampler, batch_sampler is not None
        if is_stream(dataset) and (shuffle or sampler is not None):
            raise order_of_iterable(name="shuffle=True" if sampler is None else "a sampler")
        if shuffle and sampler is not None:
            raise Misuse(mistakes.SAMPLER_AND_SHUFFLE)
        if getattr(sampler, "num_replicas", 1) > 1:
            raise Misuse(mistakes.SAMPLER_OF_ONE_RANK)
        drawn_by, place = self.seed if seed is None else seed, self.control_group.place
        self._made += 1
        largest, are_several = max(self.programs), len(self.programs) > 1
        readers = frozenset(worker for worker, parts in enumerate(self._needed[largest]) if parts)
        uses = self.needed
        if are_several and is_stream(dataset):  # whose last mini-batch may be of any size
            uses = dict.fromkeys(range(largest), ALL) if place.worker in readers else {}
        loader = Loader(
            loading=ItemLoading(dataset, drawn_by, collate_fn, names=self.feed.names),
            share=Share(self.feed.size, largest, place.copies, place.copy),
            uses=uses,
            uses_of=self._used if are_several else None,
            order=ItemOrder(dataset, drawn_by, shuffle, sampler, gives_batches),
            reader_messages=ReaderMessages(self.control_group, readers, self._made, self._messages),
            located=self.located.for_loader(self.control_group.refusals.note_loading),
            workers=replace(workers, timeout=self.control_group.timeout),
            drop_last=drop_last,
        )
        self._loaders.add(loader)
        return loader

    def close(self) -> None:
        """Ends the data workers of all loaders."""
        for loader in self._loaders:
            loader.close()


# `RankContext`: a rank's part of a program together with the model, as it is before the stages are made.


@dataclass(frozen=True)
class RankContext:
    """Everything that stages and a lane are made from, for ``--check`` and then again for the training itself.

    ``script`` and ``facts`` are this rank's part of the program. ``source`` loads the parts of micro-batches; it is
    None in a rehearsal. With ``ranges`` stages, ties and links are wrapped for a profiler. ``programs`` has jobs and
    facts of the programs for other numbers of micro-batches.
    """

    world: World
    script: RankScript
    facts: RankFacts
    model: Model
    probed: ProbeResult
    seed: int
    source: MicroBatchSource | None
    ranges: bool = False
    programs: Mapping[int, tuple[Job, RankFacts]] = field(default_factory=dict)

    @cached_property
    def ties(self) -> tuple[Tie, ...]:
        """Parameters that stages share, as the model file declares them."""
        return declared(self.model, self.world.job)

    @cached_property
    def absence(self) -> Absence | None:
        """The stages that micro-batches do not have; None if each micro-batch has all."""
        return Absence(self.world.job) if self.world.job.lacking or self.may_lack_input else None

    @property
    def is_counted(self) -> bool:
        """Whether the loss is a sum and a count."""
        return self.probed.expected_count is not None

    @cached_property
    def counts(self) -> Mapping[int, Callable[[Any], Any]]:
        """Functions that return the counts of targets, by the stage that computes the loss, if several stages do."""
        job = self.world.job
        losses = {sink: self.model.of_sink(job.end_name(sink)).loss for sink in job.sinks if len(job.sinks) > 1}
        return {sink: loss.count for sink, loss in losses.items() if isinstance(loss, CountedLoss)}

    @cached_property
    def loss_factors(self) -> dict[int, float]:
        """By what the losses of `counts` are multiplied in the update under way: `agree_on_counts`."""
        return dict.fromkeys(self.counts, 1.0)

    @property
    def may_lack_input(self) -> bool:
        """Whether inputs are dicts by source, of which entries may lack."""
        return self.world.job.may_lack_input and self.probed.by_source


# The lane of a rank: its stages, its links to other workers, and the loading of inputs and targets.


def components_of(context: RankContext, stages: Mapping[int, Stage]) -> LaneComponents:
    """Returns the components of this rank's lane; with ``context.ranges`` they are wrapped for a profiler."""
    world, job, facts = context.world, context.world.job, context.facts

    def incoming(route: Route) -> Any:
        value = job.value_of(route)
        of_makers = getattr(stages[route.target], VALUES[value].slots)
        slots = of_makers[job.makers(value, route.target).index(route.source)]
        return shared(Incoming(world.peer(route.worker), route, job, slots), route, job, stages)

    load_input, load_target = loads(context.source, job, world.device, context.absence)
    components = LaneComponents(
        stages=stages,
        incoming={route: incoming(route) for route in facts.incoming},
        outgoing={route: Outgoing(world.peer(route.worker), route, job) for route in facts.outgoing},
        load_input=load_input,
        load_target=load_target,
        ties={tie.group: tie for stage in stages.values() for tie in stage.ties},
    )
    if context.absence is not None and (context.may_lack_input or context.is_counted):
        components = at_times(components, context.absence, counted=context.is_counted)
    return ranged(components, ranges_on(world.device), job.slices) if context.ranges else components


def lane_of(context: RankContext, components: LaneComponents) -> Lane:
    """Makes the lane, the argument with which the functions of a rank's script are called."""
    job = context.world.job
    if job.period:
        return StreamLane(components, UpdateRange(job.passes), context.facts.initial)
    if context.absence is None:
        return Lane(components)
    control = context.world.control_group
    total = (lambda count: added_over_all(control, count)[0]) if context.is_counted else None
    return AbsenceLane(components, context.absence, total)


def driver_of(context: RankContext, lane: Lane) -> Driver:
    """Returns the driver, which runs the turns of a stream: the lane of this rank must be a `StreamLane`."""
    assert isinstance(lane, StreamLane)
    assert context.facts.turns is not None
    return Driver(context.script.turn, lane, context.facts.turns)


def run_stream(context: RankContext, lane: Lane, updates: int) -> None:
    """Runs the first ``updates`` updates of a stream, to the end of the last one."""
    driver = driver_of(context, lane)
    for _ in range(updates):
        driver.add_update()
    driver.drain()


def loads(
    source: MicroBatchSource | None, job: Job, device: torch.device, absence: Absence | None = None
) -> tuple[Load, Load]:
    """Returns two functions, of an update and a micro-batch, that load its input and its target onto the device, or
    None without a source. A `ModelError` in one of them names the stage and the micro-batch. If several stages get an
    input or a target, each function also takes the number of the stage, and returns the part for it (`Job.of_end`): of
    an input None if by ``absence`` the micro-batch lacks the stage, else a `Misuse` if there is none.
    """
    if source is None:
        return (lambda _update, _micro, *_stage: None), (lambda _update, _micro, *_stage: None)

    component = source.component

    def located(kind: str, number: int, ends: Sequence[int]) -> Load:
        def loaded(update: int, micro: int, stage: int = ends[-1]) -> Any:
            try:
                value = component(update, micro, number)
            except ModelError as error:
                later, place = divmod(micro, job.passes)
                error.operation = error.operation or LaneOperation(kind, stage, (place,), update + later, job.slices)
                raise
            if type(value) is torch.Tensor and value.device == device:
                return value
            of_stage = job.of_end(value, stage, ends)
            is_missing = of_stage is None and number == _INPUT and job.is_by_end(value, ends)
            if is_missing and (absence is None or absence.has(micro, stage)):
                later, place = divmod(micro // job.parts, job.micro_batches)
                raise input_is_missing(name=job.end_name(stage), micro=place, update=update + later)
            return to_device(of_stage, device)

        return loaded

    return located("load input", _INPUT, job.sources), located("load target", _TARGET, job.sinks)


MakeOptimizer = Callable[[list[torch.nn.Parameter]], Any]
"""A function from the parameters of a weight group to their optimizer."""


def located_at(world: World, facts: RankFacts, *, explains: bool) -> Located:
    """Returns the `Located` for the calls of this rank; ``explains`` is passed to `World.leak_groups`."""
    abandon = partial(world.leak_groups, explains=explains)
    return Located(
        world.place.rank,
        world.place.worker,
        lambda: memory_report(world.device, facts, world.job.slices, world.job.units),
        abandon,
        world.control_group.refusals.tell,
    )


def build_and_probe(
    world: World, located: Located, model: Model, feed: Feed, *, seed: int, measures: bool
) -> tuple[dict[int, torch.nn.Module], ProbeResult, list[str]]:
    """Builds and probes the modules of this rank's stages; returns modules, result and remarks, which are the same on
    all ranks.

    ``feed`` must hold the example already; its ``names`` of keyword arguments are set here. If a rank raises an error,
    the ranks that wait for it raise `PeerLost`.
    """
    require_losses(world.job, model)
    with located, failures_shared(world.control_group.store, world.place.rank), generators_kept():
        built = modules(world, model, seed)
        require_frozen(world.job, built)
        compared = compare_stages(world.control_group, model, built, declared(model, world.job))
        probed = probe_stages(world, model, feed, built, seed=seed, measures=measures)
    feed.names = keyword_names(probed.traits, built)
    of_model = () if model.layers is None else model.layers.remarks
    return built, probed, [*of_model, *remarks(world.job, world.backend, world.device, probed), *compared]


def modules(world: World, model: Model, seed: int) -> dict[int, torch.nn.Module]:
    """Makes the modules of this rank's stages, with their initial weights; every rank calls it. A parameter that
    several of them share is one object, and each is labelled with the model's own name for it.
    """
    ties = declared(model, world.job)
    held = [s for s, workers in enumerate(world.job.holders) if world.place.worker in workers]
    members = None if world.job.period else world.control_group.members
    built: dict[int, torch.nn.Module] = {}
    for s in held:
        is_sink = s in world.job.sinks
        of_stage = model.of_sink(world.job.end_name(s)) if is_sink else model
        built[s] = of_stage.stage(s, world.job.stages, seed, world.device, members=members, is_sink=is_sink)
    unite(world.control_group, world.job, built, ties, model=model)
    label(parameters_by_name(model, built, ties))
    return built


def require_losses(job: Job, model: Model) -> None:
    """Raises `Misuse` if a dict of losses has not one for each stage that feeds no other, or a loss is a module with
    parameters or buffers that would not be those of the last stage: they have no names of their own.
    """
    names = [*map(job.end_name, job.sinks)]
    if isinstance(model.loss, Mapping) and model.loss.keys() != {*names}:
        raise mistakes.losses_are_of_others(scheme=job.name, names=names, losses=[*model.loss])
    for name in names[:-1]:
        modules = modules_in(model.of_sink(name).loss)
        if any([*module.parameters(), *module.buffers()] for module in modules):
            raise mistakes.loss_of_another_has_state(name=name, last=names[-1])


def require_frozen(job: Job, built: Mapping[int, torch.nn.Module]) -> None:
    """Raises `Misuse` if a program has frozen stages, and ``requires_grad`` of a module says otherwise."""
    for stage, module in built.items() if job.frozen else ():
        named = dict(module.named_parameters())
        trained = [name for name, parameter in named.items() if parameter.requires_grad]
        if stage in job.frozen and trained:
            raise mistakes.frozen_stage_is_trained(scheme=job.name, stage=job.stage_name(stage), names=trained)
        if stage not in job.frozen and named and not trained:
            raise mistakes.trained_stage_is_frozen(scheme=job.name, stage=job.stage_name(stage), frozen=job.frozen)


def remarks(job: Job, backend: str, device: torch.device, probed: ProbeResult) -> list[str]:
    """Warnings for the user about stages that cannot run as scheduled, and about settings that may make ranks hang."""
    alone = [(s, probed.traits[s].alone) for s in job.grouped if s in job.recomputing]
    whole = [(s, probed.traits[s].whole) for s in job.split_backward]
    evaluating = [s for s, traits in enumerate(probed.traits) if traits.evaluates]
    return [
        *([stages_are_in_evaluation_mode(evaluating)] if evaluating else []),
        *[forward_writes_parameter(stage=s, names=t.changed) for s, t in enumerate(probed.traits) if t.changed],
        *[f"stage {s} {why}: it runs one micro-batch at a time, also where it has several" for s, why in alone if why],
        *[f"stage {s} has {why} in it: its I is a whole backward, and its W does nothing" for s, why in whole if why],
        *[
            f"stage {s} saves no tensor of {SMALLEST} bytes or more that can move to the host, as weights, inputs, "
            "outputs, carries and what torch.utils.checkpoint keeps stay where they are: its offload and reload do "
            "nothing"
            for s in job.moving
            if not probed.moved_bytes[s].activations
        ],
        *[
            f"stage {s} keeps nothing of {SMALLEST} bytes or more between I and W that can move to the host: its "
            "offload_operands and reload_operands do nothing"
            for s in job.moving_operands
            if not probed.moved_bytes[s].operands
        ],
        *[backward_is_bent(stage=s) for s in probed.bent],
        *cuda_warnings(backend, device.type),
    ]


def loss_share(probed: ProbeResult, passes: int) -> float:
    """Weight of the loss of one micro-batch, or part of one, in that of an update of ``passes`` over all copies, with
    which the backward begins. If ``loss`` returns counts, it follows from an estimated count, which `GradientSum`
    corrects.
    """
    return 1 / (probed.expected_count or passes)


def assemble(
    context: RankContext,
    built: dict[int, torch.nn.Module],
    optimizer: MakeOptimizer | None,
    make_stage: Callable[..., Stage] = Stage,
    sum_dtype: torch.dtype | None = None,
) -> dict[int, Stage]:
    """Returns the stages of this rank by number, ready for the first update.

    ``optimizer`` makes the optimizer of a weight group, if steps are part of the schedule; without it the caller steps
    with the gradients of an update. ``make_stage`` makes a stage from the arguments of `Stage`. Gradients are added up
    in ``sum_dtype``, by default each in the dtype of its parameter.
    """
    world, model, probed, job = context.world, context.model, context.probed, context.world.job
    share = loss_share(probed, job.passes * world.place.copies)

    def numbering() -> Numbering:
        return Numbering(context.seed, world.place.copy, job.passes, job.cycle, slices=job.slices)

    def gradients_of(group: Group, trained: Sequence[torch.nn.Parameter]) -> GradientSum:
        peers, members = world.sums[group]
        kind = GradientSum if sum_dtype is None else WideGradientSum
        gradient_sum = kind(
            name=group_text(group),
            parameters=trained,
            group=peers,
            members=members,
            names=world.control_group.names,
            settle=world.control_group.wait,
            dtype=sum_dtype,
            loss_count=None if probed.expected_count is None else Count(group[0], probed.expected_count, world.device),
            staging=world.staging,
            absence=context.absence,
        )
        world.holders.add(gradient_sum)
        return gradient_sum

    def output_of(number: int, module: torch.nn.Module, of_stage: Numbering) -> StageOutput:
        if job.fed[number]:
            moves_operands = number in job.moving_operands
            after, readers = probed.boundaries[number], job.fed[number]
            if len(readers) > 1:
                return SendToSeveral(number, after, share, moves_operands=moves_operands, readers=readers)
            return SendOutput(number, after, share, moves_operands=moves_operands)
        trains = any(p.requires_grad for p in module.parameters())
        if not job.at_times:  # else a micro-batch may have no stage whose weights need its gradient
            trains = trains or any(any(probed.boundaries[stage].recorded) for stage in job.feeding[number])
        name = job.end_name(number)
        return LossOutput(
            model.of_sink(name).judge,
            share,
            of_stage,
            counted=probed.expected_count is not None,
            read=world.read,
            trains=trains,
            counts_items=number == job.sinks[-1],
            name=loss_name(name) if len(job.sinks) > 1 else "",
            stage=number,
            absence=context.absence,
            factors=context.loss_factors if number in context.counts else None,
        )

    def weights_of(trained: list[torch.nn.Parameter]) -> Weights:
        if optimizer is None:
            return Unstepped()
        if not job.period:
            return Weights(optimizer(trained))
        stepped = masters(trained)  # updates overlap: the weights have several versions
        return Versions(trained, stepped, optimizer(stepped))

    def load_keywords(update: int, micro: int) -> Keywords:
        if context.source is None:  # in a rehearsal
            return {}
        keywords: Keywords = to_device(context.source.keywords(update, micro), world.device)
        return keywords

    # Ties come before stages: `optimizer` must be called in the order of `by_group`.
    groups = {
        group: [p for p in of_group if p.requires_grad] for group, of_group in by_group(built, context.ties).items()
    }
    ties = {
        group: WeightGroup(group, weights_of(trained), gradients_of(group, trained), numbering())
        for group, trained in groups.items()
        if len(group) > 1
    }
    stages: dict[int, Stage] = {}
    for number, module in built.items():
        facts, of_stage, trained = context.facts.stages[number], numbering(), groups[number,]
        stages[number] = make_stage(
            number=number,
            module=module,
            weights=weights_of(trained),
            before=probed.before(number, job),
            output=output_of(number, module, of_stage),
            gradient_sum=gradients_of((number,), trained),
            traits=probed.traits[number],
            numbering=of_stage,
            recomputed=frozenset(spread(facts.recomputed)),
            ties=[tie for group, tie in ties.items() if number in group],
            load_keywords=load_keywords,
            read=world.read,
            host_link=world.host_link if job.moves else None,
            backwards=job.backwards[number],
            absence=context.absence,
        )
        stages[number].reserve(facts.slots, world.device)
    return stages
