"""Prediction from a profile and a cluster file, by a replay of the program, as it could be made before the run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from chimera_ir.ir.levels import Program
from chimera_ir.ir.ops import Instruction
from chimera_ir.ir.streams import ProgramStream, longer, view_of
from chimera_ir.predict.replay import Event, pace, replay
from chimera_ir.predict.setting import Setting
from chimera_ir.profile.choose import Inputs, Wanted
from chimera_ir.trace.account import windows
from chimera_ir.trace.forecast import PredictedLanes, like_typical, played_updates
from chimera_ir.trace.match import instructions
from chimera_ir.trace.spans import Lane, LaneSpan, UpdateWindow
from chimera_ir.trace.trace_files import Trace

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
    """Source of a prediction for a trace: profile and cluster of ``inputs``, with copies, layout and sizes of the run.

    For a rehearsal only the sizes of the profile count: an operation takes the rehearsed time of its kind, whether it
    recomputes or not, and a step takes none.

    Raises `Unfit` if the profile has no costs for these stages and sizes, or the cluster too few workers.
    """
    header, about = trace.header, trace.about
    wanted = Wanted(header.stages, header.workers, about.copies, about.micro_batch_size)
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
    """Returns the lanes of a program replayed in a setting, and which updates in them to compare with ``typical``.

    ``typical`` is an update of a run. If a barrier precedes each update (``barriered``), one update is replayed.
    Otherwise the counted updates are whole turns that take exactly as long as updates in the long run. If there are
    none, which is possible on shared links, the turn that ends with the shown update counts.
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
    """Whether the counted updates take ``nanoseconds`` each, as a mean, on every worker, apart from rounding."""
    whole = len(counted) * nanoseconds
    return all(
        abs(update_windows[counted[-1]][worker].end - update_windows[counted[0]][worker].start - whole) <= 2
        for worker, lane in enumerate(lanes)
        if lane
    )


def _replayed(program: Program | ProgramStream, setting: Setting, updates: int) -> tuple[tuple[Lane, ...], float]:
    """Lanes of a replay of ``updates`` updates, and the seconds from one update to the next in the long run."""
    whole = longer(program, updates)
    replayed = replay(whole, setting)
    lanes = tuple(
        tuple(_profiled_spans(instructions(program, worker, updates), lane, replayed.lanes[worker]))
        for worker, lane in enumerate(whole.lanes)
    )
    return lanes, pace(program, setting) if isinstance(program, Program) and updates > 1 else replayed.seconds


def _profiled_spans(
    serving: Iterator[tuple[int, Instruction]], lane: Sequence[Instruction], timed: Sequence[Event]
) -> Iterator[LaneSpan]:
    """Yields the instructions of a lane with their times in a replay; an instruction without an event takes no time.

    ``serving`` has each instruction as in the run, with the update that it serves; ``lane`` has it as in the replayed
    program. ``timed`` has the events of ``lane``. All three are in one order, and no instruction occurs twice in
    ``lane``.
    """
    now, events = 0, iter(timed)
    ahead = next(events, None)
    for (update, operation), instruction in zip(serving, lane, strict=True):
        end = now
        if ahead is not None and ahead.instruction == instruction:
            end, ahead = round(ahead.end * 1e9), next(events, None)
        yield LaneSpan(operation, update, now, end)
        now = end
