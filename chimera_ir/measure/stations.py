"""The stages of a model, one at a time, each ready to run a micro-batch as a rank of a generated program runs it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from runtime import GradientSum, Names, Tensors, draw_seed
from support.batches import Batches
from support.blame import ModelError
from support.compute import Boundary, Kept, LastStage, Pass, Seeds, Stage
from support.faults import Misuse
from support.memory import bytes_of
from support.model import Model
from support.nested import to_device
from support.probe import Sight, look, look_back
from support.saved import Footprint
from support.versions import Weights

_TIMEOUT = 60.0


@dataclass(frozen=True)
class Cut:
    """A model cut into so many ``stages``, micro-batches of so many items, and where they run."""

    model: Model
    dataset: Any
    stages: int
    sizes: tuple[int, ...]
    device: torch.device
    seed: int

    def batches(self, size: int) -> Batches:
        """The micro-batches of a size; every update has one.

        Raises
        ------
        Misuse
            If the dataset is not map-style, or has too few items.
        """
        batches = Batches(self.dataset, size, 1, 1, 1, 0, self.seed)
        batches.check()
        return batches

    def module(self, stage: int) -> torch.nn.Module:
        """A stage with its initial weights."""
        with self.here():
            return self.model.stage(stage, self.stages, self.seed, self.device)

    def here(self) -> AbstractContextManager[object]:
        """Where the model's own code runs: on the meta device everything that it makes is without memory."""
        return self.device if self.device.type == "meta" else nullcontext()


@dataclass(frozen=True)
class _Seen:
    """What the first way through the stages found out: what a stage is handed, and hands on."""

    handed: Any
    before: Boundary | None
    after: Boundary | None
    sight: Sight


@dataclass(frozen=True)
class Station:
    """A stage on micro-batches of ``size`` items; ``handed`` is what the stage before hands it, None for the first.

    ``before`` and ``after`` are what it receives and sends, ``footprint`` is what one forward leaves behind.
    """

    size: int
    module: torch.nn.Module
    stage: Stage
    before: Boundary | None
    after: Boundary | None
    footprint: Footprint
    buffers: tuple[str, ...]
    handed: Tensors | None
    load_input: Callable[[int], Any]
    load_target: Callable[[int], Any]

    def refill(self) -> None:
        """Receives what every micro-batch receives: a stage may change its input in place."""
        for slot, tensor in zip(self.stage.inputs[0] if self.handed else (), self.handed or (), strict=True):
            slot.copy_(tensor)

    def input(self, micro: int) -> Any:
        """What a forward is called on; the first stage loads it."""
        return self.load_input(micro) if self.handed is None else self.stage.inputs[0]

    def forward(self, micro: int) -> Pass:
        """A forward that keeps its activations; the last stage's with the loss."""
        if isinstance(self.stage, LastStage):
            return self.stage.forward_loss(micro, self.input(micro), self.load_target(micro))
        return self.stage.forward(micro, self.input(micro))

    def backward(self, state: Pass) -> None:
        """Its backward."""
        if isinstance(self.stage, LastStage):
            self.stage.backward_loss(state)
        else:
            self.stage.backward(state, self.stage.gradients[0])

    def forward_keep_input(self, micro: int) -> Kept:
        """A forward that keeps its input alone."""
        if isinstance(self.stage, LastStage):
            return self.stage.forward_loss_keep_input(micro, self.input(micro), self.load_target(micro))
        return self.stage.forward_keep_input(micro, self.input(micro))[0]

    def backward_recompute(self, state: Kept) -> None:
        """Its backward, which runs the forward again."""
        if isinstance(self.stage, LastStage):
            self.stage.backward_loss_recompute(state)
        else:
            self.stage.backward_recompute(state, self.stage.gradients[0])

    def step(self) -> None:
        """The optimizer's step, and all else that begins the next update."""
        self.stage.step()

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        """The parameters that have gradients."""
        return _trained(self.module)

    @property
    def input_bytes(self) -> int:
        """What is kept for each micro-batch where the stage runs again: its input, target, and buffers it updates."""
        copies = bytes_of(self.module.get_buffer(name) for name in self.buffers)
        return self.footprint.inputs + self.footprint.targets + copies

    @property
    def activation_bytes(self) -> int:
        """M_a: what autograd saves, weights aside, and the whole of what was received, which waits for the backward."""
        received = self.footprint.inputs - self.footprint.saved_inputs if self.before is not None else 0
        return self.footprint.activations + received


def stations(cut: Cut, told: Callable[[str], None]) -> Iterator[tuple[int, tuple[Station, ...]]]:
    """Stage by stage, the last one first, its stations by size; two stages are never held at once.

    ``told`` is called when a stage has been looked at. What stages hand on is found on the way down, which of it
    comes back as gradients on the way up.

    Raises
    ------
    Misuse
        If a stage does what the model file's interface does not allow.
    ModelError
        If the model file's code raises an error.
    """
    seen = _way_down(cut, told)
    follow: dict[int, tuple[bool, ...] | None] = dict.fromkeys(cut.sizes)
    for stage in reversed(range(cut.stages)):
        module = cut.module(stage)
        found: list[Station] = []
        for size in cut.sizes:
            one = seen.pop((stage, size))
            after = one.after if one.after is None else replace(one.after, differentiable=follow[size] or ())
            with running(cut, stage, size):
                sight = _look(cut, stage, size, module, one.before, one.handed, measures=False)
                with cut.here():
                    follow[size] = tuple(look_back(stage, module, sight, follow[size]))
            before = one.before if one.before is None else replace(one.before, differentiable=follow[size] or ())
            found.append(_station(cut, stage, size, module, replace(one, before=before, after=after)))
        yield stage, tuple(found)


