"""Rule "memory": no worker exceeds the bounds that the scheme declares.

The units are the paper's (section 3.3). M_a is the activations of one micro-batch on one stage, alive from its forward
to its backward. M_theta is the weights of one stage; a worker has them once per stage it holds, however many pipes
share them, and once more for every older version that it keeps.
"""

from collections.abc import Iterator
from math import ceil
from typing import assert_never

from chimera_ir.diagnostics.catalogue.program import BoundExceeded, VersionsExceed, WeightsExceed
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.flow import live
from chimera_ir.ir.levels import Bound, Program, Quantity, Schedule
from chimera_ir.ir.ops import NOWHERE
from chimera_ir.ir.text.printer import line
from chimera_ir.verify.copies import copies


def memory(schedule: Schedule) -> Iterator[Diagnostic]:
    """Yields the declared bounds that do not hold, each at the worker that exceeds it most.

    Only the program shows how many versions an asynchronous schedule keeps: `memory_of_versions`.
    """
    held = tuple(len(stages) for stages in schedule.header.stages_of)
    for bound in schedule.header.bounds:
        match bound.quantity:
            case Quantity.ACTIVATIONS:
                yield from _activations(schedule, bound)
            case Quantity.WEIGHTS:
                if not schedule.header.asynchronous:
                    yield from _weights(WeightsExceed, schedule, bound, held)
            case _:
                assert_never(bound.quantity)


def memory_of_versions(program: Program) -> Iterator[Diagnostic]:
    """Yields the declared bounds on weights that an asynchronous program exceeds, with the versions that it keeps."""
    for bound in program.header.bounds if program.header.asynchronous else ():
        if bound.quantity is Quantity.WEIGHTS:
            yield from _weights(VersionsExceed, program, bound, copies(program))


def _activations(schedule: Schedule, bound: Bound) -> Iterator[Diagnostic]:
    peaks = live.activations(schedule)
    amounts = live.whole(schedule.header, peaks)
    worker = max(range(len(peaks)), key=amounts.__getitem__)
    amount, at = amounts[worker], peaks[worker].at
    if amount > bound.limit and at is not None:
        yield BoundExceeded(at.origin, worker, ceil(amount), bound.limit, line(at))


def _weights(
    message: type[BoundExceeded], level: Schedule | Program, bound: Bound, weights: tuple[int, ...]
) -> Iterator[Diagnostic]:
    worker = max(range(len(weights)), key=weights.__getitem__)
    if weights[worker] > bound.limit:
        stages = ", ".join(map(str, level.header.stages_of[worker]))
        first = next((operation.origin for operation in level.lanes[worker]), NOWHERE)
        yield message(first, worker, weights[worker], bound.limit, stages)
