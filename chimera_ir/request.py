"""What is asked of the compiler."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from chimera_ir.cost.model import CostModel, Costs
from chimera_ir.source import Source
from chimera_ir.syntax.change import Change

if TYPE_CHECKING:
    from chimera_ir.predict.prediction import Forecast

MAX_OPERATIONS = 1_000_000
"""How many compute operations a scheme may ask for, unless the user raises it."""


@dataclass(frozen=True, slots=True)
class Request:
    """A text, the parameters and clauses that the user set, durations, and a limit on its size.

    With a ``forecast`` the durations come from its profile instead of ``costs``, and the report has a prediction.
    """

    source: Source
    settings: Mapping[str, int] = field(default_factory=dict)
    costs: Costs = field(default_factory=Costs)
    max_operations: int = MAX_OPERATIONS
    change: Change = field(default_factory=Change)
    forecast: "Forecast | None" = None

    @property
    def cost_model(self) -> CostModel:
        """Where durations come from."""
        return self.forecast or self.costs
