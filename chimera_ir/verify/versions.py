"""Rule "versions": forward and backward of a micro-batch read the same weights, which exist when they are read.

With a flush a program has one version: no operation of a stage comes after its step. Without a flush, a schedule names
the version that each operation reads. In its program a version exists from the step that makes it to the step that
makes the next version or, if it is stashed before that, until it is dropped. `copies` checks that a program keeps no
more versions than its operations need.
"""

from bisect import bisect_left
from collections.abc import Iterator
from heapq import merge
from itertools import islice
from operator import itemgetter

from chimera_ir.diagnostics.catalogue import lanes as say
from chimera_ir.diagnostics.catalogue.program import AfterStep, VersionsDiffer
from chimera_ir.diagnostics.catalogue.schedule import TiesDiffer
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.ir.ids import Micro, Version, WeightGroup, Worker
from chimera_ir.ir.lane_parts import LaneParts
from chimera_ir.ir.levels import Header, Program, Schedule
from chimera_ir.ir.ops import Compute, Drop, Instruction, Stash, Step, singles
from chimera_ir.ir.text.printer import group_name, line
from chimera_ir.verify.copies import Lane, last_reads
from chimera_ir.verify.gradients import not_held

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
    """Yields diagnostics of a lane with a flush: stash and drop lines, and operations after a step of their stage."""
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
        """Yields the stashed versions that are never dropped."""
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
