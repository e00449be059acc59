"""Rule "memory": no worker exceeds the bounds that the scheme declares.

The units are the paper's (section 3.3). M_a is the activations of one micro-batch on one stage, alive from its forward
to its backward. M_theta is the weights of one stage; a worker has them once per stage it holds, however many pipes
share them, and once more for every older version that it keeps.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil
from typing import assert_never

from chimera_ir.diagnostics.catalogue.program import (
    BoundExceeded,
    BoundUnchecked,
    BytesExceed,
    HostBytesExceed,
    HostExceeds,
    VersionsExceed,
    WeightsExceed,
)
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.flow import live
from chimera_ir.ir.ids import Worker
from chimera_ir.ir.levels import Header, Program, Schedule
from chimera_ir.ir.memory_bounds import Bound, Quantity
from chimera_ir.ir.ops import NOWHERE
from chimera_ir.ir.text.printer import line
from chimera_ir.verify.copies import copies

Needs = Callable[[Program], Mapping[Quantity, Sequence[int]]]
"""A function from a program to the bytes that it needs of each kind of memory, as a number for each worker."""

_IN_BYTES = {Quantity.BYTES: BytesExceed, Quantity.HOST_BYTES: HostBytesExceed}


def memory(schedule: Schedule | Program) -> Iterator[Diagnostic]:
    """Yields a diagnostic for each declared bound that does not hold, at the worker that exceeds it most.

    Bounds in bytes, and without a flush those of weights, are left to `memory_of_program`: only a program shows bytes,
    and how many versions a worker keeps.
    """
    held = tuple(len(stages) for stages in schedule.header.stages_of)
    for bound in schedule.header.bounds:
        match bound.quantity:
            case Quantity.ACTIVATIONS:
                yield from _micros(BoundExceeded, schedule, bound, live.activations(schedule))
            case Quantity.HOST:
                yield from _micros(HostExceeds, schedule, bound, live.on_host(schedule))
            case Quantity.WEIGHTS:
                if not schedule.header.steps_inside:
                    yield from _weights(WeightsExceed, schedule, bound, held)
            case Quantity.BYTES | Quantity.HOST_BYTES:
                pass
            case _:
                assert_never(bound.quantity)


def memory_of_program(program: Program, needs: Needs | None) -> Iterator[Diagnostic]:
    """Yields the declared bounds that a program exceeds and that only a program can be compared with.

    These are bounds in bytes and, without a flush, of weights in all versions. Where memory moves to the host, the
    program's lines say when, so all other bounds are checked here as well. ``needs`` returns the bytes of a program;
    None if they are not known.
    """
    header = program.header
    if header.moves:
        yield from memory(program)
    in_bytes = any(bound.quantity.in_bytes for bound in header.bounds)
    needed = needs(program) if needs is not None and in_bytes else {}
    for bound in header.bounds:
        if bound.quantity is Quantity.WEIGHTS and header.steps_inside:
            yield from _weights(VersionsExceed, program, bound, copies(program))
        amounts = needed.get(bound.quantity, ())
        if amounts and (worker := bound.exceeded(amounts)) is not None:
            message = _IN_BYTES[bound.quantity]
            yield message(bound.origin, worker, amounts[worker], bound.limits[worker], _stages(header, worker))


def memory_unknown(header: Header) -> Iterator[Diagnostic]:
    """Yields a warning for each declared bound in bytes, for the case that no bytes are known."""
    yield from (BoundUnchecked(bound.origin) for bound in header.bounds if bound.quantity.in_bytes)


def _micros(
    message: type[BoundExceeded], schedule: Schedule | Program, bound: Bound, peaks: Sequence[live.Peak]
) -> Iterator[Diagnostic]:
    amounts = live.whole(schedule.header, peaks)
    # A worker that keeps nothing exceeds no limit.
    worker = bound.exceeded([amount or limit for amount, limit in zip(amounts, bound.limits, strict=True)])
    if worker is not None and (at := peaks[worker].at) is not None:
        yield message(at.origin, worker, ceil(amounts[worker]), bound.limits[worker], line(at, schedule.header))


def _weights(
    message: type[BoundExceeded], level: Schedule | Program, bound: Bound, weights: tuple[int, ...]
) -> Iterator[Diagnostic]:
    worker = bound.exceeded(weights)
    if worker is not None:
        first = next((operation.origin for operation in level.lanes[worker]), NOWHERE)
        yield message(first, worker, weights[worker], bound.limits[worker], _stages(level.header, worker))


def _stages(header: Header, worker: Worker) -> str:
    return ", ".join(map(str, header.stages_of[worker]))
