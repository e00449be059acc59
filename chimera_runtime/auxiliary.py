"""Auxiliary losses: what a stage adds to the loss from within its forward, wherever the stage is."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

Auxiliary = list[tuple[str, torch.Tensor]]
"""The auxiliary losses of a forward, by name; a name may come several times."""

_HEARD: ContextVar[Auxiliary | None] = ContextVar("auxiliary losses", default=None)


def auxiliary_loss(name: str, value: torch.Tensor) -> None:
    """Adds to the loss of the micro-batch that a stage is called on; to be called within the stage's forward.

    Outside of a pipeline, as where the module is used by itself, it does nothing.

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
    """
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise TypeError(f"the auxiliary loss {name} is to be a tensor of one number")
    heard = _HEARD.get()
    if heard is not None:
        heard.append((name, value))


@contextmanager
def listening() -> Iterator[Auxiliary]:
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
