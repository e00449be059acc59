"""Compiles a large scheme by turns: its window is compiled and proven, and the rest is more of the same turn.

All that is written for the scheme follows from the window (`elaborate.repeats`): the program and its proof
(`verify.insertion`), the scripts, and the figures (`cost.growth`). If anything of this cannot be shown, the scheme is
compiled as a whole.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from math import lcm

from chimera_ir.codegen.rolling import roll_around
from chimera_ir.cost.durations import Durations
from chimera_ir.cost.growth import Turns, Unsettled, grown, launched_later, settles
from chimera_ir.cost.host_plan import launches, with_events
from chimera_ir.cost.report import CommunicatorChoice, Report, report
from chimera_ir.cost.simulate import CriticalPath, Timeline, simulate, ticks
from chimera_ir.diagnostics.model import Rejected, raise_errors
from chimera_ir.elaborate.elaborate import Outline
from chimera_ir.elaborate.repeats import Lists, Window, lists_of, stretches_in
from chimera_ir.flow.net import net_of
from chimera_ir.ir.levels import Header, Program, Schedule
from chimera_ir.ir.ops import Communicators, Compute, Instruction, Operation, Pair
from chimera_ir.ir.rolled import Insertion
from chimera_ir.lower.lower import forwards, forwards_header, lower, order
from chimera_ir.plural import counted
from chimera_ir.verify.findings import names
from chimera_ir.verify.insertion import insertion
from chimera_ir.verify.verify import Checked, Verified, verify_lowered, verify_schedule, verify_turns

_KEPT = ((2, 1), (3, 1), (4, 2), (6, 3), (8, 4), (12, 6), (24, 12), (48, 24))
"""How many turns windows keep, and before how many of the last ones, less one, the others come in."""

_LARGER = 1.03
"""A window is not tried if the next one is not larger by this factor."""

_MORE = (0, 1, 3, 7, 15, 31, 63, 127, 255)
"""How many turns more the window of the forwards alone keeps, one after the other."""

Cuts = list[tuple[int, int]]


@dataclass(frozen=True)
class ScheduledWindow:
    """The schedule of a window, and where its turns are."""

    lists: Lists
    window: Window
    turns: Turns

    @property
    def schedule(self) -> Schedule:
        """The schedule of the window."""
        return self.turns.net.schedule

    @property
    def left_out(self) -> str:
        """The turns that the window leaves out, in words for a picture."""
        window, header = self.window, self.window.header
        of_each = " of each pipe" if len(header.pipes) > 1 else ""
        turn = f"{counted(window.step // header.parts, 'micro-batch')}{of_each}"
        return f"{counted(window.left_out, 'turn')} of {turn} left out"


def scheduled(outline: Outline, durations: Durations) -> Iterator[ScheduledWindow]:
    """Yields the windows of a scheme whose times settle, up to half as large as itself."""
    lists = lists_of(outline)
    if lists is None:
        return
    step, whole = lists.stretches[0].step * len(lists.header.pipes), lists.header.micro_batches
    for (kept, back), (following, _) in pairwise((*_KEPT, (2 * lists.turns, 0))):
        next_size = whole - (lists.turns - following) * step
        if next_size < _LARGER * (next_size - (following - kept) * step):
            continue
        window = lists.window(kept, back)
        if window is None:
            continue
        if 2 * len(window.plan.operations) > sum(map(len, lists.lanes)):
            return
        schedule = order(window.plan)
        with suppress(KeyError):  # an operation is missing
            cuts, longer = cuts_in(schedule.lanes, window), partial(_longer, lists, kept, back)
            turns = Turns(window.header, net_of(schedule), cuts, window.left_out, window.before, window.after, longer)
            if settles(durations, turns):
                yield ScheduledWindow(lists, window, turns)


def _longer(lists: Lists, kept: int, back: int, more: int) -> Schedule:
    window = lists.window(kept + more, back)
    assert window is not None, "more is left out"
    return order(window.plan)


def cuts_in(lanes: Iterable[Sequence[Instruction]], window: Window) -> Cuts:
    """The places of a window's cuts in lanes that have its operations among others."""
    cuts: Cuts = []
    for lane, ends in zip(lanes, window.cuts, strict=True):
        places = {_name(line): place for place, line in enumerate(lane) if isinstance(line, Compute | Pair)}
        start, end = (places[_name(operation)] for operation in ends)
        cuts.append((start, end))
    return cuts


def _name(operation: Operation) -> Hashable:
    """The part of an operation that stays if its stage recomputes."""
    return tuple([(part.kind.letter, part.micros, part.stage) for part in operation.parts])


@dataclass(frozen=True)
class Repeated:
    """A scheme compiled by turns.

    ``verified`` and ``verified_evaluation`` are proven for all turns, with the window as their `Verified.program`. The
    ``timeline`` shows the window, with the figures of the whole.
    """

    verified: Verified
    verified_evaluation: Verified
    report: Report
    timeline: Timeline


def repeated(
    outline: Outline, baseline: Outline | None, durations: Durations, communicators: Communicators
) -> Repeated | None:
    """Compiles a scheme by turns; None if it has too few, or none.

    The report compares with ``baseline``, the outline of another scheme; None if that is the same scheme.
    """
    spent, evaluation = 0, None
    for window in scheduled(outline, durations):
        # Trying is no more work than the whole.
        spent += len(window.window.plan.operations)
        if spent > sum(map(len, window.lists.lanes)):
            return None
        with suppress(Rejected):
            verified = _verified(window, durations, communicators)
            evaluation = evaluation or (_evaluation(window, communicators) if verified else None)
            if verified and evaluation:
                for other in [window] if baseline is None else scheduled(baseline, durations):
                    with suppress(Unsettled):
                        return _with_report(window, other, durations, verified, evaluation)
    return None


