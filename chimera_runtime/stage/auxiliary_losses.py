"""Auxiliary losses, which are terms of the loss, and reports, for people: numbers of a forward beside its output."""

import math
import numbers
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from chimera_runtime.errors import stage as mistakes
from chimera_runtime.ranks.device_to_host import Numbers, Reader
from chimera_runtime.values.losses import Tally, added
from chimera_runtime.values.mesh_tensors import is_spread


class Report(NamedTuple):
    """A number that a forward has reported, and its weight; None stands for the number of micro-batches.

    Each is a tensor without a graph if it is on a device other than the CPU: it is read later.
    """

    name: str
    value: float | torch.Tensor
    weight: float | torch.Tensor | None


class Auxiliary(list[tuple[str, torch.Tensor]]):
    """The auxiliary losses of a forward, by name; a name may come several times. ``reports`` are what it reported.

    If it ``takes`` none, only reports are collected: in an evaluation nothing has a gradient.
    """

    def __init__(self, takes: bool = True) -> None:
        super().__init__()
        self.reports: list[Report] = []
        self.takes = takes

    def weigh(self, micro_batches: int) -> None:
        """Gives the reports so far that have no weight that of their ``micro_batches``."""
        self.reports[:] = [r if r.weight is not None else r._replace(weight=micro_batches) for r in self.reports]


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
    if collected is None or not collected.takes or torch._C._current_graph_task_id() != _NO_BACKWARD:
        return
    if not torch.is_grad_enabled():
        raise mistakes.auxiliary_loss_has_no_gradient(name)
    collected.append((name, value))


def report(name: str, value: float | torch.Tensor, count: float | torch.Tensor | None = None) -> None:
    """Reports a number beside the loss, such as an accuracy; call it within the forward of a stage or within the loss.

    `Outcome.reports` has the mean of all numbers of a name, over micro-batches, stages and copies, weighted by their
    counts; so has the result of `Pipeline.evaluate`. Nothing is trained by it. A forward that runs again for its
    backward does not report again.

    Parameters
    ----------
    name
        The key in `Outcome.reports`. Not every micro-batch, stage or rank has to report it.
    value
        A number, or a tensor of one number, of which no gradient is kept: a mean over ``count`` items, say.
    count
        The weight of the number: by default a micro-batch counts by its items.

    Raises
    ------
    TypeError
        If the name is no text, or the value or the count no real number.
    ValueError
        If the count is not positive, or not finite; of a count on a GPU this is known after the update, as BadModel.
    Misuse
        If it is called outside of a step or an evaluation of a pipeline.
    """
    if torch._C._current_graph_task_id() != _NO_BACKWARD:
        return
    collected = _COLLECTED.get()
    if collected is None:
        raise mistakes.report_is_outside(name)
    if not isinstance(name, str):
        raise TypeError(mistakes.REPORT_HAS_NO_NAME)
    weight = None if count is None else _number(count)
    number = _number(value)
    if number is None or (weight is None and count is not None):
        raise TypeError(mistakes.report_is_no_number(name, "value" if number is None else "count"))
    if isinstance(weight, float) and not 0 < weight < math.inf:
        raise ValueError(mistakes.report_has_wrong_count(name, weight))
    collected.reports.append(Report(name, number, weight))


def _number(value: Any) -> float | torch.Tensor | None:
    """The number in a value, in a tensor of its own if that has to be read later; None if it is no real number."""
    if not isinstance(value, torch.Tensor):
        return float(value) if isinstance(value, numbers.Real) else None
    if value.numel() != 1 or value.is_complex() or is_spread(value):
        return None
    value = value.detach()
    return 1.0 if value.is_meta else value.item() * 1.0 if value.device.type == "cpu" else value.clone()


@contextmanager
def collecting(before: Auxiliary | None = None) -> Iterator[Auxiliary]:
    """Collects what the forwards that this thread runs inside tell, in the list ``before`` if given."""
    collected = Auxiliary() if before is None else before
    token = _COLLECTED.set(collected)
    try:
        yield collected
    finally:
        _COLLECTED.reset(token)


def roots_of(auxiliary: Auxiliary) -> tuple[torch.Tensor, ...]:
    """The auxiliary losses that have a graph, at which a backward begins."""
    return tuple([value for _, value in auxiliary if value.requires_grad])


@dataclass
class Reports:
    """The reports of forwards, by update, until the update is over; ``read`` reads numbers from the device."""

    read: Reader
    _reports: dict[int, list[tuple[list[Report], Numbers | None]]] = field(default_factory=dict)

    def add(self, update: int, reports: list[Report]) -> None:
        """Begins to read reports."""
        on_device = [n for _, *both in reports for n in both if isinstance(n, torch.Tensor)]
        self._reports.setdefault(update, []).append((reports, self.read(on_device) if on_device else None))

    def take(self, update: int) -> Tally:
        """Returns the sums of an update, and forgets them. Raises `BadModel` if a count is not positive."""
        sums: dict[str, tuple[float, float]] = {}
        for reports, read in self._reports.pop(update, ()):
            coming = iter(read() if read is not None else ())
            for name, value, weight in reports:
                value = next(coming) if isinstance(value, torch.Tensor) else value
                weight = next(coming) if isinstance(weight, torch.Tensor) else 1.0 if weight is None else weight
                if not 0 < weight < math.inf:
                    raise mistakes.report_had_wrong_count(name, weight)
                total, weights = sums.get(name, (0.0, 0.0))
                sums[name] = total + value * weight, weights + weight
        return Tally(reports=sums)


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
