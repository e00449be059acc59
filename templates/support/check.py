"""``--check``: runs the generated loops for one update and compares them with the reference, gradient by gradient."""

import ctypes
import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from runtime import plain
from support.compute import LastStage, Stage
from support.reference import TOLERANCES, Reference, distance, size
from support.world import World


class Recorder:
    """Stands in for the optimizer: keeps the gradients that the loops would have stepped with."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.parameters = parameters
        self.gradients: list[torch.Tensor | None] = []

    def step(self) -> None:
        """Keeps a copy of every gradient."""
        self.gradients = [None if p.grad is None else p.grad.detach().clone() for p in self.parameters]


@dataclass(frozen=True)
class Verdict:
    """How far the loops are from one process, relative to the largest gradient and to the loss."""

    error: float
    tolerance: float
    dtype: str
    loss: float
    reference_loss: float
    replicas_equal: bool

    @property
    def passed(self) -> bool:
        """Whether gradients, loss and replicas are as they must be."""
        close = abs(self.loss - self.reference_loss) <= self.tolerance * max(1.0, abs(self.reference_loss))
        return self.error <= self.tolerance and close and self.replicas_equal

    def __str__(self) -> str:
        replicas = "bitwise equal" if self.replicas_equal else "NOT bitwise equal"
        return (
            f"check: {'passed' if self.passed else 'FAILED'}\n"
            f"  gradients: max |difference| / max |gradient| = {self.error:.2e}, "
            f"at most {self.tolerance:.0e} in {self.dtype}\n"
            f"  loss: {self.loss:.9f}, in one process {self.reference_loss:.9f}\n"
            f"  replicas of every stage: {replicas}"
        )


def compare(
    world: World, stages: dict[int, Stage], recorders: dict[int, Recorder], reference: Reference
) -> Verdict | None:
    """The verdict, on rank 0; nothing elsewhere. Every rank calls it after the update that was recorded."""
    found = {number: recorder.gradients for number, recorder in recorders.items()}
    _publish_digests(world, found)
    loss = sum(stage.take_loss() for stage in stages.values() if isinstance(stage, LastStage))
    facts = torch.tensor([loss], dtype=torch.float64)
    world.settle(dist.all_reduce(facts, group=world.chat, async_op=True), "for the sum of the losses")
    if world.place.rank:
        _measure(world, recorders)
        return None
    wanted_loss, wanted = reference.gradients(0)
    errors = [distance(found[s], wanted[s]) for s in found]
    errors += _collect(world, wanted)
    largest = max(size(gradients) for gradients in wanted)
    dtype = _coarsest([g.dtype for gradients in wanted for g in gradients if g is not None])
    worst = max(errors, default=0.0)
    return Verdict(
        error=worst / largest if largest else worst,
        tolerance=TOLERANCES[dtype],
        dtype=str(dtype).removeprefix("torch."),
        loss=float(facts[0]) / (reference.micro_batches * reference.parts * reference.copies),
        reference_loss=wanted_loss,
        replicas_equal=_equal_digests(world),
    )


def _on(gradient: torch.Tensor | None, device: str) -> torch.Tensor | None:
    return None if gradient is None else gradient.detach().to(device)


def _coarsest(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    known = [d for d in dtypes if d in TOLERANCES]
    return max(known, key=lambda d: TOLERANCES[d], default=torch.float64)


def _collect(world: World, wanted: list[list[torch.Tensor | None]]) -> list[float]:
    """Rank 0 hands every other rank the reference's gradients of its stages, and takes back the distance."""
    for stage, gradients in enumerate(wanted):
        world.store.set(f"check/present/{stage}", json.dumps([g is not None for g in gradients]))
    world.store.set("check/ready", "1")
    errors = []
    for stage, gradients in enumerate(wanted):
        for rank in world.ranks_of(stage):
            if rank == 0:
                continue
            answer, what = torch.zeros(1, dtype=torch.float64), f"for the comparison of stage {stage}"
            world.store.set(f"check/turn/{stage}/{rank}", "1")
            for gradient in gradients:
                if gradient is not None:
                    world.send(gradient, rank, what)
            world.recv(answer, rank, what)
            errors.append(float(answer))
    return errors


def _measure(world: World, recorders: dict[int, Recorder]) -> None:
    # How long the reference takes nobody knows; should rank 0 die meanwhile, torchrun ends this rank.
    world.learn("check/ready", 0, "for the one-process reference", math.inf)
    for stage in sorted(recorders):
        present = json.loads(world.learn(f"check/present/{stage}", 0, "for the reference", world.timeout))
        mine = [_on(gradient, "cpu") for gradient in recorders[stage].gradients]
        wanted = [
            torch.empty_like(p, device="cpu") if there else None
            for p, there in zip(recorders[stage].parameters, present, strict=True)
        ]
        what = f"for the reference's gradients of stage {stage}"
        world.learn(f"check/turn/{stage}/{world.place.rank}", 0, what, math.inf)
        for tensor in wanted:
            if tensor is not None:
                world.recv(tensor, 0, what)
        world.send(torch.tensor([distance(mine, wanted)], dtype=torch.float64), 0, what)


def _publish_digests(world: World, found: dict[int, list[torch.Tensor | None]]) -> None:
    for stage, gradients in found.items():
        world.store.set(f"check/digest/{stage}/{world.place.rank}", digest(gradients))


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
