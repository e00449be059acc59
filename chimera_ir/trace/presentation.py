"""Residuals by kind and worker and the causes of the bubble: as text for a terminal, and as JSON."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain
from statistics import fmean
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from chimera_ir.escapes import visible_lines
from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import Compute, Instruction, Pair, Step
from chimera_ir.ir.streams import view_of
from chimera_ir.picture.looks import shown_micro
from chimera_ir.plural import counted, listed
from chimera_ir.predict.screen import size
from chimera_ir.profile.costs import FREE_TIMING, StageCosts, Timing
from chimera_ir.tables import Column, Table
from chimera_ir.trace.bundles import Stopped, StoppedRank
from chimera_ir.trace.compare import MemoryRow, Residual, Side, TraceComparison, costs, later
from chimera_ir.trace.drawing import milliseconds, summary
from chimera_ir.trace.forecast import length
from chimera_ir.trace.trace_files import BUSY, Activity, Lane, LaneSpan, Trace, UpdateWindow, activity, cause, words

# Costs of stages, taken from a recorded run.
#
# They are medians of the run's operations. A rehearsal sleeps in place of computing: its costs are the lengths of its
# sleeps.


def run_stages(
    trace: Trace, lanes: Sequence[Lane], windows: Iterable[Sequence[UpdateWindow]]
) -> tuple[StageCosts, ...]:
    """The costs of each stage of a traced program: medians, or sleeps of a rehearsal; sizes are not known.

    ``windows`` has, for each update that counts, the part of every rank's lane. An operation that was never recorded
    takes the mean time of its kind or, without one, a time in proportion to its cost in the table of kinds.
    """
    header, size = trace.header, trace.about.micro_batch_size
    cost = costs(header, trace.about.rehearse, lanes, windows)
    instructions = [*chain.from_iterable(view_of(trace.program).lanes)]

    def weight(operation: Compute | Pair) -> float:
        return operation.size * sum(part.kind.cost for part in operation.parts)

    computes = [operation for operation in instructions if isinstance(operation, Compute | Pair)]
    per_unit = [cost(operation) / 1e9 / weight(operation) for operation in computes if cost(operation)]
    usual = fmean(per_unit) if per_unit else 1e-3

    def seconds(instruction: Instruction) -> float:
        if nanoseconds := cost(instruction):
            return nanoseconds / 1e9
        return usual * weight(instruction) if isinstance(instruction, Compute | Pair) else 0.0

    # The times of each stage by the number of items; an operation over a part of a micro-batch gives those of a whole.
    times: list[dict[int, dict[str, float]]] = [{size: {}} for _ in range(header.stages)]
    for operation in computes:
        for part in operation.parts:
            of_stage = times[part.stage]
            share, heavier = Fraction(part.size, header.parts), Fraction(header.weight(part), part.size)
            for single in {operation, part}:
                length = float(seconds(single) / heavier)
                if share == 1 or single.kind.letter not in of_stage[size]:
                    of_stage[size][single.kind.letter] = float(length / share)
                if share != 1 and (size * share).denominator == 1:
                    of_stage.setdefault(int(size * share), {})[single.kind.letter] = length
    steps: dict[int, float] = {line.group[0]: seconds(line) for line in instructions if isinstance(line, Step)}
    return tuple(_stage(of_stage, size, steps.get(stage, 0.0)) for stage, of_stage in enumerate(times))


def _stage(times: Mapping[int, Mapping[str, float]], size: int, step: float) -> StageCosts:
    """The costs of a stage from the seconds of each kind of operation by number of items; a step takes ``step``.

    Where the time of a kind is known for a whole micro-batch (``size`` items) alone, fewer items take their share.
    """
    unknown = StageCosts(0, 0, 0, dict.fromkeys(times, FREE_TIMING))
    at: dict[int, Timing] = {}
    for items, of_kinds in times.items():
        scaled = {letter: seconds * items / size for letter, seconds in times[size].items()}
        at |= unknown.slept(items, {**scaled, **of_kinds}).at
    return replace(unknown, at=at, step=step)


IN_FULL = 8
"""The most workers that each get a table on the terminal; for more workers it shows the mean alone."""


_Line = tuple[str, str, str, str, str]
"""A name, milliseconds as predicted and measured, their difference, and the measured time's share of an update."""


