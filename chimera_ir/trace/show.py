"""The residuals: by kind and worker, and where the bubble was; for a terminal, a page and programs."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from chimera_ir.plural import counted
from chimera_ir.trace.compare import Comparison, Row
from chimera_ir.trace.drawing import milliseconds, summary
from chimera_ir.trace.spans import BUSY, Activity, words

IN_FULL = 8
"""For up to how many workers the terminal shows a table each; for more it shows the mean alone."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a table, as text: times in milliseconds, shares in percent."""

    name: str
    predicted: str
    measured: str
    difference: str
    share: str


@dataclass(frozen=True, slots=True)
class Block:
    """A table's lines with what they are about; ``total`` is their sum."""

    name: str
    lines: tuple[Line, ...]
    total: Line


def blocks(comparison: Comparison) -> list[Block]:
    """By kind: the mean of all workers, then every worker."""
    rows = comparison.rows
    every = _by_kind([row for each in rows for row in each], len(rows))
    return [
        _block("mean of all workers", every, *comparison.steps),
        *(_block(f"worker {worker}", _by_kind(each, 1), *comparison.step(worker)) for worker, each in enumerate(rows)),
    ]


def bubbles(comparison: Comparison) -> list[Line]:
    """What computed nothing, by worker and cause, the longest first."""
    named = [
        (f"worker {worker}: {cause(row)}", row, comparison.step(worker)[1])
        for worker, rows in enumerate(comparison.rows)
        for row in rows
        if row.kind not in BUSY
    ]
    named.sort(key=lambda each: -each[1].measured)
    return [_line(name, row.predicted, row.measured, whole) for name, row, whole in named]


def cause(row: Row) -> str:
    """A kind with what was waited for: ``wait for messages from worker 1``."""
    if row.kind is Activity.FLUSH:
        return "done; waits for the last worker"
    return f"wait for {row.cause}" if row.cause else str(row.kind.value)


def _by_kind(rows: Iterable[Row], workers: int) -> dict[Activity, tuple[float, float]]:
    found: dict[Activity, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for row in rows:
        predicted, measured = found[row.kind]
        found[row.kind] = predicted + row.predicted / workers, measured + row.measured / workers
    return found


def _block(name: str, kinds: dict[Activity, tuple[float, float]], predicted: float, measured: float) -> Block:
    lines = [_line(each.value, *kinds[each], measured) for each in Activity if each in kinds]
    return Block(name, tuple(lines), _line("update", predicted, measured, measured))


def _line(name: str, predicted: float, measured: float, whole: float) -> Line:
    return Line(
        name=name,
        predicted=milliseconds(predicted),
        measured=milliseconds(measured),
        difference=f"{(measured - predicted) * 1e3:+.3f}",
        share=f"{100 * measured / whole:.1f}%" if whole else "",
    )


def text(comparison: Comparison) -> RenderableType:
    """The tables for a terminal; colour adds nothing that the words do not say."""
    told, *workers = blocks(comparison)
    shown = [told, *(workers if len(workers) <= IN_FULL else [])]
    longest = bubbles(comparison)[: 2 * IN_FULL]
    return Group(
        Text(comparison.about.scheme, "bold"),
        Text(summary(comparison)),
        Text(basis(comparison)),
        Text(ground(comparison)),
        *(_table(block.name, block.lines, block.total) for block in shown),
        _table("where the bubble was", longest, None),
    )


def basis(comparison: Comparison) -> str:
    """What the figures are of."""
    about, count = comparison.about, len(comparison.chosen)
    copies = f", {counted(about.copies, 'copy')}" if about.copies > 1 else ""
    slept = "; compute was a sleep (--rehearse)" if about.rehearse else ""
    early = f"; the run ended early: {comparison.ended}" if comparison.ended else ""
    return (
        f"in milliseconds; the mean of {count} of {counted(comparison.updates, 'update')}, "
        f"those in the middle by length{copies}; {about.backend}{slept}{early}"
    )


def ground(comparison: Comparison) -> str:
    """What the prediction was made from."""
    slept = comparison.about.rehearse is not None
    told = comparison.foretold
    if told:
        sleeps = "; F and B are those of the rehearsal" if slept else ""
        return f"predicted by a replay, from the profile '{told.profile}' and the cluster '{told.cluster}'{sleeps}"
    costs = "F and B of the rehearsal" if slept else "the run's own medians"
    return f"predicted from {costs}; messages, sums and posting take no time"


def _table(name: str, lines: Sequence[Line], total: Line | None) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_footer=total is not None)
    table.add_column(name, footer=total.name if total else "", overflow="fold")
    table.add_column("predicted", footer=total.predicted if total else "", justify="right")
    table.add_column("measured", footer=total.measured if total else "", justify="right", style="bold")
    table.add_column("difference", footer=total.difference if total else "", justify="right")
    table.add_column("share", footer=total.share if total else "", justify="right")
    for line in lines:
        table.add_row(line.name, line.predicted, line.measured, line.difference, line.share)
    return table


def as_json(comparison: Comparison) -> dict[str, Any]:
    """The same for programs, in seconds; docs/trace.md describes it."""
    predicted, measured = comparison.steps
    promised, found = comparison.bubbles
    told = comparison.foretold
    return {
        "scheme": comparison.about.scheme,
        "prediction": {"profile": told.profile, "cluster": told.cluster} if told else None,
        "updates": comparison.updates,
        "chosen": list(comparison.chosen),
        "shown": comparison.typical,
        "ended": comparison.ended,
        "step_seconds": {"predicted": predicted, "measured": measured},
        "bubble_ratio": {"predicted": promised, "measured": found},
        "workers": [_worker(comparison, worker) for worker in range(len(comparison.rows))],
        "operations": list(_operations(comparison)),
    }


def _worker(comparison: Comparison, worker: int) -> dict[str, Any]:
    predicted, measured = comparison.step(worker)
    return {
        "worker": worker,
        "step_seconds": {"predicted": predicted, "measured": measured},
        "residuals": [
            {"kind": row.kind.value, "cause": row.cause, "predicted": row.predicted, "measured": row.measured}
            for row in comparison.rows[worker]
        ],
    }


def _operations(comparison: Comparison) -> Iterator[dict[str, Any]]:
    for worker, predicted, measured in comparison.operations:
        yield {
            "worker": worker,
            "operation": words(predicted.operation),
            "predicted": [predicted.start / 1e9, predicted.end / 1e9],
            "measured": [measured.start / 1e9, measured.end / 1e9],
        }
