"""Rule "gradients": each weight group's gradients are summed over exactly the workers that hold it, once per update.

A group is a stage by itself, or stages that share parameters: a worker holds it if it holds any of its stages.

The sum comes after the last backward that contributes and before the step, and all workers launch their sums in orders
that agree. An asynchronous program has many updates, which follow one another on every worker: the gradients of the
next update add up in the memory of the current update, so they must wait for its step. A sum uses this memory even if
its worker adds nothing to it. Where no operation adds to gradients, there is no sum and no step.
"""

from collections.abc import Iterator
from itertools import pairwise

from chimera_ir.diagnostics.catalogue.program import (
    LaunchOrder,
    MisplacedLine,
    MissingLine,
    NoSuchUpdate,
    NotHeld,
    NotTied,
    RedundantLine,
)
from chimera_ir.diagnostics.model import Diagnostic, Note
from chimera_ir.ir.ids import Version, WeightGroup, Worker
from chimera_ir.ir.levels import Header, Program
from chimera_ir.ir.ops import NOWHERE, AllReduce, Instruction, Step, WaitAllReduce
from chimera_ir.ir.text.printer import group_name, kinds_line, line
from chimera_ir.plural import counted
from chimera_ir.source import Span
from chimera_ir.verify.index import Synchronisation, sum_key, update_of
from chimera_ir.verify.wording import summed, workers

_KINDS: tuple[type[Synchronisation], ...] = (AllReduce, WaitAllReduce, Step)
_DONE = {AllReduce: "launched", WaitAllReduce: "waited for", Step: "stepped"}


def gradients(program: Program) -> Iterator[Diagnostic]:
    """Yields lines of the sums and steps that are missing, redundant, misplaced or of the wrong stage or order.

    Parameters
    ----------
    program
        Its operations complete and placed.
    """
    mistakes: list[Diagnostic] = []
    for number in range(program.header.workers):
        mistakes.extend(_WorkerSums(program, Worker(number)).mistakes())
    yield from mistakes or _orders(program)


def not_held(header: Header, worker: Worker, instruction: Instruction, group: WeightGroup) -> Diagnostic | None:
    """The diagnostic of a line whose group does not exist or is not held by its worker; None if the line is right."""
    known = group in header.group_numbers
    if not known and len(group) > 1:
        stages = ", ".join(map(str, group[:-1]))
        header_line = f"tied {' '.join(f's{stage}' for stage in group)}"
        return NotTied(instruction.origin, worker, line(instruction), f"{stages} and {group[-1]}", header_line)
    if known and worker in header.members(group):
        return None
    holders = workers(header.members(group)) if known else "no worker"
    return NotHeld(instruction.origin, worker, line(instruction), group_name(group), holders)