def _blocks(comparison: TraceComparison) -> Iterator[RenderableType]:
    """Yields tables of times by kind of activity: the mean of all workers and, if they are few, one for each."""
    rows = comparison.rows
    all_workers = _by_kind(chain.from_iterable(rows), len(rows))
    yield _block("mean of all workers", all_workers, *comparison.steps)
    for worker, worker_rows in enumerate(rows if len(rows) <= IN_FULL else ()):
        yield _block(f"worker {worker}", _by_kind(worker_rows, 1), *comparison.step(worker))


def _bubbles(comparison: TraceComparison) -> list[_Line]:
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


def _block(name: str, kinds: dict[str, tuple[float, float]], predicted: float, measured: float) -> RenderableType:
    lines = [_line(kind, *kinds[kind], measured) for kind in (*BUSY, *Activity) if kind in kinds]
    return _table(name, lines, _line("update", predicted, measured, measured))


def _line(name: str, predicted: float, measured: float, whole: float) -> _Line:
    share = f"{100 * measured / whole:.1f}%" if whole else ""
    return name, milliseconds(predicted), milliseconds(measured), _signed(measured - predicted), share


def _signed(seconds: float) -> str:
    return f"{seconds * 1e3:+.3f}"


def text(comparison: TraceComparison) -> RenderableType:
    """Tables for a terminal; everything is readable without colour."""
    ended = f"; the run ended early: {comparison.ended}" if comparison.ended else ""
    return Group(
        Text(comparison.about.scheme, "bold"),
        Text(summary(comparison)),
        Text(_largest(comparison)),
        Text(f"in milliseconds; {basis(comparison)}{ended}"),
        Text(ground(comparison)),
        *_blocks(comparison),
        _table("where the bubble was", _bubbles(comparison)[: 2 * IN_FULL]),
        *([_memory(comparison.memory)] if comparison.memory else []),
    )


def _memory(memory: Iterable[MemoryRow]) -> RenderableType:
    columns = Column("memory"), Column("predicted", "right"), Column("measured", "right", "bold")
    rows = [
        (
            f"worker {row.worker}: {row.purpose}",
            "" if row.predicted is None else size(row.predicted),
            size(row.measured),
        )
        for row in memory
    ]
    return Table(columns, rows).for_terminal()


def _largest(comparison: TraceComparison) -> str:
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


def _table(name: str, lines: Sequence[_Line], total: _Line = ("",) * 5) -> RenderableType:
    columns = [Column(name, footer=total[0])]
    for head, figure in zip(("predicted", "measured", "difference", "share"), total[1:], strict=True):
        columns.append(Column(head, "right", "bold" if head == "measured" else "", figure))
    return Table(columns, lines).for_terminal()


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


# Table of a recorded run for its page: the spans of every update that is shown, and predicted beside measured time.
#
# Times are nanoseconds from the start of the update. The page's script reads the table as the type ``Trace`` of
# ``templates/page/document.d.ts``.

MOST_SPANS = 100_000
"""The most spans of a page; of a longer run the page has updates at equal distances, and the typical one."""

_WAITS: Mapping[str, str] = {
    Activity.RECV: "message",
    Activity.SEND: "send",
    Activity.SUM: "sum",
    Activity.MOVE: "send",
    Activity.POST: "post",
    Activity.LOAD: "post",
    Activity.BETWEEN: "bubble",
    Activity.FLUSH: "bubble",
}
"""The names of the patterns of activities that compute nothing."""

