"""Tables of the memory that each worker of a program keeps, operation by operation."""

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

from chimera_ir.cost.report import Figures
from chimera_ir.flow import live
from chimera_ir.ir.ids import Worker
from chimera_ir.ir.kinds import ON_HOST_UNITS, ON_WORKER, Counted
from chimera_ir.ir.levels import Header, Program
from chimera_ir.ir.memory_bounds import Quantity
from chimera_ir.ir.ops import Compute, WaitMove
from chimera_ir.page.operation_tables import OperationRow
from chimera_ir.page.tables import ChangeTable, MemoryTable
from chimera_ir.picture.looks import Row
from chimera_ir.predict.memory_need import MemoryNeed, worker_bytes
from chimera_ir.predict.setting import Setting
from chimera_ir.verify.holdings import KEPT_UNITS


class _ChangeOfRow(NamedTuple):
    """A change of what a worker keeps, shown on the page at the start or, with ``at_end``, at the end of an operation.

    ``number`` is the row of that operation; ``row`` is the operation or move that causes the change, which may be
    another. ``micros`` is how much more is kept, negative if less, in the units of which a micro-batch has
    `Header.units`; ``unit`` says what is kept.
    """

    row: OperationRow
    number: int
    at_end: bool
    unit: Counted
    micros: int


_Size = Callable[[_ChangeOfRow], float]


class MemoryInBytes(NamedTuple):
    """The bytes that each worker needs (``needs``), with the ``setting`` from which they follow.

    ``available`` is how many bytes there are on every worker.
    """

    setting: Setting
    needs: Sequence[MemoryNeed]
    available: int


def tables_of_memory(
    program: Program, rows: Sequence[OperationRow], figures: Figures, memory_in_bytes: MemoryInBytes | None
) -> list[MemoryTable]:
    """Returns the tables of memory, one for each unit that it is counted in.

    They are activations in M_a; stashed inputs, if a stage recomputes; activations on hosts, if memory moves; and
    bytes, if ``memory_in_bytes`` is given.
    """
    header = program.header
    changes = list(_changes_with_moves(program, rows) if header.moves else _changes(header, rows))
    declared = next((bound.limits for bound in header.bounds if bound.quantity is Quantity.ACTIVATIONS), None)
    nothing = [0] * header.workers

    def micro_batches(*units: Counted) -> ChangeTable:
        chosen = [change for change in changes if change.unit in units]
        return _table(chosen, lambda change: change.micros / header.units)

    activations = micro_batches(*ON_WORKER)
    limits = None if declared is None else [limit if isinstance(limit, int) else float(limit) for limit in declared]
    memory = [MemoryTable("M_a", "activations", nothing, limits, _floats(figures.activations), activations)]
    if header.recomputing:
        inputs = micro_batches(Counted.INPUT)
        memory.append(MemoryTable("inputs", "stashed inputs", nothing, None, _floats(figures.stashed_inputs), inputs))
    if header.moves:
        on_host, peaks = micro_batches(*ON_HOST_UNITS), live.whole(header, live.on_host(program))
        memory.append(MemoryTable("host", "activations on the host", nothing, None, _floats(peaks), on_host))
    if memory_in_bytes is not None:
        memory.append(_bytes(header, changes, *memory_in_bytes))
    return memory


def _bytes(
    header: Header, changes: Sequence[_ChangeOfRow], setting: Setting, needs: Sequence[MemoryNeed], available: int
) -> MemoryTable:
    """The table of memory in bytes: weights, optimizer and buffers from the start, and what operations keep and free.

    ``needs`` has the bytes that each worker needs, ``available`` those that it has. What the first half of a split
    backward needs only while it runs is left out.
    """
    workers = [worker_bytes(header, setting, worker, need) for worker, need in enumerate(needs)]

    def size(change: _ChangeOfRow) -> float:
        return change.micros * workers[change.row.worker].sizes(change.row.operation.stage)[change.unit] / header.units

    return MemoryTable(
        "bytes",
        "memory",
        [worker.at_first for worker in workers],
        [available] * header.workers,
        [need.total for need in needs],
        _table(changes, size),
    )


def _changes(header: Header, rows: Sequence[OperationRow]) -> Iterator[_ChangeOfRow]:
    """Yields the changes where no memory moves: each at the start or the end of its own operation.

    What an operation makes is kept from its start on, what it frees until its end. Between the halves of a split
    backward, operands take the place of the activations that the first half frees.
    """
    for number, row in enumerate(rows):
        for step, unit, amount in live.changes(header, (row.operation,), KEPT_UNITS):
            yield _ChangeOfRow(row, number, live.is_at_end(step, unit, amount), unit, amount)


def _changes_with_moves(program: Program, rows: Sequence[OperationRow]) -> Iterator[_ChangeOfRow]:
    """Yields the changes where memory moves, each at the start or the end of an operation that occupies the lane.

    The lane launches moves and waits for them between two operations. A change by a wait, or by a move that is launched
    after a wait, is shown at the start of the next operation, any other change at the end of the operation before.
    """
    numbers = {row.operation: number for number, row in enumerate(rows)}
    for worker, parts in enumerate(program.parts):
        steps = list(parts.steps)
        operations = [numbers[step] for step in steps if isinstance(step, Compute) and not step.kind.moves]
        place, waited = 0, False
        for step in steps:
            moves = isinstance(step, WaitMove) or step.kind.moves
            waited = isinstance(step, WaitMove) or (waited and moves)
            for _, unit, amount in live.changes(program.header, (step,), KEPT_UNITS):
                if not moves:
                    number = operations[place]
                    yield _ChangeOfRow(rows[number], number, live.is_at_end(step, unit, amount), unit, amount)
                    continue
                row = OperationRow(Worker(worker), Compute(step.kind, step.micros, step.stage), Row.WHOLE, place)
                follows = place < len(operations) and (waited or place == 0)
                yield _ChangeOfRow(row, operations[place if follows else place - 1], not follows, unit, amount)
            place += not moves


def _table(changes: Sequence[_ChangeOfRow], size: _Size) -> ChangeTable:
    return ChangeTable(
        worker=[change.row.worker for change in changes],
        operation=[change.number for change in changes],
        at_end=[int(change.at_end) for change in changes],
        amount=[size(change) for change in changes],
    )


def _floats(amounts: Sequence[Fraction]) -> list[float]:
    return [float(amount) for amount in amounts]
