"""Finds out, once at start, what the stages hand to one another: one micro-batch down the first pipe and back.

Nothing remains of it: random state, buffers such as batch-norm statistics, and gradients are as before.
"""

import json
from contextlib import nullcontext
from dataclasses import astuple, dataclass, replace
from itertools import compress
from typing import Any

import torch

from runtime import draw_seed
from support.batches import Batches
from support.blame import Calling
from support.compute import Boundary, Traits
from support.faults import FAILED, Misuse
from support.model import Model
from support.nested import is_rows, leaves, to_device
from support.saved import Footprint, Saved
from support.world import World

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Findings:
    """What each stage hands to the next, what it was seen to do and, if that was asked for, what it keeps."""

    boundaries: list[Boundary]
    traits: list[Traits]
    footprints: list[Footprint]


@dataclass(frozen=True)
class Sight:
    """A stage's forward on the first micro-batch: its inputs, what it returned or the loss, and how it was before.

    ``single`` and ``traits`` are as in `Boundary` and `Findings`, the ``footprint`` is empty unless it was measured;
    ``in_place`` says that the stage changed its input, ``buffers`` are copies from before.
    """

    inputs: Tensors
    outputs: Tensors
    buffers: dict[str, torch.Tensor]
    single: bool
    traits: Traits
    footprint: Footprint
    in_place: bool


def find(
    world: World, model: Model, batches: Batches, built: dict[int, torch.nn.Module], seed: int, measures: bool
) -> Findings:
    """The findings, the same on every rank; every rank calls it. Footprints are among them if it ``measures``.

    Raises
    ------
    Misuse
        If a stage returns what it must not.
    """
    prober = _Prober(world, model, batches, built, seed, measures)
    boundaries, traits = prober.forward()
    return Findings(prober.backward(boundaries), traits, prober.footprints)


class _Prober:
    def __init__(
        self,
        world: World,
        model: Model,
        batches: Batches,
        built: dict[int, torch.nn.Module],
        seed: int,
        measures: bool,
    ) -> None:
        self._world = world
        self._model = model
        self._batches = batches
        self._built = built
        self._seed = seed
        self._measures = measures
        self._runs: dict[int, Sight] = {}
        self.footprints: list[Footprint] = []

    def _rank(self, stage: int) -> int:
        return self._world.place.rank_of(0, self._world.job.placement[0][stage])

    def _is_mine(self, stage: int) -> bool:
        return self._world.place.rank == self._rank(stage)

    def forward(self) -> tuple[list[Boundary], list[Traits]]:
        """Shapes, dtypes and traits; that a tensor is recorded says nothing yet of whether its gradient comes back."""
        world, last = self._world, self._world.job.stages - 1
        boundaries: list[Boundary] = []
        traits: list[Traits] = []
        for stage in range(world.job.stages):
            if self._is_mine(stage):
                before = boundaries[-1] if stage else None
                with torch.random.fork_rng():
                    torch.manual_seed(draw_seed("shapes", self._seed, stage))
                    single, seen = self._run(stage, before, self._handed(stage, before))
                self._say(f"traits/{stage}", [seen.buffers, seen.alone])
                if stage < last:
                    self._say(f"boundary/{stage}", _described(single, self._runs[stage].outputs))
                    self._pass_on(stage)
            buffers, alone = self._hear(f"traits/{stage}", stage)
            traits.append(Traits(tuple(buffers), alone))
            if self._measures:
                self.footprints.append(Footprint(*self._hear(f"footprint/{stage}", stage)))
            if stage < last:
                boundaries.append(_boundary(self._hear(f"boundary/{stage}", stage)))
        return boundaries, traits

    def backward(self, boundaries: list[Boundary]) -> list[Boundary]:
        """The boundaries, once it is known which tensors' gradients come back."""
        found: list[Boundary] = []
        roots_follow: tuple[bool, ...] = ()
        for stage in reversed(range(1, self._world.job.stages)):
            if self._is_mine(stage):
                with torch.random.fork_rng():
                    self._say(f"gradients/{stage - 1}", self._run_back(stage, roots_follow))
            roots_follow = tuple(self._hear(f"gradients/{stage - 1}", stage))
            found.append(replace(boundaries[stage - 1], differentiable=roots_follow))
        for stage, seen in self._runs.items():
            _restore(self._built[stage], seen.buffers)
        return found[::-1]

    def _run_back(self, stage: int, follow: tuple[bool, ...]) -> list[bool]:
        """Which inputs of a stage receive a gradient, if those outputs do that ``follow`` marks."""
        last = stage == self._world.job.stages - 1
        return look_back(stage, self._built[stage], self._runs[stage], None if last else follow)

    def _run(self, stage: int, before: Boundary | None, handed: Any) -> tuple[bool, Traits]:
        world, last = self._world, stage == self._world.job.stages - 1
        target = to_device(self._batches.target(0, 0), world.device) if last else None
        seen = look(self._model, stage, self._built[stage], before, handed, target, last, self._measures)
        if self._measures:
            self._say(f"footprint/{stage}", astuple(seen.footprint))
        self._runs[stage] = seen
        if seen.in_place and stage in world.job.recomputing:
            raise Misuse(f"stage {stage} changes its input in place, but is to run on it again; let it work on a copy")
        if stage in world.job.grouped and not last and not is_rows(seen.outputs):
            raise Misuse(
                f"stage {stage} returns a tensor without dimensions, but handles several micro-batches in one "
                "operation; return tensors with the micro-batch in dimension 0"
            )
        return seen.single, seen.traits

    def _say(self, key: str, fact: object) -> None:
        self._world.store.set(key, json.dumps(fact))

    def _hear(self, key: str, stage: int) -> Any:
        what = f"for what stage {stage} does with the first micro-batch"
        return json.loads(self._world.learn(key, self._rank(stage), what, self._world.timeout))

    def _pass_on(self, stage: int) -> None:
        """Sends the outputs of a stage to the rank of the next one, unless it is this one."""
        target = self._rank(stage + 1)
        if target != self._world.place.rank:
            for tensor in self._runs[stage].outputs:
                self._world.send(tensor, target, f"for stage {stage + 1} to take the first micro-batch")

    def _handed(self, stage: int, before: Boundary | None) -> Any:
        """What a stage is called on: the first inputs of the dataset, or what the stage before returned."""
        device = self._world.device
        if before is None:
            return to_device(self._batches.input(0, 0), device)
        if self._is_mine(stage - 1):
            return self._runs[stage - 1].outputs
        buffers = before.buffers(torch.device("cpu"))
        for tensor in buffers:
            self._world.recv(tensor, self._rank(stage - 1), f"for the first micro-batch of stage {stage - 1}")
        return tuple(t.to(device) for t in buffers)


