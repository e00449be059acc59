"""The instructions of a worker: a closed union of small types, compared by what they do, not by their origin.

Without a flush, instructions name weight versions: a compute operation the version that it reads, a sum and
a step the version that they lead to. In a synchronous program there is one version, and ``version`` is None.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from heapq import merge
from itertools import chain, combinations, groupby
from operator import itemgetter
from typing import Any, Generic, NamedTuple, NewType, TypeVar, cast

from chimera_ir.ir.kinds import PAIR, Kind, Pairing, Value
from chimera_ir.source import Span

# Sets of kinds that can make up all operations of a micro-batch on a stage, by the table alone: F and B, or F, I and W.


def unmade(kinds: Iterable[Kind]) -> Iterator[tuple[Kind, Value]]:
    """Yields each of ``kinds`` that reads a value of its own stage which none of ``kinds`` makes, with the value."""
    kinds = tuple(kinds)
    made = {value for row in kinds for value in row.keeps}
    yield from ((row, value) for row in kinds for value in row.reads if not value.crosses and value not in made)


@cache
def alternatives(kinds: tuple[Kind, ...]) -> tuple[tuple[Kind, ...], ...]:
    """Returns the sets of kinds that the operations of one micro-batch on a stage can have, the smallest set first.

    In each set exactly one kind opens the micro-batch, that is, comes first. A kind of the set can make each value that
    another one reads, before it is read. Each value that any of ``kinds`` frees is freed as often as it is made.
    Exactly one kind of the set sums gradients, if any of ``kinds`` does.

    Examples
    --------
    >>> from chimera_ir.ir.kinds import BACKWARD, FORWARD, INPUT_GRADIENT_ALONE, OFFLOAD, RELOAD, all_kinds
    >>> alternatives(tuple(kind for kind in all_kinds() if not kind.moves))
    ((F, B), (F, B, recompute), (F, I, W), (F, I, W, recompute))
    >>> alternatives((FORWARD, INPUT_GRADIENT_ALONE))
    ((F, I),)
    >>> alternatives((FORWARD, BACKWARD, OFFLOAD, RELOAD))
    ((F, B), (F, B, offload, reload))
    """
    freed = {value for row in kinds for value in row.frees}
    sums = int(any(row.sums for row in kinds))

    def complete(several: tuple[Kind, ...]) -> bool:
        kept = Counter(value for row in several for value in row.keeps if value in freed)
        gone = Counter(value for row in several for value in row.frees)
        once = sum(row.opens for row in several) == 1 and sum(row.sums for row in several) == sums
        return once and kept == gone and not any(unmade(several)) and _can_run(several)

    subsets = chain.from_iterable(combinations(kinds, size) for size in range(1, len(kinds) + 1))
    return tuple(filter(complete, subsets))


def _can_run(kinds: Iterable[Kind]) -> bool:
    """Whether in some order each kind finds made what it reads of its own stage and slice."""
    waiting, made = set(kinds), set[Value]()
    while waiting:
        ready = {kind for kind in waiting if all(v.crosses or v.slices_on or v in made for v in kind.reads)}
        if not ready:
            return False
        waiting -= ready
        made.update(value for kind in ready for value in kind.keeps)
    return True


# Types of integers that must not be mixed up.

Worker = NewType("Worker", int)
"""A place in the pipeline group, 0 .. workers-1; W copies of the group make W ranks of each worker."""

Stage = NewType("Stage", int)
"""The number of a stage, which is a part of the model, 0 .. D-1."""

WeightGroup = tuple[Stage, ...]
"""Weights that are summed and stepped together, named by the stages that hold them, ascending.

The weights of a stage alone have one stage; parameters that several stages share have all of these. The gradients are
summed over all workers that hold any of the stages."""

Micro = NewType("Micro", int)
"""The number of a micro-batch among those of all pipes, 0 .. N-1; in a turn, counted from its first micro-batch."""

Clock = NewType("Clock", int)
"""The order that a scheme gives an operation; it is not a time."""

Slot = NewType("Slot", int)
"""The index of a receive buffer among those that a worker has for the messages from one stage to another."""

Version = NewType("Version", int)
"""The number of updates that have made the weights of a group; only schemes without a flush have several versions.

