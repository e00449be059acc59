"""Prediction of a run: from the costs of operations, with free messages and sums, or by a replay from a profile."""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from statistics import fmean
from typing import NamedTuple

from chimera_ir.flow import engine
from chimera_ir.ir.levels import Header, Program
from chimera_ir.ir.ops import AllReduce, Instruction, Message, Send, WaitAllReduce, WaitRecv, WeightGroup
from chimera_ir.ir.streams import ProgramStream, longer, view_of
from chimera_ir.predict.replay import pace, replay
from chimera_ir.predict.setting import Setting
from chimera_ir.profile.choose import Inputs, Wanted
from chimera_ir.trace.match import instructions
from chimera_ir.trace.trace_files import Activity, Lane, LaneSpan, Trace, UpdateWindow, activity, cause, ends

# Time of an update by activity and cause; the times add up to the length of the update.

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


# Prediction from the costs of operations.

Cost = Callable[[Instruction], int]
"""Nanoseconds of an operation; never called for a wait."""


class PredictedLanes(NamedTuple):
    """A prediction: ``windows[u][w]`` is the window of update u on worker w, whose lane is ``lanes[w]``.

    ``shown`` is the update to show next to a measured one; a predicted time is the mean of the ``counted`` updates.
    """

    lanes: tuple[Lane, ...]
    windows: Sequence[tuple[UpdateWindow, ...]]
    shown: int
    counted: range


def played_updates(program: Program | ProgramStream, barriered: bool) -> int:
    """Number of updates to predict so that one of them is like the measured ones.

    One if a barrier precedes each update (``barriered``), four if updates follow one another; of a stream as many as
    its view has, which shows all that ever happens.
    """
    return view_of(program).header.updates if isinstance(program, ProgramStream) else 1 if barriered else 4


def like_typical(header: Header, updates: int, typical: int) -> int:
    """Index, among ``updates`` predicted updates, of the one that is most like ``typical``, an update of a run.

    The middle update is taken or, as even and odd updates of a stream differ, the one before.
    """
    shown = updates // 2
    return shown - (shown - typical) % 2 if header.asynchronous and shown > 1 else shown


def play(program: Program | ProgramStream, updates: int, cost: Cost) -> tuple[Lane, ...]:
    """Lanes of ``updates`` updates of a verified program in which everything runs as early as possible, from time 0.

    The wait for a message ends when the message is sent, the wait for a sum when the last holder launches it.
    """
    lanes = [list(instructions(program, worker, updates)) for worker in range(program.header.workers)]
    posted: dict[Hashable, list[int]] = defaultdict(list)
    for number, (update, instruction) in enumerate(chain(*lanes)):
        if isinstance(instruction, Send | AllReduce):
            posted[update, _subject(instruction)].append(number)
    before, durations = list[list[int]](), list[int]()
    for lane in lanes:
        for place, (update, instruction) in enumerate(lane):
            before.append([len(before) - 1] if place else [])
            if isinstance(instruction, WaitRecv | WaitAllReduce):
                before[-1] += posted[update, _subject(instruction)]
                durations.append(0)
            else:
                durations.append(cost(instruction))
    order = engine.ordered(before)
    assert len(order) == len(before), "a verified program ends"
    ends = iter(engine.ends(order, before, durations))
    return tuple(tuple(_spans(lane, ends)) for lane in lanes)


def _subject(instruction: Send | WaitRecv | AllReduce | WaitAllReduce) -> Message | WeightGroup:
    return instruction.message if isinstance(instruction, Send | WaitRecv) else instruction.group


def _spans(lane: Iterable[tuple[int, Instruction]], ends: Iterable[int]) -> Iterator[LaneSpan]:
    """Yields the instructions of a lane, each given with its update: from the end of the one before to its own."""
    now = 0
    for (update, instruction), end in zip(lane, ends, strict=False):
        yield LaneSpan(instruction, update, now, end)
        now = end


# Prediction from a profile and a cluster file, by a replay of the program, as it could be made before the run.

