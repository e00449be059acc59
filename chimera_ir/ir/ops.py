"""The instructions of a worker: a closed union of small types, compared by what they do, not by their origin.

Without a flush, instructions name weight versions: a compute operation the version that it reads, a sum and
a step the version that they lead to. In a synchronous program there is one version, and ``version`` is None.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from chimera_ir.ir.ids import Micro, Slot, Stage, Version, WeightGroup, Worker
from chimera_ir.ir.kinds import PAIR, Kind, Pairing, Value
from chimera_ir.source import Span

NOWHERE = Span(0, 0)
"""The origin of an instruction that comes from no line of text."""


Crossing = tuple[Stage, Stage, Value]
"""An edge of the graph of stages, by the value that crosses it: the stage that makes it, and a stage that reads it."""


class Message(NamedTuple):
    """A value of some micro-batches, from the stage that makes it to a stage that reads it."""

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
