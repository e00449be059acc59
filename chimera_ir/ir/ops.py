"""The operations of a worker: a closed union of small types, compared by what they do, not by where they stand.

In an asynchronous program operations name weight versions: the one that a compute operation reads, the one that a sum
and a step lead to. Where they are None the program is synchronous, and there is one version.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from chimera_ir.ir.ids import Micro, Slot, Stage, Version, Worker
from chimera_ir.ir.kinds import Kind
from chimera_ir.source import Span

NOWHERE = Span(0, 0)
"""The origin of an operation that no line of text asked for."""


class Message(NamedTuple):
    """What one stage hands to its neighbour: activations if ``source < target``, else gradients w.r.t. the input."""

    micros: tuple[Micro, ...]
    source: Stage
    target: Stage


@dataclass(frozen=True, slots=True)
class Compute:
    """What a stage computes, by its kind, of the concatenation of ``micros``."""

    kind: Kind
    micros: tuple[Micro, ...]
    stage: Stage
    origin: Span = field(default=NOWHERE, compare=False, repr=False)
    version: Version | None = None


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
    """Blocks the lane until a posted send has been taken over; its tensors may then go."""

    message: Message
    origin: Span = field(default=NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class WaitRecv:
    """Blocks the lane until a posted receive has arrived."""

    message: Message
    origin: Span = field(default=NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Launches the sum of a stage's gradients over all ranks that hold the stage; never blocks the lane."""

    stage: Stage
    origin: Span = field(default=NOWHERE, compare=False, repr=False)
    version: Version | None = None


@dataclass(frozen=True, slots=True)
class WaitAllReduce:
    """Blocks the lane until the sum of a stage's gradients is there."""

    stage: Stage
    origin: Span = field(default=NOWHERE, compare=False, repr=False)
    version: Version | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """The optimizer's step on the weights of a stage."""

    stage: Stage
    origin: Span = field(default=NOWHERE, compare=False, repr=False)
    version: Version | None = None


@dataclass(frozen=True, slots=True)
class Stash:
    """Keeps the newest weights of a stage, as ``version``, beside those that the next step makes."""

    stage: Stage
    version: Version
    origin: Span = field(default=NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Drop:
    """Lets a stashed version of a stage's weights go."""

    stage: Stage
    version: Version
    origin: Span = field(default=NOWHERE, compare=False, repr=False)


Talk = Send | Recv | WaitSend | WaitRecv
Instruction = Compute | Send | Recv | WaitSend | WaitRecv | AllReduce | WaitAllReduce | Step | Stash | Drop
