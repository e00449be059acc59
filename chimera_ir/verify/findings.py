"""Findings: the diagnostics of rules, and which rules were applied in full.

The rules that were applied in full hold if no diagnostic is an error.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum

from chimera_ir.diagnostics.catalogue.program import MoreErrors, MoreWarnings
from chimera_ir.diagnostics.model import Diagnostic, Severity, once

_MOST = 20
"""The most errors of a rule that are reported one by one."""


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
    SCRIPTS = "scripts"


def names(rules: Collection[Rule]) -> tuple[str, ...]:
    """The names of rules, in the order in which they are reported."""
    return tuple(rule.value for rule in Rule if rule in rules)


@dataclass(frozen=True, slots=True)
class Findings:
    """Diagnostics, and the ``rules`` that were applied in full. These rules hold if no diagnostic is an error."""

    rules: frozenset[Rule] = frozenset()
    diagnostics: tuple[Diagnostic, ...] = ()

    def __add__(self, other: "Findings") -> "Findings":
        """The rules and diagnostics of both."""
        return Findings(self.rules | other.rules, self.diagnostics + other.diagnostics)

    @property
    def errors(self) -> bool:
        """Whether any diagnostic is an error."""
        return any(diagnostic.severity is Severity.ERROR for diagnostic in self.diagnostics)


def apply(rule: Rule, *parts: Iterable[Diagnostic]) -> Findings:
    """Returns the findings of a rule that is applied in full, in several ``parts``, which yield diagnostics.

    A part is checked only if the parts before it find nothing.
    """
    return Findings(frozenset({rule}), check(rule.value, *parts).diagnostics)


def check(rule: str, *parts: Iterable[Diagnostic]) -> Findings:
    """Returns the findings of a part of a rule; the rule does not count as applied.

    ``rule`` is its name, and ``parts`` are as in `apply`. Of many diagnostics the first are kept, with the number of
    the others.
    """
    listed = next((diagnostics for diagnostics in map(once, parts) if diagnostics), ())
    rest = listed[_MOST:]
    if not rest:
        return Findings(diagnostics=listed)
    summary = {Severity.ERROR: MoreErrors, Severity.WARNING: MoreWarnings}[rest[0].severity]
    return Findings(diagnostics=(*listed[:_MOST], summary(rest[0].span, len(rest), rule)))
