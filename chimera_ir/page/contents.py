"""The contents of a page, from the levels of a compilation."""

from typing import Protocol

from chimera_ir.cost.report import Report
from chimera_ir.ir.levels import Header
from chimera_ir.page import event_tables, memory_tables, operation_tables
from chimera_ir.page.lengths import Lengths
from chimera_ir.page.tables import Facts, PageDocument, ScheduleTables
from chimera_ir.predict.charges import Charges, operations_alone
from chimera_ir.predict.events import events_of
from chimera_ir.predict.prediction import Prediction
from chimera_ir.verify.verify import Verified


class Levels(Protocol):
    """The levels of a compilation that its page shows."""

    @property
    def verified(self) -> Verified:
        """The program, with the proof of every rule."""

    @property
    def report(self) -> Report:
        """The report, with the durations of operations."""

    @property
    def prediction(self) -> Prediction | None:
        """The prediction, with the stages and the cluster of a profile."""


def document(levels: Levels) -> PageDocument:
    """The contents of the page of a compilation."""
    tables = schedule_tables(levels)
    return PageDocument(title=tables.name, notes=[], schedules=[tables], texts=[])


def schedule_tables(levels: Levels) -> ScheduleTables:
    """All tables of a verified program, with the times of its prediction or, without one, of operations alone."""
    program, figures = levels.verified.program, levels.report
    header = program.header
    charges = _charges(header, levels)
    lengths = Lengths(charges)
    rows = operation_tables.rows(parts.computes.lines for parts in program.parts)
    happening = event_tables.tables(events_of(program, charges), rows, charges, lengths)
    shown = operation_tables.tables(header, rows, happening.of_rows)
    return ScheduleTables(
        name=name_of(header),
        workers=header.workers,
        unit=figures.durations.unit.value or "",
        updates=header.updates,
        kinds=shown.kinds,
        looks=shown.looks,
        sliders=lengths.sliders(),
        operations=shown.operations,
        events=happening.events,
        messages=happening.messages,
        sums=happening.sums,
        turn=happening.turn,
        memory=memory_tables.tables(header, rows, figures),
        facts=Facts(
            float(figures.makespan),
            float(figures.bubble_ratio),
            {letter: float(count) for letter, count in figures.counts.items()},
        ),
    )


def _charges(header: Header, levels: Levels) -> Charges:
    if levels.prediction is None:
        return operations_alone(header, levels.report.durations)
    return Charges(header, levels.prediction.setting)


def name_of(header: Header) -> str:
    """The scheme and its parameters, as in ``mine D=4 N=8``."""
    return " ".join([header.scheme, *(f"{name}={value}" for name, value in header.parameters)])
