"""The contents of a page, from the levels of a compilation."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import PurePath
from typing import Protocol

from chimera_ir.cost.durations import Durations
from chimera_ir.cost.report import Figures, Report
from chimera_ir.cost.table import heading
from chimera_ir.ir.kinds import RECOMPUTATION
from chimera_ir.ir.levels import Header, Program
from chimera_ir.page import event_tables, memory_tables, operation_tables, text_lines
from chimera_ir.page.lengths import Lengths
from chimera_ir.page.memory_tables import MemoryInBytes
from chimera_ir.page.tables import Facts, PageDocument, ScheduleTables
from chimera_ir.predict import screen
from chimera_ir.predict.charges import Charges, operations_alone
from chimera_ir.predict.events import Events, events_of
from chimera_ir.predict.prediction import Forecast, Prediction
from chimera_ir.predict.replay import Replay
from chimera_ir.predict.setting import Setting
from chimera_ir.predict.summary import Summary
from chimera_ir.request import Request
from chimera_ir.verify.verify import ProvenScripts, Verified

_UNBROKEN = 1 << 16
"""A width at which no note is broken into lines."""


class Levels(Protocol):
    """The levels of a compilation that its page shows."""

    @property
    def request(self) -> Request:
        """The text that was compiled, with its parameters and options."""

    @property
    def verified(self) -> Verified:
        """The program, with the proof of every rule."""

    @property
    def program_text(self) -> str:
        """The text of the program."""

    @property
    def replay(self) -> Replay:
        """The replay of the program."""

    @property
    def scripts(self) -> ProvenScripts:
        """The scripts of the ranks, with their proof."""

    @property
    def report(self) -> Report:
        """The report, with the durations of operations."""

    @property
    def prediction(self) -> Prediction | None:
        """The prediction of time and memory; None without a profile and a cluster."""

    @property
    def forecast(self) -> Forecast | None:
        """The profile, the cluster and the options that the prediction is made from; None without them."""

    @property
    def summary(self) -> Summary:
        """The answers to what a user asks first."""

    @property
    def opponent(self) -> "Levels":
        """The levels of the baseline: of the schedule that the report compares with."""


def document(levels: Levels) -> PageDocument:
    """The contents of the page of a compilation."""
    shown, compared = ShownSchedule.of(levels), levels.request.opposes
    schedules = [shown, *([_compared(levels.opponent.verified, levels)] if compared else [])]
    tables = [schedule.tables() for schedule in schedules]
    if compared:
        names = _distinct_names(tables, levels)
        tables = [replace(table, name=name) for table, name in zip(tables, names, strict=True)]
    return PageDocument(
        title=operation_tables.name_of(shown.header),
        notes=list(_notes(levels)),
        schedules=tables,
        matches=operation_tables.matches(*(schedule.rows for schedule in schedules)) if compared else None,
        texts=[
            text_lines.source_text(levels.request.source, shown.rows),
            text_lines.program_text(levels.program_text, levels.verified, shown.rows),
            *text_lines.script_texts(levels.scripts, shown.program, shown.rows),
        ],
    )


def _distinct_names(tables: Sequence[ScheduleTables], levels: Levels) -> list[str]:
    """Names for the tables of two schedules, made different where they are equal.

    The order that a search found and the one that it began with get "found" and "before" added; schedules from two
    files get the ends of their paths.
    """
    names = [table.name for table in tables]
    if len({*names}) > 1:
        return names
    if levels.request.against is None:
        return [f"{name} ({order})" for name, order in zip(names, ("found", "before"), strict=True)]
    sources = levels.request.source.name, levels.opponent.request.source.name
    paths = [PurePath(source).parts for source in sources]
    for length in range(1, 1 + max(map(len, paths))):
        ends = ["/".join(path[-length:]) for path in paths]
        if len({*ends}) > 1:
            return [f"{name} ({end})" for name, end in zip(names, ends, strict=True)]
    return [f"{name} ({place})" for name, place in zip(names, ("first", "second"), strict=True)]


@dataclass(frozen=True)
class ShownSchedule:
    """A verified program as the page shows it, with the events of its replay and its figures.

    ``setting`` (the costs of its stages, and the cluster) and ``memory`` (its memory in bytes) come from a prediction;
    both are None without one. Of the baseline the memory is always None.
    """

    verified: Verified
    events: Events
    figures: Figures
    setting: Setting | None
    memory: MemoryInBytes | None

    @staticmethod
    def of(levels: Levels) -> "ShownSchedule":
        """The schedule that was compiled, not the one that it is compared with."""
        prediction = levels.prediction
        if prediction is None:
            return ShownSchedule(levels.verified, levels.replay.events, levels.report, None, None)
        memory = MemoryInBytes(prediction.setting, prediction.memory, prediction.available)
        return ShownSchedule(levels.verified, levels.replay.events, levels.report, prediction.setting, memory)

    @property
    def program(self) -> Program:
        """The program; without a flush, as many of its updates as show all that ever happens."""
        return self.verified.program

    @property
    def header(self) -> Header:
        """The header of the program."""
        return self.program.header

    @cached_property
    def rows(self) -> Sequence[operation_tables.OperationRow]:
        """The rows of its operations."""
        return operation_tables.rows(parts.computes.lines for parts in self.program.parts)

    def tables(self) -> ScheduleTables:
        """All tables of the schedule.

        Times are those of the prediction; without one, operations alone take time.
        """
        header, figures, rows = self.header, self.figures, self.rows
        charges = _charges(header, figures.durations, self.setting)
        lengths = Lengths(charges)
        happening = event_tables.tables(self.events, rows, charges, lengths)
        shown = operation_tables.tables_of_operations(header, rows, happening.of_rows)
        sliders = lengths.sliders()
        return ScheduleTables(
            name=operation_tables.name_of(header),
            workers=header.workers,
            unit=figures.durations.unit.value or "",
            updates=header.updates,
            kinds=shown.kinds,
            looks=shown.looks,
            sliders=sliders,
            operations=shown.operations,
            events=happening.events,
            messages=happening.messages,
            sums=happening.sums,
            moves=happening.moves,
            turn=happening.turn,
            memory=memory_tables.tables_of_memory(self.program, rows, figures, self.memory),
            facts=Facts(
                float(figures.makespan),
                float(figures.bubble_ratio),
                {letter: float(count) for letter, count in figures.counts.items()},
            ),
            remarks=[words for name, words in _REMARKS.items() if name in ("", *(slider.name for slider in sliders))],
        )


def _charges(header: Header, durations: Durations, setting: Setting | None) -> Charges:
    return operations_alone(header, durations) if setting is None else Charges(header, setting)


def _compared(opponent: Verified, levels: Levels) -> ShownSchedule:
    """The schedule that a compilation is compared with, under the same stage costs and on the same cluster."""
    forecast, like = levels.forecast, levels.verified.program.header
    setting = forecast.setting_of_baseline(opponent.program.header, like) if forecast else None
    charges = _charges(opponent.program.header, levels.report.baseline.durations, setting)
    return ShownSchedule(opponent, events_of(opponent.program, charges), levels.report.baseline, setting, None)


_REMARKS = {
    "": "The order of operations, and where sums are launched, stay as they were compiled.",
    RECOMPUTATION.letter: "What recomputation takes is a slider of its own; on the command line, --cost B= alone"
    " includes it, so give --cost recompute= as well.",
}
"""Remarks on what sliders do and do not change, keyed by the name of a slider.

A page has the remark on a slider if it has the slider; the remark with the key ``""`` stands on every page.
"""


def _notes(levels: Levels) -> Iterator[str]:
    """Yields the lines that ``chimera compile`` prints about a schedule: its sizes, then a line for each answer."""
    report, summary = levels.report, levels.summary
    _, sizes = heading(report).plain.split(": ", 1)
    yield from sizes.split("\n")
    shown = screen.show(report, summary, levels.prediction, _UNBROKEN, summary.speed.baseline)
    yield from (" ".join(answer.plain.split()) for answer in shown)
