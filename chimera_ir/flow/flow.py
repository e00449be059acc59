"""Finds which operation makes each value, and which takes it, from the table of kinds.

F m0 s0     makes y, which F m0 s1 takes, and a, which B m0 s0 takes
F m0 s1     takes y; makes a, which B m0 s1 takes
B m0 s1     takes a; makes dx, which B m0 s0 takes
B m0 s0     takes a and dx
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from itertools import chain

from chimera_ir.ir.kinds import Kind, Value, all_kinds, values
from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import Blocks, Compute, Message, Operation, Pair, Stage, Worker

ABSENT = -1
"""The number of an operation that does not exist."""

Numbered = Iterable[tuple[int, Operation]]
"""Operations, each after its number. The caller chooses what the numbers count, such as places in lanes."""


class Flow:
    """The operations that make and take each value; an operation is given by its number.

    A micro-batch, or a slice of one, on a stage is a cell, with the number ``micro * stages + stage``.
    ``makers[value][cell]`` is the operation in the cell that makes the value, ``takers[value][cell]`` the one after
    which the value no longer exists, or `ABSENT`. If two operations of a cell make or take the same value, the later
    one counts.
    """

    def __init__(self, header: Header, numbered: Numbered) -> None:
        self.stages = header.stages
        size = header.stages * header.micro_batches
        # Values that the same kinds make, or take, share one list of numbers.
        makes, takes, read = _kinds_by_value(header.kinds, tuple(values()))
        self._taken = {value for value, kinds in takes.items() if kinds}
        numbers = {kinds: [ABSENT] * size for kinds in (*makes.values(), *takes.values(), *read.values())}
        self.makers: dict[Value, list[int]] = {value: numbers[kinds] for value, kinds in makes.items()}
        self.takers: dict[Value, list[int]] = {value: numbers[kinds] for value, kinds in takes.items()}
        columns = {reading: numbers[kinds] for reading, kinds in read.items()}
        # What is read depends on the slice and the stage, at ``cell % places``.
        self._places = header.slices * header.stages
        places = [(place, Stage(stage)) for place in range(header.slices) for stage in range(header.stages)]
        self._reads = {kind: [_readable(columns, header, kind, *place) for place in places] for kind in header.kinds}
        lacks = ((stage, micro) for stage, micros in header.lacks.items() for micro in micros)
        self._absent = {micro * header.stages + stage for stage, micro in lacks}
        self._fill(numbers, numbered)
        self._header = header

    def _fill(self, numbers: Mapping[frozenset[Kind], list[int]], numbered: Numbered) -> None:
        """Writes each operation's number into the lists of all sets of kinds that have its kind, at its cells."""
        stages = self.stages
        entered = {kind: [column for kinds, column in numbers.items() if kind in kinds] for kind in self._reads}
        for number, operation in numbered:
            for part in (operation,) if isinstance(operation, Compute) else operation.parts:
                stage, columns = part.stage, entered[part.kind]
                for micro in part.micros:
                    cell = micro * stages + stage
                    for column in columns:
                        column[cell] = number

    def needs(self, operation: Operation) -> tuple[int, ...]:
        """The operations that make what an operation reads, each once; `ABSENT` for one that is missing."""
        if isinstance(operation, Pair):
            return tuple(dict.fromkeys(chain.from_iterable(map(self.needs, operation.parts))))
        cell = operation.micros[0] * self.stages + operation.stage
        readable = self._reads[operation.kind][cell % self._places]
        if self._absent:
            readable = [(makers, away) for makers, away in readable if cell + away not in self._absent]
        if len(operation.micros) == 1:
            return tuple([makers[cell + away] for makers, away in readable])
        cells = [micro * self.stages + operation.stage for micro in operation.micros]
        return tuple(dict.fromkeys(makers[cell + away] for makers, away in readable for cell in cells))

    def producer(self, message: Message) -> int:
        """The number of the operation that makes the value in a message."""
        micros, source, _, value = message
        return self.makers[value][micros[0] * self.stages + source]

    def consumer(self, message: Message) -> int:
        """The number of the operation that takes the value in a message, the first one if several stages do."""
        micros, source, target, value = message
        takers, first = self.takers[value], micros[0] * self.stages
        if not self._header.feeds:
            return takers[first + target]
        return min(takers[first + stage] for stage in self._header.sharing(value, source, target, micros[0]))

    def last_use(self, message: Message) -> int:
        """The number of the operation after which the memory of a received message may be used again.

        Values that are made from the message and kept on the stage may be in the same memory.
        """
        micros, source, target, value = message
        last = self._last[value]
        if len(micros) == 1 and not self._header.feeds:
            return last[micros[0] * self.stages + target]
        stages = self._header.sharing(value, source, target, micros[0])
        return max(last[micro * self.stages + stage] for micro in micros for stage in stages)

    @cached_property
    def _last(self) -> dict[Value, list[int]]:
        """Maps a value to the last operation in each cell of a receiver that needs the memory of the message.

        It takes the value itself, or what the stage has made from the value.
        """
        columns = {
            value: [self.takers[kept] for kept in (value, *follows(value)) if kept in self._taken]
            for value in self.makers
            if value.crosses and value in self._taken
        }
        return {value: [*map(max, *several)] if len(several) > 1 else several[0] for value, several in columns.items()}


