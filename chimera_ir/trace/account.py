"""Time of an update by activity and cause; the times add up to the length of the update."""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean

from chimera_ir.ir.levels import Header
from chimera_ir.trace.trace_files import Activity, Lane, LaneSpan, UpdateWindow, activity, cause, ends

Account = Counter[tuple[str, str]]
"""Nanoseconds, keyed by an activity and, of a wait, its cause; the cause of any other activity is empty."""


def account(header: Header, lane: Lane, window: UpdateWindow, barriered: bool) -> Account:
    """Divides the time of a window of a rank's lane: nanoseconds by activity and cause, which add up to it.

    Time outside of operations counts as `Activity.BETWEEN`; after the last operation of a ``barriered`` run, as
    `Activity.FLUSH`.
    """
    nanoseconds: Account = Counter()
    now = window.start
    for span in inside(lane, window):
        start, end = max(span.start, now), min(span.end, window.end)
        nanoseconds[Activity.BETWEEN, ""] += start - now
        nanoseconds[activity(span.operation), cause(header, span.operation)] += max(end - start, 0)
        now = max(end, start)
    nanoseconds[Activity.FLUSH if barriered else Activity.BETWEEN, ""] += window.end - now
    return nanoseconds


def inside(lane: Lane, window: UpdateWindow) -> Sequence[LaneSpan]:
    """The spans of a lane that lie in a window, wholly or in part."""
    first = bisect_right(lane, window.start, key=lambda span: span.end)
    last = bisect_left(lane, window.end, key=lambda span: span.start)
    return lane[first:last]


def windows(header: Header, lanes: Sequence[Lane], barriered: bool) -> list[tuple[UpdateWindow, ...]]:
    """The windows of each update that every rank has finished: when each rank begins and ends the update.

    If the run is ``barriered``, all ranks have the same window, from the first operation of any rank to the last.
    Otherwise a rank's window begins where that of the update before ends, and its first with its first operation.
    """
    # Ranks without operations finish nothing: they get the windows of the others.
    finished = [ends(lane) for lane in lanes if lane]
    updates = range(min(map(len, finished), default=0))
    if barriered:
        starts = [{span.update: span.start for span in reversed(lane)} for lane in lanes if lane]
        shared = [
            UpdateWindow(min(start[update] for start in starts), max(end[update] for end in finished))
            for update in updates
        ]
        return [(window,) * len(lanes) for window in shared]
    everywhere = [max(end[update] for end in finished) for update in updates]
    ends_by_lane = [ends(lane) if lane else dict(enumerate(everywhere)) for lane in lanes]
    opening = min((lane[0].start for lane in lanes if lane), default=0)
    begins = [lane[0].start if lane else opening for lane in lanes]
    return [
        tuple(
            UpdateWindow(lane_ends[update - 1] if update else begin, lane_ends[update])
            for begin, lane_ends in zip(begins, ends_by_lane, strict=True)
        )
        for update in updates
    ]


def length(window: Iterable[UpdateWindow]) -> float:
    """Length of an update in nanoseconds: the mean over its windows on all ranks."""
    return fmean(end - start for start, end in window)
