"""The two transports of the rule "channels", and the lanes that run on them.

Directed queues (NCCL)
    One in-order queue per directed pair of workers. A transfer happens when its send and its receive are both at the
    head.
Tagged (gloo)
    A transfer happens once both ends are posted, in any order.

On both, posting never blocks a lane; a wait blocks it until the transfer has happened. A sum is done once every worker
that holds the stage has launched it; every stage has its own communicator.

Where every pair of workers sends and receives in the same order the two are one: if both ends of a message are posted,
so are both ends of all before it in its queue, none of which is there any more. So lanes need to be run only once; that
the orders agree is what the rule looks at first.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from chimera_ir.ir.ids import Worker
from chimera_ir.ir.levels import Header, Parts, Program
from chimera_ir.ir.ops import AllReduce, Recv, Send, WaitAllReduce
from chimera_ir.verify.index import key, sum_key


class Transport(Enum):
    """How messages find their receivers; the value is how diagnostics call it."""

    DIRECTED = "in-order queues (NCCL)"
    TAGGED = "tagged messages (gloo)"


class Run(NamedTuple):
    """A worker performs its next ``length`` instructions."""

    worker: Worker
    length: int


@dataclass(frozen=True, slots=True)
class Replay:
    """How far the lanes come: the runs in a global order, and the place in its lane at which each worker ends.

    If every place is the length of the lane, ``runs`` is a certificate: performed in this order no wait ever blocks.
    """

    runs: tuple[Run, ...]
    places: tuple[int, ...]


_POSTED = (Send, Recv)


class _Lane(NamedTuple):
    """What of a lane matters: the places of its postings and waits, and the event of each.

    A wait is the number of its event, a posting the bitwise complement of that number.
    """

    places: list[int]
    events: list[int]
    length: int


class _Execution:
    """Runs each lane until it blocks, and again whenever what it waits for has come.

    An event happens once all its ends are posted: two for a message, one a worker for a sum.
    """

    def __init__(self, program: Program, until: Sequence[int]) -> None:
        header = program.header
        sums = (len(holders) for holders in header.holders for _ in range(header.updates))
        self._lacking = [2] * (2 * header.stages * header.micro_batches) + list(sums)
        self._lanes = [_lane(header, parts, end) for parts, end in zip(program.parts, until, strict=True)]
        self._next = [0] * len(self._lanes)
        self._sleepers: dict[int, list[int]] = {}
        self._awake = deque(range(len(self._lanes)))

    def run(self) -> Replay:
        runs: list[Run] = []
        places = [0] * len(self._lanes)
        while self._awake:
            worker = self._awake.popleft()
            place = self._advance(worker)
            if place > places[worker]:
                runs.append(Run(Worker(worker), place - places[worker]))
                places[worker] = place
        return Replay(tuple(runs), tuple(places))

    def _advance(self, worker: int) -> int:
        """Runs a lane as far as it comes; the place where that is."""
        places, events, length = self._lanes[worker]
        lacking = self._lacking
        for number in range(self._next[worker], len(events)):
            event = events[number]
            if event >= 0:
                if lacking[event]:
                    self._sleepers.setdefault(event, []).append(worker)
                    self._next[worker] = number
                    return places[number]
                continue
            lacking[~event] -= 1
            if not lacking[~event]:
                self._awake.extend(self._sleepers.pop(~event, ()))
        self._next[worker] = len(events)
        return length


def _lane(header: Header, parts: Parts, end: int) -> _Lane:
    sums = 2 * header.stages * header.micro_batches
    found: list[tuple[int, int]] = []
    for place, talk in parts.messages:
        event = key(header, talk.message)
        found.append((place, ~event if isinstance(talk, _POSTED) else event))
    for place, update in parts.updates:
        if isinstance(update, AllReduce | WaitAllReduce):
            event = sums + sum_key(header, update)
            found.append((place, ~event if isinstance(update, AllReduce) else event))
    found.sort()
    return _Lane([place for place, _ in found if place < end], [event for place, event in found if place < end], end)


def replay(program: Program, until: Sequence[int] | None = None) -> Replay:
    """Runs the lanes as far as they come.

    Posting never blocks and what has happened stays so: the lanes come equally far whatever the order they run in.

    Parameters
    ----------
    program
        Without errors by the rules "messages" and "gradients". On directed queues it must also send and receive in the
        same orders.
    until
        The place at which each lane ends, if it is not its end.
    """
    return _Execution(program, until or [len(lane) for lane in program.lanes]).run()
