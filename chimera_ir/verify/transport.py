"""The two transports of the rule "channels", each as it is, and the lanes that run on them.

Directed queues (NCCL)
    One in-order queue per directed pair of workers. A transfer happens when its send and its receive are both at the
    head.
Tagged (gloo)
    A transfer happens once both ends are posted, in any order.

On both, posting never blocks a lane; a wait blocks it until the transfer has happened. A sum is done once every worker
that holds the stage has launched it; every stage has its own communicator, on which the sums of all updates follow one
another in the order in which all its members launch them (rule "gradients").
"""

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, assert_never

from chimera_ir.ir.ids import Worker
from chimera_ir.ir.levels import Header, Program
from chimera_ir.ir.ops import (
    AllReduce,
    Backward,
    Drop,
    Forward,
    Instruction,
    Recv,
    Send,
    Stash,
    Step,
    WaitAllReduce,
    WaitRecv,
    WaitSend,
)
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


class _Tagged:
    """Counts the posted ends of each message."""

    def __init__(self, messages: int) -> None:
        self._ends = bytearray(messages)

    def post_send(self, message: int, worker: int, peer: int) -> list[int]:
        """The transfers that happen by a send."""
        self._ends[message] += 1
        return [message] if self._ends[message] == 2 else []

    def post_recv(self, message: int, worker: int, peer: int) -> list[int]:
        """The transfers that happen by a receive."""
        return self.post_send(message, worker, peer)


class _Directed:
    """Keeps what is posted at both ends of every directed pair, and not transferred yet."""

    def __init__(self) -> None:
        self._queues: dict[tuple[int, int], tuple[deque[int], deque[int]]] = {}

    def post_send(self, message: int, worker: int, peer: int) -> list[int]:
        """The transfers that happen by a send."""
        queue = self._queues.setdefault((worker, peer), (deque(), deque()))
        queue[0].append(message)
        return self._heads(*queue)

    def post_recv(self, message: int, worker: int, peer: int) -> list[int]:
        """The transfers that happen by a receive."""
        queue = self._queues.setdefault((peer, worker), (deque(), deque()))
        queue[1].append(message)
        return self._heads(*queue)

    @staticmethod
    def _heads(sends: deque[int], recvs: deque[int]) -> list[int]:
        done = []
        while sends and recvs and sends[0] == recvs[0]:
            done.append(sends.popleft())
            recvs.popleft()
        return done


class _Execution:
    """Runs each lane until it blocks, and again whenever what it waits for has come."""

    def __init__(self, program: Program, transport: Transport) -> None:
        header = program.header
        self._header = header
        self._lanes = program.lanes
        self._sums = 2 * header.stages * header.micro_batches
        self._done = bytearray(self._sums + header.stages * header.updates)
        self._lacking = [len(holders) for holders in header.holders for _ in range(header.updates)]
        self._sleepers: dict[int, list[int]] = {}
        self._wire: _Tagged | _Directed = _Directed() if transport is Transport.DIRECTED else _Tagged(self._sums)
        self._places = [0] * len(self._lanes)
        self._awake = deque(range(len(self._lanes)))

    def run(self) -> Replay:
        runs: list[Run] = []
        while self._awake:
            worker = self._awake.popleft()
            before = self._places[worker]
            self._advance(worker)
            if self._places[worker] > before:
                runs.append(Run(Worker(worker), self._places[worker] - before))
        return Replay(tuple(runs), tuple(self._places))

    def _advance(self, worker: int) -> None:
        lane = self._lanes[worker]
        for place in range(self._places[worker], len(lane)):
            event = awaited(self._header, lane[place])
            if event is not None and not self._done[event]:
                self._sleepers.setdefault(event, []).append(worker)
                self._places[worker] = place
                return
            for happened in self._post(worker, lane[place]):
                self._done[happened] = True
                self._awake.extend(self._sleepers.pop(happened, ()))
        self._places[worker] = len(lane)

    def _post(self, worker: int, instruction: Instruction) -> list[int]:
        """What happens by an instruction, now that it is its turn."""
        match instruction:
            case Send(message, to):
                return self._wire.post_send(key(self._header, message), worker, to)
            case Recv(message, source):
                return self._wire.post_recv(key(self._header, message), worker, source)
            case AllReduce():
                number = sum_key(self._header, instruction)
                self._lacking[number] -= 1
                return [] if self._lacking[number] else [self._sums + number]
            case Forward() | Backward() | WaitSend() | WaitRecv() | WaitAllReduce() | Step() | Stash() | Drop():
                return []
            case _:
                assert_never(instruction)


def awaited(header: Header, instruction: Instruction) -> int | None:
    """The event for which an instruction blocks its lane: a message by its `key`, a sum after all messages."""
    match instruction:
        case WaitSend(message) | WaitRecv(message):
            return key(header, message)
        case WaitAllReduce():
            return 2 * header.stages * header.micro_batches + sum_key(header, instruction)
        case _:
            return None


def replay(program: Program, transport: Transport) -> Replay:
    """Runs the lanes as far as they come.

    Posting never blocks and what has happened stays so: the lanes come equally far whatever the order they run in.

    Parameters
    ----------
    program
        Without errors by the rules "messages" and "gradients".
    transport
        The model of the messages.
    """
    return _Execution(program, transport).run()
