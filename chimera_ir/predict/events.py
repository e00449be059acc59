"""The events of a program, and what each waits for: all that a replay knows about how programs run.

A lane runs its instructions one after another. `send`, `recv` and `all_reduce` only post.

    begin       of a lane: nothing; an update that follows another begins once the lane has ended that
    compute     once the lane is there; takes its stage's time
    step        once the lane is there; takes the time of its stage's optimizer, and is no event where that is 0
    post        keeps the lane for the link's overhead, before anything that it posts begins
    notice      a posted receive tells the sender, which takes the link's latency; gloo sends no payload before that
    wire        a message leaves once it is sent, its notice is there, and what was sent before it on the same link
                (from one worker to one other) has left; takes bytes times beta
    flight      until it has arrived: the link's latency
    eager       messages have no notice: one leaves once it is sent, and what was sent eagerly before it has left;
                a wait of its send waits for nothing
    sum         an all-reduce runs once its last member has launched it, and what each of them launched before is over
    wait        of a send until the message has left, of a receive until it has arrived, of a sum until that is over

Every event waits for a fixed set of others and begins when the last of them is over. So an event that takes longer
never makes another one earlier, unless wires share a port (`shares`), where one of them that comes later lets others go
first.
"""

from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple, assert_never

from chimera_ir.ir.ids import Worker
from chimera_ir.ir.levels import Program
from chimera_ir.ir.ops import (
    AllReduce,
    Compute,
    Drop,
    Instruction,
    Message,
    Recv,
    Send,
    Stash,
    Step,
    WaitAllReduce,
    WaitRecv,
    WaitSend,
)
from chimera_ir.predict.charges import Charges
from chimera_ir.profile.cluster import Link


class Role(Enum):
    """What an event is; the head of this file says how each behaves."""

    BEGIN = auto()
    COMPUTE = auto()
    STEP = auto()
    POST = auto()
    NOTICE = auto()
    WIRE = auto()
    FLIGHT = auto()
    SUM = auto()
    WAIT = auto()


class Node(NamedTuple):
    """An event: the instruction that asks for it (a lane's first for its begin), the workers that take part, how long.

    Of a wire and of a flight the workers are the sender and the receiver, of a notice the receiver and the sender.
    """

    role: Role
    what: Instruction
    workers: tuple[Worker, ...]
    seconds: float


class Port(NamedTuple):
    """Where messages over a link leave a worker, or arrive."""

    worker: Worker
    leaving: bool
    link: Link


class Events(NamedTuple):
    """All events by number: event n waits for those in ``before[n]``.

    ``lanes[w]`` are in order: the begin of worker w, if it has anything to do, then its computes, its waits, and
    what posting and stepping take where they take something.

    ``posted[n]`` are the events after which a wire or a sum was posted: by both ends, an eager one by its sender alone,
    a sum by every member.
    ``ports[n]`` are those that a wire shares with others, where its link is shared; its seconds are those that it would
    take alone.
    """

    nodes: Sequence[Node]
    before: Sequence[Sequence[int]]
    posted: dict[int, list[int]]
    lanes: Sequence[Sequence[int]]
    ports: dict[int, tuple[Port, Port]]

    def after(self) -> list[list[int]]:
        """Those that wait for each event."""
        found: list[list[int]] = [[] for _ in self.nodes]
        for number, before in enumerate(self.before):
            for other in before:
                found[other].append(number)
        return found


def events(program: Program, charges: Charges) -> Events:
    """The events of a verified program, in time linear in its instructions."""
    gathered = _Gathered(charges)
    for number, lane in enumerate(program.lanes):
        gathered.lane(Worker(number), lane)
    return Events(gathered.nodes, gathered.before, gathered.posted, gathered.lanes, gathered.ports)


