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
    """A kind of operations; ``preference`` decides between critical paths of equal length."""

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
    """Colours and pattern of the boxes of one colour group, on a light page and on a dark one."""

    name: str
    light: BoxColours
    dark: BoxColours
    pattern: int


@dataclass(frozen=True, slots=True)
class Slider:
    """A cost that can be changed, with its first and its largest value."""

    name: str
    label: str
    value: float
    max: float


@dataclass(frozen=True, slots=True)
class LengthForm:
    """A length as a sum of terms: the index of a slider, whose value counts, and a coefficient on it."""

    of: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class OperationTable:
    """Compute operations, lane by lane; both parts of a pair are rows."""

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
    """Wires on shared links, each with the ports where it leaves and where it arrives, which are numbered."""

    wire: Column
    leaving: Column
    arriving: Column


@dataclass(frozen=True, slots=True)
class EventTable:
    """Events and their waits: first those of the lanes, lane by lane, then all others."""

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
    """Messages, with the operations at both ends and the events in which they are sent and awaited."""

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
    """Sums of gradients with their launches; a sum that one rank holds alone has no event."""

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

    ``before`` has the nodes that each node waits for, ``ago`` how many turns earlier each of these runs.
    """

    events: Column
    before: Column
    before_from: Column
    ago: Column
    updates: int


@dataclass(frozen=True, slots=True)
class ChangeTable:
    """Changes of what a worker keeps, at the start or at the end of an operation."""

    worker: Column
    operation: Column
    at_end: Column
    amount: Column


@dataclass(frozen=True, slots=True)
class MemoryTable:
    """The memory of each worker in one unit."""

    unit: str
    name: str
    start: Column
    bound: Column | None
    peak: Column
    changes: ChangeTable


@dataclass(frozen=True, slots=True)
class Facts:
    """Figures of the report, to compare with."""

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
    """A text with the line of each operation, 0 for none; ``rank`` is -1 for a text that is not a script."""

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
    trace: object = None
    format: int = 1