class _WorkerSums:
    """The lines with which a worker launches, awaits and applies its sums, by group and update."""

    def __init__(self, program: Program, worker: Worker) -> None:
        self._header = program.header
        self._worker = worker
        self._lane = program.lanes[worker]
        self._parts = program.parts[worker]
        self._lines: dict[tuple[type, WeightGroup, int], int] = {}
        self._backwards: dict[tuple[WeightGroup, int], tuple[int, int]] = {}

    def mistakes(self) -> Iterator[Diagnostic]:
        """All mistakes that show in the lane alone."""
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
        """Records the place of a line, or reports a line that makes no sense or repeats another."""
        stray = not_held(self._header, self._worker, instruction, instruction.group) or self._no_update(instruction)
        if stray is not None:
            yield stray
            return
        first = self._lines.setdefault((type(instruction), instruction.group, update_of(instruction)), place)
        if first != place:
            what = f"{summed(instruction)} is already {_DONE[type(instruction)]}"
            yield RedundantLine(instruction.origin, self._worker, line(instruction), what, (self._lane[first].origin,))

    def _no_update(self, instruction: Synchronisation) -> Diagnostic | None:
        last = self._header.updates
        if not self._header.trains:
            reason = f"the header says `{kinds_line(self._header)}`: no operation adds to gradients"
        elif not self._header.asynchronous:
            reason = "" if instruction.version is None else "a synchronous program has one update and no versions"
        else:
            known = instruction.version is not None and 1 <= instruction.version <= last
            reason = "" if known else f"{counted(last, 'update')} make the versions 1 to {last}"
        return NoSuchUpdate(instruction.origin, self._worker, line(instruction), reason) if reason else None

    def _places(self, group: WeightGroup, update: int) -> list[int | None]:
        """The places of the launch, the wait and the step of an update."""
        return [self._lines.get((kind, group, update)) for kind in _KINDS]

    def _missing(self, group: WeightGroup, update: int) -> Iterator[Diagnostic]:
        places, name = self._places(group, update), group_name(group)
        _, last = self._backwards.get((group, update), (None, None))
        origin = next((self._lane[place].origin for place in (last, *places) if place is not None), NOWHERE)
        version = Version(update + 1) if self._header.asynchronous else None
        part, whose = ("", "that stage") if len(group) == 1 else ("a stage of ", "those stages")
        reasons = (
            f"every worker that holds {part}{name} takes part in the sum of its gradients",
            f"the step needs the sum of the gradients of {name}",
            f"worker {self._worker} holds weights of {name}, which every update must change",
        )
        end = "before the next update's backwards" if self._header.asynchronous else "at the end"
        spots = (f"after its last backward of {whose}", "between the launch and the step", end)
        for kind, place, reason, spot in zip(_KINDS, places, reasons, spots, strict=True):
            if place is None:
                yield MissingLine(origin, self._worker, line(kind(group, version=version)), reason, spot)

    def _misplaced(self, group: WeightGroup, update: int) -> Iterator[Diagnostic]:
        """The pairs out of order of an update's last backward, launch, wait and step, and the next update's lines.

        The next launch comes after this step if backwards come between them, so it is checked only if there are none.
        """
        launch, wait, step = self._places(group, update)
        next_launch, _, next_step = self._places(group, update + 1)
        _, last = self._backwards.get((group, update), (None, None))
        first, _ = self._backwards.get((group, update + 1), (None, None))
        needs = (
            (launch, last, "the sum would lack the gradients of this backward"),
            (wait, launch, "waits for what is not launched yet"),
            (step, wait, "the sum of the gradients may not be there yet"),
            (first, step, "its gradients would mix with those of the update before"),
            (None if first is not None else next_launch, step, "it sums in the memory that holds the sum before it"),
            (next_step, step, "versions are made one after the other"),
        )
        for place, needed, reason in needs:
            if place is not None and needed is not None and place < needed:
                before, after = self._lane[place], self._lane[needed]
                yield MisplacedLine(before.origin, self._worker, line(before), line(after), after.origin, reason)


def _orders(program: Program) -> Iterator[Diagnostic]:
    """Yields a circle of sums, each launched before the next one by some worker, if there is such a circle."""
    names: dict[int, str] = {}
    after: dict[int, dict[int, tuple[Worker, Span]]] = {}
    for number, parts in enumerate(program.parts):
        launches = [launch for launch in parts.updates.lines if isinstance(launch, AllReduce)]
        names |= {sum_key(program.header, launch): summed(launch) for launch in launches}
        for earlier, later in pairwise(launches):
            known = after.setdefault(sum_key(program.header, earlier), {})
            known.setdefault(sum_key(program.header, later), (Worker(number), later.origin))
    circle = _circle(after)
    if not circle:
        return
    links = [(earlier, later, *after[earlier][later]) for earlier, later in pairwise((*circle, circle[0]))]
    texts = [f"worker {worker} launches {names[earlier]} before {names[later]}" for earlier, later, worker, _ in links]
    notes = tuple(Note(text, link[3]) for text, link in zip(texts[1:], links[1:], strict=True))
    yield LaunchOrder(links[0][3], texts[0], notes)


def _circle(after: dict[int, dict[int, tuple[Worker, Span]]]) -> list[int]:
    """Sums that are each launched before the next, and the last before the first; empty if there is no circle."""
    # Depth-first search without recursion: ``path`` has the sums on the stack, ``finished`` those in no circle.
    finished: set[int] = set()
    for root in after:
        path: dict[int, None] = {}
        stack = [(root, iter(after[root]))] if root not in finished else []
        path.update(dict.fromkeys([root] if stack else []))
        while stack:
            node, following = stack[-1]
            successor = next(following, None)
            if successor is None:
                stack.pop()
                path.pop(node)
                finished.add(node)
            elif successor in path:
                ring = list(path)
                return ring[ring.index(successor) :]
            elif successor not in finished:
                path[successor] = None
                stack.append((successor, iter(after.get(successor, {}))))
    return []