LONGER = (1, 2, 4, 8, 16)
"""Factors on the number of replayed updates, tried in order until the replay shows steady updates."""

MOST = 300_000
"""The most instructions of a replay with more updates than the first one."""


@dataclass(frozen=True, slots=True)
class ProfileSource:
    """Source of a prediction; ``profile`` and ``cluster`` are the names that the two files give themselves."""

    profile: str
    cluster: str
    setting: Setting


def profile_source(trace: Trace, inputs: Inputs) -> ProfileSource:
    """Source of a prediction for a trace: profile and cluster of ``inputs``, with copies and sizes of the run.

    For a rehearsal only the sizes of the profile count: an operation takes the rehearsed time of its kind, whether it
    recomputes or not, and a step takes none. Raises `Unfit` if the profile or the cluster does not fit the run.
    """
    header, about = trace.header, trace.about
    wanted = replace(Wanted.of(header, about.copies, about.micro_batch_size), moves=False)
    if about.rehearse is None:
        stages = inputs.choose(wanted)
    else:
        stages = tuple(sizes.slept(wanted.micro_batch_size, about.rehearse) for sizes in inputs.choose_sizes(wanted))
    where = inputs.cluster, about.copies, about.micro_batch_size, about.layout == "replica"
    setting = Setting(stages, *where, about.sharded_optimizer and about.rehearse is None)
    return ProfileSource(inputs.counts.name, inputs.cluster.name, setting)


def predict_from_profile(
    program: Program | ProgramStream, setting: Setting, barriered: bool, typical: int
) -> PredictedLanes:
    """The lanes of a program replayed in a setting, and which updates in them to compare with ``typical``.

    If a barrier precedes each update (``barriered``), one update is replayed. Otherwise the counted updates are whole
    turns that take exactly as long as updates in the long run. If there are none, which is possible on shared links,
    the turn that ends with the shown update counts.
    """
    header = view_of(program).header
    updates = played_updates(program, barriered)
    if barriered:
        predicted, _ = _replayed(program, setting, updates)
        return PredictedLanes(predicted, windows(header, predicted, barriered), 0, range(1))
    # Replay more and more updates, until some whole turns before the shown update are in the steady state.
    turn = header.per_turn
    lines = sum(map(len, view_of(program).lanes))
    counts = [times * updates for times in LONGER if times == 1 or times * lines <= MOST]
    for count in counts:
        predicted, seconds = _replayed(program, setting, count)
        update_windows, shown = windows(header, predicted, barriered), like_typical(header, count, typical)
        for start in range(shown + 1 - turn, 0, -turn):
            counted = range(start, shown + 1)
            if _steady(predicted, update_windows, counted, 1e9 * seconds):
                return PredictedLanes(predicted, update_windows, shown, counted)
    return PredictedLanes(predicted, update_windows, shown, range(max(shown + 1 - turn, 0), shown + 1))


def _steady(
    lanes: Sequence[Lane], update_windows: Sequence[Sequence[UpdateWindow]], counted: range, nanoseconds: float
) -> bool:
    whole = len(counted) * nanoseconds
    return all(
        abs(update_windows[counted[-1]][worker].end - update_windows[counted[0]][worker].start - whole) <= 2
        for worker, lane in enumerate(lanes)
        if lane
    )


def _replayed(program: Program | ProgramStream, setting: Setting, updates: int) -> tuple[tuple[Lane, ...], float]:
    """The lanes of a replay of ``updates`` updates, and the seconds of an update; what has no event takes no time."""
    whole = longer(program, updates)
    replayed = replay(whole, setting)
    lanes = []
    for worker, (lane, events) in enumerate(zip(whole.lanes, replayed.lanes, strict=True)):
        # An instruction occurs once in the lane of the whole program.
        ended = {event.instruction: round(1e9 * event.end) for event in events}
        ends = accumulate((ended.get(instruction, 0) for instruction in lane), max)
        lanes.append(tuple(_spans(instructions(program, worker, updates), ends)))
    return tuple(lanes), pace(program, setting) if isinstance(program, Program) and updates > 1 else replayed.seconds
