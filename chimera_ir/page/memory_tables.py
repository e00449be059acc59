"""Tables of the memory that each worker of a program keeps, operation by operation."""

from collections.abc import Sequence
from fractions import Fraction

from chimera_ir.cost.report import Figures
from chimera_ir.flow import live
from chimera_ir.ir.kinds import Counted
from chimera_ir.ir.levels import Header, Quantity
from chimera_ir.page.operation_tables import OperationRow
from chimera_ir.page.tables import ChangeTable, MemoryTable

_BY_UNIT = {"M_a": (Counted.ACTIVATIONS, Counted.OPERANDS), "inputs": (Counted.INPUT,)}
"""The counts that are added up in each unit."""


def tables(header: Header, rows: Sequence[OperationRow], figures: Figures) -> list[MemoryTable]:
    """Activations in M_a and, where any stage recomputes, the inputs that are kept for it."""
    limits = next((bound.limits for bound in header.bounds if bound.quantity is Quantity.ACTIVATIONS), None)
    start = [0] * header.workers
    activations = _changes(header, rows, _BY_UNIT["M_a"])
    memory = [MemoryTable("M_a", "activations", start, limits, _floats(figures.activations), activations)]
    if header.recomputing:
        inputs = _changes(header, rows, _BY_UNIT["inputs"])
        memory.append(MemoryTable("inputs", "stashed inputs", start, None, _floats(figures.stashed_inputs), inputs))
    return memory


def _changes(header: Header, rows: Sequence[OperationRow], units: Sequence[Counted]) -> ChangeTable:
    """The changes in some units: what an operation makes is kept from its start, what it frees until its end.

    Operands alone take the place of the activations that are freed.
    """
    changes = [
        (row.worker, number, int(amount < 0 or unit is Counted.OPERANDS), amount)
        for number, row in enumerate(rows)
        for _, unit, amount in live.changes(header, (row.operation,), units)
    ]
    return ChangeTable(
        worker=[worker for worker, _, _, _ in changes],
        operation=[operation for _, operation, _, _ in changes],
        at_end=[at_end for _, _, at_end, _ in changes],
        amount=[amount / header.parts if header.parts > 1 else amount for _, _, _, amount in changes],
    )


def _floats(amounts: Sequence[Fraction]) -> list[float]:
    return [float(amount) for amount in amounts]
