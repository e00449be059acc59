"""The limits of a search for a better order: time by the clock, and work."""

from dataclasses import dataclass
from fractions import Fraction

SHARE_OF_SECONDS = Fraction(4, 5)
"""Deterministic time of the solver in each thread for each second of a budget."""


@dataclass(frozen=True, slots=True)
class SearchBudget:
    """Limits of the time and the work of a search.

    A search ends after a fixed amount of work, so that its result is the same each time; a machine that has two cores
    for it does the work within ``seconds`` by the clock, and after these the search ends in any case. ``work`` sets the
    amount, in seconds of the solver's deterministic time; by default it follows from ``seconds``. ``seed`` is that of
    all chance.
    """

    seconds: float
    seed: int = 0
    work: float = 0

    @property
    def deterministic_seconds(self) -> float:
        """The amount of work after which the search ends, in seconds of the solver's deterministic time."""
        return self.work or float(SHARE_OF_SECONDS * Fraction(self.seconds))