def _verified(window: ScheduledWindow, durations: Durations, communicators: Communicators) -> Verified | None:
    checked = verify_schedule(window.schedule, window.window.plan)
    if checked.findings.diagnostics:
        return None
    _, duration = ticks(checked.schedule.header, durations)
    program = lower(checked.schedule, duration=duration, net=checked.net, communicators=communicators)
    assert isinstance(program, Program), "a window has a flush"
    whole, cuts = window.window, cuts_in(program.lanes, window.window)
    return _extended(program, checked, whole.header, whole.left_out * whole.step, whole.step, cuts)


def _evaluation(window: ScheduledWindow, communicators: Communicators) -> Verified | None:
    """The proven forwards alone, from a window of their own: their turns may begin later."""
    lists, whole = window.lists, window.window
    kept = lists.turns - whole.left_out
    for more in _MORE:
        schedule = lists.forwards(kept + more)
        if schedule is None or schedule.header.micro_batches > 4 * whole.plan.header.micro_batches:
            return None
        left_out = (whole.header.micro_batches - schedule.header.micro_batches) // len(whole.header.pipes)
        ordered = forwards(schedule)
        stretches = stretches_in(ordered)
        if stretches is None or min(stretch.turns for stretch in stretches) < 3:
            continue
        # Cuts in the middle, and so far apart that micro-batches are numbered alike after both, if they can be.
        turns, step = min(stretch.turns for stretch in stretches), stretches[0].step
        together = lcm(step, whole.step) // step
        if left_out % (together * step) or turns <= 2 * together:
            together = 1
        back = (turns + together) // 2
        checked = verify_schedule(ordered, None)
        raise_errors(checked.findings.diagnostics)
        program = lower(checked.schedule, net=checked.net, communicators=communicators)
        assert isinstance(program, Program), "a window has a flush"
        cuts: Cuts = []
        for stretch, parts in zip(stretches, program.parts, strict=True):
            start, places = stretch.start + (stretch.turns - back) * stretch.length, parts.computes.places
            cuts.append((places[start], places[start + together * stretch.length]))
        made = _extended(program, checked, forwards_header(whole.header), left_out, together * step, cuts)
        if made:
            return made
    return None


def _extended(
    program: Program, checked: Checked, header: Header, left_out: int, step: int, cuts: Cuts
) -> Verified | None:
    """As `extended`, of a program that is proven only if turns can be put into it."""
    insertions = _insertions(program, header, left_out, step, cuts)
    first = next(insertions, None)
    return _with_turns(verify_lowered(program, checked), chain([first], insertions)) if first else None


def extended(verified: Verified, header: Header, left_out: int, step: int, cuts: Cuts) -> Verified | None:
    """The program with the micro-batches of each pipe that are left out, in turns of ``step``.

    These come in one turn before the second of the ``cuts``, or there if the lanes are not yet alike before.
    """
    return _with_turns(verified, _insertions(verified.program, header, left_out, step, cuts))


def _insertions(program: Program, header: Header, left_out: int, step: int, cuts: Cuts) -> Iterator[Insertion]:
    count, rest = divmod(left_out, step)
    for back in (1, 0) if not rest else ():
        earlier = [(start - back * (end - start), end - back * (end - start)) for start, end in cuts]
        at = insertion(program, header, count, step, earlier) if min(earlier) >= (0, 0) else None
        if at:
            yield at


def _with_turns(verified: Verified, insertions: Iterable[Insertion]) -> Verified | None:
    program = verified.program
    for at in insertions:
        turns = zip(program.lanes, at.cuts, at.slots, strict=True)
        lanes = [roll_around(program.header, lane, *ends, slots) for lane, ends, slots in turns]
        looped = [lane for lane in lanes if lane is not None]
        made = verify_turns(verified, at, looped) if len(looped) == len(lanes) else None
        if made:
            return made
    return None


def _with_report(
    window: ScheduledWindow, other: ScheduledWindow, durations: Durations, verified: Verified, evaluation: Verified
) -> Repeated:
    """Adds the figures; raises `Unsettled` if the times of either schedule do not grow alike in all turns."""
    schedule, program = verified.schedule, verified.program
    timeline = simulate(schedule, durations, window.turns.net)
    launched = launched_later(launches(program, timeline), timeline, window.turns)
    made = report(
        schedule,
        durations,
        other.schedule,
        verified.weights,
        launched,
        names(verified.rules),
        timeline,
        program=program,
        grow=partial(grown, turns=window.turns),
        grow_baseline=partial(grown, turns=other.turns),
    )
    results = verified.with_evaluation(lambda: evaluation)
    choices = (CommunicatorChoice(result.communicators.value, result.count, result.blocked) for result in results)
    made = replace(made, communicators=tuple(choices))
    tick = timeline.tick
    drawn = replace(
        with_events(timeline, program),
        critical_path=CriticalPath(timeline.critical_path.operations, made.makespan / tick, made.counts),
        work=tuple(work / tick for work in made.work),
        steady_period=made.steady_period / tick,
        left_out=window.left_out,
    )
    return Repeated(verified, evaluation, made, drawn)
