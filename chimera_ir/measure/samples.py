"""Repeated measurements of one thing: their median, their spread, and whether that is good enough."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import median, quantiles

NOISY = 0.05
"""A median that is uncertain by a larger share of itself is too noisy to use."""

GOOD = 0.01
"""One that is uncertain by no more needs no further rounds."""

FEWEST = 5
"""So many rounds count at least."""


Told = Callable[[str, int, int], None]
"""Is told what has just been done, and that it was so many steps of how many."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Measurements of one quantity, positive and in its unit; at least two."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The figure to use."""
        return median(self.values)

    @property
    def spread(self) -> float:
        """Between the quartiles (IQR), as a share of the median."""
        first, _, third = quantiles(self.values, n=4, method="inclusive")
        return (third - first) / self.median

    @property
    def scatter(self) -> float:
        """The spread of what nothing disturbs: twice from the lower quartile to the median, as a share of the median.

        As much as the spread where values lie alike on both sides. A neighbour who slows the machine down for a while
        makes many rounds in a row longer, and with them the upper quartile: that is no scatter from round to round.
        """
        first, middle, _ = quantiles(self.values, n=4, method="inclusive")
        return 2 * (middle - first) / middle

    @property
    def uncertainty(self) -> float:
        """By which share the median may be off: 1.57 IQR / sqrt(n).

        Half the notch of McGill, Tukey and Larsen, "Variations of Box Plots" (1978): for measurements that scatter by
        chance, an interval that holds the true median in about 95 of 100 cases. It knows nothing of what slows all
        of them down alike.
        """
        return 1.57 * self.spread / sqrt(len(self.values))

    @property
    def is_noisy(self) -> bool:
        """Whether the median is too uncertain to use."""
        return self.uncertainty > NOISY


def enough(taken: list[list[float]], most: int) -> bool:
    """Whether every quantity, measured once a round, is known well enough, or as well as ``most`` rounds make it."""
    rounds = min(map(len, taken))
    if rounds < FEWEST:
        return False
    return rounds >= most or all(Samples(tuple(values)).uncertainty <= GOOD for values in taken)


def in_rounds(measure: Callable[[], tuple[float, ...]], warm_up: int, most: int) -> tuple[Samples, ...]:
    """Measures several quantities in turns, so that what slows the machine down meets all of them.

    The first ``warm_up`` rounds do not count; then at least FEWEST and no more than ``most``.
    """
    for _ in range(warm_up):
        measure()
    taken = [[value] for value in measure()]
    while not enough(taken, most):
        for values, value in zip(taken, measure(), strict=True):
            values.append(value)
    return tuple(Samples(tuple(values)) for values in taken)


def too_noisy(where: str, figures: Sequence[tuple[str, Samples]]) -> list[str]:
    """Says in a line which of the figures are too noisy to use, if any is."""
    wrong = [f"{name} {percent(one.uncertainty)}" for name, one in figures if one.is_noisy]
    if not wrong:
        return []
    rounds = max(len(one.values) for _, one in figures)
    return [
        f"{where}: too noisy to use: after {rounds} rounds the median may be off by more than {percent(NOISY)}: "
        + ", ".join(wrong)
    ]


def rounded(value: float, digits: int = 4) -> float:
    """With so many significant digits, as a profile is read by people."""
    return float(f"{value:.{digits}g}")


def percent(share: float) -> str:
    """A share as a person reads it.

    Examples
    --------
    >>> percent(0.0712), percent(0.996), percent(-12.3)
    ('7.1 %', '100 %', '-1230 %')
    """
    return f"{100 * share:.2g} %" if abs(share) < 0.995 else f"{100 * share:.0f} %"
