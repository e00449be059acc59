"""Residuals by kind and worker and the causes of the bubble: as text for a terminal, and as JSON."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from chimera_ir.plural import counted, listed
from chimera_ir.predict.prediction_table import size
from chimera_ir.trace.compare import Residual, TraceComparison
from chimera_ir.trace.drawing import milliseconds, summary
from chimera_ir.trace.memory_rows import MemoryRow
from chimera_ir.trace.spans import BUSY, Activity, words
from chimera_ir.trace.stops import StoppedRank
from chimera_ir.trace.trace_files import Trace

IN_FULL = 8
"""The most workers that each get a table on the terminal; for more workers it shows the mean alone."""


class Line(NamedTuple):
    """A line of a table, as text: times in milliseconds, and the measured time's share of an update in percent."""

    name: str
    predicted: str
    measured: str
    difference: str
    share: str


class Block(NamedTuple):
    """A table with its name; ``total`` is the sum of its lines."""

    name: str
    lines: tuple[Line, ...]
    total: Line


def blocks(comparison: TraceComparison) -> list[Block]:
    """Tables of times by kind of activity: first the mean of all workers, then a table for every worker."""
    rows = comparison.rows
    all_workers = _by_kind([row for worker_rows in rows for row in worker_rows], len(rows))
    return [
        _block("mean of all workers", all_workers, *comparison.steps),
        *(
            _block(f"worker {worker}", _by_kind(worker_rows, 1), *comparison.step(worker))
            for worker, worker_rows in enumerate(rows)
        ),
    ]


def bubbles(comparison: TraceComparison) -> list[Line]:
    """A line for each activity of each worker that computes nothing, the longest first."""
    named = [
        (f"worker {worker}: {cause_of(row.kind, row.cause)}", row, comparison.step(worker)[1])
        for worker, rows in enumerate(comparison.rows)
        for row in rows
        if row.kind not in BUSY
    ]
    named.sort(key=lambda entry: -entry[1].measured)
    return [_line(name, row.predicted, row.measured, whole) for name, row, whole in named]


def cause_of(kind: str, cause: str) -> str:
    """Words for an activity and its cause, such as ``wait for messages from worker 1``."""
    if kind == Activity.FLUSH:
        return "done; waits for the last worker"
    return f"wait for {cause}" if cause else str(kind)


def _by_kind(rows: Iterable[Residual], workers: int) -> dict[str, tuple[float, float]]:
    times: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for row in rows:
        predicted, measured = times[row.kind]
        times[row.kind] = predicted + row.predicted / workers, measured + row.measured / workers
    return times


def _block(name: str, kinds: dict[str, tuple[float, float]], predicted: float, measured: float) -> Block:
    lines = [_line(kind, *kinds[kind], measured) for kind in (*BUSY, *Activity) if kind in kinds]
    return Block(name, tuple(lines), _line("update", predicted, measured, measured))


def _line(name: str, predicted: float, measured: float, whole: float) -> Line:
    share = f"{100 * measured / whole:.1f}%" if whole else ""
    return Line(name, milliseconds(predicted), milliseconds(measured), _signed(measured - predicted), share)


def _signed(seconds: float) -> str:
    """A difference, given in seconds, as text in milliseconds with its sign."""
    return f"{seconds * 1e3:+.3f}"


def text(comparison: TraceComparison) -> RenderableType:
    """Tables for a terminal; everything is readable without colour."""
    mean, *workers = blocks(comparison)
    shown = [mean, *(workers if len(workers) <= IN_FULL else [])]
    longest = bubbles(comparison)[: 2 * IN_FULL]
    return Group(
        Text(comparison.about.scheme, "bold"),
        Text(summary(comparison)),
        Text(_largest(comparison)),
        Text(f"in milliseconds; {basis(comparison)}{_early(comparison)}"),
        Text(ground(comparison)),
        *(_table(block.name, block.lines, block.total) for block in shown),
        _table("where the bubble was", longest, None),
        *([_memory(comparison.memory)] if comparison.memory else []),
    )


