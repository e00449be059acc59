"""The tables of a page, column by column, as ``templates/page/document.d.ts`` describes them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import accumulate, chain, groupby
from operator import attrgetter
from pathlib import PurePath
from typing import NamedTuple

from chimera_ir.cost.report import Figures
from chimera_ir.flow import live
from chimera_ir.ir.kinds import KEPT, ON_HOST_UNITS, ON_WORKER, Counted
from chimera_ir.ir.levels import Header, Program, Quantity
from chimera_ir.ir.ops import NOWHERE, Compute, Micro, Operation, Stage, WaitMove, Worker
from chimera_ir.ir.streams import ProgramStream
from chimera_ir.ir.text.printer import line
from chimera_ir.ir.turns import in_turn
from chimera_ir.picture.looks import BLACK, ColourGroup, Looks, Row, Shade, ink, kinds_of, mixed, rows_of, strands
from chimera_ir.predict.memory_need import MemoryNeed, worker_bytes
from chimera_ir.predict.setting import Setting
from chimera_ir.source import Source
from chimera_ir.verify.holdings import KEPT_UNITS
from chimera_ir.verify.verify import ProvenScripts, Verified

Column = Sequence[int] | Sequence[float]
"""Numbers, one for each row of a table."""


class Nested(NamedTuple):
    """Rows of several numbers in two columns: those of row i are ``numbers[starts[i]]`` up to ``numbers[starts[i +
    1]]``.
    """

    numbers: list[int]
    starts: list[int]


def nested(rows: Iterable[Sequence[int]]) -> Nested:
    """The two columns of rows of several numbers.

    Examples
    --------
    >>> nested([[3, 4], [], [5]])
    Nested(numbers=[3, 4, 5], starts=[0, 2, 2, 3])
    """
    listed = list(rows)
    return Nested(list(chain.from_iterable(listed)), list(accumulate(map(len, listed), initial=0)))


@dataclass(frozen=True, slots=True)
class OperationKind:
    """A kind of operations, such as all forwards, with its ``preference`` for critical paths."""

    letter: str
    name: str
    preference: int


@dataclass(frozen=True, slots=True)
class BoxColours:
    """The colours of a box and of the text in it."""

    fill: str
    ink: str


@dataclass(frozen=True, slots=True)
class Look:
    """Colours and pattern of the boxes of one colour group; each chunk and slice has another ``pattern``."""

    name: str
    light: BoxColours
    dark: BoxColours
    pattern: int


@dataclass(frozen=True, slots=True)
class Slider:
    """A cost that a reader can change, up to ``max``; ``value`` is what it is at first."""

    name: str
    label: str
    value: float
    max: float


@dataclass(frozen=True, slots=True)
class LengthForm:
    """A length of time as a sum of terms: each is the index of a slider, and a factor on the slider's value."""

    of: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class OperationTable:
    """Compute operations, a row for each, lane by lane; a pair has a row for each of its two parts."""

    worker: Column
    kind: Column
    size: Column
    stage: Column
    look: Column
    row: Column
    event: Column
    label: Sequence[str]
    words: Sequence[str]


@dataclass(frozen=True, slots=True)
class PortTable:
    """Messages on shared links: the event of each, and the numbers of the ports that it leaves and arrives at."""

    wire: Column
    leaving: Column
    arriving: Column


@dataclass(frozen=True, slots=True)
class EventTable:
    """Events of the program, and the events that each waits for: those of lanes, lane by lane, then all others."""

    role: Column = ()
    verb: Column = ()
    verbs: Sequence[str] = ()
    subject: Column = ()
    worker: Column = ()
    form: Column = ()
    forms: Sequence[LengthForm] = ()
    before: Column = ()
    before_from: Column = (0,)
    lane_from: Column = (0,)
    ports: PortTable | None = None


@dataclass(frozen=True, slots=True)
class MessageTable:
    """Messages, a row for each, with the operations at both ends and the events of the transfer."""

    words: Sequence[str] = ()
    link: Column = ()
    bytes: Column = ()
    maker: Column = ()
    taker: Column = ()
    send: Column = ()
    recv: Column = ()
    wire: Column = ()
    flight: Column = ()
    wait: Column = ()
    links: Sequence[Mapping[str, object]] = ()


