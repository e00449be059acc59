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
from chimera_ir.ir.ops import AllReduce, WaitAllReduce
from chimera_ir.verify.index import keys, sum_key


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


_Lane = list[int]
"""Of each instruction its event, if it is a wait, or the complement of that number, if it posts; else `_NEITHER`."""

_NEITHER = -(2**62)


class _Execution:
    """Runs each lane until it blocks, and again whenever what it waits for has come.

    An event happens once all its ends are posted: two for a message, one a worker for a sum.
    """

    def __init__(self, program: Program, until: Sequence[int]) -> None:
        header = program.header
        sums = (len(holders) for holders in header.holders for _ in range(header.updates))
        self._lacking = [2] * (2 * header.stages * header.micro_batches) + list(sums)
        self._lanes: list[_Lane] = [_lane(header, parts, end) for parts, end in zip(program.parts, until, strict=True)]
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
        lane, lacking = self._lanes[worker], self._lacking
        for place in range(self._next[worker], len(lane)):
            event = lane[place]
            if event >= 0:
                if lacking[event]:
                    self._sleepers.setdefault(event, []).append(worker)
                    self._next[worker] = place
                    return place
            elif event != _NEITHER:
                lacking[~event] -= 1
                if not lacking[~event]:
                    self._awake.extend(self._sleepers.pop(~event, ()))
        self._next[worker] = len(lane)
        return len(lane)


def _lane(header: Header, parts: Parts, length: int) -> _Lane:
    """The events of a lane's first ``length`` instructions."""
    lane = [_NEITHER] * parts.length
    for posted in (parts.sends, parts.recvs):
        for place, number in zip(posted.places, keys(header, posted.lines), strict=True):
            lane[place] = ~number
    for awaited in (parts.wait_sends, parts.wait_recvs):
        for place, number in zip(awaited.places, keys(header, awaited.lines), strict=True):
            lane[place] = number
    sums = 2 * header.stages * header.micro_batches
    for place, each in parts.updates:
        if isinstance(each, AllReduce | WaitAllReduce):
            number = sums + sum_key(header, each)
            lane[place] = ~number if isinstance(each, AllReduce) else number
    return lane[:length]


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
