"""The tables of a page, column by column: the Python side of ``templates/page/document.d.ts``, field by field."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

Column = Sequence[int] | Sequence[float]
"""Numbers, one for each row of a table."""


class Nested(NamedTuple):
    """Rows of several numbers, stored as two columns.

    ``numbers`` has the numbers of all rows, one row after another. ``starts`` has the index in ``numbers`` at which
    each row begins and, as one entry more, the length of ``numbers``.
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
    """A kind of operations, such as all forwards.

    ``preference`` decides which of several critical paths of equal length is taken: the path with the most operations
    of preference 3, then the path with the most pairs, then the path with the most operations of preference 1.
    """

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
    """Colours and pattern of the boxes of one colour group, on a light page and on a dark one.

    ``name`` says which pipe, stage and kind they are; ``pattern`` is a number, different for each chunk and slice.
    """

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
    """Compute operations, a row for each, lane by lane; a pair has a row for each of its two parts.

    ``kind``, ``look`` and ``event`` are indices of rows in the tables of kinds, looks and events. ``size`` is the
    number of micro-batches. ``row`` says which part of the lane's height the box takes: all of it, or a half. ``label``
    is the text in the box, ``words`` the operation as in IR text.
    """

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
    """Events of the program, and the events that each waits for: first those of lanes, lane by lane, then all others.

    ``verb`` and ``form`` are indices into ``verbs`` and ``forms``; a form says how long the event is. ``subject`` is
    the row of the event's message, sum, move or operation. ``before`` and ``before_from`` are the two columns of a
    `Nested`, whose rows have the events that each event waits for. ``lane_from`` has the first event of each lane, then
    the end of the last lane.
    """

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
    """Messages, a row for each, with the operations at both ends and the events of the transfer.

    ``maker`` and ``taker`` are the rows of the operations that make and read the value, ``link`` is an index into
    ``links``. All other numbers are events: the sender posts the message after event ``send``, the receiver after event
    ``recv``; ``wire`` and ``flight`` are the two parts of the transfer, and in ``wait`` the receiver waits for the
    message.
    """

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
    """Sums of gradients, a row for each, with the event of the sum and the events after which workers launch it.

    ``launches`` and ``launches_from`` are the two columns of a `Nested`, with a row of events for each sum. The
    ``event`` of a sum that one rank holds alone is -1: nothing is added.
    """

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
    """The turn that a stream repeats: node n is event ``events[n]``.

    ``before`` has the nodes that each node waits for, in the form of `Nested`, and ``ago`` how many turns earlier each
    of these runs. A turn makes ``updates`` updates.
    """

    events: Column
    before: Column
    before_from: Column
    ago: Column
    updates: int


@dataclass(frozen=True, slots=True)
class ChangeTable:
    """Changes of the amount that a worker keeps, a row for each: ``amount`` is added, or freed if it is negative.

    ``operation`` is the row of the operation that makes the change: at its end if ``at_end``, else at its start.
    """

    worker: Column
    operation: Column
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
    """Figures of the report, with which a page compares the figures that it computes itself.

    ``critical`` maps the letter of each kind to the number of its operations on the critical path.
    """

    makespan: float
    bubble_ratio: float
    critical: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ScheduleTables:
    """All tables of one schedule."""

    name: str
    workers: int
    unit: str
    updates: int
    kinds: Sequence[OperationKind]
    looks: Sequence[Look]
    sliders: Sequence[Slider]
    operations: OperationTable
    events: EventTable
    messages: MessageTable
    sums: SumTable
    moves: MoveTable
    turn: TurnTable | None
    memory: Sequence[MemoryTable]
    facts: Facts
    remarks: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class SourceText:
    """A text, and for each row of operations its line in the text, 0 if it has none.

    ``rank`` is that of a script, and -1 for any other text.
    """

    name: str
    language: str
    text: str
    line: Column
    rank: int = -1


@dataclass(frozen=True, slots=True)
class ShownMistake:
    """A mistake of a text: the message, what of it is drawn on the lanes, and its lines in the text.

    ``operations`` are the rows of operations to mark. An arrow goes from one row to another and has words. ``missing``
    are instructions that the text lacks.
    """

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
    trace: object = None
    format: int = 1