@dataclass(frozen=True, slots=True)
class SumTable:
    """Sums of gradients, a row for each, with the event of the sum and the events after which workers launch it."""

    words: Sequence[str] = ()
    event: Column = ()
    launches: Column = ()
    launches_from: Column = (0,)


@dataclass(frozen=True, slots=True)
class MoveTable:
    """Moves of memory between workers and their hosts, each with its event."""

    words: Sequence[str] = ()
    event: Column = ()


@dataclass(frozen=True, slots=True)
class TurnTable:
    """The turn that a stream repeats: node n is event ``events[n]``, and waits for nodes ``before`` it."""

    events: Column
    before: Column
    before_from: Column
    ago: Column
    updates: int


@dataclass(frozen=True, slots=True)
class ChangeTable:
    """Changes of what a worker keeps: ``amount`` is added at the start or, if ``at_end``, the end of ``operation``.

    It is kept of the micro-batch and the stage of the operation ``of``.
    """

    worker: Column
    operation: Column
    of: Column
    at_end: Column
    amount: Column


@dataclass(frozen=True, slots=True)
class MemoryTable:
    """The memory of each worker in one unit: what it keeps at the start, its limit, its peak, and all changes."""

    unit: str
    name: str
    start: Column
    bound: Column | None
    peak: Column
    changes: ChangeTable


@dataclass(frozen=True, slots=True)
class Facts:
    """Figures of the report."""

    makespan: float
    bubble_ratio: float
    critical: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleTables:
    """All tables of one schedule; without times it has operations alone."""

    name: str
    workers: int
    unit: str
    updates: int
    kinds: Sequence[OperationKind]
    looks: Sequence[Look]
    sliders: Sequence[Slider] = ()
    operations: OperationTable
    clocks: Column | None = None
    events: EventTable = EventTable()
    messages: MessageTable = MessageTable()
    sums: SumTable = SumTable()
    moves: MoveTable = MoveTable()
    turn: TurnTable | None = None
    memory: Sequence[MemoryTable] = ()
    facts: Facts = Facts(0, 0, {})
    remarks: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class SourceText:
    """A text, and the line of each row of operations, 0 if it has none; ``rank`` is that of a script, else -1."""

    name: str
    language: str
    text: str
    line: Column
    rank: int = -1


@dataclass(frozen=True, slots=True)
class ShownMistake:
    """A mistake of a text: the message, what of it is drawn on the lanes, and its lines in the text."""

    code: str
    title: str
    text: str
    operations: Column = ()
    arrows: Sequence[Mapping[str, object]] = ()
    missing: Sequence[str] = ()
    lines: Column = ()


@dataclass(frozen=True, slots=True)
class PageDocument:
    """Everything that a page shows."""

    title: str
    notes: Sequence[str]
    schedules: Sequence[ScheduleTables]
    texts: Sequence[SourceText]
    mistake: ShownMistake | None = None
    matches: Column | None = None
    matched_by: Column | None = None
    trace: object = None
    format: int = 1


# The rows of a page's compute operations, and the looks of their boxes.

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


def matches(rows: Sequence[OperationRow], others: Sequence[OperationRow]) -> list[int]:
    """The index in ``others`` of the row with the same kind, micro-batches and stage, for each of ``rows``; else -1.

    A half of a backward that is whole in ``others`` has that one's index, and a whole backward that of its first half.
    """
    numbers = {_work_key(row.operation): number for number, row in enumerate(others)}
    same = {_work_key(row.operation) for row in rows}
    backwards = {
        key[1:]: numbers[key]
        for key in (_work_key(row.operation) for row in reversed(others) if _is_backward(row.operation))
        if key not in same
    }

    def match(operation: Compute) -> int:
        key = _work_key(operation)
        return numbers.get(key, backwards.get(key[1:], -1) if _is_backward(operation) else -1)

    return [match(row.operation) for row in rows]


