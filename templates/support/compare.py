"""What the ranks computed against what one process computed, tensor by tensor."""

import ctypes
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from runtime import plain
from support.reference import Wanted, distance, size
from support.world import World


@dataclass(frozen=True)
class Found:
    """What a rank computed: by stage, one tensor or none per parameter; for each update, its part of the loss."""

    parameters: Mapping[int, Sequence[torch.nn.Parameter]]
    tensors: Mapping[int, Sequence[torch.Tensor | None]]
    losses: Sequence[float]


@dataclass(frozen=True)
class Verdict:
    """How far the loops are from one process: relative to the largest tensor, and in the loss of every update.

    ``kind`` is what was compared: ``gradient`` or ``weight``.
    """

    kind: str
    error: float
    tolerance: float
    dtype: str
    losses: Sequence[float]
    reference_losses: Sequence[float]
    replicas_equal: bool

    @property
    def loss_error(self) -> float:
        """The largest difference of a loss, relative to the loss where that is above 1; infinite if it is no number."""
        pairs = zip(self.losses, self.reference_losses, strict=True)
        errors = [abs(mine - theirs) / max(1.0, abs(theirs)) for mine, theirs in pairs]
        return max(error if error == error else math.inf for error in errors)

    @property
    def passed(self) -> bool:
        """Whether tensors, losses and replicas are as they must be."""
        return max(self.error, self.loss_error) <= self.tolerance and self.replicas_equal

    def __str__(self) -> str:
        return (
            f"check: {'passed' if self.passed else 'FAILED'}\n"
            f"  {self.kind}s{self._after}: max |difference| / max |{self.kind}| = {self.error:.2e}, "
            f"at most {self.tolerance:.0e} in {self.dtype}\n"
            f"  {self._said_of_losses}\n"
            f"  replicas of every stage: {'bitwise equal' if self.replicas_equal else 'NOT bitwise equal'}"
        )

    @property
    def _after(self) -> str:
        return f" after {len(self.losses)} updates" if len(self.losses) > 1 else ""

    @property
    def _said_of_losses(self) -> str:
        if len(self.losses) == 1:
            return f"loss: {self.losses[0]:.9f}, in one process {self.reference_losses[0]:.9f}"
        last = f"the last {self.losses[-1]:.9f}, in one process {self.reference_losses[-1]:.9f}"
        return f"losses: max |difference| / max(1, |loss|) = {self.loss_error:.2e}; {last}"


def compare(world: World, found: Found, share: float, reference: Callable[[], Wanted]) -> Verdict | None:
    """The verdict, on rank 0; nothing elsewhere. Every rank calls it after what was recorded.

    ``share`` is what the loss of one micro-batch counts. The reference runs on rank 0 alone.
    """
    _publish_digests(world, found)
    losses = torch.tensor(found.losses, dtype=torch.float64)
    world.settle(dist.all_reduce(losses, group=world.chat, async_op=True), "for the sum of the losses")
    if world.place.rank:
        _measure(world, found)
        return None
    wanted = reference()
    errors = [distance(found.tensors[s], wanted.tensors[s]) for s in found.tensors]
    errors += _collect(world, wanted.tensors)
    largest = max(size(tensors) for tensors in wanted.tensors)
    dtype = _coarsest(wanted)
    worst = max(errors, default=0.0)
    return Verdict(
        kind=wanted.kind,
        error=worst / largest if largest else worst,
        tolerance=wanted.tolerances[dtype],
        dtype=str(dtype).removeprefix("torch."),
        losses=(losses * share).tolist(),
        reference_losses=wanted.losses,
        replicas_equal=_equal_digests(world),
    )


def _on(tensor: torch.Tensor | None, device: str) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().to(device)


def _coarsest(wanted: Wanted) -> torch.dtype:
    known = [t.dtype for tensors in wanted.tensors for t in tensors if t is not None and t.dtype in wanted.tolerances]
    return max(known, key=lambda d: wanted.tolerances[d], default=torch.float64)


def _collect(world: World, wanted: Sequence[Sequence[torch.Tensor | None]]) -> list[float]:
    """Rank 0 hands every other rank the reference's tensors of its stages, and takes back the distance."""
    for stage, tensors in enumerate(wanted):
        world.store.set(f"check/present/{stage}", json.dumps([t is not None for t in tensors]))
    world.store.set("check/ready", "1")
    errors = []
    for stage, tensors in enumerate(wanted):
        for rank in world.ranks_of(stage):
            if rank == 0:
                continue
            answer, what = torch.zeros(1, dtype=torch.float64), f"for the comparison of stage {stage}"
            world.store.set(f"check/turn/{stage}/{rank}", "1")
            for tensor in tensors:
                if tensor is not None:
                    world.send(tensor, rank, what)
            world.recv(answer, rank, what)
            errors.append(float(answer))
    return errors


def _measure(world: World, found: Found) -> None:
    # How long the reference takes nobody knows; should rank 0 die meanwhile, torchrun ends this rank.
    world.learn("check/ready", 0, "for the one-process reference", math.inf)
    for stage in sorted(found.tensors):
        present = json.loads(world.learn(f"check/present/{stage}", 0, "for the reference", world.timeout))
        mine = [_on(tensor, "cpu") for tensor in found.tensors[stage]]
        wanted = [
            torch.empty_like(p, device="cpu") if there else None
            for p, there in zip(found.parameters[stage], present, strict=True)
        ]
        what = f"for the reference's tensors of stage {stage}"
        world.learn(f"check/turn/{stage}/{world.place.rank}", 0, what, math.inf)
        for tensor in wanted:
            if tensor is not None:
                world.recv(tensor, 0, what)
        world.send(torch.tensor([distance(mine, wanted)], dtype=torch.float64), 0, what)


def _publish_digests(world: World, found: Found) -> None:
    for stage, tensors in found.tensors.items():
        world.store.set(f"check/digest/{stage}/{world.place.rank}", digest(tensors))


def digest(tensors: Iterable[torch.Tensor | None]) -> str:
    """A hash of the bits of tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(b"none" if tensor is None else _bytes(tensor))
    return found.hexdigest()


def _bytes(tensor: torch.Tensor) -> bytes:
    data = plain(tensor.detach().cpu())
    return ctypes.string_at(data.data_ptr(), data.nbytes)


def _equal_digests(world: World) -> bool:
    for stage in range(world.job.stages):
        what = f"for the digest of stage {stage}"
        ranks = world.ranks_of(stage)
        if len({world.learn(f"check/digest/{stage}/{r}", r, what, world.timeout) for r in ranks}) > 1:
            return False
    return True
