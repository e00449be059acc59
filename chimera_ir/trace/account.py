"""Where the time of an update went, by kind and by cause; what the kinds have adds up to the whole."""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean

from chimera_ir.ir.levels import Header
from chimera_ir.trace.spans import Activity, Lane, Span, Window, activity, cause, ends

Account = Counter[tuple[Activity, str]]
"""Nanoseconds by kind and, of waits, by what was waited for."""


def account(header: Header, lane: Lane, window: Window, barriered: bool) -> Account:
    """What a rank did in a window of its lane: every nanosecond of it once.

    What lies between operations belongs to nobody; after the last one, where a barrier follows, to the flush.
    """
    found: Account = Counter()
    now = window.start
    for span in inside(lane, window):
        start, end = max(span.start, now), min(span.end, window.end)
        found[Activity.BETWEEN, ""] += start - now
        found[activity(span.operation), cause(header, span.operation)] += max(end - start, 0)
        now = max(end, start)
    found[Activity.FLUSH if barriered else Activity.BETWEEN, ""] += window.end - now
    return found


def inside(lane: Lane, window: Window) -> Sequence[Span]:
    """The spans that have a part in a window."""
    first = bisect_right(lane, window.start, key=lambda span: span.end)
    last = bisect_left(lane, window.end, key=lambda span: span.start)
    return lane[first:last]


def windows(header: Header, lanes: Sequence[Lane], barriered: bool) -> list[tuple[Window, ...]]:
    """For each update that every rank has finished, its window on every rank.

    With a barrier before each update it is the same for all: from the first operation of any rank to the last. Else an
    update lasts on each rank from the end of the one before, and the first from its first operation.
    """
    finished = [ends(lane, header.asynchronous) for lane in lanes if lane]
    updates = range(min((len(each) for each in finished), default=0))
    if barriered:
        starts = [_starts(lane) for lane in lanes if lane]
        shared = [
            Window(min(each[update] for each in starts), max(each[update] for each in finished)) for update in updates
        ]
        return [(window,) * len(lanes) for window in shared]
    everybody = [max(each[update] for each in finished) for update in updates]
    edges = [ends(lane, header.asynchronous) if lane else dict(enumerate(everybody)) for lane in lanes]
    opening = min((lane[0].start for lane in lanes if lane), default=0)
    begins = [lane[0].start if lane else opening for lane in lanes]
    return [
        tuple(
            Window(edge[update - 1] if update else begin, edge[update])
            for begin, edge in zip(begins, edges, strict=True)
        )
        for update in updates
    ]


def _starts(lane: Lane) -> dict[int, int]:
    found: dict[int, int] = {}
    for span in lane:
        found.setdefault(span.update, span.start)
    return found


def length(window: Iterable[Window]) -> float:
    """How long an update took, on average over the ranks."""
    return fmean(end - start for start, end in window)
