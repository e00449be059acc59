"""Rule "complete": each micro-batch has, on each stage, one of the allowed sets of operations, each operation once.

The table of kinds says what is allowed, and `alternatives` lists the sets of kinds: a forward and a backward, or a
forward and the two halves of a backward, for example. One operation of a set, a forward, is the first on the stage.
Every value that the stage then keeps of the micro-batch is freed by exactly one operation of the set: what the forward
keeps by the backward or, if that is split, by the input gradient, and what this keeps by the weight gradient.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, islice, product

from chimera_ir.diagnostics.catalogue.groups import PairOfOne, PairUneven
from chimera_ir.diagnostics.catalogue.lanes import OperandsOfWhole
from chimera_ir.diagnostics.catalogue.schedule import DoneTwice, Duplicate, Missing, MissingMove, Skipped
from chimera_ir.diagnostics.catalogue.values import Instance
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.ir.alternatives import alternatives
from chimera_ir.ir.ids import Micro, Stage, Worker
from chimera_ir.ir.kinds import Kind
from chimera_ir.ir.levels import Header, Pipe, Schedule
from chimera_ir.ir.ops import NOWHERE, Compute, Pair
from chimera_ir.ir.text.printer import line, micros_name
from chimera_ir.source import Span

_LISTED = 100_000
"""The most incomplete cells, each a micro-batch on a stage, that are counted for a pipe."""

_Placed = tuple[Worker, Compute]

_Repetition = Duplicate | DoneTwice | OperandsOfWhole

_Cells = Mapping[int, Sequence[_Placed]]
"""The operations in each cell, a micro-batch on a stage, whose key is ``micro * stages + stage``.