def _way_down(cut: Cut, told: Callable[[str], None]) -> dict[tuple[int, int], _Seen]:
    seen: dict[tuple[int, int], _Seen] = {}
    boundaries: dict[int, Boundary | None] = dict.fromkeys(cut.sizes)
    handed: dict[int, Any] = dict.fromkeys(cut.sizes)
    for stage in range(cut.stages):
        module = cut.module(stage)
        for size in cut.sizes:
            before = boundaries[size]
            with running(cut, stage, size):
                sight = _look(cut, stage, size, module, before, handed[size], measures=True)
            if sight.in_place:
                raise Misuse(
                    f"stage {stage} changes its input in place, so that it could not run again on it; "
                    "let it work on a copy"
                )
            after = _boundary(sight) if stage < cut.stages - 1 else None
            bare = replace(sight, inputs=(), outputs=(), buffers={})
            seen[stage, size] = _Seen(handed[size], before, after, bare)
            boundaries[size], handed[size] = after, tuple(t.detach().cpu() for t in sight.outputs if not t.is_meta)
            if cut.device.type == "meta":
                handed[size] = tuple(t.detach() for t in sight.outputs)
        told(f"depth {cut.stages}: looked at stage {stage}")
    return seen


@contextmanager
def running(cut: Cut, stage: int, size: int) -> Iterator[None]:
    """What needs more memory than there is, inside, is said in one line."""
    try:
        yield
    except (ModelError, torch.OutOfMemoryError) as error:
        if not isinstance(error.__cause__ if isinstance(error, ModelError) else error, torch.OutOfMemoryError):
            raise
        raise Misuse(f"stage {stage} of {cut.stages} does not fit into memory, with a micro-batch of {size}") from error


def _look(
    cut: Cut, stage: int, size: int, module: torch.nn.Module, before: Boundary | None, handed: Any, measures: bool
) -> Sight:
    last = stage == cut.stages - 1
    batches = cut.batches(size)
    argument = to_device(batches.input(0, 0) if stage == 0 else handed, cut.device)
    target = to_device(batches.target(0, 0), cut.device) if last else None
    torch.manual_seed(draw_seed("shapes", cut.seed, stage))
    with cut.here():
        return look(cut.model, stage, module, before, argument, target, last, measures)


def _boundary(sight: Sight) -> Boundary:
    recorded = tuple(t.requires_grad for t in sight.outputs)
    shapes = tuple(tuple(t.shape) for t in sight.outputs)
    return Boundary(sight.single, shapes, tuple(t.dtype for t in sight.outputs), recorded, recorded)


def _station(cut: Cut, stage: int, size: int, module: torch.nn.Module, seen: _Seen) -> Station:
    batches, device = cut.batches(size), cut.device
    names = Names(0, 0, cut.stages, _TIMEOUT)
    common = (
        stage,
        module,
        Weights(_optimizer(cut, module)),
        seen.before,
        seen.after,
        GradientSum(stage, _trained(module), None, (0,), names, lambda work: work.wait()),
        seen.sight.traits,
        Seeds(cut.seed, 0, 1),
    )
    made = Stage(*common) if seen.after is not None else LastStage(*common, loss=cut.model.judge, share=1.0)
    made.reserve((1,), (1,), device)
    for gradient in made.gradients[0] if made.gradients else ():
        with cut.here():
            gradient.copy_(torch.randn_like(gradient))
    return Station(
        size=size,
        module=module,
        stage=made,
        before=seen.before,
        after=seen.after,
        footprint=seen.sight.footprint,
        buffers=seen.sight.traits.buffers,
        handed=seen.handed if stage else None,
        load_input=_loader(batches.input, device, wanted=stage == 0),
        load_target=_loader(batches.target, device, wanted=seen.after is None),
    )


def _loader(load: Callable[[int, int], Any], device: torch.device, wanted: bool) -> Callable[[int], Any]:
    """Loads a micro-batch; on the meta device all are alike, and items are made where there is memory: beforehand."""
    if device.type != "meta":
        return lambda micro: to_device(load(micro, 0), device)
    first = to_device(load(0, 0), device) if wanted else None
    return lambda _: first


def _optimizer(cut: Cut, module: torch.nn.Module) -> Any:
    """What steps the weights, without state before the first step; where there is no memory for weights, nothing."""
    return None if cut.device.type == "meta" else cut.model.steps(_trained(module))


def _trained(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def message_bytes(boundary: Boundary | None, kinds: Sequence[bool] | None = None) -> int:
    """What a stage hands on of one micro-batch, or of it what ``kinds`` marks; the last stage hands on nothing."""
    if boundary is None:
        return 0
    tensors = boundary.buffers(torch.device("meta"))
    return bytes_of(t for t, wanted in zip(tensors, kinds or [True] * len(tensors), strict=True) if wanted)
