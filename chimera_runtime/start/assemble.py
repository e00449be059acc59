"""Builds the stages of a rank: modules, optimizers, receive buffers."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from chimera_runtime.errors import Misuse
from chimera_runtime.model.arguments import label
from chimera_runtime.model.model import Model
from chimera_runtime.model.naming import parameters_by_name
from chimera_runtime.model.ties import by_group, declared, unite
from chimera_runtime.program.numbering import Numbering
from chimera_runtime.program.rank_facts import spread
from chimera_runtime.program.weight_groups import Group, group_text
from chimera_runtime.ranks.devices import cuda_queue_warning
from chimera_runtime.ranks.world import World
from chimera_runtime.stage.stage import Stage
from chimera_runtime.stage.stage_output import LossOutput, SendOutput, StageOutput
from chimera_runtime.stage.sums import GradientSum, WideGradientSum
from chimera_runtime.stage.weight_group import WeightGroup
from chimera_runtime.stage.weight_versions import Unstepped, Versions, Weights, masters
from chimera_runtime.start.probe import Findings
from chimera_runtime.start.rank_context import Setting
from chimera_runtime.values.losses import Count
from chimera_runtime.values.shards import local
from chimera_runtime.values.tensors import digest


def modules(world: World, model: Model, seed: int) -> dict[int, torch.nn.Module]:
    """The modules of the stages that this rank holds, with their initial weights; every rank calls it.

    What stages share is one parameter, and each carries the model's own name.
    """
    ties = declared(model, world.job)
    held = [s for s, workers in enumerate(world.job.holders) if world.place.worker in workers]
    has_others = len(world.control_group.members) < dist.get_world_size()
    members = world.control_group.members if has_others and not world.job.period else None
    built = {s: model.stage(s, world.job.stages, seed, world.device, members) for s in held}
    unite(world, built, ties, model)
    label(parameters_by_name(model, built, ties))
    return built


def remarks(world: World, findings: Findings) -> list[str]:
    """What the user should know of stages that do not run as the schedule has them, and of settings that may hang."""
    alone = [(s, findings.traits[s].alone) for s in world.job.grouped if s in world.job.recomputing]
    whole = [(s, findings.traits[s].whole) for s in world.job.split_backward]
    return [
        *[f"stage {s} {why}: it runs one micro-batch at a time, also where it has several" for s, why in alone if why],
        *[f"stage {s} has {why} in it: its I is a whole backward, and its W does nothing" for s, why in whole if why],
        *cuda_queue_warning(world.backend, world.device.type),
    ]


def agree_on_weights(world: World, built: dict[int, torch.nn.Module]) -> None:
    """Makes sure that the replicas of every stage start with the same weights.

    Raises
    ------
    Misuse
        On a rank whose weights differ from those of the first rank that holds the stage.
    """
    for number, module in built.items():
        first, *_ = world.ranks_of(number)
        mine = digest(map(local, module.parameters()))
        world.control_group.store.set(f"weights/{number}/{world.place.rank}", mine)
        what = f"for the initial weights of stage {number}"
        if world.control_group.wait_for_key(f"weights/{number}/{first}", first, what).decode() != mine:
            raise Misuse(
                f"stage {number} starts with other weights on rank {world.place.rank} than on rank {first}: "
                "a stage or a layer may draw random numbers from torch alone, which is seeded alike on all ranks"
            )


def assemble(
    setting: Setting,
    built: dict[int, torch.nn.Module],
    optimizer: Callable[[list[torch.nn.Parameter]], Any] | None,
    make_stage: Callable[..., Stage] = Stage,
    sum_dtype: torch.dtype | None = None,
) -> dict[int, Stage]:
    """The stages of this rank, ready for the first update; ``make_stage`` is called like `Stage`.

    Without an ``optimizer`` the gradients of an update stay, and whoever called it makes the step. Gradients are summed
    in ``sum_dtype``, or in their own.
    """
    world, model, job = setting.world, setting.model, setting.world.job
    boundaries, expected = setting.findings.boundaries, setting.findings.expected_count
    stages: dict[int, Stage] = {}
    parameters = {group: [p for p in all_ if p.requires_grad] for group, all_ in by_group(built, setting.ties).items()}

    def weights_of(group: Group) -> tuple[Weights, GradientSum]:
        trained, (peers, members) = parameters[group], world.sums[group]
        kind = GradientSum if sum_dtype is None else WideGradientSum
        count = None if expected is None else Count(group[0], expected, world.device)
        gradients = kind(
            group_text(group),
            trained,
            peers,
            members,
            world.control_group.names,
            world.control_group.wait,
            sum_dtype,
            count,
            world.staging,
        )
        return _weights(setting, trained, optimizer), gradients

    def counting() -> Numbering:
        return Numbering(setting.seed, world.place.copy, job.passes, job.cycle)

    ties = {group: WeightGroup(group, *weights_of(group), counting()) for group in parameters if len(group) > 1}
    for number, module in built.items():
        facts, numbering = setting.facts.stages[number], counting()
        weights, gradients = weights_of((number,))
        ending: StageOutput
        if number < job.stages - 1:
            ending = SendOutput(number, boundaries[number], setting.share)
        else:
            trains = any(p.requires_grad for p in module.parameters())
            trains = trains or (number > 0 and any(boundaries[number - 1].recorded))
            ending = LossOutput(model.judge, setting.share, numbering, expected is not None, world.read, trains)
        stages[number] = make_stage(
            number,
            module,
            weights,
            boundaries[number - 1] if number else None,
            ending,
            gradients,
            setting.findings.traits[number],
            numbering,
            frozenset(spread(facts.recomputed)),
            [tie for group, tie in ties.items() if number in group],
            setting.keywords,
            world.read,
        )
        stages[number].reserve(facts.inputs, facts.gradients, world.device)
    return stages


def _weights(
    setting: Setting,
    parameters: list[torch.nn.Parameter],
    optimizer: Callable[[list[torch.nn.Parameter]], Any] | None,
) -> Weights:
    """The weights of a group, with as many versions as operations will ask for."""
    if optimizer is None:
        return Unstepped()
    if not setting.world.job.period:
        return Weights(optimizer(parameters))
    stepped = masters(parameters)
    return Versions(parameters, stepped, optimizer(stepped))
