"""What rules say, and which of them were asked: what was proven is derived from it."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from chimera_ir.diagnostics.catalogue.program import MoreErrors, MoreWarnings
from chimera_ir.diagnostics.model import Diagnostic, Severity

_MOST = 20
"""How many errors of one rule are reported one by one."""


class Rule(Enum):
    """The rules of verification, in the order in which they are reported; the values are their names."""

    COMPLETE = "complete"
    PLACED = "placed"
    CONFLICT_FREE = "conflict-free"
    ACYCLIC = "acyclic"
    CHANNELS = "channels"
    GRADIENTS = "gradients"
    VERSIONS = "versions"
    MEMORY = "memory"
    REPEATS = "repeats"


@dataclass(frozen=True, slots=True)
class Findings:
    """The rules that were applied, each to all that it is about, and the diagnostics of these and of other checks.

    Without errors, these rules hold.
    """

    rules: frozenset[Rule] = frozenset()
    diagnostics: tuple[Diagnostic, ...] = ()

    def __add__(self, other: "Findings") -> "Findings":
        """Both."""
        return Findings(self.rules | other.rules, self.diagnostics + other.diagnostics)

    @property
    def errors(self) -> bool:
        """Whether any diagnostic is an error."""
        return any(diagnostic.severity is Severity.ERROR for diagnostic in self.diagnostics)


def apply(rule: Rule, *parts: Iterable[Diagnostic]) -> Findings:
    """A rule, applied in full; each of its parts is asked if those before it find nothing."""
    return Findings(frozenset({rule}), check(rule.value, *parts).diagnostics)


def check(rule: str, *parts: Iterable[Diagnostic]) -> Findings:
    """A part of a rule, which leaves it open whether the rule holds; its own parts as in `apply`."""
    listed = next((diagnostics for diagnostics in map(tuple, parts) if diagnostics), ())
    rest = listed[_MOST:]
    if not rest:
        return Findings(diagnostics=listed)
    more = {Severity.ERROR: MoreErrors, Severity.WARNING: MoreWarnings}[rest[0].severity]
    return Findings(diagnostics=(*listed[:_MOST], more(rest[0].span, len(rest), rule)))
