"""Auxiliary losses: terms of the loss that any stage adds from within its forward."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch

from chimera_runtime.errors import stage as mistakes
from chimera_runtime.ranks.device_to_host import Numbers, Reader
from chimera_runtime.values.losses import Tally, added

Auxiliary = list[tuple[str, torch.Tensor]]
"""The auxiliary losses of a forward, by name; a name may come several times."""

_NO_BACKWARD = -1
"""Number that torch gives for the running backward in a thread in which no backward runs."""

_COLLECTED: ContextVar[Auxiliary | None] = ContextVar("auxiliary losses", default=None)


def auxiliary_loss(name: str, value: torch.Tensor) -> None:
    """Adds a term to the loss of a micro-batch; call it within the forward of a stage or within the loss.

    It does nothing if the module is used by itself, outside of a pipeline. It also does nothing in a backward, in which
    torch.utils.checkpoint runs a forward again whose losses have been counted before.

    Parameters
    ----------
    name
        The key of the loss in `Outcome.auxiliary`; losses of one name are added up, over layers and stages.
    value
        A tensor of one number, already multiplied by its weight: the mean over the micro-batch. If ``loss`` returns a
        sum and a count, the value is a sum, which is divided by the same count.

    Raises
    ------
    TypeError
        If the value is not a tensor of one number.
    BadModel
        If torch records no graph at the call, so that the loss would have no gradient.
    """
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise TypeError(f"the auxiliary loss {name} is to be a tensor of one number")
    collected = _COLLECTED.get()
    if collected is None or torch._C._current_graph_task_id() != _NO_BACKWARD:
        return
    if not torch.is_grad_enabled():
        raise mistakes.auxiliary_loss_has_no_gradient(name)
    collected.append((name, value))


@contextmanager
def collecting(before: Auxiliary | None = None) -> Iterator[Auxiliary]:
    """Collects the auxiliary losses of the forwards that this thread runs inside, in the list ``before`` if given."""
    collected: Auxiliary = [] if before is None else before
    token = _COLLECTED.set(collected)
    try:
        yield collected
    finally:
        _COLLECTED.reset(token)


def roots_of(auxiliary: Auxiliary) -> tuple[torch.Tensor, ...]:
    """The auxiliary losses that have a graph, at which a backward begins."""
    return tuple([value for _, value in auxiliary if value.requires_grad])


@dataclass
class AuxiliaryLosses:
    """The auxiliary losses of a stage, by update; ``names`` are the names that it gave in the first micro-batch."""

    stage: int
    names: Collection[str]
    read: Reader
    _losses: dict[int, list[tuple[Sequence[str], Numbers]]] = field(default_factory=dict)

    def add(self, micro: int, update: int, auxiliary: Auxiliary) -> None:
        """Begins to read a micro-batch's losses. Raises `BadModel` if one has a name that is not in ``names``."""
        names = [name for name, _ in auxiliary]
        if unknown := [name for name in names if name not in self.names]:
            raise mistakes.auxiliary_loss_is_new(self.stage, unknown[0], micro)
        if names:
            numbers = self.read([value.detach() for _, value in auxiliary])
            self._losses.setdefault(update, []).append((names, numbers))

    def take(self, update: int) -> Tally:
        """Returns the auxiliary losses of an update, added up, and forgets them."""
        read = ((names, numbers()) for names, numbers in self._losses.pop(update, []))
        return added(Tally(auxiliary={name: number}) for pair in read for name, number in zip(*pair, strict=True))
