"""Builds the stages of a rank: modules, optimizers, shapes between stages, receive buffers."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from runtime import Boundary, GradientSum, LastStage, RehearsedStage, Stage, draw_seed, waiter
from support.batches import Batches
from support.model import Model
from support.world import World


@dataclass(frozen=True)
class Rehearsal:
    """Seconds that a forward and a backward of one micro-batch take."""

    forward: float
    backward: float


def to_device(value: Any, device: torch.device) -> Any:
    """A collated batch on the device of the stages: tensors inside tuples, lists and dicts."""
    match value:
        case torch.Tensor():
            return value.to(device, non_blocking=True)
        case dict():
            return {key: to_device(item, device) for key, item in value.items()}
        case tuple() if hasattr(value, "_fields"):
            return type(value)(*(to_device(item, device) for item in value))
        case tuple() | list():
            return type(value)(to_device(item, device) for item in value)
        case _:
            return value


def modules(world: World, model: Model, seed: int) -> dict[int, torch.nn.Module]:
    """The modules of the stages that this rank holds, with their initial weights."""
    held = [s for s, workers in enumerate(world.job.holders) if world.place.worker in workers]
    with model.blamed():
        return {s: model.stage(s, world.job.stages, seed, world.device) for s in held}


def find_boundaries(
    world: World, model: Model, batches: Batches, built: dict[int, torch.nn.Module], seed: int
) -> list[Boundary]:
    """What each stage hands to the next, found by sending one micro-batch down the first pipe.

    Nothing remains of it: random state, buffers such as batch-norm statistics and gradients are as before.
    """
    boundaries: list[Boundary] = []
    handed: tuple[torch.Tensor, ...] = ()
    for stage in range(world.job.stages):
        prober = world.place.rank_of(0, world.job.placement[0][stage])
        last = stage == world.job.stages - 1
        if world.place.rank == prober:
            if stage and not handed:
                handed = _receive(world, boundaries[-1], world.job.placement[0][stage - 1])
            with model.blamed(), _unchanged(built[stage]), torch.random.fork_rng():
                torch.manual_seed(draw_seed("shapes", seed, stage))
                single, handed = _probe(model, world, batches, built[stage], boundaries, handed, stage, last)
            if not last:
                boundaries.append(_describe(single, handed))
                _publish(world, stage, boundaries[-1])
                handed = _pass_on(world, handed, world.job.placement[0][stage + 1])
        elif not last:
            boundaries.append(_learn(world, stage, prober))
    return boundaries


def _probe(
    model: Model,
    world: World,
    batches: Batches,
    module: torch.nn.Module,
    boundaries: list[Boundary],
    handed: tuple[torch.Tensor, ...],
    stage: int,
    last: bool,
) -> tuple[bool, tuple[torch.Tensor, ...]]:
    if stage == 0:
        argument = to_device(batches.input(0, 0), world.device)
    else:
        before = boundaries[-1]
        leaves = tuple(t.detach().requires_grad_(d) for t, d in zip(handed, before.differentiable, strict=True))
        argument = leaves[0] if before.single else leaves
    returned = module(argument)
    if last:
        model.scalar(model.loss(returned, to_device(batches.target(0, 0), world.device)))
        return True, ()
    return model.outputs(stage, returned)


def _describe(single: bool, tensors: tuple[torch.Tensor, ...]) -> Boundary:
    return Boundary(
        single,
        tuple(tuple(t.shape) for t in tensors),
        tuple(t.dtype for t in tensors),
        tuple(t.requires_grad for t in tensors),
    )


@contextmanager
def _unchanged(module: torch.nn.Module) -> Iterator[None]:
    kept = [buffer.clone() for buffer in module.buffers()]
    yield
    with torch.no_grad():
        for buffer, value in zip(module.buffers(), kept, strict=True):
            buffer.copy_(value)


def _publish(world: World, stage: int, boundary: Boundary) -> None:
    dtypes = [str(d).removeprefix("torch.") for d in boundary.dtypes]
    text = json.dumps([boundary.single, boundary.shapes, dtypes, boundary.differentiable])
    world.store.set(f"boundary/{stage}", text)


def _learn(world: World, stage: int, prober: int) -> Boundary:
    text = world.learn(f"boundary/{stage}", prober, f"for the shapes that stage {stage} returns", world.timeout)
    single, shapes, dtypes, differentiable = json.loads(text)
    kinds = tuple(getattr(torch, name) for name in dtypes)
    return Boundary(single, tuple(map(tuple, shapes)), kinds, tuple(differentiable))


def _pass_on(world: World, tensors: tuple[torch.Tensor, ...], worker: int) -> tuple[torch.Tensor, ...]:
    """The tensors, if this rank goes on with the next stage; nothing after sending them to the rank that does."""
    target = world.place.rank_of(0, worker)
    if target == world.place.rank:
        return tensors
    with world.waiting("for the first micro-batch to be taken", [target]):
        for tensor in tensors:
            dist.send(tensor.detach().cpu().contiguous(), target, group=world.chat)
    return ()


def _receive(world: World, boundary: Boundary, worker: int) -> tuple[torch.Tensor, ...]:
    tensors = boundary.buffers(torch.device("cpu"))
    source = world.place.rank_of(0, worker)
    with world.waiting("for the first micro-batch", [source]):
        for tensor in tensors:
            dist.recv(tensor, source, group=world.chat)
    return tuple(t.to(world.device) for t in tensors)


def assemble(
    world: World,
    model: Model,
    built: dict[int, torch.nn.Module],
    boundaries: list[Boundary],
    slots: dict[int, tuple[int, int]],
    optimizer: Callable[[list[torch.nn.Parameter]], Any],
    rehearsal: Rehearsal | None,
    seed: int,
) -> dict[int, Stage]:
    """The stages of this rank, ready for the first update."""
    overshoot = _overshoot() if rehearsal else 0.0
    stages: dict[int, Stage] = {}
    for number, module in built.items():
        last = number == world.job.stages - 1
        group, members = world.sums[number]
        parameters = [p for p in module.parameters() if p.requires_grad]
        gradients = GradientSum(number, parameters, group, members, world.names, waiter(world.backend, world.timeout))
        with model.blamed():
            steps = optimizer(parameters)
        common = (
            number,
            module,
            steps,
            boundaries[number - 1] if number else None,
            None if last else boundaries[number],
            gradients,
            (seed, world.place.copy),
        )
        stage: Stage
        if rehearsal is not None:
            stage = RehearsedStage(
                *common,
                forward_seconds=rehearsal.forward,
                backward_seconds=rehearsal.backward,
                overshoot=overshoot,
            )
        elif last:
            weight = 1 / (world.job.micro_batches * world.place.copies)
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
