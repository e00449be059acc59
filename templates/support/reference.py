"""The check: the same update in one process, written apart from everything it checks.

The reference builds the whole model, runs the micro-batches one after another through ordinary autograd and never looks
at the schedule. It shares with the ranks only what README.md defines: which item goes where, and the seeds.
"""

import hashlib
from collections.abc import Sequence
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
"""How far gradients may differ from the reference's, relative to the largest; the order of summation differs."""


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

    def gradients(self, update: int) -> tuple[float, list[list[torch.Tensor | None]]]:
        """The loss of an update on the initial weights, and the gradient of every parameter of every stage."""
        built = [self._build(s) for s in range(self.stages)]
        dataset = self.model.dataset()
        items = self._items(dataset, update)
        total = 0.0
        passes = self.micro_batches * self.parts
        for number in range(self.copies * passes):
            copy, micro = divmod(number, passes)
            value, target = self._batch(dataset, items[number])
            for s, module in enumerate(built):
                torch.manual_seed(seed_of("forward", self.seed, update, copy, micro, s))
                value = module(value)
            loss = self.model.loss(value, target) / (self.copies * passes)
            if loss.requires_grad:
                loss.backward()
            total += loss.item()
        return total, [[_gradient(p) for p in module.parameters() if p.requires_grad] for module in built]

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