def _work_key(operation: Compute) -> tuple[str, tuple[Micro, ...], Stage]:
    return operation.kind.letter, operation.micros, operation.stage


def _is_backward(operation: Compute) -> bool:
    """Whether it is a backward or a half of one."""
    return KEPT in operation.kind.reads or operation.kind.sums


class OperationTables(NamedTuple):
    """A table with a row for each operation, and those of kinds and looks, to which its rows refer by number."""

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
        [OperationKind(kind.letter, kind.noun, (3 if kind.sums else 1) * (KEPT in kind.reads)) for kind in kinds],
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
    """As how many micro-batches ``micros`` count, of which one has ``parts`` parts; an ``int`` if none is left over."""
    return int(micros // parts) if micros % parts == 0 else float(micros / parts)


def _look(painted: Looks, group: ColourGroup, number: int, example: Compute) -> Look:
    """Returns the style of the boxes of a colour group's slice ``number``; ``example`` is an operation of the group."""
    fill, text, slices = painted.fill(group), ink(example.kind), painted.header.slices
    stage = f", {painted.chunk_name(group.chunk)}" if painted.chunks > 1 else ""
    part = f", slice {number}" if slices > 1 else ""
    return Look(
        name=f"{strands(painted.header)[group.strand].name}{stage}: {example.kind.noun}{part}",
        light=BoxColours(fill, text),
        dark=BoxColours(mixed(fill, BLACK, DIMMED) if group.shade is Shade.MIDDLE else fill, text),
        pattern=group.chunk * slices + number,
    )


# Tables of the memory that each worker of a program keeps, operation by operation.


class _ChangeOfRow(NamedTuple):
    """A change of what a worker keeps of a stage, shown at the start or, with ``at_end``, at the end of an operation.

    ``number`` is the row of that operation, ``of`` that of an operation on the micro-batch. ``micros`` is how much more
    is kept, negative if less, in the units of which a micro-batch has `Header.units`; ``unit`` says what is kept.
    """

    worker: int
    stage: Stage
    number: int
    of: int
    at_end: bool
    unit: Counted
    micros: int


_Size = Callable[[_ChangeOfRow], float]


class MemoryInBytes(NamedTuple):
    """The bytes that each worker needs, the setting from which they follow, and those that every worker has."""

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
    changes = list(_changes(program, rows))
    declared = next((bound.limits for bound in header.bounds if bound.quantity is Quantity.ACTIVATIONS), None)
    nothing = [0] * header.workers

    def micro_batches(*units: Counted) -> ChangeTable:
        chosen = [change for change in changes if change.unit in units]
        return _table(
            chosen, lambda change: change.micros * header.size(change.unit, change.stage) / header.units_of_m_a
        )

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
        return change.micros * workers[change.worker].sizes(change.stage)[change.unit] / header.units

    return MemoryTable(
        "bytes",
        "memory",
        [worker.at_first for worker in workers],
        [available] * header.workers,
        [need.total for need in needs],
        _table(changes, size),
    )


def _changes(program: Program, rows: Sequence[OperationRow]) -> Iterator[_ChangeOfRow]:
    header, numbers = program.header, {row.operation: number for number, row in enumerate(rows)}
    # Of the operations on a micro-batch, one that is about few others.
    by_size = sorted(enumerate(rows), key=lambda entry: -len(entry[1].operation.micros))
    of = {(micro, row.operation.stage): number for number, row in by_size for micro in row.operation.micros}
    for worker, parts in enumerate(program.parts):
        timed = live.timed_changes(header, _steps(list(parts.steps), numbers), KEPT_UNITS)
        for (number, at_end), step, unit, amount in timed:
            whole = header.length(step.micros)
            for micro in step.micros:
                part, about = amount * header.length((micro,)) // whole, of[micro, step.stage]
                yield _ChangeOfRow(worker, step.stage, number, about, at_end, unit, part)


_Time = tuple[int, bool]
"""The start or, if True, the end of the operation in a row."""


def _steps(
    steps: Sequence[live.MoveStep], numbers: Mapping[Compute, int]
) -> Iterator[tuple[live.MoveStep, _Time, _Time]]:
    """Yields what a lane does with its times: what an operation makes is kept from its start on.

    Moves are launched and waited for between two operations. A change by a wait, or by a move that is launched after a
    wait, is shown at the start of the next operation, any other change by a move at the end of the one before.
    """
    operations = [numbers[step] for step in steps if isinstance(step, Compute) and not step.kind.moves]
    place, waited = 0, False
    for step in steps:
        moves = isinstance(step, WaitMove) or step.kind.moves
        waited = isinstance(step, WaitMove) or (waited and moves)
        if moves:
            follows = place < len(operations) and (waited or place == 0)
            between = operations[place if follows else place - 1], not follows
            yield step, between, between
        else:
            yield step, (operations[place], False), (operations[place], True)
            place += 1


def _table(changes: Sequence[_ChangeOfRow], size: _Size) -> ChangeTable:
    return ChangeTable(
        worker=[change.worker for change in changes],
        operation=[change.number for change in changes],
        of=[change.of for change in changes],
        at_end=[int(change.at_end) for change in changes],
        amount=[size(change) for change in changes],
    )


def _floats(amounts: Sequence[Fraction]) -> list[float]:
    return [float(amount) for amount in amounts]


# The texts beside the lanes, and the line of each operation in them: of the scheme, the program and the scripts.


def source_text(source: Source, rows: Iterable[OperationRow]) -> SourceText:
    """The text that was compiled, named without its folder, with the line that each operation comes from."""

    @cache
    def line_at(offset: int) -> int:
        return source.position(offset).line

    language = "csv" if source.is_csv else "sir" if source.is_ir else "chim"
    origins = [row.operation.origin for row in rows]
    lines = [0 if origin == NOWHERE else line_at(origin.start) for origin in origins]
    return SourceText(PurePath(source.name).name, language, source.text.replace("\r\n", "\n"), lines)


def program_text(text: str, verified: Verified, rows: Sequence[OperationRow]) -> SourceText:
    """The ``text`` of a program with the line of each operation; without a flush, its line in the turn."""
    headings = _headings(text, len(verified.program.lanes))
    place = _places(verified)
    return SourceText("schedule.sir", "sir", text, [headings[row.worker] + 1 + place(row) for row in rows])


def script_texts(scripts: ProvenScripts, program: Program, rows: Sequence[OperationRow]) -> Iterator[SourceText]:
    """The script of each rank, with the lines of the rank's own operations."""
    rows_of: dict[int, list[OperationRow]] = {worker: [*lane] for worker, lane in groupby(rows, attrgetter("worker"))}
    before = 0
    for worker, (script, numbers) in enumerate(zip(scripts.by_worker, scripts.lines, strict=True)):
        computes = program.parts[worker].computes.places
        called = [numbers[computes[row.place]] for row in rows_of.get(worker, ())]
        lines = [*([0] * before), *called, *([0] * (len(rows) - before - len(called)))]
        before += len(called)
        yield SourceText(script.name, "python", script.text, lines, worker)


def _headings(text: str, workers: int) -> list[int]:
    lines = text.split("\n")
    headings, line = list[int](), 0
    for worker in range(workers):
        line = lines.index(f"worker {worker}:", line)
        headings.append(line + 1)
    return headings


def _places(verified: Verified) -> Callable[[OperationRow], int]:
    """Maps the row of an operation to its line, from 0, in its worker's lane or, without a flush, turn."""
    level, parts = verified.level, verified.program.parts
    if not isinstance(level, ProgramStream):
        return lambda row: parts[row.worker].computes.places[row.place]
    # The lines of a turn, keyed by operations as in turn 0.
    turns = [
        {
            in_turn(level.header, line)[0]: place
            for place, line in enumerate(turn.instructions)
            if isinstance(line, Compute)
        }
        for turn in level.turns
    ]
    return lambda row: turns[row.worker][in_turn(level.header, row.operation)[0]]
