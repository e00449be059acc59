"""Finds out, once at start, what the stages hand to one another: one micro-batch down the first pipe and back.

Nothing remains of it: random state, gradients, and what modules hold beside their parameters are as before.
"""

import json
import pickle
from contextlib import nullcontext
from dataclasses import astuple, dataclass, replace
from itertools import compress
from typing import Any, NamedTuple

import torch

from chimera_runtime.blame import UserCode
from chimera_runtime.data.batches import MicroBatchSource
from chimera_runtime.errors import FAILED, Misuse
from chimera_runtime.model.model import Model
from chimera_runtime.ranks.gathering import largest_of_rows
from chimera_runtime.ranks.world import World
from chimera_runtime.stage.auxiliary_losses import collecting, roots_of
from chimera_runtime.stage.module_state import ModuleState, StateSnapshot
from chimera_runtime.stage.recomputation import versions_of
from chimera_runtime.stage.saved_tensors import Footprint, SavedTensors, memory_of
from chimera_runtime.stage.splitting import SecondHalf, SplitBackward, WholeBackward, obstacle
from chimera_runtime.values.aliases import ReleasedTensors
from chimera_runtime.values.boundary import Boundary, Traits, with_shared
from chimera_runtime.values.keywords import Keywords, accepted, require_unused
from chimera_runtime.values.losses import as_pair, expected_count
from chimera_runtime.values.nested import ONE_TENSOR, Form, fresh, is_rows, mapped, to_device
from chimera_runtime.values.sendable import require_here, require_sendable
from chimera_runtime.values.shards import rest
from chimera_runtime.values.tensors import Tensors, all_generators_kept, draw_seed, has_drawn, states_beside_torch


@dataclass(frozen=True)
class Findings:
    """What each stage hands to the next, what it was seen to do and, if that was asked for, what it keeps.

    ``expected_count`` is what an update may count if ``loss`` returns a sum and a count; None if it returns a mean.
    ``auxiliary`` are the names of the auxiliary losses of all stages.
    """

    boundaries: list[Boundary]
    traits: list[Traits]
    footprints: list[Footprint]
    expected_count: float | None
    auxiliary: tuple[str, ...] = ()


class Given(NamedTuple):
    """What a stage is called on: ``before`` describes what it was handed, None for the first stage."""

    before: Boundary | None
    handed: Any
    target: Any
    last: bool
    keywords: Keywords


@dataclass(frozen=True)
class Sight:
    """A stage's forward on the first micro-batch: its inputs, what it returned or the loss, and how it was before.

    ``form`` and ``traits`` are as in `Boundary` and `Findings`, the ``footprint`` is empty unless it was measured;
    ``count`` is what came with the loss, if something did, ``auxiliary`` are roots as well.
    """

    inputs: Tensors
    outputs: Tensors
    form: Form
    traits: Traits
    footprint: Footprint
    count: float | None
    auxiliary: Tensors


def find(
    world: World, model: Model, batches: MicroBatchSource, built: dict[int, torch.nn.Module], seed: int, measures: bool
) -> Findings:
    """The findings, the same on every rank; every rank calls it. Footprints are among them if it ``measures``.

    Raises
    ------
    Misuse
        If a stage returns what it must not.
    """
    prober = _Prober(world, model, batches, built, seed, measures)
    boundaries, traits = prober.forward()
    expected = expected_count(prober.count(), world.job.passes * world.place.copies)
    known = [replace(b, counted=expected is not None) for b in prober.forget(prober.backward(boundaries))]
    if expected is not None:
        expected = largest_of_rows(world.control_group, built.values(), expected, world.device)
    names = sorted({name for of_stage in traits for name in of_stage.auxiliary})
    return Findings(known, with_shared(traits), prober.footprints, expected, tuple(names))