def look(
    model: Model,
    stage: int,
    module: torch.nn.Module,
    before: Boundary | None,
    handed: Any,
    target: Any,
    last: bool,
    measures: bool,
) -> Sight:
    """Runs a stage on a micro-batch, the last one with the loss; footprints are counted if it ``measures``."""
    inputs: Tensors = ()
    argument = handed
    if before is not None:
        inputs = tuple(t.detach().requires_grad_(d) for t, d in zip(handed, before.recorded, strict=True))
        argument = inputs[0] if before.single else inputs
    buffers = {name: (buffer.clone(), buffer._version) for name, buffer in module.named_buffers()}
    versions, random = _versions(argument), _random_state()
    saved = Saved(module.parameters)
    with saved.watching() if measures else nullcontext():
        with Calling(f"the forward of stage {stage}", FAILED):
            returned = module(argument)
        single, outputs = model.outputs(stage, returned) if not last else (True, ())
        if last:
            outputs = (model.scalar(model.judge(returned, target)),)
    draws = any(not torch.equal(a, b) for a, b in zip(random, _random_state(), strict=True))
    changed = tuple(n for n, b in module.named_buffers() if n in buffers and not _same(b, *buffers[n]))
    return Sight(
        inputs=inputs,
        outputs=outputs,
        buffers={name: copy for name, (copy, _) in buffers.items()},
        single=single,
        traits=Traits(changed, _alone(draws, changed, is_rows(argument), is_rows(returned))),
        footprint=saved.footprint(argument, outputs, target),
        in_place=versions != _versions(argument),
    )


def look_back(stage: int, module: torch.nn.Module, seen: Sight, follow: tuple[bool, ...] | None) -> list[bool]:
    """Which inputs of a stage receive a gradient, if those outputs do that ``follow`` marks; None is for the loss."""
    roots = [t for t in (seen.outputs if follow is None else compress(seen.outputs, follow)) if t.requires_grad]
    if roots:
        with Calling(f"the backward of stage {stage}", FAILED):
            torch.autograd.backward(roots, [torch.zeros_like(root) for root in roots])
    for parameter in module.parameters():
        parameter.grad = None
    return [leaf.grad is not None for leaf in seen.inputs]


def _described(single: bool, tensors: Tensors) -> list[object]:
    dtypes = [str(t.dtype).removeprefix("torch.") for t in tensors]
    return [single, [list(t.shape) for t in tensors], dtypes, [t.requires_grad for t in tensors]]


def _boundary(facts: list[Any]) -> Boundary:
    single, shapes, dtypes, recorded = facts
    kinds = tuple(getattr(torch, name) for name in dtypes)
    return Boundary(single, tuple(map(tuple, shapes)), kinds, tuple(recorded), tuple(recorded))


def _versions(argument: Any) -> list[int]:
    return [leaf._version for leaf in leaves(argument) if isinstance(leaf, torch.Tensor)]


def _random_state() -> list[torch.Tensor]:
    cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if cuda else [])]


def _same(buffer: torch.Tensor, copy: torch.Tensor, version: int) -> bool:
    """Whether a buffer is as it was; one without values (on the meta device) tells it by its version."""
    if buffer.is_meta:
        return buffer._version == version
    return buffer.shape == copy.shape and torch.equal(buffer, copy)


@torch.no_grad()
def _restore(module: torch.nn.Module, buffers: dict[str, torch.Tensor]) -> None:
    """Undoes what the probe did to buffers; one that the forward made or replaced by another size stays."""
    for name, buffer in module.named_buffers():
        if name in buffers and buffer.shape == buffers[name].shape:
            buffer.copy_(buffers[name])


def _alone(draws: bool, buffers: tuple[str, ...], joinable: bool, separable: bool) -> str:
    """Why a stage cannot run several micro-batches at once, or nothing."""
    if draws:
        return "draws random numbers"
    if buffers:
        return f"updates its buffer{'s' if len(buffers) > 1 else ''} {', '.join(buffers)}"
    if not joinable:
        return "has inputs that are not tensors with the micro-batch in dimension 0"
    return "" if separable else "has outputs that are not tensors with the micro-batch in dimension 0"
