"""What was predicted before the run: the program replayed, with the costs of a profile, on the links of a cluster."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from chimera_ir.ir.levels import Program
from chimera_ir.ir.ops import Instruction
from chimera_ir.ir.turns import longer, updates_a_turn
from chimera_ir.predict.replay import Event, pace, replay
from chimera_ir.predict.setting import Setting
from chimera_ir.profile.choose import Inputs, Wanted
from chimera_ir.trace.account import windows
from chimera_ir.trace.forecast import Promised, alike, played_updates
from chimera_ir.trace.match import instructions
from chimera_ir.trace.read import Trace
from chimera_ir.trace.spans import Lane, Span, Window

LONGER = (1, 2, 4, 8, 16)
"""How many times as many updates are replayed as otherwise, while what the beginning lacks has not faded."""

MOST = 300_000
"""Instructions that are replayed for that, at most."""


@dataclass(frozen=True, slots=True)
class Foretold:
    """What a prediction was made from; ``profile`` and ``cluster`` are the names that these give themselves."""

    profile: str
    cluster: str
    setting: Setting


def foretold(trace: Trace, inputs: Inputs) -> Foretold:
    """What the files say about the run of a trace: with its copies, its layout and its micro-batches.

    In a rehearsal forwards and backwards take the F and B of the run, recomputing or not, and steps take nothing: of
    the profile only the sizes are left.

    Raises
    ------
    Unfit
        If the profile has no costs for it, or the cluster too few workers.
    """
    header, about = trace.program.header, trace.about
    wanted = Wanted(header.stages, header.workers, about.copies, about.micro_batch_size)
    if about.rehearse is None:
        stages = inputs.choose(wanted)
    else:
        stages = tuple(each.slept(wanted.micro_batch_size, *about.rehearse) for each in inputs.choose_sizes(wanted))
    setting = Setting(stages, inputs.cluster, about.copies, about.micro_batch_size, about.layout == "replica")
    return Foretold(inputs.counts.name, inputs.cluster.name, setting)


def foretell(program: Program, setting: Setting, barriered: bool, typical: int) -> Promised:
    """The lanes of a replay, and which of its updates are like the typical one of a run.

    Without a barrier as many are counted as come again and again, and take as long as updates do in the long run.
    Where none such are found, as may be where links are shared, it is one turn.
    """
    header = program.header
    updates = played_updates(header, barriered)
    if barriered:
        promised, _ = _replayed(program, setting, updates)
        return Promised(promised, windows(header, promised, barriered), 0, range(1))
    turn = updates_a_turn(header) if header.asynchronous else 1
    counts = [times * updates for times in LONGER if times == 1 or times * sum(map(len, program.lanes)) <= MOST]
    for count in counts:
        promised, seconds = _replayed(program, setting, count)
        found, shown = windows(header, promised, barriered), alike(header, count, typical)
        for start in range(shown + 1 - turn, 0, -turn):
            counted = range(start, shown + 1)
            if _steady(promised, found, counted, 1e9 * seconds):
                return Promised(promised, found, shown, counted)
    return Promised(promised, found, shown, range(max(shown + 1 - turn, 0), shown + 1))


def _steady(lanes: Sequence[Lane], found: Sequence[Sequence[Window]], counted: range, each: float) -> bool:
    """Whether updates take so many nanoseconds each on every worker, but for what rounding takes at both ends."""
    whole = len(counted) * each
    return all(
        abs(found[counted[-1]][worker].end - found[counted[0]][worker].start - whole) <= 2
        for worker, lane in enumerate(lanes)
        if lane
    )


def _replayed(program: Program, setting: Setting, updates: int) -> tuple[tuple[Lane, ...], float]:
    """Every worker's lane of so many updates, and the seconds from one to the next in the long run."""
    whole = longer(program, updates)
    found = replay(whole, setting)
    lanes = tuple(
        tuple(_spans(instructions(program, worker, updates), lane, found.lanes[worker]))
        for worker, lane in enumerate(whole.lanes)
    )
    return lanes, found.seconds if program.header.asynchronous or updates == 1 else pace(program, setting)


def _spans(
    serving: Iterator[tuple[int, Instruction]], lane: Sequence[Instruction], timed: Sequence[Event]
) -> Iterator[Span]:
    """The instructions of a lane with their times; those that are no events take none.

    Both are in the same order, and no instruction is there twice.
    """
    now, events = 0, iter(timed)
    ahead = next(events, None)
    for (update, operation), each in zip(serving, lane, strict=True):
        end = now
        if ahead is not None and ahead.what == each:
            end, ahead = round(ahead.end * 1e9), next(events, None)
        yield Span(operation, update, now, end)
        now = end
