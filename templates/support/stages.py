"""Builds the stages of a rank: modules, optimizers, receive buffers."""

from collections.abc import Callable
from typing import Any

import torch

from runtime import GradientSum, waiter
from support.compare import digest
from support.compute import LastStage, Seeds, Stage
from support.faults import Misuse
from support.model import Model
from support.probe import Findings
from support.rehearsal import Rehearsal, RehearsedStage, overshoot
from support.setting import Setting
from support.versions import Versions, Weights, masters
from support.world import World


def modules(world: World, model: Model, seed: int) -> dict[int, torch.nn.Module]:
    """The modules of the stages that this rank holds, with their initial weights."""
    held = [s for s, workers in enumerate(world.job.holders) if world.place.worker in workers]
    return {s: model.stage(s, world.job.stages, seed, world.device) for s in held}


def remarks(world: World, findings: Findings) -> list[str]:
    """What the user should know of stages that run several micro-batches in one operation."""
    alone = [(s, findings.traits[s].alone) for s in world.job.grouped if s in world.job.recomputing]
    return [f"stage {s} {why}: it runs one micro-batch at a time, also where it has several" for s, why in alone if why]


def agree_on_weights(world: World, built: dict[int, torch.nn.Module]) -> None:
    """Makes sure that the replicas of every stage start with the same weights.

    Raises
    ------
    Misuse
        On a rank whose weights differ from those of the first rank that holds the stage.
    """
    for number, module in built.items():
        first, *_ = world.ranks_of(number)
        mine = digest(module.parameters())
        world.store.set(f"weights/{number}/{world.place.rank}", mine)
        what = f"for the initial weights of stage {number}"
        if world.learn(f"weights/{number}/{first}", first, what, world.timeout).decode() != mine:
            raise Misuse(
                f"stage {number} starts with other weights on rank {world.place.rank} than on rank {first}: "
                "build_stage may draw random numbers from torch alone, which is seeded alike on all ranks"
            )


def _own_parameters(built: dict[int, torch.nn.Module]) -> None:
    """Refuses a parameter that two stages share: each stage sums and steps its own."""
    owner: dict[torch.nn.Parameter, int] = {}
    for number, module in built.items():
        for name, parameter in module.named_parameters():
            if owner.setdefault(parameter, number) != number:
                raise Misuse(
                    f"stages {owner[parameter]} and {number} share the parameter {name}: "
                    "build_stage must make new modules every time it is called"
                )


def assemble(
    setting: Setting,
    built: dict[int, torch.nn.Module],
    optimizer: Callable[[list[torch.nn.Parameter]], Any],
    rehearsal: Rehearsal | None,
) -> dict[int, Stage]:
    """The stages of this rank, ready for the first update."""
    _own_parameters(built)
    world, model, job = setting.world, setting.model, setting.world.job
    boundaries = setting.findings.boundaries
    slack = overshoot() if rehearsal else 0.0
    stages: dict[int, Stage] = {}
    for number, module in built.items():
        last = number == job.stages - 1
        group, members = world.sums[number]
        parameters = [p for p in module.parameters() if p.requires_grad]
        common = (
            number,
            module,
            _weights(setting, parameters, optimizer, rehearsal is not None),
            boundaries[number - 1] if number else None,
            None if last else boundaries[number],
            GradientSum(number, parameters, group, members, world.names, waiter(world.backend, world.timeout)),
            setting.findings.traits[number],
            Seeds(setting.options.seed, world.place.copy, job.passes),
        )
        stage: Stage
        if rehearsal is not None:
            stage = RehearsedStage(
                *common,
                forward_seconds=rehearsal.forward / job.parts,
                backward_seconds=rehearsal.backward / job.parts,
                overshoot=slack,
            )
        elif last:
            stage = LastStage(*common, loss=model.judge, share=setting.share)
        else:
            stage = Stage(*common)
        stage.reserve(*setting.script.SLOTS[number], world.device)
        stages[number] = stage
    return stages


def _weights(
    setting: Setting,
    parameters: list[torch.nn.Parameter],
    optimizer: Callable[[list[torch.nn.Parameter]], Any],
    rehearsed: bool,
) -> Weights:
    """The weights of a stage, with as many versions as operations will ask for; a rehearsal never asks."""
    if rehearsed or not setting.world.job.period:
        return Weights(optimizer(parameters))
    stepped = masters(parameters)
    return Versions(parameters, stepped, optimizer(stepped))
