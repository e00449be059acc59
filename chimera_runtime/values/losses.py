"""Losses of an update, added up over micro-batches and ranks: each is a mean, or a sum and a count."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from chimera_runtime.errors import stage as mistakes

Loss = Any
"""Result of ``loss``: a tensor of one number, the mean over a micro-batch, or a pair of a sum and a count."""


@dataclass(frozen=True)
class CountedLoss:
    """A loss that is a sum and a count, of which the count follows from the target alone, as a number of tokens does.

    It is called as a function ``loss`` that returns both. Where several stages compute a loss, one that is divided by a
    count must be of this class: a stage before two of them gets the sum of their gradients, so each is divided by its
    own count from the start. The ranks add up the counts of an update before it begins.

    Parameters
    ----------
    total
        Function of output and target that returns the sum over a micro-batch, a tensor of one number.
    count
        Function of a target, as the data have it, that returns the count: a number, or a tensor of one number.
    """

    total: Callable[[Any, Any], torch.Tensor]
    count: Callable[[Any], Any]

    def __call__(self, output: Any, target: Any) -> Loss:
        """Returns the sum and the count."""
        return self.total(output, target), self.count(target)


@dataclass(frozen=True)
class Tally:
    """Total of some losses of an update, and the count by which it is divided: 1 a micro-batch if they are means.

    ``auxiliary`` has sums. ``reports`` has the weighted sum and the sum of the weights of what was reported.
    """

    total: float = 0.0
    count: float = 0.0
    auxiliary: Mapping[str, float] = field(default_factory=dict)
    reports: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def __add__(self, other: "Tally") -> "Tally":
        names = self.auxiliary.keys() | other.auxiliary.keys()
        sums = {name: self.auxiliary.get(name, 0.0) + other.auxiliary.get(name, 0.0) for name in names}
        reports = dict(self.reports)
        for name, (total, count) in other.reports.items():
            before, counted = reports.get(name, (0.0, 0.0))
            reports[name] = before + total, counted + count
        return Tally(self.total + other.total, self.count + other.count, sums, reports)

    @property
    def mean(self) -> float:
        """The total divided by the count; nan if the count is 0."""
        return self.total / self.count if self.count else math.nan

    @property
    def auxiliary_means(self) -> dict[str, float]:
        """The mean of each auxiliary loss."""
        return {name: total / self.count if self.count else math.nan for name, total in self.auxiliary.items()}

    @property
    def report_means(self) -> dict[str, float]:
        """The mean of what was reported, by name."""
        return {name: total / count for name, (total, count) in self.reports.items() if count}

    def numbers(self, names: Sequence[str] = (), reports: Sequence[str] = ()) -> list[float]:
        """Returns total, count, the auxiliary losses ``names`` and two numbers of each of ``reports``, to be summed."""
        reported = [number for name in reports for number in self.reports.get(name, (0.0, 0.0))]
        return [self.total, self.count, *(self.auxiliary.get(name, 0.0) for name in names), *reported]

    @classmethod
    def of(cls, numbers: Iterable[float], names: Sequence[str] = (), reports: Sequence[str] = ()) -> "Tally":
        """Makes a tally from a list that `numbers` returned, or from the sum of such lists over ranks."""
        total, count, *others = numbers
        auxiliary, reported = others[: len(names)], iter(others[len(names) :])
        pairs = zip(reported, reported, strict=True)
        return cls(total, count, dict(zip(names, auxiliary, strict=True)), dict(zip(reports, pairs, strict=True)))


def loss_name(sink: str) -> str:
    """The name among reports of the loss of a stage that feeds no other, where there are several."""
    return f"loss of {sink}"


def added(tallies: Iterable[Tally]) -> Tally:
    """The sum of tallies: totals, counts and auxiliary losses are added up."""
    return sum(tallies, Tally())


def as_pair(loss: Loss) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the sum and the count, in float64, of a result of ``loss``; or the mean and None if it has no count."""
    if not isinstance(loss, tuple | list):
        return loss, None
    total, count = loss
    if not isinstance(count, torch.Tensor):
        return total, torch.full((1,), float(count), dtype=torch.float64, device=total.device)
    return total, count.detach().to(total.device, torch.float64).reshape(1)


def expected_count(count: float | None, micro_batches: int) -> float | None:
    """Returns an estimate of an update's count, by which gradients are divided at first; None if losses are means.

    It is the power of 2 nearest to ``count``, that of one micro-batch, times ``micro_batches``. Multiplication and
    division by a power of 2 do not round, so the final gradients do not depend on the estimate.
    """
    if count is None:
        return None
    return float(2.0 ** round(math.log2(max(count, 1.0) * micro_batches)))


class Count:
    """Sum of the loss counts of the micro-batches whose backward a stage has run in this update, in ``tensor``.

    All gradients have been divided by the ``expected`` count: see `expected_count`.
    """

    def __init__(self, stage: int, expected: float, device: torch.device) -> None:
        self._stage = stage
        self._expected = expected
        self.tensor = torch.zeros(1, dtype=torch.float64, device=device)

    def add(self, counts: Iterable[torch.Tensor]) -> None:
        """Adds the counts of a backward's micro-batches. Call after the backward."""
        for count in counts:
            self.tensor += count

    def clear(self) -> None:
        """Resets the count for the next update."""
        self.tensor.zero_()

    def correction(self, count: float) -> float:
        """Returns the factor that corrects gradients, which were divided by the expected count and not by ``count``.

        ``count`` is the sum over all ranks; if it is 0, the factor is 0. Raises `BadModel` if it is infinite or
        negative.
        """
        if not 0 <= count < math.inf:
            raise mistakes.count_is_impossible(stage=self._stage, count=count)
        return self._expected / count if count else 0.0
