"""Rule "versions": forward and backward of a micro-batch read the same weights, which exist when they are read.

With a flush a program has one version: no operation of a stage comes after its step. Without a flush, a schedule names
the version that each operation reads. In its program a version exists from the step that makes it to the step that
makes the next version or, if it is stashed before that, until it is dropped. `copies` checks that a program keeps no
more versions than its operations need.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from heapq import merge
from itertools import islice, pairwise
from operator import itemgetter

from chimera_ir.diagnostics.catalogue import program as of_program
from chimera_ir.diagnostics.catalogue import schedule as say
from chimera_ir.diagnostics.catalogue.program import AfterStep, VersionsDiffer
from chimera_ir.diagnostics.catalogue.schedule import TiesDiffer
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.ir.levels import Header, Program, Schedule
from chimera_ir.ir.ops import (
    NOWHERE,
    AllReduce,
    Compute,
    Drop,
    Instruction,
    LaneParts,
    Micro,
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
from chimera_ir.verify.complete import Lane, last_reads
from chimera_ir.verify.findings import Synchronisation, sum_key, summed, update_of, workers

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

_KINDS: tuple[type[Synchronisation], ...] = (AllReduce, WaitAllReduce, Step)
_DONE = {AllReduce: "launched", WaitAllReduce: "waited for", Step: "stepped"}


def gradients(program: Program) -> Iterator[Diagnostic]:
    """Yields diagnostics of lines for sums and steps (missing, redundant, misplaced), and of contradicting orders.

    The program is complete and placed. The orders of workers are compared only if each lane by itself is right.
    """
    mistakes: list[Diagnostic] = []
    for number in range(program.header.workers):
        mistakes.extend(_WorkerSums(program, Worker(number)).mistakes())
    yield from mistakes or _orders(program)


def not_held(header: Header, worker: Worker, instruction: Instruction, group: WeightGroup) -> Diagnostic | None:
    """Returns the mistake of a line about a weight group that does not exist, or is not held by its worker.

    The result is None if the line is right.
    """
    exists = group in header.group_numbers
    if not exists and len(group) > 1:
        header_line = f"tied {' '.join(f's{stage}' for stage in group)}"
        return of_program.NotTied(instruction.origin, worker, line(instruction, header), listed(group), header_line)
    if exists and worker in header.members(group):
        return None
    holders = workers(header.members(group)) if exists else "no worker"
    return of_program.NotHeld(instruction.origin, worker, line(instruction, header), group_name(group), holders)


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
        stray = not_held(self._header, self._worker, instruction, instruction.group) or self._no_update(instruction)
        if stray is not None:
            yield stray
            return
        first = self._lines.setdefault((type(instruction), instruction.group, update_of(instruction)), place)
        if first != place:
            where = instruction.origin, self._worker, line(instruction, self._header)
            yield say.RepeatedLine(*where, summed(instruction), _DONE[type(instruction)], self._lane[first].origin)

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
                yield message(origin, self._worker, missing, group_name(group), len(group) > 1)

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
        names |= {sum_key(program.header, launch): summed(launch) for launch in launches}
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
            group = group_name(step.group)
            yield AfterStep(operation.origin, worker, line(operation, header), group, line(step, header), step.origin)


def differing(schedule: Schedule) -> Iterator[Diagnostic]:
    """Yields diagnostics of operations that read another version than the forward of their micro-batch there.

    The forward is on the same stage. The schedule shows some updates of a stream.
    """
    for lane in map(singles, schedule.lanes):
        forwards = {
            (micro, operation.stage): operation
            for operation in lane
            if operation.kind.opens
            for micro in operation.micros
        }
        for operation in (operation for operation in lane if not operation.kind.moves):
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
    tied = {stage for tie in header.ties for stage in tie}
    forwards = {
        (micro, operation.stage): operation
        for lane in schedule.lanes
        for operation in singles(lane)
        if operation.kind.opens and operation.stage in tied
        for micro in operation.micros
    }
    for tie in header.ties:
        for stage in tie[1:]:
            pairs = (
                (forwards[micro, tie[0]], forwards[micro, stage]) for micro in map(Micro, range(header.micro_batches))
            )
            differing = next(((first, other) for first, other in pairs if first.version != other.version), None)
            if differing is not None:
                first, other = differing
                yield TiesDiffer(other.origin, tie[0], stage, line(first, header), line(other, header), first.origin)


class _Walk:
    """Goes along a lane line by line, and keeps account of the weight versions that exist.

    ``_newest`` has the newest version of each group. ``_stashed`` has the older versions that exist. ``_lacking`` has
    the versions that do not exist and have been reported.
    """

    def __init__(self, header: Header, worker: Worker, lane: Lane, parts: LaneParts) -> None:
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
                    yield from self._stray(instruction) or self._stash(place, instruction)
                case Drop():
                    yield from self._stray(instruction) or self._drop(place, instruction)
                case _:
                    pass
        yield from self._left_over()

    def _stray(self, instruction: Stash | Drop) -> list[Diagnostic]:
        stray = not_held(self._header, self._worker, instruction, instruction.group)
        return [] if stray is None else [stray]

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
            yield say.MissingStash(*where, line(operation, self._header), _name(weights), step)

    def _stash(self, place: int, stash: Stash) -> Iterator[Diagnostic]:
        weights = stash.group, stash.version
        following = self._steps.get((stash.group, Version(stash.version + 1)))
        if following is None:
            yield say.NeverReplaced(stash.origin, self._worker, line(stash, self._header), _name(weights))
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
            yield say.NeverStashed(drop.origin, self._worker, line(drop, self._header), _name(weights))
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
            yield say.MissingDrop(*where, _name(weights), line(self._lane[end], self._header))

    def _too_early(
        self, message: type[say.LineAboutContent], early: Instruction, late: Instruction, weights: _Weights
    ) -> Diagnostic:
        return message(
            early.origin, self._worker, line(early, self._header), line(late, self._header), late.origin, _name(weights)
        )

    def _repeated(self, instruction: Stash | Drop, weights: _Weights, done: str, first: int) -> Diagnostic:
        where = instruction.origin, self._worker, line(instruction, self._header)
        return say.RepeatedLine(*where, _name(weights), done, self._lane[first].origin)


def _first_places(parts: LaneParts, kind: type[Step | Stash | Drop]) -> dict[_Weights, int]:
    places: dict[_Weights, int] = {}
    for place, instruction in parts.updates:
        if isinstance(instruction, kind) and instruction.version is not None:
            places.setdefault((instruction.group, instruction.version), place)
    return places


def _name(weights: _Weights) -> str:
    group, version = weights
    return f"version {version} of {group_name(group)}"
