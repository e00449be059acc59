"""The rows of a page's compute operations, and the looks of their boxes."""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import NamedTuple

from chimera_ir.ir.ids import Worker
from chimera_ir.ir.kinds import KEPT, Kind
from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import Compute, Operation
from chimera_ir.ir.text.printer import line
from chimera_ir.page.tables import BoxColours, Column, Look, OperationKind, OperationTable
from chimera_ir.picture.legend import kinds_of
from chimera_ir.picture.looks import ColourGroup, Looks, Row, Shade, rows_of
from chimera_ir.picture.words import BLACK, ink, mixed, strands

DIMMED = Fraction(1, 5)
"""The share of black that is mixed into middle colours on a dark page: it tells weight gradients from forwards."""


def name_of(header: Header) -> str:
    """The scheme and its parameters, as in ``mine D=4 N=8``."""
    return " ".join([header.scheme, *(f"{name}={value}" for name, value in header.parameters)])


class OperationRow(NamedTuple):
    """A compute operation as a row of a table; the two parts of a pair have a row each.

    ``height`` is the part of the lane's height that its box takes. ``place`` is how many operations stand before it in
    its lane, where a pair counts once and moves of memory do not count.
    """

    worker: Worker
    operation: Compute
    height: Row
    place: int


def rows(lanes: Iterable[Iterable[Operation]]) -> list[OperationRow]:
    """The rows of all operations that occupy the lanes, lane by lane."""
    return [
        OperationRow(Worker(worker), part, height, place)
        for worker, lane in enumerate(lanes)
        for place, operation in enumerate(operation for operation in lane if not operation.kind.moves)
        for height, part in rows_of(operation)
    ]


def matches(rows: Iterable[OperationRow], others: Iterable[OperationRow]) -> list[int]:
    """The index in ``others`` of the row with the same kind, micro-batches and stage, for each of ``rows``; else -1."""
    numbers = {_work_key(row.operation): number for number, row in enumerate(others)}
    return [numbers.get(_work_key(row.operation), -1) for row in rows]


def _work_key(operation: Compute) -> tuple[object, ...]:
    return operation.kind.letter, operation.micros, operation.stage


class OperationTables(NamedTuple):
    """Tables from which the page draws operations: one with a row for each, and two that these rows refer to by number.

    ``kinds`` has the kinds of operations, ``looks`` the styles in which boxes are drawn.
    """

    kinds: list[OperationKind]
    looks: list[Look]
    operations: OperationTable


def tables_of_operations(header: Header, rows: Sequence[OperationRow], events: Column) -> OperationTables:
    """Returns the table of operations with its kinds and looks; ``events`` has the row of each operation's event."""
    operations = [row.operation for row in rows]
    kinds = kinds_of(operations)
    kind_numbers = {kind.letter: number for number, kind in enumerate(kinds)}
    painted = Looks(header)
    slices = [operation.micros[0] % header.slices for operation in operations]
    groups = [*zip(map(painted.group, operations), slices, strict=True)]
    look_numbers = {group: number for number, group in enumerate(sorted({*groups}))}
    examples = dict(zip(groups, operations, strict=True))
    return OperationTables(
        [OperationKind(kind.letter, kind.noun, _preference(kind)) for kind in kinds],
        [_look(painted, *group, examples[group]) for group in look_numbers],
        OperationTable(
            worker=[row.worker for row in rows],
            kind=[kind_numbers[operation.kind.letter] for operation in operations],
            size=[share(header.weight(operation), header.parts) for operation in operations],
            stage=[operation.stage for operation in operations],
            look=[look_numbers[group] for group in groups],
            row=[int(row.height) for row in rows],
            event=events,
            label=[painted.label(operation) for operation in operations],
            words=[line(operation, header) for operation in operations],
        ),
    )


def share(micros: int | Fraction, parts: int) -> float:
    """Returns as how many micro-batches ``micros`` parts count, where a micro-batch has ``parts`` parts.

    The result is an ``int`` if no part is left over.
    """
    return int(micros // parts) if micros % parts == 0 else float(micros / parts)


def _preference(kind: Kind) -> int:
    """Returns a weight of a kind, by which the page chooses between critical paths of equal length.

    The path with the most whole backwards is taken; of equal ones that with the most pairs, then with the most input
    gradients.
    """
    return (3 if kind.sums else 1) * (KEPT in kind.reads)


def _look(painted: Looks, group: ColourGroup, number: int, example: Compute) -> Look:
    """Returns the style of the boxes of a colour group's slice ``number``; ``example`` is an operation of the group."""
    fill, text, slices = painted.fill(group), ink(example.kind), painted.header.slices
    stage = f", {painted.letter(group.chunk)}" if painted.chunks > 1 else ""
    part = f", slice {number}" if slices > 1 else ""
    return Look(
        name=f"{strands(painted.header)[group.strand].name}{stage}: {example.kind.noun}{part}",
        light=BoxColours(fill, text),
        dark=BoxColours(mixed(fill, BLACK, DIMMED) if group.shade is Shade.MIDDLE else fill, text),
        pattern=group.chunk * slices + number,
    )
