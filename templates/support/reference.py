"""The check: the same updates in one process, written apart from everything it checks.

The reference builds the whole model, runs the micro-batches one after another through ordinary autograd and never looks
at the schedule; where updates overlap, all that it knows is which version of the weights a micro-batch reads. It shares
with the ranks only what docs/runtime.md defines: which item goes where, and the seeds.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import default_collate

TOLERANCES = {
    torch.float64: 1e-12,
    torch.complex128: 1e-12,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.float16: 2e-2,
    torch.bfloat16: 5e-2,
}
"""How far gradients may differ from the reference's, relative to the largest; the order of summation differs.

The same holds for weights after plain gradient descent, with momentum or without."""

ADAPTIVE_TOLERANCES = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float32: 1e-3,
    torch.complex64: 1e-3,
    torch.float16: 1e-1,
    torch.bfloat16: 1e-1,
}
"""The same for weights after other optimizers, which divide by what may be as small as a rounding error."""


@dataclass(frozen=True)
class Wanted:
    """What one process computed: by stage, one tensor or none per parameter; the loss of every update."""

    kind: str
    tensors: list[list[torch.Tensor | None]]
    losses: list[float]
    tolerances: dict[torch.dtype, float]


def seed_of(*parts: str | int) -> int:
    """The first 8 bytes of BLAKE2b of the parts joined by slashes, as a 63-bit number."""
    digest = hashlib.blake2b("/".join(str(p) for p in parts).encode("ascii"), digest_size=8).hexdigest()
    return int(digest, 16) // 2


@dataclass(frozen=True)
class Reference:
    """One process that trains the whole model: B*N*W items per update.

    Where micro-batches are cut into parts, it runs the parts one after another: each has dropout and batch statistics
    of its own, and its loss the weight of a part.
    """

    model: Any
    stages: int
    micro_batch_size: int
    micro_batches: int
    parts: int
    copies: int
    seed: int
    device: torch.device

    def gradients(self, update: int) -> Wanted:
        """The loss of an update on the initial weights, and the gradient of every parameter of every stage."""
        built, dataset = [self._build(s) for s in range(self.stages)], self.model.dataset()
        items = self._items(dataset, update)
        loss = sum(
            self._pass(built, self._batch(dataset, items[copy * self._passes + micro]), update, copy, micro)
            for copy in range(self.copies)
            for micro in range(self._passes)
        )
        gradients = [[_gradient(p) for p in module.parameters() if p.requires_grad] for module in built]
        return Wanted("gradient", gradients, [loss], TOLERANCES)

    def train(self, updates: int, period: int, reads: Sequence[Sequence[tuple[int, int]]]) -> Wanted:
        """The loss of every update, and all weights after the last one.

        Micro-batch m, counted over all updates, runs on the version of each stage's weights that ``reads`` says: of the
        runs (offset, count), one of each micro-batch of a period, the offset to the updates in the periods before.
        """
        built, dataset = [self._build(s) for s in range(self.stages)], self.model.dataset()
        histories = [History(module, self.model.optimizer, _spread(r)) for module, r in zip(built, reads, strict=True)]
        losses = []
        for update in range(updates):
            items = self._items(dataset, update)
            losses.append(0.0)
            for micro in range(self._passes):
                for history in histories:
                    history.show(update * self._passes + micro, period // self._passes)
                for copy in range(self.copies):
                    batch = self._batch(dataset, items[copy * self._passes + micro])
                    losses[-1] += self._pass(built, batch, update, copy, micro)
            for s, history in enumerate(histories):
                history.step(seed_of("step", self.seed, update, s))
        adaptive = any(history.is_adaptive for history in histories)
        newest: list[list[torch.Tensor | None]] = [[*history.newest] for history in histories]
        return Wanted("weight", newest, losses, ADAPTIVE_TOLERANCES if adaptive else TOLERANCES)

    @property
    def _passes(self) -> int:
        return self.micro_batches * self.parts

    def _pass(self, built: list[torch.nn.Module], batch: tuple[Any, Any], update: int, copy: int, micro: int) -> float:
        """Adds the gradients of a micro-batch; returns its part of the update's loss."""
        value, target = batch
        for s, module in enumerate(built):
            torch.manual_seed(seed_of("forward", self.seed, update, copy, micro, s))
            value = module(value)
        loss = self.model.loss(value, target) / (self.copies * self._passes)
        if loss.requires_grad:
            loss.backward()
        return float(loss.item())

    def _build(self, stage: int) -> torch.nn.Module:
        torch.manual_seed(seed_of("weights", self.seed, stage))
        module: torch.nn.Module = self.model.build_stage(stage, self.stages)
        return module.to(self.device).train()

    def _items(self, dataset: Any, update: int) -> list[list[tuple[int, int]]]:
        """For each part of each micro-batch of each copy in turn, its items, each with a seed of its own."""
        size, count = self.micro_batch_size // self.parts, self.micro_batches * self.copies * self.parts
        epoch, update = divmod(update, len(dataset) // (size * count))
        generator = torch.Generator().manual_seed(seed_of("order", self.seed, epoch))
        order = torch.randperm(len(dataset), generator=generator).tolist()[update * size * count :]
        seeded = [(item, seed_of("item", self.seed, epoch, item)) for item in order[: size * count]]
        return [seeded[i * size : (i + 1) * size] for i in range(count)]

    def _batch(self, dataset: Any, items: list[tuple[int, int]]) -> tuple[Any, Any]:
        """The collated inputs and targets of a micro-batch."""
        loaded = []
        for item, seed in items:
            torch.manual_seed(seed)
            loaded.append(dataset[item])
        inputs, targets = zip(*loaded, strict=True)
        return _move(default_collate(list(inputs)), self.device), _move(default_collate(list(targets)), self.device)


def _move(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {k: _move(v, device) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_move(v, device) for v in value])
    return value


def _spread(runs: Sequence[tuple[int, int]]) -> list[int]:
    """Runs of (offset, count) as one offset per micro-batch of a period."""
    return [offset for offset, count in runs for _ in range(count)]


class History:
    """The weights of a stage after every update, as far back as micro-batches to come read them."""

    def __init__(self, module: torch.nn.Module, make_optimizer: Callable[[Any], Any], offsets: Sequence[int]) -> None:
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._optimizer = make_optimizer(self._parameters) if self._parameters else None
        self._offsets = offsets
        self._versions = [self._copied()]
        self._forgotten = 0

    def _copied(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self._parameters]

    @property
    def newest(self) -> list[torch.Tensor]:
        """The weights after the last update."""
        return self._versions[-1]

    @property
    def is_adaptive(self) -> bool:
        """Whether the optimizer is another one than plain gradient descent."""
        return not isinstance(self._optimizer, torch.optim.SGD | None)

    def show(self, micro: int, updates: int) -> None:
        """Gives the module the weights that a micro-batch reads, where a period has so many updates."""
        period, place = divmod(micro, len(self._offsets))
        self._load(self._versions[max(0, period * updates + self._offsets[place]) - self._forgotten])
        while period * updates + min(self._offsets) > self._forgotten:
            del self._versions[0]
            self._forgotten += 1

    def step(self, seed: int) -> None:
        """Makes the next version of the newest one, with the gradients that were added since the last step."""
        self._load(self.newest)
        for parameter in self._parameters:
            parameter.grad = _gradient(parameter)
        torch.manual_seed(seed)
        if self._optimizer is not None:
            self._optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None
        self._versions.append(self._copied())

    @torch.no_grad()
    def _load(self, tensors: Sequence[torch.Tensor]) -> None:
        for parameter, tensor in zip(self._parameters, tensors, strict=True):
            parameter.copy_(tensor)


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    gradient = parameter.grad
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


def distance(found: Sequence[torch.Tensor | None], wanted: Sequence[torch.Tensor | None]) -> float:
    """The largest difference of two lists of gradients; infinite where one has a gradient and the other has none."""
    largest = 0.0
    for mine, theirs in zip(found, wanted, strict=True):
        if (mine is None) != (theirs is None):
            return float("inf")
        if mine is not None and theirs is not None and mine.numel():
            difference = float((_wide(mine) - _wide(theirs)).abs().max())
            largest = max(largest, difference if difference == difference else float("inf"))
    return largest


def _wide(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


def size(gradients: Sequence[torch.Tensor | None]) -> float:
    """The largest absolute value among gradients."""
    return max((float(_wide(g).abs().max()) for g in gradients if g is not None and g.numel()), default=0.0)
