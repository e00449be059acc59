"""Rule "gradients": each weight group's gradients are summed over exactly the workers that hold it, once per update.

A weight group is a stage by itself, or stages that share parameters. A worker holds a group if it holds any stage of
it.

The sum comes after the last backward that adds to it and before the step. All workers launch their sums in orders that
agree. Without a flush a program has many updates, which follow one another on every worker. The gradients of the next
update are added up in the same memory as those of the current one, so they must wait for the current step. A sum uses
this memory even if its worker adds nothing to it. Where no operation makes gradients, there is no sum and no step.
"""

from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from chimera_ir.diagnostics.catalogue import lanes as say
from chimera_ir.diagnostics.catalogue import program as of_program
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.ir.ids import WeightGroup, Worker
from chimera_ir.ir.levels import Header, Program
from chimera_ir.ir.ops import NOWHERE, AllReduce, Instruction, Step, WaitAllReduce
from chimera_ir.ir.text.printer import group_name, kinds_line, line
from chimera_ir.plural import listed
from chimera_ir.source import Span
from chimera_ir.verify.index import Synchronisation, sum_key, update_of
from chimera_ir.verify.wording import summed, workers

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
    """Checks the lines with which a worker launches its sums, waits for them, and steps: once per group and update."""

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
        """Notes the place of a line for a sum or a step; yields a diagnostic if it is wrong or repeats another line."""
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
        """Returns the places in the lane of a group's launch, wait and step in an update; None for a missing one."""
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
    """Yields a diagnostic if the orders in which workers launch their sums contradict each other."""
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
    """Returns a cycle of sums, each launched before the next by some worker; an empty list if there is none.

    ``after`` has, for each sum, the sums that some worker launches later.
    """
    try:
        TopologicalSorter(after).prepare()
    except CycleError as error:
        # The sorter lists the cycle backwards, with one of its sums at both ends; it begins with the sum listed first.
        cycle = error.args[1][:0:-1]
        first = cycle.index(next(number for number in after if number in cycle))
        return [*cycle[first:], *cycle[:first]]
    return []
