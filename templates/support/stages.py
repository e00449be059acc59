"""Builds the stages of a rank: modules, optimizers, shapes between stages, receive buffers."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from runtime import GradientSum, draw_seed, waiter
from support.batches import Batches
from support.compute import Boundary, LastStage, RehearsedStage, Stage, Traits
from support.faults import Misuse
from support.model import Model
from support.nested import is_rows, leaves
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


@dataclass(frozen=True)
class Findings:
    """What each stage hands to the next, and what it was seen to do."""

    boundaries: list[Boundary]
    traits: list[Traits]


def remarks(world: World, findings: Findings) -> list[str]:
    """What the user should know of stages that run several micro-batches in one operation."""
    alone = [(s, findings.traits[s].alone) for s in world.job.grouped if s in world.job.recomputing]
    return [f"stage {s} {why}: it runs one micro-batch at a time, also where it has several" for s, why in alone if why]


def find_boundaries(
    world: World, model: Model, batches: Batches, built: dict[int, torch.nn.Module], seed: int
) -> Findings:
    """What each stage hands to the next, found by sending one micro-batch down the first pipe, and what it does.

    Nothing remains of it: random state, buffers such as batch-norm statistics and gradients are as before.
    """
    boundaries: list[Boundary] = []
    traits: list[Traits] = []
    handed: tuple[torch.Tensor, ...] = ()
    for stage in range(world.job.stages):
        prober = world.place.rank_of(0, world.job.placement[0][stage])
        last = stage == world.job.stages - 1
        if world.place.rank == prober:
            if stage and not handed:
                handed = _receive(world, boundaries[-1], world.job.placement[0][stage - 1])
            with model.blamed(), _unchanged(built[stage]), torch.random.fork_rng():
                torch.manual_seed(draw_seed("shapes", seed, stage))
                single, handed, seen = _probe(model, world, batches, built[stage], boundaries, handed, stage, last)
            traits.append(seen)
            world.store.set(f"traits/{stage}", json.dumps([seen.buffers, seen.alone]))
            if not last:
                boundaries.append(_describe(single, handed))
                _publish(world, stage, boundaries[-1])
                handed = _pass_on(world, handed, world.job.placement[0][stage + 1])
        else:
            boundaries += [] if last else [_learn(world, stage, prober)]
            text = world.learn(f"traits/{stage}", prober, f"for what stage {stage} does", world.timeout)
            buffers, alone = json.loads(text)
            traits.append(Traits(tuple(buffers), alone))
    return Findings(boundaries, traits)


def _probe(
    model: Model,
    world: World,
    batches: Batches,
    module: torch.nn.Module,
    boundaries: list[Boundary],
    handed: tuple[torch.Tensor, ...],
    stage: int,
    last: bool,
) -> tuple[bool, tuple[torch.Tensor, ...], Traits]:
    if stage == 0:
        argument = to_device(batches.input(0, 0), world.device)
    else:
        before = boundaries[-1]
        inputs = tuple(t.detach().requires_grad_(d) for t, d in zip(handed, before.differentiable, strict=True))
        argument = inputs[0] if before.single else inputs
    untouched = {name: buffer.clone() for name, buffer in module.named_buffers()}
    versions = [leaf._version for leaf in leaves(argument) if isinstance(leaf, torch.Tensor)]
    target = to_device(batches.target(0, 0), world.device) if last else None
    random = _random_state(world.device)
    returned = module(argument)
    single, handed = (True, ()) if last else model.outputs(stage, returned)
    if last:
        model.scalar(model.loss(returned, target))
    draws = any(not torch.equal(a, b) for a, b in zip(random, _random_state(world.device), strict=True))
    buffers = tuple(n for n, b in module.named_buffers() if n in untouched and not torch.equal(b, untouched[n]))
    changed = versions != [leaf._version for leaf in leaves(argument) if isinstance(leaf, torch.Tensor)]
    if changed and stage in world.job.recomputing:
        raise Misuse(f"stage {stage} changes its input in place, but is to run on it again; let it work on a copy")
    if stage in world.job.grouped and not last and not is_rows(handed):
        raise Misuse(
            f"stage {stage} returns a tensor without dimensions, but handles several micro-batches in one operation; "
            "return tensors with the micro-batch in dimension 0"
        )
    alone = _alone(draws, buffers, is_rows(argument), is_rows(returned))
    return single, handed, Traits(buffers, alone)


def _alone(draws: bool, buffers: tuple[str, ...], joinable: bool, separable: bool) -> str:
    """Why a stage cannot run several micro-batches at once, or nothing."""
    if draws:
        return "draws random numbers"
    if buffers:
        return f"updates its buffer{'s' if len(buffers) > 1 else ''} {', '.join(buffers)}"
    if not joinable:
        return "has inputs that are not tensors with the micro-batch in dimension 0"
    return "" if separable else "has outputs that are not tensors with the micro-batch in dimension 0"


def _random_state(device: torch.device) -> list[torch.Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


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
    findings: Findings,
    slots: dict[int, tuple[tuple[int, ...], tuple[int, ...]]],
    optimizer: Callable[[list[torch.nn.Parameter]], Any],
    rehearsal: Rehearsal | None,
    seed: int,
) -> dict[int, Stage]:
    """The stages of this rank, ready for the first update."""
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
