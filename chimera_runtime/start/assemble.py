"""Makes the stages of a rank: modules with initial weights, then optimizers, gradient sums and receive buffers."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from chimera_runtime.blame import Located
from chimera_runtime.data.feed import Feed
from chimera_runtime.errors.start import backward_is_bent, forward_writes_parameter, stages_are_in_evaluation_mode
from chimera_runtime.model.arguments import label
from chimera_runtime.model.model import Model
from chimera_runtime.model.naming import parameters_by_name
from chimera_runtime.model.ties import by_group, declared, unite
from chimera_runtime.program.job import Job
from chimera_runtime.program.numbering import Numbering
from chimera_runtime.program.rank_facts import RankFacts, spread
from chimera_runtime.program.weight_groups import Group, group_text
from chimera_runtime.ranks.devices import cuda_warnings
from chimera_runtime.ranks.rendezvous import failures_shared
from chimera_runtime.ranks.world import World
from chimera_runtime.stage.gradient_sums import GradientSum, WideGradientSum
from chimera_runtime.stage.stage import Stage
from chimera_runtime.stage.stage_output import LossOutput, SendOutput, StageOutput
from chimera_runtime.stage.tensor_moves import SMALLEST
from chimera_runtime.stage.weight_versions import Unstepped, Versions, WeightGroup, Weights, masters
from chimera_runtime.start.inventory import compare_stages
from chimera_runtime.start.memory_report import memory_report
from chimera_runtime.start.probe import ProbeResult, probe_stages
from chimera_runtime.start.rank_context import RankContext
from chimera_runtime.values.boundary import keyword_names
from chimera_runtime.values.keywords import Keywords
from chimera_runtime.values.losses import Count
from chimera_runtime.values.nested import to_device
from chimera_runtime.values.tensors import generators_kept

MakeOptimizer = Callable[[list[torch.nn.Parameter]], Any]
"""A function from the parameters of a weight group to their optimizer."""


def located_at(world: World, facts: RankFacts, *, explains: bool) -> Located:
    """Returns the `Located` for the calls of this rank: it adds rank, worker and memory to errors raised inside.

    ``explains`` is passed to `World.leak_groups`.
    """
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
    """Builds the modules of this rank's stages, and probes them; returns modules, result and remarks for the user.

    Every rank calls it, and gets the same remarks.

    ``feed``, which gives stages their micro-batches, must hold the example already; its ``names`` are set here, to the
    names of the keyword arguments. If a rank raises an error, the ranks that wait for it raise `PeerLost`.
    """
    with located, failures_shared(world.control_group.store, world.place.rank), generators_kept():
        built = modules(world, model, seed)
        compared = compare_stages(world.control_group, model, built, declared(model, world.job))
        probed = probe_stages(world, model, feed, built, seed=seed, measures=measures)
    feed.names = keyword_names(probed.traits, built)
    of_model = () if model.layers is None else model.layers.remarks
    return built, probed, [*of_model, *remarks(world.job, world.backend, world.device, probed), *compared]


def modules(world: World, model: Model, seed: int) -> dict[int, torch.nn.Module]:
    """Makes the modules of this rank's stages, with their initial weights; every rank calls it.

    A parameter that several stages of this rank share is one object, and each parameter is labelled with the model's
    own name for it.
    """
    ties = declared(model, world.job)
    held = [s for s, workers in enumerate(world.job.holders) if world.place.worker in workers]
    members = None if world.job.period else world.control_group.members
    built = {s: model.stage(s, world.job.stages, seed, world.device, members=members) for s in held}
    unite(world.control_group, world.job, built, ties, model=model)
    label(parameters_by_name(model, built, ties))
    return built


def remarks(job: Job, backend: str, device: torch.device, probed: ProbeResult) -> list[str]:
    """Warnings for the user about stages that cannot run as scheduled, and about settings that may make ranks hang."""
    alone = [(s, probed.traits[s].alone) for s in job.grouped if s in job.recomputing]
    whole = [(s, probed.traits[s].whole) for s in job.split_backward]
    evaluating = [s for s, traits in enumerate(probed.traits) if traits.evaluates]
    return [
        *([stages_are_in_evaluation_mode(evaluating)] if evaluating else []),
        *[forward_writes_parameter(s, t.changed) for s, t in enumerate(probed.traits) if t.changed],
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
        *[backward_is_bent(s) for s in probed.bent],
        *cuda_warnings(backend, device.type),
    ]


def loss_share(job: Job, copies: int, probed: ProbeResult) -> float:
    """Weight of the loss of one micro-batch in the loss of the update over all copies.

    It is the gradient with which the backward of the loss begins. If ``loss`` returns sums and counts, it is one
    divided by an estimated count; `GradientSum` corrects this by the actual count.
    """
    return 1 / (probed.expected_count or job.passes * copies)


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
    share = loss_share(job, world.place.copies, probed)

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
        )
        world.holders.add(gradient_sum)
        return gradient_sum

    def output_of(number: int, module: torch.nn.Module, of_stage: Numbering) -> StageOutput:
        if job.fed[number]:
            moves_operands = number in job.moving_operands
            return SendOutput(number, probed.boundaries[number], share, moves_operands=moves_operands)
        trains = any(p.requires_grad for p in module.parameters())
        trains = trains or any(any(probed.boundaries[stage].recorded) for stage in job.feeding[number])
        counted = probed.expected_count is not None
        return LossOutput(model.judge, share, of_stage, counted=counted, read=world.read, trains=trains)

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
            host_link=world.host_link,
        )
        stages[number].reserve(facts.slots, world.device)
    return stages
