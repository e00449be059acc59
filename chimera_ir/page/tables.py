"""The tables of a page, column by column: the Python side of ``templates/page/document.d.ts``, field by field."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

Column = Sequence[int] | Sequence[float]
"""Numbers, one for each row of a table."""


class Nested(NamedTuple):
    """Rows of several numbers in two columns: all numbers in a sequence, and where each row begins, then the end."""

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
    """A kind of operations; ``preference`` decides between critical paths of equal length.

    The path with the most operations of preference 3 is taken, then the one with the most pairs, then of preference 1.
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
    """A length as a sum of terms; each is the index of a slider and the factor on the slider's value."""

    of: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class OperationTable:
    """Compute operations, lane by lane; both parts of a pair are rows.

    ``kind``, ``look`` and ``event`` are rows of the tables of kinds, looks and events. ``size`` is in micro-batches,
    and ``row`` is the part of the lane's height. ``label`` stands in the box, ``words`` is the operation as in IR text.
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
    """Events and their waits: first those of the lanes, lane by lane, then all others.

    ``verb`` and ``form`` are indices into ``verbs`` and ``forms``. ``subject`` is the row of the event's message, sum,
    move or operation. ``before`` and ``before_from`` are the events that each waits for, in the form of `Nested`.
    ``lane_from`` has the first event of each lane, then the end of the last.
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
    """Messages, with the operations at both ends and the events in which they are sent and awaited.

    ``maker`` and ``taker`` are rows of operations, ``link`` is an index into ``links``. The other numbers are events:
    ``send`` and ``recv`` are those after which each end is posted, ``wire`` and ``flight`` those of the transfer,
    ``wait`` is the receiver's wait.
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
    """Sums of gradients, each with its event, and the events after which its workers launch it.

    ``launches`` and ``launches_from`` have the form of `Nested`. A sum that one rank holds alone has no event: -1.
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
    """Changes of what a worker keeps, by ``amount`` (negative for less).

    Each happens at the start or at the end of an operation, which is given by its row.
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
    """Figures of the report, for comparison with those that a page computes.

    ``critical`` has how many operations of each kind, by letter, are on the critical path.
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
