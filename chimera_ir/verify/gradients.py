"""Rule "gradients": each stage's replicas are summed over exactly the workers that hold it, once per update, after the
last backward that contributes and before the step; and all workers launch their sums in orders that agree."""

from collections.abc import Iterator
from itertools import pairwise

from chimera_ir.diagnostics.catalogue.program import (
    LaunchOrder,
    MisplacedLine,
    MissingLine,
    NotHeld,
    RedundantLine,
)
from chimera_ir.diagnostics.model import Diagnostic, Note
from chimera_ir.ir.ids import Stage, Worker
from chimera_ir.ir.levels import Program
from chimera_ir.ir.ops import NOWHERE, AllReduce, Backward, Instruction, Step, WaitAllReduce
from chimera_ir.ir.text.printer import line
from chimera_ir.source import Span
from chimera_ir.verify.words import workers

_KINDS: tuple[type[AllReduce | WaitAllReduce | Step], ...] = (AllReduce, WaitAllReduce, Step)
_DONE = {AllReduce: "launched", WaitAllReduce: "waited for", Step: "stepped"}


def gradients(program: Program) -> Iterator[Diagnostic]:
    """Lines of the gradient synchronisation that are missing, redundant, misplaced or of the wrong stage or order.

    Parameters
    ----------
    program
        Its operations complete and placed.
    """
    mistakes: list[Diagnostic] = []
    for number in range(program.header.workers):
        mistakes.extend(_lane(program, Worker(number)))
    yield from mistakes or _orders(program)


def _lane(program: Program, worker: Worker) -> Iterator[Diagnostic]:
    held = program.header.stages_of[worker]
    lane = program.lanes[worker]
    found: dict[tuple[type, Stage], int] = {}
    last: dict[Stage, int] = {}
    for place, each in enumerate(lane):
        if isinstance(each, Backward):
            last[each.stage] = place
        if not isinstance(each, AllReduce | WaitAllReduce | Step):
            continue
        if not 0 <= each.stage < program.header.stages or worker not in program.header.holders[each.stage]:
            yield _not_held(program, worker, each)
            continue
        first = found.setdefault((type(each), each.stage), place)
        if first != place:
            what = f"stage {each.stage} is already {_DONE[type(each)]}"
            yield RedundantLine(each.origin, worker, line(each), what, (lane[first].origin,))
    for stage in held:
        yield from _stage(lane, worker, stage, last.get(stage), [found.get((kind, stage)) for kind in _KINDS])


def _not_held(program: Program, worker: Worker, each: AllReduce | WaitAllReduce | Step) -> Diagnostic:
    inside = 0 <= each.stage < program.header.stages
    holders = workers(program.header.holders[each.stage]) if inside else "no worker"
    return NotHeld(each.origin, worker, line(each), each.stage, holders)


def _stage(
    lane: tuple[Instruction, ...], worker: Worker, stage: Stage, last: int | None, found: list[int | None]
) -> Iterator[Diagnostic]:
    """What is missing or misplaced around one stage: its last backward, launch, wait and step, in this order."""
    origin = next((lane[place].origin for place in (last, *found) if place is not None), NOWHERE)
    launch, wait, step = found
    reasons = (
        f"every worker that holds stage {stage} takes part in the sum of its gradients",
        f"the step needs the sum of the gradients of stage {stage}",
        f"worker {worker} holds weights of stage {stage}, which every update must change",
    )
    spots = ("after its last backward of that stage", "between the launch and the step", "at the end")
    for kind, place, reason, spot in zip(_KINDS, found, reasons, spots, strict=True):
        if place is None:
            yield MissingLine(origin, worker, line(kind(stage)), reason, spot)
    early = (
        (launch, last, "the sum would lack the gradients of this backward"),
        (wait, launch, "waits for what is not launched yet"),
        (step, wait, "the sum of the gradients may not be there yet"),
    )
    for one, two, reason in early:
        if one is not None and two is not None and one < two:
            before, after = lane[one], lane[two]
            yield MisplacedLine(before.origin, worker, line(before), line(after), after.origin, reason)


def _orders(program: Program) -> Iterator[Diagnostic]:
    """The shortest-known circle of "launches a before b" over all workers, if there is one."""
    after: dict[Stage, dict[Stage, tuple[Worker, Span]]] = {}
    for number, lane in enumerate(program.lanes):
        launches = [each for each in lane if isinstance(each, AllReduce)]
        for one, two in pairwise(launches):
            after.setdefault(one.stage, {}).setdefault(two.stage, (Worker(number), two.origin))
    circle = _circle(after)
    if not circle:
        return
    links = [(one, two, *after[one][two]) for one, two in pairwise((*circle, circle[0]))]
    texts = [f"worker {worker} launches stage {one} before stage {two}" for one, two, worker, _ in links]
    notes = tuple(Note(text, link[3]) for text, link in zip(texts[1:], links[1:], strict=True))
    yield LaunchOrder(links[0][3], texts[0], notes)


def _circle(after: dict[Stage, dict[Stage, tuple[Worker, Span]]]) -> list[Stage]:
    """Stages each of which is launched before the next, and the last before the first; empty if there are none."""
    finished: set[Stage] = set()
    for root in after:
        path: dict[Stage, None] = {}
        stack = [(root, iter(after[root]))] if root not in finished else []
        path.update(dict.fromkeys([root] if stack else []))
        while stack:
            stage, following = stack[-1]
            successor = next(following, None)
            if successor is None:
                stack.pop()
                path.pop(stage)
                finished.add(stage)
            elif successor in path:
                ring = list(path)
                return ring[ring.index(successor) :]
            elif successor not in finished:
                path[successor] = None
                stack.append((successor, iter(after.get(successor, {}))))
    return []
