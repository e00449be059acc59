"""Builds the stages of a rank: modules, optimizers, receive buffers."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from runtime import GradientSum, waiter
from support.check import digest
from support.compute import LastStage, RehearsedStage, Stage
from support.faults import Misuse
from support.model import Model
from support.probe import Findings
from support.world import World


@dataclass(frozen=True)
class Rehearsal:
    """Seconds that a forward and a backward of one micro-batch take."""

    forward: float
    backward: float


def modules(world: World, model: Model, seed: int) -> dict[int, torch.nn.Module]:
    """The modules of the stages that this rank holds, with their initial weights."""
    held = [s for s, workers in enumerate(world.job.holders) if world.place.worker in workers]
    with model.blamed():
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
    world: World,
    model: Model,
    built: dict[int, torch.nn.Module],
    findings: Findings,
    slots: dict[int, tuple[tuple[int, ...], tuple[int, ...]]],
    optimizer: Callable[[list[torch.nn.Parameter]], Any],
    rehearsal: Rehearsal | None,
    seed: int,
) -> dict[int, Stage]:
    """The stages of this rank, ready for the first update."""
    _own_parameters(built)
    boundaries = findings.boundaries
    overshoot = _overshoot() if rehearsal else 0.0
    stages: dict[int, Stage] = {}
    for number, module in built.items():
        last = number == world.job.stages - 1
        group, members = world.sums[number]
        parameters = [p for p in module.parameters() if p.requires_grad]
        gradients = GradientSum(number, parameters, group, members, world.names, waiter(world.backend, world.timeout))
        with model.blamed():
            steps = optimizer(parameters)
            if not callable(getattr(steps, "step", None)):
                raise Misuse(f"{model.file}: optimizer returned a {type(steps).__name__}, not a torch.optim.Optimizer")
        common = (
            number,
            module,
            steps,
            boundaries[number - 1] if number else None,
            None if last else boundaries[number],
            gradients,
            findings.traits[number],
            (seed, world.place.copy),
        )
        stage: Stage
        if rehearsal is not None:
            stage = RehearsedStage(
                *common,
                forward_seconds=rehearsal.forward / world.job.parts,
                backward_seconds=rehearsal.backward / world.job.parts,
                overshoot=overshoot,
            )
        elif last:
            weight = 1 / (world.job.passes * world.place.copies)
            stage = LastStage(*common, loss=model.loss, weight=weight)
        else:
            stage = Stage(*common)
        stage.reserve(*slots[number], world.device)
        stages[number] = stage
    return stages


def _overshoot() -> float:
    """By how much a sleep of 2 ms lasts longer than that on this machine, the median of 21."""
    samples = []
    for _ in range(21):
        start = time.perf_counter()
        time.sleep(0.002)
        samples.append(time.perf_counter() - start - 0.002)
    return sorted(samples)[10]
