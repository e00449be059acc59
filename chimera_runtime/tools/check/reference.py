"""The check: the same updates in one process, written apart from everything it checks.

The reference builds the whole model, runs the micro-batches one after another through ordinary autograd and never looks
at the schedule: all that it knows is which version of the weights a micro-batch reads. It shares with the ranks only
what the docs define (`reference_data`): which item goes where (docs/howto/data.md), and the seeds (runtime.md).
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from chimera_runtime.tools.check.reference_data import mini_batches, seed_all, seed_devices, seed_of

Gradients = Sequence[torch.Tensor | None]
"""Of a weight group: one for each parameter that requires one, or none where none came."""

Ties = Mapping[tuple[int, ...], Sequence[Sequence[tuple[int, str]]]]
"""By the stages that share them, parameters: of each, its stages and its names there; the first gives its value.

A stage by itself is one whose layers share them.
"""


def _nothing() -> AbstractContextManager[Sequence[Any]]:
    """A context in which no auxiliary losses are heard."""
    return nullcontext(())


def _unnamed(_modules: Sequence[torch.nn.Module]) -> None:
    """Leaves parameters without names."""


@dataclass(frozen=True)
class Reference:
    """One process that trains the whole model: B*N*W items per update.

    Where micro-batches are cut into parts, it runs the parts one after another: each has dropout and batch statistics
    of its own, and its loss the weight of a part. ``listening`` is a context that has the auxiliary losses of the
    forwards inside, by name; ``label`` lets the parameters of a stage carry their names in the model.
    """

    model: Any
    stages: int
    micro_batch_size: int
    micro_batches: int
    parts: int
    copies: int
    seed: int
    device: torch.device
    ties: Ties = field(default_factory=dict)
    listening: Callable[[], Any] = _nothing
    label: Callable[[Sequence[torch.nn.Module]], None] = _unnamed

    def begin(self, period: int, reads: Sequence[Sequence[tuple[int, int]]]) -> "Training":
        """Training from the initial weights, where each stage reads the versions that ``reads`` says.

        Micro-batch m, counted over all updates, runs on a version of each stage's weights: of the runs (offset, count),
        one of each micro-batch of a period, the offset to the updates in the periods before.
        """
        return Training(self, period, reads)

    @property
    def passes(self) -> int:
        """How many forwards of each stage an update of a copy has."""
        return self.micro_batches * self.parts

    def loss(
        self, built: Sequence[torch.nn.Module], batch: Any, update: int, copy: int, micro: int
    ) -> tuple[torch.Tensor, float, list[tuple[str, torch.Tensor]]]:
        """Of a micro-batch, a sum and what it counts: a mean counts 1; and its auxiliary losses."""
        value, target, named = batch
        auxiliary: list[tuple[str, torch.Tensor]] = []
        for s, module in enumerate(built):
            seed_all(seed_of("forward", self.seed, update, copy, micro, s))
            with self.listening() as heard:
                value = module(value, **{name: named[name] for name in named if _takes(module, name)})
            auxiliary += heard
        loss = self.model.loss(value, target)
        total, count = loss if isinstance(loss, (tuple, list)) else (loss, 1)
        return total, float(count), auxiliary

    def build(self, stage: int) -> torch.nn.Module:
        """A stage with its initial weights."""
        layers = self.model.layers
        if layers is None:
            module = self._made(stage, lambda: self.model.build_stage(stage, self.stages))
        else:
            held = layers.ranges(self.stages)[stage]
            module = _InTurn({str(index): self._made(index, layers.layers[index]) for index in held})
        return module.to(self.device).train()

    def _made(self, number: int, make: Callable[[], torch.nn.Module]) -> torch.nn.Module:
        """A stage or a layer, by its number."""
        torch.manual_seed(seed_of("weights", self.seed, number))
        return make()

    def batches(self) -> Iterator[list[list[Any]]]:
        """What each update trains on, see `reference_data`."""
        return mini_batches(
            self.model,
            (self.micro_batch_size, self.micro_batches * self.copies, self.parts),
            self.seed,
            self.device,
        )


class _InTurn(torch.nn.ModuleDict):
    """Layers, each of which is called on what the one before returned."""

    def forward(self, value: Any, **named: Any) -> Any:
        for layer in self.values():
            value = layer(value, **{name: named[name] for name in named if _takes(layer, name)})
        return value


def _takes(module: torch.nn.Module, name: str) -> bool:
    """Whether a stage can be called with an argument of a name, beside the first one."""
    try:
        inspect.signature(module.forward).bind_partial(None, **{name: None})
    except TypeError:
        return False
    return True


def _spread(runs: Sequence[tuple[int, int]]) -> list[int]:
    """Runs of (offset, count) as one offset per micro-batch of a period."""
    return [offset for offset, count in runs for _ in range(count)]


class Training:
    """A reference that trains: for every update its `gradients`, then a `step` with gradients that are given to it.

    A step takes what the ranks computed, once that has been compared. So the next update begins on the weights of the
    ranks, and a rounding error is not magnified by an optimizer that divides by what may be as small.
    """

    def __init__(self, reference: Reference, period: int, reads: Sequence[Sequence[tuple[int, int]]]) -> None:
        self._reference = reference
        self._updates_of_a_period = period // reference.passes
        self._batches = reference.batches()
        self._update = 0
        self.modules = [reference.build(stage) for stage in range(reference.stages)]
        for parameters in reference.ties.values():
            for ends in parameters:
                _tie(self.modules, ends)
        reference.label(self.modules)
        offsets = list(map(_spread, reads))
        self._ties = {stages: shared for stages, shared in reference.ties.items() if len(stages) > 1}
        self.groups = [*((stage,) for stage in range(reference.stages)), *self._ties]
        """The weight groups: each stage by itself, then the ties; in their order are histories and gradients."""
        self.histories = [
            History(self._trained(group), reference.model.optimizer, offsets[group[0]]) for group in self.groups
        ]
        self.losses: list[float] = []
        self.loss_sizes: list[float] = []
        self.auxiliary: list[dict[str, tuple[float, float]]] = []
        self.dtypes = {p.dtype for module in self.modules for p in module.parameters()}
        if reference.model.autocast is not None:
            self.dtypes.add(reference.model.autocast)

    def _trained(self, group: tuple[int, ...]) -> dict[str, torch.nn.Parameter]:
        """The parameters of a group that require gradients: those of a stage without what it shares, or of a tie."""
        ties = self._ties
        shared = {
            f"{name} of stage {stage}": dict(self.modules[stage].named_parameters(remove_duplicate=False))[name]
            for parameters in ([ties[group]] if group in ties else ties.values())
            for (stage, name), *_ in parameters
        }
        if group in ties:
            return {name: parameter for name, parameter in shared.items() if parameter.requires_grad}
        apart = {*map(id, shared.values())}
        named = self.modules[group[0]].named_parameters()
        return {name: p for name, p in named if p.requires_grad and id(p) not in apart}

    def gradients(self) -> list[Gradients]:
        """Of the next update, by weight group; its loss is then the last of ``losses``.

        ``loss_sizes`` has the mean absolute loss of its micro-batches, ``auxiliary`` both of each auxiliary loss.
        Gradients are those of the sum of all sums, divided by all that counts; where nothing counts they are 0, and the
        loss is not a number.
        """
        reference = self._reference
        batches = next(self._batches)
        passes = [
            self._pass(batches[copy * reference.passes + micro], copy, micro)
            for micro in range(reference.passes)
            for copy in range(reference.copies)
        ]
        count = sum(count for _, count, _ in passes)
        means, sizes = [], []
        for name in ["", *{name for *_, auxiliary in passes for name in auxiliary}]:
            totals = [auxiliary.get(name, 0.0) if name else total for total, _, auxiliary in passes]
            means.append((name, sum(totals) / count if count else float("nan")))
            sizes.append(sum(map(abs, totals)) / count if count else float("nan"))
        self.losses.append(means[0][1])
        self.loss_sizes.append(sizes[0])
        self.auxiliary.append({name: (mean, s) for (name, mean), s in zip(means[1:], sizes[1:], strict=True)})
        factor = reference.copies * reference.passes / count if count else 0.0
        return [history.take_gradients(factor) for history in self.histories]

    def _pass(self, batch: Sequence[Any], copy: int, micro: int) -> tuple[float, float, dict[str, float]]:
        """Adds the gradients of a micro-batch, each divided by the number of them; returns its sums and its count."""
        for history in self.histories:
            history.show(self._update * self._reference.passes + micro, self._updates_of_a_period)
        loss, count, auxiliary = self._reference.loss(self.modules, batch, self._update, copy, micro)
        self.dtypes.add(loss.dtype)
        sums: dict[str, float] = {}
        for name, value in auxiliary:
            sums[name] = sums.get(name, 0.0) + float(value)
        parts = [part.reshape(()) for part in (loss, *(value for _, value in auxiliary)) if part.requires_grad]
        if parts:
            torch.autograd.backward([part / (self._reference.copies * self._reference.passes) for part in parts])
        return float(loss.item()), count, sums

    def step(self, gradients: Sequence[Gradients]) -> None:
        """Makes the next version of all weights."""
        for group, history, mine in zip(self.groups, self.histories, gradients, strict=True):
            history.step(mine, seed_of("step", self._reference.seed, self._update, *group))
        self._update += 1


def _tie(modules: Sequence[torch.nn.Module], ends: Sequence[tuple[int, str]]) -> None:
    """Puts a parameter of one stage in the place of others, wherever these are."""
    (stage, name), *others = ends
    first = dict(modules[stage].named_parameters(remove_duplicate=False))[name]
    for other, other_name in others:
        old = dict(modules[other].named_parameters(remove_duplicate=False))[other_name]
        for part in modules[other].modules():
            for key, parameter in [*part.named_parameters(recurse=False, remove_duplicate=False)]:
                if parameter is old:
                    setattr(part, key, first)


class History:
    """The weights of a group after every update, as far back as micro-batches to come read them.

    ``largest_step`` is by how much a step has changed a weight at most.
    """

    def __init__(
        self, trained: Mapping[str, torch.nn.Parameter], make_optimizer: Callable[[Any], Any], offsets: Sequence[int]
    ) -> None:
        self.names = list(trained)
        self.largest_step = 0.0
        self._parameters = list(trained.values())
        self._optimizer = make_optimizer(self._parameters) if self._parameters else None
        self._offsets = offsets
        self._versions = [[p.data for p in self._parameters]]
        self._forgotten = 0

    @property
    def newest(self) -> list[torch.Tensor]:
        """The weights after the last update."""
        return self._versions[-1]

    @property
    def is_adaptive(self) -> bool:
        """Whether the optimizer is another one than `torch.optim.SGD`."""
        return not isinstance(self._optimizer, torch.optim.SGD | None)

    def show(self, micro: int, updates: int) -> None:
        """Gives the parameters the weights that a micro-batch reads, where a period has so many updates."""
        period, place = divmod(micro, len(self._offsets))
        self._point_to(self._versions[max(0, period * updates + self._offsets[place]) - self._forgotten])
        while period * updates + min(self._offsets) > self._forgotten:
            del self._versions[0]
            self._forgotten += 1

    def take_gradients(self, factor: float = 1.0) -> Gradients:
        """What the backwards since the last call have added up, times a factor."""
        gradients = [None if p.grad is None else _dense(p.grad) * factor for p in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        return gradients

    def step(self, gradients: Gradients, seed: int) -> None:
        """Makes the next version of the newest one."""
        before = self.newest
        self._versions.append([tensor.clone() for tensor in before])
        self._point_to(self.newest)
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
        seed_devices(seed)
        if self._optimizer is not None:
            self._optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None
        self.largest_step = max(self.largest_step, distance(self.newest, before))

    def _point_to(self, version: Sequence[torch.Tensor]) -> None:
        for parameter, tensor in zip(self._parameters, version, strict=True):
            parameter.data = tensor


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def distance(computed: Gradients, wanted: Gradients) -> float:
    """The largest difference of two lists of tensors; infinite where one has a tensor and the other has none."""
    return max(differences(computed, wanted), default=0.0)


def differences(computed: Gradients, wanted: Gradients, roundings: int = 0) -> Iterator[float]:
    """Of each tensor, the largest difference beyond what so many roundings of each number explain."""
    for mine, theirs in zip(computed, wanted, strict=True):
        if mine is None or theirs is None:
            yield 0.0 if mine is theirs else float("inf")
        elif mine.numel() == 0:
            yield 0.0
        else:
            expected = _wide(theirs)
            explained = roundings * torch.finfo(theirs.dtype).eps * expected.abs()
            beyond = float(((_wide(mine) - expected).abs() - explained).max())
            yield max(0.0, beyond) if beyond == beyond else float("inf")


def _wide(value: torch.Tensor) -> torch.Tensor:
    return value.to("cpu", torch.complex128 if value.is_complex() else torch.float64)


def size(gradients: Gradients) -> float:
    """The largest absolute value among gradients."""
    return max((float(_wide(g).abs().max()) for g in gradients if g is not None and g.numel()), default=0.0)