Cells without operations are absent, so that memory grows with the operations and not with the sizes in the header.
"""


def complete(header: Header, operations: Sequence[_Placed]) -> Iterator[Diagnostic]:
    """Yields diagnostics of missing and of repeated operations.

    Missing operations have one diagnostic for each pipe and set of kinds, repeated ones one for each pair of lines. A
    micro-batch on a stage counts in at most one diagnostic. ``operations`` are all operations, each with the worker
    that runs it. The header has passed the rule "placed", so its micro-batches are 0 .. N-1; the numbers of the
    operations are within its ranges.
    """
    whole = alternatives(header.kinds)
    if _is_complete(header, operations, whole):
        return
    cells: dict[int, list[_Placed]] = defaultdict(list)
    for placed in operations:
        for micro in placed[1].micros:
            cells[micro * header.stages + placed[1].stage].append(placed)
    repeated = list(_repeated(header, cells, whole))
    yield from repeated
    # A line that moves the same micro-batches again and again lacks others for this reason: its repetition says it all.
    lines = {diagnostic.span for diagnostic in repeated}
    for diagnostic in _missing(header, cells, whole):
        if not isinstance(diagnostic, MissingMove) or diagnostic.span not in lines:
            yield diagnostic


def _is_complete(header: Header, operations: Iterable[_Placed], whole: Iterable[tuple[Kind, ...]]) -> bool:
    """Whether every micro-batch has on every stage one of the sets of kinds in ``whole``, each kind once."""
    # A cell's set of kinds is a number with a bit for each kind: large schedules have millions of cells.
    bits = {kind: 1 << number for number, kind in enumerate(header.kinds)}
    present: dict[int, int] = {}
    stages = header.stages
    for _, operation in operations:
        stage, bit = operation.stage, bits[operation.kind]
        for micro in operation.micros:
            cell = micro * stages + stage
            before = present.get(cell, 0)
            if before & bit:
                return False
            present[cell] = before | bit
    right = {sum(bits[kind] for kind in kinds) for kinds in whole}
    return len(present) == stages * header.micro_batches and {*present.values()} <= right


def _repeated(header: Header, cells: _Cells, whole: Sequence[tuple[Kind, ...]]) -> Iterator[Diagnostic]:
    """Yields diagnostics of operations that exclude each other: one is there twice, or does the work of another.

    ``cells`` has the operations of each micro-batch on each stage. `_clash` finds the two that exclude each other;
    ``whole`` are the allowed sets of kinds.
    """
    twice: dict[tuple[Span, Span], list[_Repetition]] = {}
    for several in cells.values():
        both = _clash(several, whole)
        if both is not None:
            first, second = both
            twice.setdefault((first[1].origin, second[1].origin), []).append(_again(header, second, first))
    for group in twice.values():
        first_one = group[0]
        yield replace(first_one, count=len(group))


def _clash(several: Sequence[_Placed], whole: Sequence[tuple[Kind, ...]]) -> tuple[_Placed, _Placed] | None:
    """Returns the first two operations of a micro-batch on a stage that exclude each other; None if there are none.

    Two operations exclude each other if they are of one kind, or if no set in ``whole`` has both of their kinds.
    """
    for first, second in combinations(several, 2):
        kind, other = first[1].kind, second[1].kind
        if kind is other or not any(kind in kinds and other in kinds for kinds in whole):
            return first, second
    return None


def _again(header: Header, second: _Placed, first: _Placed) -> _Repetition:
    (worker, operation), (first_worker, earlier) = second, first
    if operation.kind is earlier.kind:
        where = line(operation, header), worker, first_worker, earlier.origin, _directions(header)
        return Duplicate(operation.origin, *where, 1)
    for (place, move), (_, backward) in (second, first), (first, second):
        if move.kind.moves_operands:
            texts = line(move, header), place, line(backward, header), backward.origin
            return OperandsOfWhole(move.origin, *texts, 1)
    return DoneTwice(
        operation.origin, line(operation, header), line(earlier, header), worker, first_worker, earlier.origin, 1
    )


def _missing(header: Header, cells: _Cells, whole: Sequence[tuple[Kind, ...]]) -> Iterator[Diagnostic]:
    for pipe in header.pipes:
        absent: dict[tuple[Kind, ...], list[tuple[Micro, Stage]]] = defaultdict(list)
        for lacking, micro, stage in islice(_absent(header, pipe, cells, whole), _LISTED):
            absent[lacking].append((micro, stage))
        for lacking, places in absent.items():
            micro, stage = places[0]
            present = [operation for _, operation in cells.get(micro * header.stages + stage, ())]
            version = next((operation.version for operation in present if not operation.kind.moves), None)
            lines = [Compute(kind, (micro,), stage, version=None if kind.moves else version) for kind in lacking]
            added = "` and `".join(line(operation, header) for operation in lines)
            where = _nearest(header, pipe, cells, lacking[0], micro, stage)
            which = micros_name((micro,), header.slices)
            facts = pipe.name, pipe.workers[stage], which, stage, tuple(kind.noun for kind in lacking), added
            message = MissingMove if any(kind.moves for kind in lacking) else Missing
            yield (message if present else Skipped)(where, *facts, _directions(header), len(places))


def _absent(
    header: Header, pipe: Pipe, cells: _Cells, whole: Sequence[tuple[Kind, ...]]
) -> Iterator[tuple[tuple[Kind, ...], Micro, Stage]]:
    """Yields what is missing in a pipe: the missing kinds, the micro-batch, and the stage on which they are missing.

    The missing kinds make the kinds that are there a whole set: the first possible one in ``whole``. A micro-batch on a
    stage where two operations exclude each other is left out.
    """
    for micro, number in product(pipe.micros, range(header.stages)):
        several = cells.get(micro * header.stages + number, ())
        if not several or _clash(several, whole) is None:
            present = [operation.kind for _, operation in several]
            kinds = next(kinds for kinds in whole if {*present} <= {*kinds})
            lacking = tuple(kind for kind in kinds if kind not in present)
            if lacking:
                yield lacking, micro, Stage(number)


def _nearest(header: Header, pipe: Pipe, cells: _Cells, kind: Kind, micro: Micro, stage: Stage) -> Span:
    """Returns the line to blame for a missing operation: the line of the most similar operation of the pipe.

    ``kind``, ``micro`` and ``stage`` are of the missing operation. An operation of the same kind is most similar, then
    one that frees what the missing one keeps, or the reverse (`_linked`). Among equals an operation on the same stage
    comes first, then one that is no forward, then one of an earlier micro-batch, then one of the nearest micro-batch.
    """

    def distance(operation: Compute) -> tuple[bool, bool, bool, bool, bool, int]:
        (other, *_), here = operation.micros, operation.stage == stage
        same = operation.kind is kind
        linked = _linked(operation.kind, kind)
        return not same, not linked, not here, operation.kind.opens, other > micro, abs(other - micro)

    mine = {*pipe.micros}
    candidates = [operation for several in cells.values() for _, operation in several if operation.micros[0] in mine]
    return min(candidates, key=distance).origin if candidates else NOWHERE


def _linked(kind: Kind, other: Kind) -> bool:
    """Whether one of two kinds keeps a value, for its own slice, that the other one frees."""
    both = (*((value, other) for value in kind.frees), *((value, kind) for value in other.frees))
    return any(value in maker.keeps_in_slice for value, maker in both)


def _directions(header: Header) -> str:
    """Returns words for a diagnostic if micro-batches go forward and back; an empty text for forwards alone."""
    return " in each direction" if header.answers else ""


def paired(schedule: Schedule) -> Iterator[Diagnostic]:
    """Yields pairs of which forward and backward share a micro-batch, so that they wait for themselves.

    Also yields pairs of which the two sides differ in the number of micro-batches.
    """
    for lane in schedule.lanes:
        for pair in lane:
            if isinstance(pair, Pair):
                yield from _mistakes(schedule.header, pair)


def _mistakes(header: Header, pair: Pair) -> Iterator[Diagnostic]:
    forward, backward = pair.parts
    facts = pair.origin, (), Instance(), line(forward, header), line(backward, header)
    common = {*forward.micros} & {*backward.micros}
    if common:
        yield PairOfOne(*facts, micros_name([min(common)], header.slices))
    elif forward.size != backward.size:
        yield PairUneven(*facts, forward.size, backward.size)
