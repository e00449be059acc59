"""Adds recomputations to lanes whose header only lists the stages that recompute.

Plans and schedules may leave recomputations out, as the header lists the stages. In full, a forward on such a stage
keeps its input alone, and recompute is an operation of the lane:

    F m0 s0                     F m0 s0
    F m1 s0                     F m1 s0
    B m0 s0                     recompute m0 s0
    B m1 s0                     B m0 s0
                                recompute m1 s0
                                B m1 s0
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import TypeVar, cast

from chimera_ir.ir.ids import Micro, Stage
from chimera_ir.ir.kinds import FORWARD_OF_INPUT, INPUT, KEPT, RECOMPUTATION
from chimera_ir.ir.levels import Header, Pipe, Plan
from chimera_ir.ir.ops import Compute, Instruction, Operation, Pair
from chimera_ir.ir.planned import Planned

Line = TypeVar("Line", bound=Instruction)


def in_full(header: Header, lanes: Iterable[Sequence[Line]]) -> tuple[tuple[Line, ...], ...]:
    """The lanes with all recomputations, each right before the operation that needs the activations it makes.

    Where a lane already has a recomputation of a stage of a pipe, none are added for that stage.
    """
    if not header.recomputing:
        return tuple(map(tuple, lanes))
    return tuple(tuple(cast("Iterator[Line]", chain.from_iterable(_blocks(header, lane)))) for lane in lanes)


def recomputes_all(pipe: Pipe, stage: int) -> bool:
    """Whether a stage of a pipe keeps only its input of every micro-batch."""
    return stage in pipe.recompute and all(stage != other for other, _ in pipe.recomputed)


def in_blocks(header: Header, operations: Sequence[Operation]) -> Sequence[tuple[Operation, ...]]:
    """Returns a block for each operation: the recomputations that must come right before it, then the operation.

    A forward on a stage that recomputes becomes a forward that keeps only its input. Where ``operations`` already has
    recomputations of a stage of a pipe, none are added for that stage.
    """
    if not header.recomputing:
        return [(operation,) for operation in operations]
    return cast("list[tuple[Operation, ...]]", list(_blocks(header, operations)))


def _blocks(header: Header, lane: Sequence[Instruction]) -> Iterator[tuple[Instruction, ...]]:
    whole, done = _listed(header, lane), set[tuple[Micro, Stage]]()
    for instruction in lane:
        first: list[Compute] = []
        for part in _parts(instruction):
            micros = tuple([micro for micro in part.micros if (micro, part.stage) not in done])
            needs = KEPT in part.kind.reads and not part.kind.moves and header.recomputes(part.micros[0], part.stage)
            if needs and _place(header, part) not in whole:
                done.update((micro, part.stage) for micro in micros)
                first += [Compute(RECOMPUTATION, micros, part.stage, part.origin, part.version)] if micros else []
        if isinstance(instruction, Pair):
            yield *first, replace(instruction, forward=_kept(header, instruction.forward))
        else:
            yield *first, _kept(header, instruction) if isinstance(instruction, Compute) else instruction


def forwards_of_clocked(plan: Plan) -> Iterator[Planned]:
    """Yields the operations of a plan that have clocks.

    On stages whose recomputations are lines of the plan, forwards are changed to the kind that keeps only its input.
    """
    listed = _listed(plan.header, (planned.operation for planned in plan.operations))
    for planned in plan.clocked:
        operation = planned.operation
        for part in operation.parts if listed else ():
            if part.kind.opens and _place(plan.header, part) in listed:
                forward = _kept(plan.header, part)
                operation = replace(operation, forward=forward) if isinstance(operation, Pair) else forward
        yield planned if operation is planned.operation else planned._replace(operation=operation)


def _listed(header: Header, lane: Iterable[Instruction]) -> set[tuple[str, Stage]]:
    """The stages for which a lane itself has recomputations, each as (name of the pipe, stage)."""
    parts = (part for instruction in lane for part in _parts(instruction))
    return {_place(header, part) for part in parts if INPUT in part.kind.reads}


def _place(header: Header, part: Compute) -> tuple[str, Stage]:
    return header.pipe(part.micros[0]).name, part.stage


def _parts(instruction: Instruction) -> tuple[Compute, ...]:
    return instruction.parts if isinstance(instruction, Compute | Pair) else ()


def _kept(header: Header, operation: Compute) -> Compute:
    """Returns an operation as it is or, for a forward on a stage that recomputes, one that keeps its input alone."""
    if operation.kind.opens and header.recomputes(operation.micros[0], operation.stage):
        return replace(operation, kind=FORWARD_OF_INPUT)
    return operation