def _memory(rows: Iterable[MemoryRow]) -> Table:
    """Table of the most bytes of carries and on the host, which are in no other table."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("memory", overflow="fold")
    table.add_column("predicted", justify="right")
    table.add_column("measured", justify="right", style="bold")
    for row in rows:
        predicted = "" if row.predicted is None else size(row.predicted)
        table.add_row(f"worker {row.worker}: {row.purpose}", predicted, size(row.measured))
    return table


def _largest(comparison: TraceComparison) -> str:
    """A sentence on the activity that adds most to the difference between prediction and measurement.

    Times are means of all workers.
    """
    rows = [row for worker_rows in comparison.rows for row in worker_rows]
    kinds = _by_kind(rows, len(comparison.rows)).items()
    predicted, measured = comparison.steps
    sign = 1 if measured >= predicted else -1
    _, kind, part = max((sign * (after - before), kind, after - before) for kind, (before, after) in kinds)
    return f"largest part of the difference, {_signed(measured - predicted)} ms: {kind}, {_signed(part)} ms"


def basis(comparison: TraceComparison) -> str:
    """A sentence on the measured side: updates, copies, backend."""
    about, count = comparison.about, len(comparison.chosen)
    copies = f", {counted(about.copies, 'copy')}" if about.copies > 1 else ""
    slept = "; compute was a sleep (--rehearse)" if about.rehearse else ""
    return (
        f"the mean of {count} of {counted(comparison.updates, 'update')}, "
        f"those in the middle by length{copies}; {about.backend}{slept}"
    )


def _early(comparison: TraceComparison) -> str:
    """The end of a sentence on a run: that it ended early, and with which message; empty if it did not."""
    return f"; the run ended early: {comparison.ended}" if comparison.ended else ""


def ground(comparison: TraceComparison) -> str:
    """A sentence on the source of the prediction."""
    slept = comparison.about.rehearse is not None
    kinds, source = listed(comparison.about.rehearse or ("F", "B")), comparison.source
    if source:
        sleeps = f"; {kinds} are those of the rehearsal" if slept else ""
        return f"predicted by a replay, from the profile '{source.profile}' and the cluster '{source.cluster}'{sleeps}"
    costs = f"{kinds} of the rehearsal" if slept else "the run's own medians"
    return f"predicted from {costs}; messages, sums and posting take no time"


def ended(trace: Trace) -> Text:
    """Text on a run that ended before an update was complete: the messages of the ranks, each once."""
    messages = dict.fromkeys(rank.ended for rank in trace.ranks if rank.ended is not None)
    lines = [
        "no update was recorded whole; the run ended early:",
        *messages,
        "trace.html shows where every rank stopped",
    ]
    return Text("\n".join(lines))


def stops_text(stops: Sequence[StoppedRank]) -> Text:
    """Text on where every rank stopped, a line for each."""
    return Text("\n".join(["the run ended early; every rank stopped in:", *map(_stop_line, stops)]))


def _stop_line(stop: StoppedRank) -> str:
    place = f"rank {stop.rank} (worker {stop.worker}): "
    if not stop.line:
        return f"{place}{stop.message}"
    update = f" of update {stop.update + 1}" if stop.update >= 0 else ""
    return f"{place}{stop.line}{update}{f', for {stop.seconds:g} s' if stop.seconds else ''}"


def stops_as_json(stops: Sequence[StoppedRank]) -> dict[str, Any]:
    """Places where the ranks stopped, as JSON; what is not known is null."""
    return {
        "ranks": [
            {
                "rank": stop.rank,
                "worker": stop.worker,
                "line": stop.line or None,
                "update": stop.update if stop.update >= 0 else None,
                "seconds": stop.seconds or None,
                "message": stop.message,
            }
            for stop in stops
        ]
    }


def ended_as_json(trace: Trace) -> dict[str, Any]:
    """A run that ended before an update was complete, as JSON."""
    messages = [{"rank": rank.rank, "ended": rank.ended} for rank in trace.ranks]
    return {"scheme": trace.about.scheme, "updates": 0, "ranks": messages}


def _table(name: str, lines: Sequence[Line], total: Line | None) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_footer=total is not None)
    row_name, *figures = total or Line("", "", "", "", "")
    table.add_column(name, footer=row_name, overflow="fold")
    for column, figure in zip(("predicted", "measured", "difference", "share"), figures, strict=True):
        table.add_column(column, footer=figure, justify="right", style="bold" if column == "measured" else "")
    for line in lines:
        table.add_row(*line)
    return table


def as_json(comparison: TraceComparison) -> dict[str, Any]:
    """The comparison as JSON, in seconds; docs/howto/trace.md describes it."""
    predicted, measured = comparison.steps
    predicted_bubble, measured_bubble = comparison.bubbles
    source = comparison.source
    return {
        "scheme": comparison.about.scheme,
        "prediction": {"profile": source.profile, "cluster": source.cluster} if source else None,
        "updates": comparison.updates,
        "chosen": list(comparison.chosen),
        "shown": comparison.typical,
        "ended": comparison.ended,
        "step_seconds": {"predicted": predicted, "measured": measured},
        "bubble_ratio": {"predicted": predicted_bubble, "measured": measured_bubble},
        "workers": [_worker(comparison, worker) for worker in range(len(comparison.rows))],
        "operations": list(_operations(comparison)),
    }


def _worker(comparison: TraceComparison, worker: int) -> dict[str, Any]:
    predicted, measured = comparison.step(worker)
    return {
        "worker": worker,
        "step_seconds": {"predicted": predicted, "measured": measured},
        "residuals": [
            {"kind": row.kind, "cause": row.cause, "predicted": row.predicted, "measured": row.measured}
            for row in comparison.rows[worker]
        ],
        "memory": [
            {"purpose": row.purpose, "predicted": row.predicted, "measured": row.measured}
            for row in comparison.memory
            if row.worker == worker
        ],
    }


def _operations(comparison: TraceComparison) -> Iterator[dict[str, Any]]:
    for worker, predicted, measured in comparison.operations:
        yield {
            "worker": worker,
            "operation": words(predicted.operation, comparison.header),
            "predicted": [predicted.start / 1e9, predicted.end / 1e9],
            "measured": [measured.start / 1e9, measured.end / 1e9],
        }
