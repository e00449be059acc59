"""Findings: the diagnostics of rules, and which rules were applied in full.

The rules that were applied in full hold if no diagnostic is an error.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import chain

from chimera_ir.diagnostics.catalogue.program import MoreErrors, MoreWarnings
from chimera_ir.diagnostics.model import Diagnostic, Severity, once
from chimera_ir.flow.flow import Flow
from chimera_ir.ir.levels import Header, Program
from chimera_ir.ir.ops import AllReduce, Message, Step, WaitAllReduce, Worker
from chimera_ir.ir.text.printer import group_name, micros_name

# Numbers for the messages and sums of a program, for use as indices of lists, and the data flow of its operations.

Synchronisation = AllReduce | WaitAllReduce | Step


def cells(program: Program) -> Flow:
    """Returns the data flow of a complete and placed program: the place in a lane where each value is made or taken."""
    return Flow(program.header, chain.from_iterable(parts.computes for parts in program.parts))


def key(header: Header, message: Message) -> int:
    """The index of a message, from 0 to ``len(edges) * micro_batches - 1``; its edge must be one of the header.

    No two messages of a program share it, as each micro-batch is in one message of each value and edge.
    """
    return header.edges[message[1:]] + message[0][0]


def update_of(instruction: Synchronisation) -> int:
    """The update that a sum or a step belongs to, counted from 0."""
    return (instruction.version or 1) - 1


def sum_key(header: Header, instruction: Synchronisation) -> int:
    """The index of the sum that a line is about, from 0 to ``len(groups) * updates - 1``; the group must exist."""
    return header.group_numbers[instruction.group] * header.updates + update_of(instruction)


def sender(header: Header, message: Message) -> Worker:
    """The worker that sends a message."""
    return header.worker(message.micros[0], message.source)


def receiver(header: Header, message: Message) -> Worker:
    """The worker that receives a message."""
    return header.worker(message.micros[0], message.target)


# Words for messages and sums, which several rules use in diagnostics.


def content(header: Header, message: Message) -> str:
    """The content of a message: ``the activations of micro-batch 0 from stage 0``."""
    return f"the {message.value.noun} of {micros_name(message.micros, header.slices)} from stage {message.source}"


def summed(instruction: Synchronisation) -> str:
    """The group of a sum or a step, with its version: ``stage 1``, or ``stage 1 for version 3``."""
    return group_name(instruction.group) + (
        "" if instruction.version is None else f" for version {instruction.version}"
    )


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