class _Prober:
    def __init__(
        self,
        world: World,
        model: Model,
        batches: MicroBatchSource,
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
        self._given: dict[int, Given] = {}
        self._before: dict[int, tuple[ModuleState, StateSnapshot]] = {}
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
        names = self._names()
        require_unused(self._model.loss, names)
        for stage in range(world.job.stages):
            if self._is_mine(stage):
                before = boundaries[-1] if stage else None
                self._before[stage] = state_of(self._built[stage])
                with all_generators_kept():
                    torch.manual_seed(draw_seed("shapes", self._seed, stage))
                    form, seen = self._run(stage, before, self._handed(stage, before), names)
                self._say(f"traits/{stage}", astuple(seen))
                if stage < last:
                    self._describe(stage, Boundary.of(form, self._runs[stage].outputs))
                    self._pass_on(stage)
            buffers, alone, keywords, auxiliary, *rest_of = self._hear(f"traits/{stage}", stage)
            traits.append(Traits(tuple(buffers), alone, tuple(keywords), tuple(auxiliary), *rest_of))
            if self._measures:
                self.footprints.append(Footprint(*self._hear(f"footprint/{stage}", stage)))
            if stage < last:
                boundaries.append(self._described(stage))
        if unknown := sorted(set(names) - {name for of_stage in traits for name in of_stage.keywords}):
            raise Misuse(f"no stage takes the keyword argument {unknown[0]}: its forward has no parameter of that name")
        return boundaries, traits

    def _names(self) -> tuple[str, ...]:
        """The names of keyword arguments, as the first stage sees them."""
        if self._is_mine(0):
            with all_generators_kept():
                self._say("keywords", list(self._batches.keywords(0, 0)))
        return tuple(self._hear("keywords", 0))

    def count(self) -> float | None:
        """What came with the loss, if something did."""
        last = self._world.job.stages - 1
        if self._is_mine(last):
            self._say("count", self._runs[last].count)
        count: float | None = self._hear("count", last)
        return count

    def backward(self, boundaries: list[Boundary]) -> list[Boundary]:
        """The boundaries, once it is known which tensors' gradients come back."""
        known: list[Boundary] = []
        roots_follow: tuple[bool, ...] = ()
        for stage in reversed(range(1, self._world.job.stages)):
            if self._is_mine(stage):
                with all_generators_kept():
                    self._say(f"gradients/{stage - 1}", self._run_back(stage, roots_follow))
            before = boundaries[stage - 1]  # a stage may call requires_grad_() on a tensor that it gets without a graph
            received = self._hear(f"gradients/{stage - 1}", stage)
            roots_follow = tuple(r and recorded for r, recorded in zip(received, before.recorded, strict=True))
            known.append(replace(before, differentiable=roots_follow))
        if self._measures:
            self._weigh_halves(known[::-1])
        return known[::-1]

    def forget(self, boundaries: list[Boundary]) -> list[Boundary]:
        """The boundaries, once it is known which tensors' memory outlives their graph: the stage keeps it."""
        dropped = {stage: ReleasedTensors(seen.outputs) for stage, seen in self._runs.items()}
        self._runs.clear()
        self._given.clear()
        for stage, outputs in dropped.items():
            self._say(f"kept/{stage}", outputs.kept())
        for stage, (state, before) in self._before.items():
            state.restore(before)
            rest(self._built[stage])
        self._before.clear()
        return [replace(b, kept=tuple(self._hear(f"kept/{stage}", stage))) for stage, b in enumerate(boundaries)]

    def _run_back(self, stage: int, follow: tuple[bool, ...]) -> list[bool]:
        """Which inputs of a stage receive a gradient, if those outputs do that ``follow`` marks."""
        last = stage == self._world.job.stages - 1
        return look_back(stage, self._built[stage], self._runs[stage], None if last else follow)

    def _run(self, stage: int, before: Boundary | None, handed: Any, names: tuple[str, ...]) -> tuple[Form, Traits]:
        world, last = self._world, stage == self._world.job.stages - 1
        target = _copied(self._batches.target(0, 0), world.device) if last else None
        taken_names = accepted(self._built[stage], names)
        loaded = _copied(self._batches.keywords(0, 0), world.device) if taken_names else {}
        given = Given(before, handed, target, last, {name: loaded[name] for name in taken_names})
        self._given[stage] = given
        seen = look(self._model, stage, self._built[stage], given, self._measures)
        if self._measures:
            self._say(f"footprint/{stage}", astuple(seen.footprint))
        if stage in world.job.split_backward:
            seen = examined(seen)
        self._runs[stage] = seen
        if not last:
            require_here(stage, seen.outputs, world.device)
            if any(path[stage] != path[stage + 1] for path in world.job.placement):
                require_sendable(stage, seen.outputs, world.backend)
        if seen.traits.in_place and stage in world.job.recomputing:
            what = seen.traits.in_place
            raise Misuse(f"stage {stage} changes {what} in place, but is to run on it again; let it work on a copy")
        if stage in world.job.grouped and not last and not is_rows(seen.outputs):
            raise Misuse(
                f"stage {stage} returns a tensor without dimensions, but handles several micro-batches in one "
                "operation; return tensors with the micro-batch in dimension 0"
            )
        return seen.form, seen.traits

    def _weigh_halves(self, boundaries: list[Boundary]) -> None:
        """Adds to the footprints what the halves of split backwards leave behind."""
        for stage in self._world.job.split_backward:
            if self._is_mine(stage):
                follow = boundaries[stage].differentiable if stage < len(boundaries) else None
                whole = bool(self._runs[stage].traits.whole)
                with all_generators_kept():
                    weighed = weigh_halves(self._model, stage, self._built[stage], self._given[stage], follow, whole)
                self._say(f"halves/{stage}", weighed)
            self.footprints[stage] = self.footprints[stage].with_halves(*self._hear(f"halves/{stage}", stage))

    def _describe(self, stage: int, boundary: Boundary) -> None:
        self._world.control_group.store.set(f"boundary/{stage}", pickle.dumps(boundary).hex())

    def _described(self, stage: int) -> Boundary:
        """What another rank of this job has found; classes in its structure may be the user's."""
        what = f"for what stage {stage} hands on"
        text = self._world.control_group.wait_for_key(f"boundary/{stage}", self._rank(stage), what).decode()
        boundary: Boundary = pickle.loads(bytes.fromhex(text))
        return boundary

    def _say(self, key: str, fact: object) -> None:
        self._world.control_group.store.set(key, json.dumps(fact))

    def _hear(self, key: str, stage: int) -> Any:
        what = f"for what stage {stage} does with the first micro-batch"
        return json.loads(self._world.control_group.wait_for_key(key, self._rank(stage), what))

    def _pass_on(self, stage: int) -> None:
        """Sends the outputs of a stage to the rank of the next one, unless it is this one."""
        target = self._rank(stage + 1)
        if target != self._world.place.rank:
            for tensor in self._runs[stage].outputs:
                self._world.control_group.send(tensor, target, f"for stage {stage + 1} to take the first micro-batch")

    def _handed(self, stage: int, before: Boundary | None) -> Any:
        """What a stage is called on: the first inputs of the dataset, or what the stage before returned."""
        device = self._world.device
        if before is None:
            return _copied(self._batches.input(0, 0), device)
        if self._is_mine(stage - 1):
            return self._runs[stage - 1].outputs
        buffers = before.buffers(torch.device("cpu"))
        for tensor in buffers:
            self._world.control_group.recv(
                tensor, self._rank(stage - 1), f"for the first micro-batch of stage {stage - 1}"
            )
        return tuple(t.to(device) for t in buffers)


def look(model: Model, stage: int, module: torch.nn.Module, given: Given, measures: bool) -> Sight:
    """Runs a stage on a micro-batch, the last one with the loss; footprints are counted if it ``measures``."""
    before, handed, target, last, keywords = given._replace(
        handed=fresh(given.handed), target=fresh(given.target), keywords=fresh(given.keywords)
    )
    inputs: Tensors = ()
    argument = handed
    if before is not None:
        inputs = tuple(t.detach().requires_grad_(d) for t, d in zip(handed, before.recorded, strict=True))
        argument = before.form.filled(inputs)
    state, contents = state_of(module)
    values = {"its input": argument, "a keyword argument": keywords, "its target": target}
    numbers = {name: versions_of(value) for name, value in values.items()}
    random, beside = _random_state(), states_beside_torch()
    saved = SavedTensors(module.parameters)
    with saved.counting() if measures else nullcontext():
        with UserCode(f"the forward of stage {stage}", FAILED), collecting() as auxiliary:
            returned = module(argument, **keywords)
        form, outputs = model.outputs(stage, returned) if not last else (ONE_TENSOR, ())
        count = None
        if last:
            loss, count = as_pair(model.judge(returned, target))
            outputs = (loss,)
    seeds_all = has_drawn(beside)
    draws = seeds_all or any(not torch.equal(a, b) for a, b in zip(random, _random_state(), strict=True))
    changes = {*state.changed(contents)}
    changed = tuple(name for name, _ in module.named_buffers() if name in changes)
    return Sight(
        inputs=inputs,
        outputs=outputs,
        form=form,
        traits=Traits(
            changed,
            "has auxiliary losses"
            if auxiliary
            else _alone(draws, changed, is_rows((argument, keywords)), is_rows(returned)),
            tuple(keywords),
            tuple(sorted({name for name, _ in auxiliary})),
            seeds_all=seeds_all,
            in_place=next((name for name, value in values.items() if versions_of(value) != numbers[name]), ""),
        ),
        footprint=saved.footprint(argument, outputs, (target, keywords)),
        count=None if count is None else 0.0 if count.is_meta else count.item(),
        auxiliary=roots_of(auxiliary),
    )


def examined(seen: Sight) -> Sight:
    """The same with what keeps the backward of the stage from being split, if something does."""
    roots = [t for t in (*seen.outputs, *seen.auxiliary) if t.requires_grad]
    return replace(seen, traits=replace(seen.traits, whole=obstacle(roots, seen.inputs)))


def weigh_halves(
    model: Model, stage: int, module: torch.nn.Module, given: Given, follow: tuple[bool, ...] | None, whole: bool
) -> tuple[int, int, int]:
    """Runs a stage as `look` does, and the first half of a backward: the bytes of `Footprint.with_halves`.

    ``follow`` is as in `look_back`; ``whole`` says that the stage's backward is not split. Gradients are cleared.
    """
    saved = SavedTensors(module.parameters)
    with saved.counting():
        seen = look(model, stage, module, given, measures=False)
    handed_on = seen.outputs if follow is None else compress(seen.outputs, follow)
    roots = tuple([t for t in (*handed_on, *seen.auxiliary) if t.requires_grad])
    gradients = tuple(map(torch.zeros_like, roots))
    before, inputs, received = dict(saved.sizes), memory_of(seen.inputs), memory_of(gradients)
    with UserCode(f"the backward of stage {stage}", FAILED):
        begun: SecondHalf = (
            WholeBackward(roots, gradients, module.parameters(), apart=False)
            if whole
            else SplitBackward(roots, gradients, seen.inputs)
        )
    for leaf in (*seen.inputs, *module.parameters()):
        leaf.grad = None
    del seen, handed_on, roots  # and with them that part of the graph which the second half does not need
    released = before.keys() - saved.sizes.keys() - inputs.keys()
    operands = {piece: size for piece, size in memory_of(begun.operands).items() if piece not in saved.sizes}
    return (
        sum(before[piece] for piece in released),
        sum(operands.values()),
        sum(received[piece] for piece in received.keys() & operands.keys()),
    )


def look_back(stage: int, module: torch.nn.Module, seen: Sight, follow: tuple[bool, ...] | None) -> list[bool]:
    """Which inputs of a stage receive a gradient, if those outputs do that ``follow`` marks; None is for the loss."""
    handed_on = seen.outputs if follow is None else compress(seen.outputs, follow)
    roots = [t for t in (*handed_on, *seen.auxiliary) if t.requires_grad]
    if roots:
        with UserCode(f"the backward of stage {stage}", FAILED):
            torch.autograd.backward(roots, [torch.zeros_like(root) for root in roots])
    for parameter in module.parameters():
        parameter.grad = None
    return [leaf.grad is not None for leaf in seen.inputs]


def _copied(value: Any, device: torch.device) -> Any:
    """What the data have, on a device and in memory of its own: a stage may change it in place."""
    return mapped(to_device(value, device), torch.clone)


def state_of(module: torch.nn.Module) -> tuple[ModuleState, StateSnapshot]:
    """What a module holds beside its parameters, and what it holds now."""
    state = ModuleState(module)
    return state, state.snapshot(thorough=True)


def _random_state() -> list[torch.Tensor]:
    cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if cuda else [])]


def _alone(draws: bool, buffers: tuple[str, ...], joinable: bool, separable: bool) -> str:
    """Why a stage cannot run several micro-batches at once, or nothing."""
    if draws:
        return "draws random numbers"
    if buffers:
        return f"updates its buffer{'s' if len(buffers) > 1 else ''} {', '.join(buffers)}"
    if not joinable:
        return "has inputs that are not tensors with the micro-batch in dimension 0"
    return "" if separable else "has outputs that are not tensors with the micro-batch in dimension 0"