_SHORTEST_GAP = 1 / 2000
"""The shortest time between operations that is a span of its own, as a share of the update."""

Numbers = list[int]


@dataclass(frozen=True, slots=True)
class SpanTable:
    """The spans of an update as columns, one entry a span: what ranks did and, as other spans, the time between."""

    worker: Numbers
    start: Numbers
    end: Numbers
    operation: Numbers
    activity: Numbers
    line: Numbers


@dataclass(frozen=True, slots=True)
class UpdateTable:
    """A recorded update: its name, how long it took (the mean of all workers), and its spans."""

    name: str
    seconds: float
    spans: SpanTable


@dataclass(frozen=True, slots=True)
class ActivityRow:
    """An activity with its cause, in words; ``wait`` is the pattern that fills its boxes, empty if it computes."""

    name: str
    wait: str


@dataclass(frozen=True, slots=True)
class ResidualRow:
    """Seconds of a worker in one activity (an index into those of `TraceTable`), predicted and measured."""

    worker: int
    activity: int
    predicted: float
    measured: float


@dataclass(frozen=True, slots=True)
class MeasuredFigures:
    """Seconds and bubble ratio of an update, the means over ``updates`` updates."""

    seconds: float
    bubble_ratio: float
    updates: int


@dataclass(frozen=True, slots=True)
class TraceTable:
    """The table of a recorded run, the type ``Trace`` of the page."""

    updates: list[UpdateTable]
    typical: int
    start: float
    activities: list[ActivityRow]
    lines: list[str]
    notes: list[str]
    residuals: list[ResidualRow]
    measured: MeasuredFigures | None
    hang: list[StoppedRank] | None


class RunTables:
    """Collects the tables of a run.

    ``operations`` has the worker and the operation of each row of the page's table. ``barriered`` says whether a
    barrier follows each update. Activities and lines are numbered in the order in which they first occur.
    """

    def __init__(self, header: Header, operations: Iterable[tuple[int, Compute]], barriered: bool) -> None:
        self._header = header
        self._behind = Activity.FLUSH if barriered else Activity.BETWEEN
        self._rows = _rows(header, operations)
        self._activities: dict[tuple[str, str], int] = {}
        self._lines: dict[str, int] = {}

    def table(self, comparison: TraceComparison | None, stopped: Stopped | None) -> TraceTable:
        """The table of a run that was compared with its prediction, or that ended early, or both.

        Without a flush an update begins in the middle of the schedule. The update in which a run ended is shown first.
        """
        updates, residuals, notes, measured = [], [], [], None
        typical = begins = 0
        if comparison is not None:
            chosen = _chosen(comparison)
            updates = [self._update(comparison, update) for update in chosen]
            residuals = [
                ResidualRow(worker, self._activity(row.kind, row.cause), row.predicted, row.measured)
                for worker, rows in enumerate(comparison.rows)
                for row in rows
            ]
            typical = chosen.index(comparison.typical)
            begins = comparison.begins if self._header.asynchronous else 0
            left_out = comparison.updates - len(chosen)
            measured = MeasuredFigures(comparison.steps[1], comparison.bubbles[1], len(comparison.chosen))
            notes = [basis(comparison), ground(comparison)]
            notes += [f"{counted(left_out, 'update')} of the run are not on this page"] if left_out else []
        if stopped is not None:
            updates.append(self._last(stopped))
            typical = len(updates) - 1
        return TraceTable(
            updates=updates,
            typical=typical,
            start=begins / 1e9,
            activities=[ActivityRow(cause_of(kind, reason), _WAITS.get(kind, "")) for kind, reason in self._activities],
            lines=[*self._lines],
            notes=[*map(visible_lines, notes)],
            residuals=residuals,
            measured=measured,
            hang=None if stopped is None else stopped.ranks,
        )

    def _last(self, stopped: Stopped) -> UpdateTable:
        spans = [[span for span in lane if span.update == stopped.update] for lane in stopped.lanes]
        origin = min((lane[0].start for lane in spans if lane), default=0)
        lanes = tuple(tuple(later(span, -origin) for span in lane) for lane in spans)
        windows = tuple(UpdateWindow(0, lane[-1].end if lane else 0) for lane in lanes)
        length = max(window.end for window in windows)
        name = f"update {stopped.update + 1}, in which the run ended"
        return UpdateTable(name, length / 1e9, self._spans(Side(lanes, windows), length))

    def _update(self, comparison: TraceComparison, update: int) -> UpdateTable:
        side = comparison.measured_update(update)
        seconds = length(comparison.windows[update][rank] for rank in comparison.first_copy) / 1e9
        longest = max(end - start for start, end in side.windows)
        return UpdateTable(f"update {update + 1}", seconds, self._spans(side, longest))

    def _spans(self, side: Side, length: int) -> SpanTable:
        table = SpanTable([], [], [], [], [], [])
        for worker, (lane, window) in enumerate(zip(side.lanes, side.windows, strict=True)):
            for span, start, end in _filled(lane, window, length * _SHORTEST_GAP, self._behind):
                if isinstance(span, Activity):
                    number = self._activity(span, "")
                else:
                    number = self._activity(activity(span.operation), cause(self._header, span.operation))
                for row in self._operations(worker, span):
                    table.worker.append(worker)
                    table.start.append(start)
                    table.end.append(end)
                    table.operation.append(row)
                    table.activity.append(number)
                    table.line.append(self._lines.setdefault(self._line(span), len(self._lines)))
        return table

    def _line(self, span: LaneSpan | Activity) -> str:
        return str(span) if isinstance(span, Activity) else words(span.operation, self._header)

    def _operations(self, worker: int, span: LaneSpan | Activity) -> Sequence[int]:
        """The rows of a span's operation in the page's table: two for a pair, -1 if it computes nothing."""
        if isinstance(span, LaneSpan) and isinstance(span.operation, Compute | Pair):
            return [self._rows.get(_key(self._header, worker, part), -1) for part in span.operation.parts]
        return [-1]

    def _activity(self, kind: str, reason: str) -> int:
        return self._activities.setdefault((kind, reason), len(self._activities))


