"""A sweep as a table for a terminal or a notebook, as CSV and as JSON."""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import assert_never

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich import text as rich_text

from chimera_ir import notebook
from chimera_ir.console import printed
from chimera_ir.cost.number_text import decimal, percent, rounded, seconds
from chimera_ir.cost.report import Report
from chimera_ir.sweeps import TableForm
from chimera_ir.sweeps.figures import times_as_fast
from chimera_ir.sweeps.sweep import Cell, Refused, SizeRow, Sweep


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
    """The sweep as a table for a console of any width; below it the reason for each code of a refusal."""
    heads, rows = _words(sweep)
    refusals = reasons(row.outcome for row in sweep.results)
    return Group(rich_text.Text(_heading(sweep)), grid(heads, rows), *(rich_text.Text(reason) for reason in refusals))


def html(sweep: Sweep) -> str:
    """The sweep as an HTML table; below it the reason for each code of a refusal."""
    refusals = "\n".join(reasons(row.outcome for row in sweep.results))
    return notebook.table(_heading(sweep), *_words(sweep)) + (notebook.message(refusals) if refusals else "")


def grid(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table of numbers for a terminal."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for head in heads:
        table.add_column(head, justify="right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def reasons(outcomes: Iterable[object]) -> list[str]:
    """A line for each code and reason among the outcomes that are refusals."""
    return list(
        dict.fromkeys(f"{outcome.code}: {outcome.reason}" for outcome in outcomes if isinstance(outcome, Refused))
    )


def in_short(refused: Refused) -> str:
    """The cell of a table for a refusal: a word, and the code that `chimera explain` takes."""
    return f"refused {refused.code}"


def _words(sweep: Sweep) -> tuple[list[str], list[list[str]]]:
    """The heads of a table and its rows, as words for people."""
    rows = [(row, _row_texts(row)) for row in sweep.results]
    heads = list(dict.fromkeys(head for _, words in rows for head in words))
    several = ["scheme"] if len(sweep.schemes) > 1 else []
    return [*several, *sweep.names, *heads], [
        [
            *(row.scheme for _ in several),
            *(str(row.settings.get(name, "")) for name in sweep.names),
            *(words.get(head, "") for head in heads),
        ]
        for row, words in rows
    ]


def _heading(sweep: Sweep) -> str:
    memory = "memory of the fullest worker"
    reports = [row.outcome for row in sweep.compiled if isinstance(row.outcome, Report)]
    if len(sweep.schemes) > 1 or not reports:
        return f"{', '.join(sweep.schemes)}: {memory}"
    report = reports[0]
    return f"{report.scheme}: {report.durations.summary(report.header, report.counts)}; {memory}"


def _row_texts(row: SizeRow) -> Mapping[str, str]:
    """The cells of a row as words, by the heads of their columns."""
    if isinstance(row.outcome, Refused):
        return {"makespan": in_short(row.outcome)}
    replayed = {} if row.seconds is None else {"T by replay": seconds(row.seconds)}
    return {**dict(_figures(row.outcome)), **replayed}


def _figures(report: Report) -> Iterator[tuple[str, str]]:
    unit, baseline = report.durations.unit, report.baseline
    yield "makespan", unit.show(report.makespan)
    yield "bubble ratio", percent(report.bubble_ratio)
    yield "steady period", unit.show(report.steady_period)
    yield from ((f"C_{kind.lower()}", decimal(count)) for kind, count in report.counts.items())
    yield "M_theta", decimal(max(report.weights))
    yield "M_a", decimal(max(report.activations))
    if any(report.stashed_inputs):
        yield "stashed", decimal(max(report.stashed_inputs))
    yield f"baseline: {baseline.scheme}", unit.show(baseline.makespan)
    yield "times as fast", decimal(times_as_fast(report))


def as_csv(sweep: Sweep) -> str:
    """The rows of a sweep as CSV with a line of heads; numbers as in ``report.json``."""
    out = io.StringIO()
    writer = csv.DictWriter(out, sweep.rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows({head: _number(cell) for head, cell in row.items()} for row in sweep.rows)
    return out.getvalue()


def _number(cell: Cell) -> Cell:
    return int(cell) if isinstance(cell, float) and cell.is_integer() else rounded(cell)


def as_json(sweep: Sweep) -> str:
    """The sweep as a JSON list: for each row what was set, and the content of report.json, or why there is none."""
    return json.dumps([{"set": dict(row.settings), **_entries(row)} for row in sweep.results], indent=2) + "\n"


def _entries(row: SizeRow) -> Mapping[str, object]:
    if isinstance(row.outcome, Refused):
        return {"scheme": row.scheme, "refused": row.outcome.reason, "code": row.outcome.code}
    return {**row.outcome.as_json(), **({} if row.seconds is None else {"T_replay": rounded(row.seconds)})}
