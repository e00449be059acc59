"""An order that a search found for a configuration."""

from dataclasses import dataclass

from chimera_ir.cost.number_text import rounded
from chimera_ir.ir.levels import Schedule
from chimera_ir.ir.text.printer import show
from chimera_ir.orders.improve import Improvement


@dataclass(frozen=True, slots=True)
class FoundOrder:
    """A verified order that a search found, of the operations of a configuration.

    ``before`` are the seconds of an update by a replay of the scheme's own order.
    """

    improvement: Improvement
    before: float

    @property
    def schedule(self) -> Schedule:
        """The schedule in this order."""
        return self.improvement.schedule

    @property
    def text(self) -> str:
        """The text of the schedule, which compiles to it again, below comments that say how it was found."""
        return f"{self.improvement.comments}{show(self.schedule)}"

    def as_json(self) -> dict[str, object]:
        """The result of the search, and ``before``, as plain data for JSON."""
        return {**self.improvement.as_json(), "T_replay_before": rounded(self.before)}
