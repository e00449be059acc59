"""Table of a recorded run for its page: the spans of every update that is shown, and predicted beside measured time.

Times are nanoseconds from the start of the update. The page's script reads the table as the type ``Trace`` of
``templates/page/document.d.ts``.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from chimera_ir.escapes import visible_lines
from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import Compute, Pair
from chimera_ir.picture.words import shown_micro
from chimera_ir.plural import counted
from chimera_ir.trace.account import length
from chimera_ir.trace.compare import Side, TraceComparison, later
from chimera_ir.trace.presentation import basis, cause_of, ground
from chimera_ir.trace.spans import Activity, Lane, LaneSpan, UpdateWindow, activity, cause, words
from chimera_ir.trace.stops import Stopped, StoppedRank

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
    """The spans of an update as columns, one entry a span: what ranks did and, as other spans, the time between.

    ``operation`` is the row of the span's operation in the page's table, or -1 if the span has none. ``activity`` and
    ``line`` are indices into the lists ``activities`` and ``lines`` of `TraceTable`.
    """

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
    """Seconds that a worker spends on one activity in an update, predicted and measured.

    ``activity`` is an index into ``activities`` of `TraceTable`.
    """

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
    """The table of a recorded run.

    ``typical`` is the index of the update that a page shows first. ``start`` is the time in seconds at which that
    update begins in the schedule that the page draws. ``lines`` are the lines of the program that were run, each once.
    ``measured`` is None if no update was recorded whole. ``hang`` says where ranks stopped; None if the run did not end
    early.
    """

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
    barrier follows each update. Activities and lines get their numbers in the order in which they first occur.
    """

    def __init__(self, header: Header, operations: Iterable[tuple[int, Compute]], barriered: bool) -> None:
        self._header = header
        self._behind = Activity.FLUSH if barriered else Activity.BETWEEN
        self._rows = _rows(header, operations)
        self._activities: dict[tuple[str, str], int] = {}
        self._lines: dict[str, int] = {}

    def table(self, comparison: TraceComparison | None, stopped: Stopped | None) -> TraceTable:
        """The table of a run that was compared with its prediction, or that ended early, or both.

        Without a flush an update begins in the middle of the schedule. Of a run that ended early, the update in which
        it ended is shown first.
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
        """Returns the update in which a run ended, with the spans that were recorded of it."""
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
                for row in self._operations(worker, span):
                    table.worker.append(worker)
                    table.start.append(start)
                    table.end.append(end)
                    table.operation.append(row)
                    table.activity.append(self._activity_of(span))
                    table.line.append(self._lines.setdefault(self._line(span), len(self._lines)))
        return table

    def _line(self, span: LaneSpan | Activity) -> str:
        return str(span) if isinstance(span, Activity) else words(span.operation, self._header)

    def _operations(self, worker: int, span: LaneSpan | Activity) -> Sequence[int]:
        """Returns the rows of a span's operation in the page's table: two for a pair, -1 if it computes nothing."""
        if isinstance(span, LaneSpan) and isinstance(span.operation, Compute | Pair):
            return [self._rows.get(_key(self._header, worker, part), -1) for part in span.operation.parts]
        return [-1]

    def _activity_of(self, span: LaneSpan | Activity) -> int:
        if isinstance(span, Activity):
            return self._activity(span, "")
        return self._activity(activity(span.operation), cause(self._header, span.operation))

    def _activity(self, kind: str, reason: str) -> int:
        return self._activities.setdefault((kind, reason), len(self._activities))


def _filled(
    lane: Lane, window: UpdateWindow, shortest: float, behind: Activity
) -> Iterator[tuple[LaneSpan | Activity, int, int]]:
    """Yields what a lane does in a window: its spans and the gaps between them, each with its start and its end.

    Gaps shorter than ``shortest`` are left out. The gap after the last span has the activity ``behind``.
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
    """Maps the key of each operation to the operation's row in the page's table.

    Operations of a stream that differ by whole turns have one key, and the row of the first of them.
    """
    rows: dict[_OperationKey, int] = {}
    for row, (worker, operation) in enumerate(operations):
        rows.setdefault(_key(header, worker, operation), row)
    return rows


def _key(header: Header, worker: int, operation: Compute) -> _OperationKey:
    """Returns a key of an operation; operations of a stream that differ by whole turns have the same key."""
    first = shown_micro(header, operation.micros[0])
    micros = tuple(int(micro - operation.micros[0] + first) for micro in operation.micros)
    return worker, operation.kind.letter, micros, int(operation.stage)


def _chosen(comparison: TraceComparison) -> list[int]:
    """Returns the numbers of the updates that a page shows, the typical one always among them.

    These are all updates or, if that is too much for a page, every k-th one.
    """
    spans = sum(len(lane) for lane in comparison.recorded) / comparison.about.copies
    step = max(1, -(-int(spans) // MOST_SPANS))
    return sorted({*range(0, comparison.updates, step), comparison.typical})