In a turn, versions are counted from the one that the updates before the turn have made."""


# The choice of which messages share a communicator.


class Communicators(Enum):
    """The messages that share a communicator; the values are the names in report.json.

    ``DIRECTED``: messages from one worker to another. ``PAIR``: messages between two workers, in both directions.
    """

    DIRECTED = "directed"
    PAIR = "pair"


NOWHERE = Span(0, 0)
"""The origin of an instruction that comes from no line of text."""


Crossing = tuple[Stage, Stage, Value]
"""An edge of the graph of stages, by the value that crosses it: the stage that makes it, and a stage that reads it."""


class Message(NamedTuple):
    """A value of some micro-batches, from the stage that makes it to a stage that reads it.

    If several stages of a worker read activations, these are sent there once, to the first of these stages.
    """

    micros: tuple[Micro, ...]
    source: Stage
    target: Stage
    value: Value

    @property
    def edge(self) -> Crossing:
        """The edge between two stages that the message crosses."""
        return self[1:]


@dataclass(frozen=True, slots=True)
class Compute:
    """An operation of a stage on one or several micro-batches, which it takes together as one batch."""

    kind: Kind
    micros: tuple[Micro, ...]
    stage: Stage
    origin: Span = field(default=NOWHERE, compare=False, repr=False)
    version: Version | None = None

    @property
    def parts(self) -> tuple["Compute", ...]:
        """The operation itself, as a tuple of one; a `Pair` has two parts."""
        return (self,)

    @property
    def size(self) -> int:
        """The number of micro-batches."""
        return len(self.micros)


@dataclass(frozen=True, slots=True)
class Pair:
    """A forward and a backward of different micro-batches, which a worker runs as one operation.

    Both begin and end together, and both have the same number of micro-batches.
    """

    forward: Compute
    backward: Compute
    origin: Span = field(default=NOWHERE, compare=False, repr=False)

    @property
    def kind(self) -> Pairing:
        """The pairing, under which a pair's cost is found."""
        return PAIR

    @property
    def parts(self) -> tuple[Compute, ...]:
        """The forward and the backward."""
        return self.forward, self.backward

    @property
    def size(self) -> int:
        """The number of micro-batches of each of the two."""
        return len(self.forward.micros)


Operation = Compute | Pair
"""An operation of a worker: one computation, or a pair of two."""


def singles(operations: Iterable[Operation]) -> tuple[Compute, ...]:
    """The computations of some operations, with each pair as its forward and its backward."""
    whole = tuple(operations)
    if Pair in {*map(type, whole)}:
        return tuple(part for operation in whole for part in operation.parts)
    return cast("tuple[Compute, ...]", whole)


