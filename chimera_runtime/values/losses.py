"""The losses of an update: of each micro-batch a mean, or a sum and a count; added up over micro-batches and ranks."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from chimera_runtime.errors import BadModel

Loss = Any
"""What ``loss`` returns: a tensor of one number, the mean over a micro-batch, or a pair of a sum and a count."""


@dataclass(frozen=True)
class Tally:
    """A part of the losses of an update: a sum, and what it is to be divided by.

    Where ``loss`` returns means, each micro-batch counts 1. ``auxiliary`` are the sums of auxiliary losses.
    """

    total: float = 0.0
    count: float = 0.0
    auxiliary: Mapping[str, float] = field(default_factory=dict)

    def __add__(self, other: "Tally") -> "Tally":
        names = self.auxiliary.keys() | other.auxiliary.keys()
        sums = {name: self.auxiliary.get(name, 0.0) + other.auxiliary.get(name, 0.0) for name in names}
        return Tally(self.total + other.total, self.count + other.count, sums)

    @property
    def mean(self) -> float:
        """The loss of all that was added up; not a number where nothing counts."""
        return self.total / self.count if self.count else math.nan

    @property
    def auxiliary_means(self) -> dict[str, float]:
        """The same of each auxiliary loss."""
        return {name: total / self.count if self.count else math.nan for name, total in self.auxiliary.items()}

    def numbers(self, names: Sequence[str] = ()) -> list[float]:
        """As numbers that can be added to those of others; ``names`` are the auxiliary losses among them."""
        return [self.total, self.count, *(self.auxiliary.get(name, 0.0) for name in names)]

    @classmethod
    def of(cls, numbers: Iterable[float], names: Sequence[str] = ()) -> "Tally":
        """What has such `numbers`."""
        total, count, *auxiliary = numbers
        return cls(total, count, dict(zip(names, auxiliary, strict=True)))


def added(tallies: Iterable[Tally]) -> Tally:
    """The sum of tallies."""
    return sum(tallies, Tally())


def as_pair(loss: Loss) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The sum of a micro-batch and, in float64, its count; a mean has none."""
    if not isinstance(loss, tuple | list):
        return loss, None
    total, count = loss
    if not isinstance(count, torch.Tensor):
        return total, torch.full((1,), float(count), dtype=torch.float64, device=total.device)
    return total, count.detach().to(total.device, torch.float64).reshape(1)


def expected_count(count: float | None, micro_batches: int) -> float | None:
    """A guess at what an update counts, by which gradients are divided at first; None where the loss is a mean.

    It is the power of 2 next to the ``count`` of one micro-batch times their number: to multiply and to divide by it
    rounds nothing, so that gradients do not depend on it.
    """
    if count is None:
        return None
    return float(2.0 ** round(math.log2(max(count, 1.0) * micro_batches)))


class Count:
    """What an update counts, as far as this stage knows: the count of each micro-batch comes with its backward.

    Parameters
    ----------
    expected
        What all gradients have been divided by: see `expected_count`.
    """

    def __init__(self, stage: int, expected: float, device: torch.device) -> None:
        self._stage = stage
        self._expected = expected
        self.tensor = torch.zeros(1, dtype=torch.float64, device=device)

    def add(self, counts: Iterable[torch.Tensor]) -> None:
        """A backward has taken place."""
        for count in counts:
            self.tensor += count

    def clear(self) -> None:
        """Begins the next update."""
        self.tensor.zero_()

    def correction(self, count: float) -> float:
        """What gradients are to be multiplied with, where ``count`` is the sum of ``tensor`` over all ranks.

        0 where nothing counts: the mini-batch has nothing to learn from.

        Raises
        ------
        BadModel
            If the count is no finite number, or negative.
        """
        if not 0 <= count < math.inf:
            raise BadModel(
                f"stage {self._stage}: the counts that loss returned for an update add up to {count:g}; return "
                "(sum, count) with a count of 0 or more"
            )
        return self._expected / count if count else 0.0
