"""Repeated measurements of one thing: their median, their spread, and whether that is good enough.

A round measures each of several things once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import median, quantiles

from chimera_ir import plural

NOISY = 0.05
"""The largest uncertainty of a usable median, as a share of the median."""

GOOD = 0.01
"""The uncertainty, as a share of the median, at which no further rounds are needed."""

BRIEF = 0.1
"""Share of the longest time measured in the same rounds; a time below it gets a weight less than 1."""

FEWEST = 5
"""The fewest rounds that count."""


ShowProgress = Callable[[str, int, int], None]
"""Shows progress: called with what has just been done, the number of steps done, and the number of all steps."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Measurements of a positive quantity, two or more.

    ``weight`` scales the uncertainty before it is compared with the limit for noise: 1, or less for a time that is much
    shorter than others of the same rounds, because a noisy short time does less harm.
    """

    values: tuple[float, ...]
    weight: float = 1.0

    @property
    def median(self) -> float:
        """Median of the measurements, which is the figure to use."""
        return median(self.values)

    @property
    def spread(self) -> float:
        """Distance between the quartiles (IQR), as a share of the median."""
        first, _, third = quantiles(self.values, n=4, method="inclusive")
        return (third - first) / self.median

    @property
    def scatter(self) -> float:
        """Spread without disturbances: twice the distance from lower quartile to median, as a share of the median.

        Equal to the spread where the values are symmetric. Another process that slows the machine down for a while
        makes many rounds in a row longer, and raises the upper quartile: that is not a scatter from round to round.
        """
        first, middle, _ = quantiles(self.values, n=4, method="inclusive")
        return 2 * (middle - first) / middle

    @property
    def uncertainty(self) -> float:
        """Uncertainty of the median, as a share of it: 1.57 IQR / sqrt(n).

        Half the notch of McGill, Tukey and Larsen, "Variations of Box Plots" (1978): for measurements that scatter by
        chance, an interval that holds the true median in about 95 of 100 cases. A disturbance that slows down all
        measurements does not show in it.
        """
        return 1.57 * self.spread / sqrt(len(self.values))

    @property
    def is_noisy(self) -> bool:
        """Whether the median is too uncertain to use."""
        return self.weight * self.uncertainty > NOISY


def together(figures: Sequence[Sequence[float]]) -> tuple[Samples, ...]:
    """Makes the samples of several quantities; ``figures`` has a list of times for each, measured in the same rounds.

    A quantity whose median is below a tenth (`BRIEF`) of the largest median gets a weight below 1, so its uncertainty
    counts for less.

    Examples
    --------
    >>> [samples.weight for samples in together([[10.0, 10.0], [0.5, 0.5]])]
    [1.0, 0.5]
    """
    medians = [median(values) for values in figures]
    least = BRIEF * max(medians)
    return tuple(Samples(tuple(v), min(1.0, m / least)) for v, m in zip(figures, medians, strict=True))


def enough(figures: list[list[float]], most: int) -> bool:
    """Whether every quantity is known well enough, or has been measured ``most`` times, once in each round."""
    rounds = min(map(len, figures))
    if rounds < FEWEST:
        return False
    return rounds >= most or all(samples.weight * samples.uncertainty <= GOOD for samples in together(figures))


def in_rounds(measure: Callable[[], tuple[float, ...]], warm_up: int, most: int) -> tuple[Samples, ...]:
    """Samples of several quantities; each round measures all, so that a disturbance of the machine affects them all.

    The first ``warm_up`` rounds do not count; then come FEWEST rounds or more, until `enough`, but at most ``most``.
    """
    for _ in range(warm_up):
        measure()
    figures = [[value] for value in measure()]
    while not enough(figures, most):
        for values, value in zip(figures, measure(), strict=True):
            values.append(value)
    return together(figures)


def noise(figures: Sequence[tuple[str, Samples]]) -> tuple[str, ...]:
    """One warning about the figures that are too noisy to use, then a line for each, the worst first."""
    noisy = sorted((named for named in figures if named[1].is_noisy), key=lambda named: -named[1].uncertainty)
    if not noisy:
        return ()
    rounds = max(len(samples.values) for _, samples in noisy)
    (worst, samples), lines = noisy[0], [f"{name}: {percent(samples.uncertainty)}" for name, samples in noisy]
    return (
        f"too noisy to use: {len(noisy)} of {plural.counted(len(figures), 'figure')}, whose medians may be off by more than "
        f"{percent(NOISY)} after {plural.counted(rounds, 'round')}, the {worst} by {percent(samples.uncertainty)}; measure "
        "on an idle machine, or with more --rounds",
        *lines,
    )


def too_noisy(where: str, figures: Sequence[tuple[str, Samples]]) -> list[str]:
    """A line for ``where``, naming the figures that are too noisy to use; an empty list if all can be used."""
    noisy = [f"{name} {percent(samples.uncertainty)}" for name, samples in figures if samples.is_noisy]
    if not noisy:
        return []
    rounds = max(len(samples.values) for _, samples in figures)
    return [
        f"{where}: too noisy to use: after {rounds} rounds the median may be off by more than {percent(NOISY)}: "
        + ", ".join(noisy)
    ]


def rounded(value: float, digits: int = 4) -> float:
    """The value with ``digits`` significant digits, for people who read a profile."""
    return float(f"{value:.{digits}g}")


def percent(share: float) -> str:
    """A share in percent, as text.

    Examples
    --------
    >>> percent(0.0712), percent(0.996), percent(-12.3)
    ('7.1 %', '100 %', '-1230 %')
    """
    return f"{100 * share:.2g} %" if abs(share) < 0.995 else f"{100 * share:.0f} %"