@dataclass(frozen=True, slots=True)
class Send:
    """Posts the sending of a message; never blocks the lane."""

    message: Message
    to: Worker
    origin: Span = field(default=NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Recv:
    """Posts the receipt of a message into a buffer; never blocks the lane."""

    message: Message
    source: Worker
    slot: Slot
    origin: Span = field(default=NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class WaitSend:
    """Blocks the lane until a posted send is over; its tensors are then free."""

    message: Message
    origin: Span = field(default=NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class WaitRecv:
    """Blocks the lane until a posted receive has arrived."""

    message: Message
    origin: Span = field(default=NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class WaitMove:
    """Blocks the lane until an offload or a reload is over; in a program, the line of the operation only launches it.

    After the wait for an offload the value is gone from the worker, after the wait for a reload it is gone from the
    host.
    """

    kind: Kind
    micros: tuple[Micro, ...]
    stage: Stage
    origin: Span = field(default=NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Launches the sum of a group's gradients over all ranks that hold any of its stages; never blocks the lane."""

    group: WeightGroup
    origin: Span = field(default=NOWHERE, compare=False, repr=False)
    version: Version | None = None


@dataclass(frozen=True, slots=True)
class WaitAllReduce:
    """Blocks the lane until the sum of a group's gradients is over."""

    group: WeightGroup
    origin: Span = field(default=NOWHERE, compare=False, repr=False)
    version: Version | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """Steps the optimizer on the weights of a group."""

    group: WeightGroup
    origin: Span = field(default=NOWHERE, compare=False, repr=False)
    version: Version | None = None


@dataclass(frozen=True, slots=True)
class Stash:
    """Keeps a copy of the newest weights of a group, as ``version``, while the next steps change the weights."""

    group: WeightGroup
    version: Version
    origin: Span = field(default=NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Drop:
    """Frees a stashed version of a group's weights."""

    group: WeightGroup
    version: Version
    origin: Span = field(default=NOWHERE, compare=False, repr=False)


Talk = Send | Recv | WaitSend | WaitRecv
Instruction = (
    Compute | Pair | Send | Recv | WaitSend | WaitRecv | WaitMove | AllReduce | WaitAllReduce | Step | Stash | Drop
)


# Finds which micro-batches operations take together, and so what each message is about.
#
# F m0,m1 s0      makes y of m0 and of m1, which F m0 s1 and F m1 s1 read: two messages
# B m0 s1
# B m1 s1
# B m0,m1 s0      reads dx of m0 and of m1, which are two messages as well


class Blocks:
    """The micro-batches that operations make values of together, and read values of together.

    A message is about micro-batches that one operation makes together and another reads together. Without operations
    all are read as they are made.
    """

    def __init__(self, operations: Iterable[Operation] = ()) -> None:
        self._together: dict[tuple[Value, Stage, Micro, bool], tuple[Micro, ...]] = {}
        for part in (part for operation in operations for part in operation.parts):
            if len(part.micros) > 1:
                made = ((value, True) for value in part.kind.hands_on)
                read = ((value, False) for value in part.kind.reads if value.crosses)
                keys = ((value, is_made, micro) for value, is_made in (*made, *read) for micro in part.micros)
                self._together |= {(value, part.stage, micro, is_made): part.micros for value, is_made, micro in keys}

    def of(self, micros: tuple[Micro, ...], value: Value, source: Stage, *targets: Stage) -> list[tuple[Micro, ...]]:
        """The micro-batches of the messages that are about ``micros``, which one end of an edge makes, or reads;
        ``targets`` are all stages that read the messages.
        """
        if len(micros) == 1 or not self._together:
            return [micros]

        def ends(micro: Micro) -> list[tuple[Micro, ...]]:
            keys = (value, source, micro, True), *((value, target, micro, False) for target in targets)
            return [self._together.get(key, (micro,)) for key in keys]

        return [tuple(together) for _, together in groupby(micros, ends)]

    def read_with(self, message: Message) -> tuple[Micro, ...]:
        """The micro-batches that are read together with those of a message."""
        micros, _, target, value = message
        return self._together.get((value, target, micros[0], False), micros)


# Sorts the instructions of a lane by type, so that a pass finds those of one type without a walk along all of them.

T = TypeVar("T", covariant=True)


@dataclass(frozen=True, slots=True)
class Lines(Generic[T]):
    """Instructions of one type in a lane: ``lines[i]`` stands at place ``places[i]`` of the lane."""

    places: "array[int]"
    lines: list[T]

    def __iter__(self) -> Iterator[tuple[int, T]]:
        return zip(self.places, self.lines, strict=True)


class LaneParts(NamedTuple):
    """A lane of ``length`` instructions, sorted by their types.

    ``computes`` has the compute operations; ``sends``, ``recvs`` and the waits for both are about messages.
    ``wait_moves`` has the waits for offloads and reloads, ``updates`` all lines about sums, steps and weight versions.
    """

    length: int
    computes: Lines[Operation]
    sends: Lines[Send]
    recvs: Lines[Recv]
    wait_sends: Lines[WaitSend]
    wait_recvs: Lines[WaitRecv]
    wait_moves: Lines[WaitMove]
    updates: Lines[AllReduce | WaitAllReduce | Step | Stash | Drop]

    @property
    def steps(self) -> Iterator[Compute | WaitMove]:
        """Yields the compute operations and the waits for offloads and reloads, in the order of the lane.

        A pair is its forward, then its backward.
        """
        if not self.wait_moves.lines:
            return (part for _, part in self.singles)
        lines: tuple[Iterator[tuple[int, Compute | WaitMove]], ...] = self.singles, iter(self.wait_moves)
        return (step for _, step in merge(*lines, key=itemgetter(0)))

    @property
    def singles(self) -> Iterator[tuple[int, Compute]]:
        """The compute operations with their places, one by one: a pair yields its forward, then its backward."""
        return ((place, part) for place, operation in self.computes for part in operation.parts)


def parts_of(lane: Sequence[Instruction]) -> LaneParts:
    """Returns the instructions of a lane sorted by their types."""
    parts = LaneParts(len(lane), *(Lines(array("q"), []) for _ in range(7)))
    of_kind: dict[type, Lines[Any]] = {
        Compute: parts.computes,
        Pair: parts.computes,
        Send: parts.sends,
        Recv: parts.recvs,
        WaitSend: parts.wait_sends,
        WaitRecv: parts.wait_recvs,
        WaitMove: parts.wait_moves,
        **dict.fromkeys((AllReduce, WaitAllReduce, Step, Stash, Drop), parts.updates),
    }
    for place, instruction in enumerate(lane):
        lines = of_kind[type(instruction)]
        lines.places.append(place)
        lines.lines.append(instruction)
    return parts


# The operations of a plan: with a clock, or without one.


class Planned(NamedTuple):
    """An operation with its worker and its clock."""

    clock: Clock
    worker: Worker
    operation: Operation


class Unclocked(NamedTuple):
    """An operation without a clock, with its worker and the value of its ``prefer``, if its line has one."""

    preference: int | None
    worker: Worker
    operation: Operation
