"""A sweep as a table for a terminal, as CSV and as JSON."""

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any, assert_never

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from chimera_ir.console import printed
from chimera_ir.cost.number_text import decimal, percent, rounded, seconds
from chimera_ir.cost.report import Report
from chimera_ir.sweeps import TableForm
from chimera_ir.sweeps.sweep import Refused, SizeRow, Sweep

_REFUSED = "refused"
"""The head of the column that says why a combination has no report."""

_Cells = Mapping[str, object]
"""The cells of a row by the heads of their columns."""


def shown(sweep: Sweep, form: TableForm) -> str:
    """The sweep as a text of the given form."""
    match form:
        case TableForm.TEXT:
            return printed(lambda console: console.print(text(sweep)))
        case TableForm.CSV:
            return as_csv(sweep)
        case TableForm.JSON:
            return as_json(sweep)
        case _:
            assert_never(form)


def text(sweep: Sweep) -> RenderableType:
    """The sweep as a table for a console of any width; the reasons of refused rows come last."""
    rows = [
        (row.settings, _cells(row, lambda report: dict(_figures(report)), lambda time: {"T by replay": seconds(time)}))
        for row in sweep.rows
    ]
    heads = _heads(words for _, words in rows)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for head in (*sweep.names, *heads):
        table.add_column(head, justify="left" if head == _REFUSED else "right", overflow="fold")
    for settings, words in rows:
        table.add_row(*(str(settings[name]) for name in sweep.names), *(str(words.get(head, "")) for head in heads))
    return Group(*(_heading(row.outcome) for row in sweep.compiled[:1] if isinstance(row.outcome, Report)), table)


def _heads(rows: Iterable[_Cells]) -> list[str]:
    heads = dict.fromkeys(head for row in rows for head in row)
    return sorted(heads, key=lambda head: head == _REFUSED)


def _heading(report: Report) -> Text:
    figures = report
    costs = figures.durations.summary(figures.header, figures.counts)
    return Text.assemble((figures.header.scheme, "bold"), f": {costs}; memory of the fullest worker")


def _cells(row: SizeRow, of_report: Callable[[Report], _Cells], replay: Callable[[float], _Cells]) -> _Cells:
    """The cells of a row: the reason of a refused one, or those of its report and, if known, its time by replay."""
    if isinstance(row.outcome, Refused):
        return {_REFUSED: row.outcome.reason}
    return {**of_report(row.outcome), **({} if row.seconds is None else replay(row.seconds))}


def _figures(report: Report) -> Iterator[tuple[str, str]]:
    figures, baseline = report, report.baseline
    unit = figures.durations.unit
    yield "makespan", unit.show(figures.makespan)
    yield "bubble ratio", percent(figures.bubble_ratio)
    yield "steady period", unit.show(figures.steady_period)
    yield from ((f"C_{kind.lower()}", decimal(count)) for kind, count in figures.counts.items())
    yield "M_theta", decimal(max(figures.weights))
    yield "M_a", decimal(max(figures.activations))
    if any(figures.stashed_inputs):
        yield "stashed", decimal(max(figures.stashed_inputs))
    yield f"baseline: {baseline.header.scheme}", unit.show(baseline.makespan)
    yield "times as fast", decimal(Fraction(round(1000 * baseline.makespan / figures.makespan), 1000))


def as_csv(sweep: Sweep) -> str:
    """The sweep as CSV with a line of heads; numbers as in ``report.json``, memory as of the fullest worker."""
    rows = [(row.settings, _cells(row, lambda report: _flat(report.as_json()), _predicted)) for row in sweep.rows]
    heads = _heads([*(numbers for _, numbers in rows), {_REFUSED: ""}])
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*sweep.names, *heads])
    writer.writerows(
        [*(settings[name] for name in sweep.names), *(numbers.get(head, "") for head in heads)]
        for settings, numbers in rows
    )
    return out.getvalue()


def _flat(report: Mapping[str, Any]) -> _Cells:
    """The figures of a report by name; the largest of those per worker, and those of the baseline with a prefix."""
    sizes = "workers", "stages", "micro_batches", "makespan", "bubble_ratio", "steady_period", "clock_span"
    return {
        **{name: report[name] for name in sizes},
        **report["critical_path"],
        **{name: max(report[name]) for name in ("weights", "activations", "stashed_inputs")},
        **{f"baseline_{name}": report["baseline"][name] for name in ("scheme", "makespan", "bubble_ratio")},
    }


def as_json(sweep: Sweep) -> str:
    """The sweep as a JSON list: for each row what was set, and the content of report.json, or why there is none."""
    rows = [{"set": dict(row.settings), **_cells(row, Report.as_json, _predicted)} for row in sweep.rows]
    return json.dumps(rows, indent=2) + "\n"


def _predicted(time: float) -> _Cells:
    return {"T_replay": rounded(time)}
