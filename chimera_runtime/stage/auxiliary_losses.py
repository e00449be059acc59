"""Auxiliary losses: what a stage adds to the loss from within its forward, wherever the stage is."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from chimera_runtime.errors import BadModel
from chimera_runtime.ranks.readout import Numbers, Reader
from chimera_runtime.values.losses import Tally, added

Auxiliary = list[tuple[str, torch.Tensor]]
"""The auxiliary losses of a forward, by name; a name may come several times."""

_NO_BACKWARD = -1
"""What torch has in place of the number of a backward in a thread that runs none."""

_HEARD: ContextVar[Auxiliary | None] = ContextVar("auxiliary losses", default=None)


def auxiliary_loss(name: str, value: torch.Tensor) -> None:
    """Adds to the loss of the micro-batch that a stage is called on; to be called within the stage's forward.

    Outside of a pipeline, as where the module is used by itself, it does nothing; nor does it in a backward, where
    torch.utils.checkpoint runs a part of a forward again that has been counted.

    Parameters
    ----------
    name
        By which `Outcome.auxiliary` has it; those of one name are added up, over layers and stages.
    value
        A tensor of one number, with its weight: a mean over the micro-batch or, where ``loss`` returns a sum and a
        count, a sum, which is divided by the same count.

    Raises
    ------
    TypeError
        If the value is no tensor of one number.
    BadModel
        If it is added where torch records nothing, so that it would have no gradient.
    """
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise TypeError(f"the auxiliary loss {name} is to be a tensor of one number")
    heard = _HEARD.get()
    if heard is None or torch._C._current_graph_task_id() != _NO_BACKWARD:
        return
    if not torch.is_grad_enabled():
        raise BadModel(
            f"the auxiliary loss {name} would have no gradient: it is added under torch.no_grad(), or in a "
            "torch.utils.checkpoint with use_reentrant=True; use use_reentrant=False"
        )
    heard.append((name, value))


@contextmanager
def collecting() -> Iterator[Auxiliary]:
    """The auxiliary losses of the forwards inside, in this thread."""
    heard: Auxiliary = []
    token = _HEARD.set(heard)
    try:
        yield heard
    finally:
        _HEARD.reset(token)


def roots_of(auxiliary: Auxiliary) -> tuple[torch.Tensor, ...]:
    """Where the backward of auxiliary losses begins."""
    return tuple([value for _, value in auxiliary if value.requires_grad])


class AuxiliaryLosses:
    """Those of a stage, added up by update; ``names`` are those that it had for the first micro-batch."""

    def __init__(self, stage: int, names: Collection[str], read: Reader) -> None:
        self._stage = stage
        self._names = names
        self._read = read
        self._losses: defaultdict[int, list[tuple[Sequence[str], Numbers]]] = defaultdict(list)

    def add(self, micro: int, update: int, auxiliary: Auxiliary) -> None:
        """Begins to read those of a forward; only a stage that has none runs several micro-batches at once.

        Raises
        ------
        BadModel
            If it had one of another name.
        """
        names = [name for name, _ in auxiliary]
        if unknown := [name for name in names if name not in self._names]:
            raise BadModel(
                f"stage {self._stage} has the auxiliary loss {unknown[0]} for micro-batch {micro}, and had it not for "
                "the first; have the same every time, of 0 where there is nothing to add"
            )
        if names:
            self._losses[update].append((names, self._read([value.detach() for _, value in auxiliary])))

    def take(self, update: int) -> Tally:
        """Those of an update; they are forgotten."""
        read = ((names, numbers()) for names, numbers in self._losses.pop(update, []))
        return added(Tally(auxiliary={name: number}) for pair in read for name, number in zip(*pair, strict=True))