@cache
def _kinds_by_value(
    kinds: tuple[Kind, ...], table: tuple[Value, ...]
) -> tuple[dict[Value, frozenset[Kind]], dict[Value, frozenset[Kind]], dict[tuple[Kind, Value], frozenset[Kind]]]:
    """The kinds that make each value of ``table``, the kinds that take it, and `sources`."""
    makes = {value: frozenset(kind for kind in kinds if value in kind.makes) for value in table}
    takes = {value: frozenset(kind for kind in kinds if value in kind.takes) for value in table}
    return makes, takes, sources(kinds)


def preceding(kinds: Iterable[Kind]) -> dict[Kind, frozenset[Kind]]:
    """Maps each kind to the kinds that are sure to run before it on the same micro-batch and stage.

    If a kind reads a value of its own stage and slice, a kind that makes the value has run before. If several kinds
    make it, only those are sure to have run that are, or precede, every one of them.
    """
    rows = tuple(kinds)
    made = {value for row in rows for value in row.keeps_in_slice}
    makers = {value: [row for row in rows if value in row.makes] for value in made}
    before, changed = dict.fromkeys(rows, frozenset(rows)), True
    while changed:
        former = {**before}
        for row in rows:
            read = [makers[value] for value in row.reads if value in makers]
            ways = [frozenset.intersection(*(former[maker] | {maker} for maker in several)) for several in read]
            before[row] = frozenset[Kind]().union(*ways)
        changed = before != former
    return before


def sources(kinds: Iterable[Kind]) -> dict[tuple[Kind, Value], frozenset[Kind]]:
    """Maps (kind, value that the kind reads) to the kinds that can have made this value before it is read.

    All kinds that make the value can, except those that run only after the reader. The value of another slice can also
    come from the reader's own kind, as a carry does.
    """
    rows = tuple(kinds)
    before = preceding(rows)
    return {
        (row, value): frozenset(
            maker for maker in rows if value in maker.makes and (value.slices_on or row not in before[maker])
        )
        for row in rows
        for value in row.reads
    }


def _readable(
    columns: Mapping[tuple[Kind, Value], Sequence[int]], header: Header, kind: Kind, place: int, stage: Stage
) -> list[tuple[Sequence[int], int]]:
    """A pair for each value that an operation of ``kind`` on ``stage`` reads, and for each stage that makes it.

    The pair is a list with the number of the maker in each cell, and what to add to the reader's cell to get the
    maker's. ``place`` is the reader's slice within its micro-batch.
    """
    return [
        (columns[kind, value], maker - stage - value.slices_on * header.stages)
        for value in kind.reads
        if value.is_made(place - value.slices_on, header.slices)
        for maker in header.makers(value, stage)
    ]


def follows(value: Value) -> tuple[Value, ...]:
    """The values that a stage makes from ``value`` and keeps, directly or through other values.

    They may lie in the memory of ``value``. Values for another slice never do, and are left out.
    """
    reached: dict[Value, None] = {}
    pending = [value]
    while pending:
        read = pending.pop()
        rows = [row for row in all_kinds() if read in row.reads]
        made = [left for row in rows for left in row.keeps_in_slice if left not in reached]
        reached.update(dict.fromkeys(made))
        pending += made
    return tuple(reached)


def crossing(
    header: Header, worker: Worker, numbered: Numbered, blocks: Blocks
) -> Iterator[tuple[int, Message, Worker]]:
    """Yields each message that a worker sends, in the order of its lane ``numbered``.

    An entry is the number of the operation that makes the message, the message, and the worker that receives it.
    """
    pipe_of = header.pipe_of
    handed_on = {
        (kind, stage): [(value, target) for value in kind.hands_on for target in header.readers(value, stage)]
        for kind in header.kinds
        for stage in header.stages_of[worker]
    }
    for number, operation in numbered:
        for part in (operation,) if isinstance(operation, Compute) else operation.parts:
            micros, stage = part.micros, part.stage
            for value, target in handed_on[part.kind, stage]:
                receiver = pipe_of[micros[0]].workers[target]
                if receiver != worker and header.has(micros[0], target):
                    sharing = header.sharing(value, stage, target, micros[0])
                    for together in blocks.of(micros, value, stage, *sharing) if target == sharing[0] else ():
                        yield number, Message(together, stage, target, value), receiver


def passed_on(header: Header, message: Message, blocks: Blocks) -> list[Message]:
    """The messages that the receivers of ``message`` send on: their own value of the same name, to each reader."""
    micros, source, target, value = message
    made: list[Message] = []
    for stage in header.sharing(value, source, target, micros[0]):
        together = blocks.read_with(message._replace(target=stage))
        for reader in header.readers(value, stage, micros[0]):
            sharing = header.sharing(value, stage, reader, micros[0])
            if reader == sharing[0]:
                made += [Message(each, stage, reader, value) for each in blocks.of(together, value, stage, *sharing)]
    return made
