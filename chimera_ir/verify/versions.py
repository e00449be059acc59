"""Rule "versions": forward and backward of a micro-batch read the same weights, which exist when they are read.

With a flush a program has one version: no operation of a stage comes after its step. Without a flush, a schedule names
the version that each operation reads. In its program a version exists from the step that makes it to the step that
makes the next version or, if it is stashed before that, until it is dropped. `copies` checks that a program keeps no
more versions than its operations need.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from heapq import merge
from itertools import chain, islice, pairwise
from operator import itemgetter

from chimera_ir.diagnostics.catalogue import program as of_program
from chimera_ir.diagnostics.catalogue import schedule as say
from chimera_ir.diagnostics.catalogue.program import AfterStep, VersionsDiffer
from chimera_ir.diagnostics.catalogue.schedule import TiesDiffer
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.flow.live import highest_by_key, most_at_once
from chimera_ir.ir.levels import Header, Program, Schedule
from chimera_ir.ir.ops import (
    NOWHERE,
    AllReduce,
    Compute,
    Drop,
    Instruction,
    LaneParts,
    Micro,
    Stage,
    Stash,
    Step,
    Version,
    WaitAllReduce,
    WeightGroup,
    Worker,
    singles,
)
from chimera_ir.ir.text.printer import group_name, kinds_line, line
from chimera_ir.plural import listed
from chimera_ir.source import Span

# Rule "gradients": each weight group's gradients are summed over exactly the workers that hold it, once per update.
#
# A weight group is a stage by itself, or stages that share parameters. A worker holds a group if it holds any stage of
# it.
#
# The sum comes after the last backward that adds to it and before the step. All workers launch their sums in orders
# that agree. Without a flush a program has many updates, which follow one another on every worker. The gradients of the
# next update are added up in the same memory as those of the current one, so they must wait for the current step. A sum
# uses this memory even if its worker adds nothing to it. Where no operation makes gradients, there is no sum and no
# step.

Synchronisation = AllReduce | WaitAllReduce | Step

_KINDS: tuple[type[Synchronisation], ...] = (AllReduce, WaitAllReduce, Step)
_DONE = {AllReduce: "launched", WaitAllReduce: "waited for", Step: "stepped"}


def _update_of(instruction: Synchronisation) -> int:
    """The update that a sum or a step belongs to, counted from 0."""
    return (instruction.version or 1) - 1


def sum_key(header: Header, instruction: Synchronisation) -> int:
    """The index of the sum that a line is about, from 0 to ``len(groups) * updates - 1``; the group must exist."""
    return header.group_numbers[instruction.group] * header.updates + _update_of(instruction)


def summed(instruction: Synchronisation, header: Header) -> str:
    """The group of a sum or a step, with its version: ``stage 1``, or ``stage 1 for version 3``."""
    return group_name(instruction.group, header) + (
        "" if instruction.version is None else f" for version {instruction.version}"
    )


def gradients(program: Program) -> Iterator[Diagnostic]:
    """Yields diagnostics of lines for sums and steps (missing, redundant, misplaced), and of contradicting orders.

    The program is complete and placed. The orders of workers are compared only if each lane by itself is right.
    """
    mistakes: list[Diagnostic] = []
    for number in range(program.header.workers):
        mistakes.extend(_WorkerSums(program, Worker(number)).mistakes())
    yield from mistakes or _orders(program)


def _not_held(header: Header, worker: Worker, instruction: Synchronisation | Stash | Drop) -> Diagnostic | None:
    """The mistake of a line about a weight group that does not exist, or is not held by its worker; None if right."""
    group = instruction.group
    exists = group in header.group_numbers
    if not exists and len(group) > 1:
        header_line = f"tied {' '.join(f's{stage}' for stage in group)}"
        return of_program.NotTied(
            instruction.origin, worker, line(instruction, header), listed(map(header.stage_name, group)), header_line
        )
    if exists and worker in header.members(group):
        return None
    members = header.members(group) if exists else ()
    holders = f"worker{'s' if len(members) > 1 else ''} {listed(members)}" if exists else "no worker"
    return of_program.NotHeld(instruction.origin, worker, line(instruction, header), group_name(group, header), holders)


class _WorkerSums:
    def __init__(self, program: Program, worker: Worker) -> None:
        self._header = program.header
        self._worker = worker
        self._lane = program.lanes[worker]
        self._parts = program.parts[worker]
        self._lines: dict[tuple[type, WeightGroup, int], int] = {}
        self._backwards: dict[tuple[WeightGroup, int], tuple[int, int]] = {}

    def mistakes(self) -> Iterator[Diagnostic]:
        """Yields the diagnostics of all mistakes that show in the lane alone."""
        # The first and last operation of each update that adds to a group's gradients.
        for place, operation in self._parts.singles:
            if operation.kind.sums:
                number = self._header.update_of(operation.micros)
                for group in self._header.groups_with[operation.stage]:
                    first, _ = self._backwards.get((group, number), (place, place))
                    self._backwards[group, number] = first, place
        for place, instruction in self._parts.updates:
            if isinstance(instruction, Synchronisation):
                yield from self._line(place, instruction)
        # Every update of every group needs a launch, a wait and a step, in this order and between those operations.
        for group in self._header.groups_of[self._worker] if self._header.trains else ():
            for number in range(self._header.updates):
                yield from self._missing(group, number)
                yield from self._misplaced(group, number)

    def _line(self, place: int, instruction: Synchronisation) -> Iterator[Diagnostic]:
        stray = _not_held(self._header, self._worker, instruction) or self._no_update(instruction)
        if stray is not None:
            yield stray
            return
        first = self._lines.setdefault((type(instruction), instruction.group, _update_of(instruction)), place)
        if first != place:
            where = instruction.origin, self._worker, line(instruction, self._header)
            yield say.RepeatedLine(
                *where, summed(instruction, self._header), _DONE[type(instruction)], self._lane[first].origin
            )

    def _no_update(self, instruction: Synchronisation) -> Diagnostic | None:
        header = self._header
        if header.trains and instruction.version in header.made:
            return None
        facts = instruction.origin, self._worker, line(instruction, header), header.updates
        if not header.trains:
            return of_program.UpdateOfForwards(*facts, kinds_line(header))
        return of_program.VersionOfOneStep(*facts) if None in header.made else of_program.NoSuchUpdate(*facts)

    def _places(self, group: WeightGroup, update: int) -> list[int | None]:
        return [self._lines.get((kind, group, update)) for kind in _KINDS]

    def _missing(self, group: WeightGroup, update: int) -> Iterator[Diagnostic]:
        places = self._places(group, update)
        _, last = self._backwards.get((group, update), (None, None))
        origin = next((self._lane[place].origin for place in (last, *places) if place is not None), NOWHERE)
        version = self._header.made[update]
        last_step = say.MissingStepOfMany if version else say.MissingStep
        messages: tuple[type[say.MissingStep], ...] = say.MissingSum, say.MissingWaitSum, last_step
        for kind, place, message in zip(_KINDS, places, messages, strict=True):
            if place is None:
                missing = line(kind(group, version=version), self._header)
                yield message(origin, self._worker, missing, group_name(group, self._header), len(group) > 1)

    def _misplaced(self, group: WeightGroup, update: int) -> Iterator[Diagnostic]:
        """Yields the diagnostics of lines of a group's update in the wrong order.

        The right order is last backward, launch, wait, step, then the next update. The launch of the next update is
        checked only if that update has no backwards on the worker; otherwise it follows from the order of these.
        """
        launch, wait, step = self._places(group, update)
        next_launch, _, next_step = self._places(group, update + 1)
        _, last = self._backwards.get((group, update), (None, None))
        first, _ = self._backwards.get((group, update + 1), (None, None))
        needs = (
            (launch, last, say.SumBeforeBackward),
            (wait, launch, say.WaitBeforeLaunch),
            (step, wait, say.StepBeforeWait),
            (first, step, say.BackwardBeforeStep),
            (None if first is not None else next_launch, step, say.SumBeforeStep),
            (next_step, step, say.StepBeforeStep),
        )
        for place, needed, message in needs:
            if place is not None and needed is not None and place < needed:
                before, after = self._lane[place], self._lane[needed]
                texts = line(before, self._header), line(after, self._header)
                yield message(before.origin, self._worker, *texts, after.origin)


def _orders(program: Program) -> Iterator[Diagnostic]:
    names: dict[int, str] = {}
    after: dict[int, dict[int, tuple[Worker, Span]]] = {}
    for number, parts in enumerate(program.parts):
        launches = [launch for launch in parts.updates.lines if isinstance(launch, AllReduce)]
        names |= {sum_key(program.header, launch): summed(launch, program.header) for launch in launches}
        for earlier, later in pairwise(launches):
            successors = after.setdefault(sum_key(program.header, earlier), {})
            successors.setdefault(sum_key(program.header, later), (Worker(number), later.origin))
    cycle = _cycle(after)
    if not cycle:
        return
    first, *others = (
        of_program.Launches(names[earlier], names[later], *after[earlier][later])
        for earlier, later in pairwise((*cycle, cycle[0]))
    )
    yield of_program.LaunchOrder(first.span, first, tuple(others))


def _cycle(after: Mapping[int, Mapping[int, object]]) -> list[int]:
    try:
        TopologicalSorter(after).prepare()
    except CycleError as error:
        # The sorter lists the cycle backwards, with one of its sums at both ends; it begins with the sum listed first.
        cycle = error.args[1][:0:-1]
        first = cycle.index(next(number for number in after if number in cycle))
        return [*cycle[first:], *cycle[:first]]
    return []


_Weights = tuple[WeightGroup, Version]


def versions(program: Program) -> Iterator[Diagnostic]:
    """Yields diagnostics of reads of wrong or missing weights, and of weights that are kept in vain.

    The operations are complete and placed; a stream has no errors by the rule "gradients".
    """
    for number, lane in enumerate(program.lanes):
        worker = Worker(number)
        if not program.header.steps_inside:
            yield from _one_version(program.header, worker, program.parts[number])
            continue
        yield from _Walk(program.header, worker, lane, program.parts[number]).mistakes()


def _one_version(header: Header, worker: Worker, parts: LaneParts) -> Iterator[Diagnostic]:
    stepped: dict[WeightGroup, tuple[int, Step]] = {}
    for place, instruction in parts.updates:
        if isinstance(instruction, Step):
            stepped.setdefault(instruction.group, (place, instruction))
        elif isinstance(instruction, Stash | Drop):
            yield say.RedundantLine(instruction.origin, worker, line(instruction, header))
    if not stepped:
        return
    # Only operations after the first step can be wrong, and hardly any is there.
    first = min(place for place, _ in stepped.values())
    late = islice(parts.computes, bisect_left(parts.computes.places, first), None)
    for place, operation in ((place, part) for place, whole in late for part in whole.parts):
        steps = [stepped[group] for group in header.groups_with[operation.stage] if group in stepped]
        step = next((step for step_place, step in steps if step_place < place), None)
        if step is not None:
            group = group_name(step.group, header)
            yield AfterStep(operation.origin, worker, line(operation, header), group, line(step, header), step.origin)


def differing(schedule: Schedule) -> Iterator[Diagnostic]:
    """Yields diagnostics of operations that read another version than the forward of their micro-batch there.

    The forward is on the same stage. The schedule shows some updates of a stream.
    """
    forwards = _forwards(schedule)
    for operation in chain.from_iterable(map(singles, schedule.lanes)):
        if not operation.kind.moves:
            read = (forwards[micro, operation.stage] for micro in operation.micros)
            other = next((forward for forward in read if forward.version != operation.version), None)
            if other is not None:
                facts = line(operation, schedule.header), line(other, schedule.header)
                yield VersionsDiffer(operation.origin, *facts, other.origin)


def ties(schedule: Schedule) -> Iterator[Diagnostic]:
    """Yields for each pair of tied stages the first micro-batch, in a stream, of which they read different versions.

    Each update of tied stages is made from the same micro-batches, so they step together, and their shared parameters
    have one version at a time.
    """
    header = schedule.header
    forwards = _forwards(schedule) if header.ties else {}
    for first_stage, stage in ((tie[0], stage) for tie in header.ties for stage in tie[1:]):
        for micro in map(Micro, range(header.micro_batches)):
            first, other = forwards[micro, first_stage], forwards[micro, stage]
            if first.version != other.version:
                texts = line(first, header), line(other, header)
                yield TiesDiffer(
                    other.origin, header.stage_name(first_stage), header.stage_name(stage), *texts, first.origin
                )
                break


def _forwards(schedule: Schedule) -> dict[tuple[Micro, Stage], Compute]:
    return {
        (micro, operation.stage): operation
        for operation in chain.from_iterable(map(singles, schedule.lanes))
        if operation.kind.opens
        for micro in operation.micros
    }


class _Walk:
    """Goes along a lane line by line, and keeps account of the weight versions that exist.

    ``_newest`` has the newest version of each group. ``_stashed`` has the older versions that exist. ``_lacking`` has
    the versions that do not exist and have been reported.
    """

    def __init__(self, header: Header, worker: Worker, lane: tuple[Instruction, ...], parts: LaneParts) -> None:
        self._header = header
        self._worker = worker
        self._lane = lane
        self._lines = merge(parts.singles, parts.updates, key=itemgetter(0))
        self._last = last_reads(header, parts)
        self._steps = _first_places(parts, Step)
        self._stashes = _first_places(parts, Stash)
        self._drops = _first_places(parts, Drop)
        self._newest = {group: Version(0) for group in header.groups_of[worker]}
        self._stashed: set[_Weights] = set()
        self._lacking: set[_Weights] = set()

    def mistakes(self) -> Iterator[Diagnostic]:
        """Yields diagnostics of operations that read a version that does not exist, and of wrong stashes and drops.

        Each version that does not exist is reported once.
        """
        for place, instruction in self._lines:
            match instruction:
                case Step(group):
                    self._newest[group] = Version(self._newest[group] + 1)
                case Compute(version=version) if version is not None:
                    for group in self._header.groups_with[instruction.stage]:
                        yield from self._read(instruction, (group, version))
                case Stash():
                    stray = _not_held(self._header, self._worker, instruction)
                    yield from self._stash(place, instruction) if stray is None else [stray]
                case Drop():
                    stray = _not_held(self._header, self._worker, instruction)
                    yield from self._drop(place, instruction) if stray is None else [stray]
                case _:
                    pass
        yield from self._left_over()

    def _read(self, operation: Compute, weights: _Weights) -> Iterator[Diagnostic]:
        group, version = weights
        if version == self._newest[group] or weights in self._stashed or weights in self._lacking:
            return
        self._lacking.add(weights)
        if version > self._newest[group]:
            yield self._too_early(say.ReadBeforeStep, operation, self._lane[self._steps[weights]], weights)
        elif weights not in self._stashes:
            step = line(self._lane[self._steps[group, Version(version + 1)]], self._header)
            where = operation.origin, self._worker, line(Stash(*weights), self._header)
            yield say.MissingStash(*where, line(operation, self._header), _name(weights, self._header), step)

    def _stash(self, place: int, stash: Stash) -> Iterator[Diagnostic]:
        weights = stash.group, stash.version
        following = self._steps.get((stash.group, Version(stash.version + 1)))
        if following is None:
            yield say.NeverReplaced(stash.origin, self._worker, line(stash, self._header), _name(weights, self._header))
            return
        if stash.version > self._newest[stash.group]:
            yield self._too_early(say.ReadBeforeStep, stash, self._lane[self._steps[weights]], weights)
        elif self._stashes[weights] != place:
            yield self._repeated(stash, weights, "stashed", self._stashes[weights])
        elif following < place:
            yield self._too_early(say.StepBeforeStash, self._lane[following], stash, weights)
        self._stashed.add(weights)

    def _drop(self, place: int, drop: Drop) -> Iterator[Diagnostic]:
        weights = drop.group, drop.version
        stash, last = self._stashes.get(weights, len(self._lane)), self._last.get(weights, -1)
        if self._drops[weights] != place:
            yield self._repeated(drop, weights, "dropped", self._drops[weights])
        elif weights not in self._stashes and weights not in self._lacking:
            yield say.NeverStashed(drop.origin, self._worker, line(drop, self._header), _name(weights, self._header))
        elif place < stash < len(self._lane):
            yield self._too_early(say.DropBeforeStash, drop, self._lane[stash], weights)
        elif stash < place < last:
            yield self._too_early(say.DropBeforeRead, drop, self._lane[last], weights)
            self._lacking.add(weights)
        self._stashed.discard(weights)

    def _left_over(self) -> Iterator[Diagnostic]:
        for weights in sorted(self._stashed - self._drops.keys()):
            stash = self._stashes[weights]
            end = max(self._last.get(weights, -1), self._steps.get((weights[0], Version(weights[1] + 1)), stash))
            where = self._lane[stash].origin, self._worker, line(Drop(*weights), self._header)
            yield say.MissingDrop(*where, _name(weights, self._header), line(self._lane[end], self._header))

    def _too_early(
        self, message: type[say.LineAboutContent], early: Instruction, late: Instruction, weights: _Weights
    ) -> Diagnostic:
        return message(
            early.origin,
            self._worker,
            line(early, self._header),
            line(late, self._header),
            late.origin,
            _name(weights, self._header),
        )

    def _repeated(self, instruction: Stash | Drop, weights: _Weights, done: str, first: int) -> Diagnostic:
        where = instruction.origin, self._worker, line(instruction, self._header)
        return say.RepeatedLine(*where, _name(weights, self._header), done, self._lane[first].origin)


def _first_places(parts: LaneParts, kind: type[Step | Stash | Drop]) -> dict[_Weights, int]:
    places: dict[_Weights, int] = {}
    for place, instruction in parts.updates:
        if isinstance(instruction, kind) and instruction.version is not None:
            places.setdefault((instruction.group, instruction.version), place)
    return places


def _name(weights: _Weights, header: Header) -> str:
    group, version = weights
    return f"version {version} of {group_name(group, header)}"


# Counts the copies of weights that a lane keeps, and those that it needs, for the rules "versions" and "memory".
#
# The newest version of a weight group is one copy. Every stashed version is another, from its `stash` to its `drop`.
# What a lane needs follows from the operations that read weights: after each step the new version, and every older
# version that an operation still reads.


def stashes(parts: LaneParts, updates: int = 0) -> Iterator[tuple[WeightGroup, int, int]]:
    """Yields a change for `flow.live.repeated` for each stash and drop; a turn has ``updates``, outside streams 0."""
    for _, entry in parts.updates:
        if isinstance(entry, Stash | Drop):
            yield entry.group, 1 if isinstance(entry, Stash) else -1, entry.version // updates if updates else 0


def copies(program: Program) -> tuple[int, ...]:
    """Returns the most weights that each worker keeps, in M_theta: the most copies of each of its stages, added up.

    Shared parameters count with each of their stages, as M_theta is all weights of a stage.
    """
    peaks = [highest_by_key((group, amount) for group, amount, _ in stashes(parts)) for parts in program.parts]
    return tuple(
        sum(1 + of_lane[stage,].amount if (stage,) in of_lane else 1 for stage in stages)
        for of_lane, stages in zip(peaks, program.header.stages_of, strict=True)
    )


def last_reads(header: Header, parts: LaneParts) -> dict[_Weights, int]:
    """Maps (group, version) to the place in a lane of the last operation that reads this version of the weights."""
    return {
        (group, operation.version): place
        for place, operation in parts.singles
        if operation.version is not None
        for group in header.groups_with[operation.stage]
    }


def surplus(program: Program) -> Iterator[Diagnostic]:
    """Yields a diagnostic for each weight group of which a lane keeps more copies at its peak than it needs.

    The program has no errors by the rule "versions". It has enough updates to show the steady state: the first and the
    last updates keep versions that only further updates would read.
    """
    for number, parts in enumerate(program.parts):
        last = last_reads(program.header, parts)
        # After a step a lane needs the version that the step made, and each older version until its last reader.
        superseded = [
            (step.group, place, last.get((step.group, Version(step.version - 1)), -1))
            for place, step in parts.updates
            if isinstance(step, Step) and step.version is not None
        ]
        enough = most_at_once(superseded)
        lines = [(place, line) for place, line in parts.updates if isinstance(line, Stash | Drop)]
        for group, (stashed, change) in highest_by_key((group, n) for group, n, _ in stashes(parts)).items():
            if stashed > enough.get(group, 0):
                kept = [line for _, line in lines[: change + 1] if line.group == group]
                facts = group_name(group, program.header), 1 + stashed, 1 + enough.get(group, 0)
                yield _surplus(program, Worker(number), facts, kept, lines[change][0], last)


def _surplus(
    program: Program,
    worker: Worker,
    facts: tuple[str, int, int],
    until_peak: Sequence[Stash | Drop],
    peak: int,
    last: Mapping[_Weights, int],
) -> of_program.TooManyCopies:
    """The diagnostic with a remedy: drop a version earlier, or stash it later.

    ``until_peak`` are the stashes and drops of the group up to the place ``peak``.
    """
    header, lane, parts = program.header, program.lanes[worker], program.parts[worker]
    group, where = until_peak[0].group, (lane[peak].origin, worker, *facts)

    def step_after(start: int) -> int:
        steps = (place for place, step in parts.updates if isinstance(step, Step) and step.group == group)
        return next(place for place in steps if place >= start)

    dropped = {drop.version for drop in until_peak if isinstance(drop, Drop)}
    for stash in until_peak:
        if isinstance(stash, Stash) and stash.version not in dropped:
            weights = group, stash.version
            drop, end = line(Drop(*weights), header), last.get(weights, -1)
            step = step_after(lane.index(stash))
            if end < step:
                return of_program.CopyInVain(*where, drop, line(lane[step], header), line(stash, header))
            if end < peak:
                return of_program.CopyKeptTooLong(*where, drop, line(lane[end], header))
    return of_program.TooManyCopies(*where, line(lane[peak], header), line(lane[step_after(peak)], header))