class _Gathered:
    """The events of the lanes so far."""

    def __init__(self, charges: Charges) -> None:
        self.nodes: list[Node] = []
        self.before: list[list[int]] = []
        self.posted: dict[int, list[int]] = {}
        self.lanes: list[list[int]] = []
        self.ports: dict[int, tuple[Port, Port]] = {}
        self._charges = charges
        self._wires: dict[Message, int] = {}
        self._eager: set[int] = set()
        self._sums: dict[tuple[int, int | None], int] = {}

    def lane(self, worker: Worker, instructions: Sequence[Instruction]) -> None:
        """Adds what a worker does; what it waits for may be added only later."""
        own = [self._add(Role.BEGIN, each, (worker,), 0.0, []) for each in instructions[:1]]
        on_link: dict[tuple[Worker, bool], list[int]] = {}
        last_sum: list[int] = []
        for each in instructions:
            own += self._overhead(worker, each, own[-1:])
            now = own[-1:]
            match each:
                case Compute():
                    own.append(self._add(Role.COMPUTE, each, (worker,), self._charges.compute(each), now))
                case Send(message, to):
                    wire = self._wire(each, worker, to)
                    queue = to, wire in self._eager
                    self._post(wire, now, on_link.get(queue, []))
                    on_link[queue] = [wire]
                case Recv(message, source):
                    wire = self._wire(Send(message, worker), source, worker)
                    if wire not in self._eager:
                        alpha = self.nodes[wire + 1].seconds
                        notice = self._add(Role.NOTICE, each, (worker, source), alpha, now)
                        self.before[wire].append(notice)
                        self.posted[wire] += now
                case WaitSend(message):
                    wire = self._wires[message]
                    awaited = [] if wire in self._eager else [wire]
                    own.append(self._add(Role.WAIT, each, (worker,), 0.0, now + awaited))
                case WaitRecv(message):
                    own.append(self._add(Role.WAIT, each, (worker,), 0.0, [*now, self._wires[message] + 1]))
                case AllReduce(stage):
                    if self._charges.ranks(stage) > 1:
                        total = self._sum(each)
                        self._post(total, now, last_sum)
                        last_sum = [total]
                case WaitAllReduce(stage, version=version):
                    awaited = [self._sums[stage, version]] if self._charges.ranks(stage) > 1 else []
                    own.append(self._add(Role.WAIT, each, (worker,), 0.0, now + awaited))
                case Step(stage):
                    if seconds := self._charges.step(stage):
                        own.append(self._add(Role.STEP, each, (worker,), seconds, now))
                case Stash() | Drop():
                    pass
                case _:
                    assert_never(each)
        self.lanes.append(own)

    def _overhead(self, worker: Worker, what: Instruction, now: list[int]) -> list[int]:
        seconds = self._charges.overhead(worker, what)
        return [self._add(Role.POST, what, (worker,), seconds, now)] if seconds else []

    def _add(
        self, role: Role, what: Instruction, workers: tuple[Worker, ...], seconds: float, before: list[int]
    ) -> int:
        self.nodes.append(Node(role, what, workers, seconds))
        self.before.append(before)
        return len(self.nodes) - 1

    def _post(self, event: int, now: list[int], queue: list[int]) -> None:
        self.before[event] += now + queue
        self.posted[event] += now

    def _wire(self, send: Send, source: Worker, target: Worker) -> int:
        """The wire of a message, which its flight follows by number; whichever end comes first adds both."""
        message = send.message
        if message not in self._wires:
            whole, size, ends = self._charges.link(source, target), self._charges.size(message), (source, target)
            link = whole.of(size)
            wire = self._add(Role.WIRE, send, ends, link.beta * size, [])
            self._add(Role.FLIGHT, send, ends, link.alpha, [wire])
            self._wires[message], self.posted[wire] = wire, []
            if link.eager:
                self._eager.add(wire)
            if whole.shared:
                self.ports[wire] = Port(source, True, whole), Port(target, False, whole)
        return self._wires[message]

    def _sum(self, launch: AllReduce) -> int:
        key = launch.stage, launch.version
        if key not in self._sums:
            members = self._charges.header.holders[launch.stage]
            self._sums[key] = self._add(Role.SUM, launch, members, self._charges.all_reduce(launch.stage), [])
            self.posted[self._sums[key]] = []
        return self._sums[key]
