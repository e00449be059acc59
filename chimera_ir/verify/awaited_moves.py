"""Part of the rule "memory": a lane waits once for each move, before anything else touches what moves.

    offload m0 s0
    F m1 s0                   may run beside the copy: it is about another micro-batch
    wait offload m0 s0        now the activations are on the host, and gone from the worker
    reload m0 s0
    wait reload m0 s0         now they are back
    B m0 s0

The rules "complete" and "acyclic" have the order of the operations themselves: an offload after the forward, a reload
after the offload, a backward after the reload. A move begins when the lane launches it, after the moves launched before
it, and ends without the help of another worker, so a wait for a move blocks no lane for ever.
"""

from collections import defaultdict
from collections.abc import Iterator

from chimera_ir.diagnostics.catalogue import lanes as say
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.flow.host_moves import MoveStep
from chimera_ir.ir.ids import Micro, Stage, Worker
from chimera_ir.ir.kinds import Kind
from chimera_ir.ir.lane_parts import LaneParts
from chimera_ir.ir.levels import Header, Program
from chimera_ir.ir.ops import Compute, WaitMove
from chimera_ir.ir.text.printer import line, micros_name

_Move = tuple[Kind, tuple[Micro, ...], Stage]


def moves(program: Program) -> Iterator[Diagnostic]:
    """Yields diagnostics of moves that nothing waits for, of needless waits, and of operations before their wait."""
    for number, parts in enumerate(program.parts if program.header.moves else ()):
        yield from _Waits(program.header, Worker(number), parts).diagnostics()


class _Waits:
    """Checks the moves of a lane and the waits for them.

    ``_launches`` has each move, by its kind, micro-batches and stage; ``_waits`` has the first wait for each.
    """

    def __init__(self, header: Header, worker: Worker, parts: LaneParts) -> None:
        self._header, self._worker, self._parts = header, worker, parts
        launches = (operation for operation in parts.computes.lines if isinstance(operation, Compute))
        self._launches = {_move(operation): operation for operation in launches if operation.kind.moves}
        self._waits: dict[_Move, WaitMove] = {}
        for wait in parts.wait_moves.lines:
            self._waits.setdefault(_move(wait), wait)

    def diagnostics(self) -> Iterator[Diagnostic]:
        """Yields the mistakes of the lane, in its order, and then the moves that nothing waits for."""
        header, worker = self._header, self._worker
        # The moves that were launched, those of them under way by micro-batch and stage, and those waited for.
        launched: set[_Move] = set()
        under_way: dict[tuple[Micro, Stage], list[_Move]] = defaultdict(list)
        ended: set[_Move] = set()
        for step in self._parts.steps:
            move, cells = _move(step), [(micro, step.stage) for micro in step.micros]
            text = line(step, header)
            if not isinstance(step, WaitMove):
                yield from self._touched(step, [other for cell in cells for other in under_way[cell]])
                if step.kind.moves:
                    launched.add(move)
                    for cell in cells:
                        under_way[cell].append(move)
            elif move not in self._launches:
                missing = line(Compute(step.kind, step.micros, step.stage), header)
                yield say.WaitForNoMove(step.origin, worker, text, missing)
            elif move in ended:
                yield say.WaitRepeated(step.origin, worker, text, step.kind.noun, self._waits[move].origin)
            elif move not in launched:
                launch = self._launches[move]
                yield say.WaitBeforeLaunch(step.origin, worker, text, line(launch, header), launch.origin)
            else:
                ended.add(move)
                for cell in cells:
                    under_way[cell].remove(move)
        for move, launch in self._launches.items():
            if move not in self._waits:
                wait = line(WaitMove(*move), header)
                yield say.MissingWaitMove(launch.origin, worker, wait, launch.kind.noun, line(launch, header))

    def _touched(self, step: MoveStep, under_way: list[_Move]) -> Iterator[Diagnostic]:
        """Yields a diagnostic for each move in ``under_way`` that ``step`` should come after.

        The move is of the same micro-batch and stage as ``step``, and the lane waits for it only later.
        """
        for move in dict.fromkeys(under_way):
            if move not in self._waits:
                continue
            wait, out = self._waits[move], move[0].offloads
            message = say.UseBeforeOut if out else say.UseBeforeBack
            texts = line(step, self._header), line(wait, self._header)
            yield message(step.origin, self._worker, *texts, wait.origin, self._content(move))

    def _content(self, move: _Move) -> str:
        kind, micros, stage = move
        what = "operands" if kind.moves_operands else "activations"
        return f"the {what} of {micros_name(micros, self._header.slices)} on stage {stage}"


def _move(step: MoveStep) -> _Move:
    return step.kind, step.micros, step.stage
