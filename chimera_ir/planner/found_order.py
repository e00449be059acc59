"""An order that a search found for a configuration."""

from dataclasses import dataclass

from chimera_ir.cost.number_text import rounded
from chimera_ir.ir.levels import Schedule
from chimera_ir.ir.text.printer import show
from chimera_ir.orders.improve import Improvement


@dataclass(frozen=True, slots=True)
class FoundOrder:
    """A verified order that a search found; ``before`` is the replay of the scheme's own order, in seconds."""

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
        """The result of the search as plain data, and the replay of the order before it."""
        return {**self.improvement.as_json(), "T_replay_before": rounded(self.before)}