def _filled(
    lane: Lane, window: UpdateWindow, shortest: float, behind: Activity
) -> Iterator[tuple[LaneSpan | Activity, int, int]]:
    """Yields what a lane does in a window: spans, and gaps of at least ``shortest``, each with start and end.

    The gap after the last span has the activity ``behind``.
    """
    now = window.start
    for span in lane:
        start, end = max(span.start, now), min(span.end, window.end)
        if start - now >= shortest:
            yield Activity.BETWEEN, now, start
        if end >= start:
            yield span, start, end
        now = max(now, end)
    if window.end - now >= shortest:
        yield behind, now, window.end


_OperationKey = tuple[int, str, tuple[int, ...], int]


def _rows(header: Header, operations: Iterable[tuple[int, Compute]]) -> Mapping[_OperationKey, int]:
    """The row of each operation in the page's table; of those that differ by whole turns, the first one."""
    rows: dict[_OperationKey, int] = {}
    for row, (worker, operation) in enumerate(operations):
        rows.setdefault(_key(header, worker, operation), row)
    return rows


def _key(header: Header, worker: int, operation: Compute) -> _OperationKey:
    first = shown_micro(header, operation.micros[0])
    micros = tuple(int(micro - operation.micros[0] + first) for micro in operation.micros)
    return worker, operation.kind.letter, micros, int(operation.stage)


def _chosen(comparison: TraceComparison) -> list[int]:
    """The numbers of the updates that a page shows: all or every k-th one, the typical one always among them."""
    spans = sum(len(lane) for lane in comparison.recorded) / comparison.about.copies
    step = max(1, -(-int(spans) // MOST_SPANS))
    return sorted({*range(0, comparison.updates, step), comparison.typical})
