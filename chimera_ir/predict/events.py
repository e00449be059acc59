"""Events of a program and the waits between them, on which a replay is based.

A lane runs its instructions one after another; `send`, `recv` and `all_reduce` only post. An event has a role:

    begin       start of a lane; waits for nothing, or for the end of the lane in the update before
    compute     waits for its lane; takes its stage's time
    step        waits for its lane; takes the time of its stage's optimizer; no event where that time is 0
    post        occupies its lane for the link's overhead, before anything that it posts begins
    notice      tells the sender that a receive is posted; takes the link's latency; gloo sends no payload before it
    wire        sends a message; waits for the send, the notice, and the message before it on the same link (from one
                worker to one other); takes bytes times beta
    flight      follows the wire until the message has arrived; takes the link's latency
    sum         runs an all-reduce; waits until its last member has launched it, and until the sum that each member
                launched before it is over
    move        copies to the host or back; waits until its worker has launched it, and for the move before it
    wait        of a send: until the message has left; of a receive: until the message has arrived; of a sum or a move:
                until it is over

Every event waits for a fixed set of others and begins when the last of them is over. So an event that takes longer
never makes another event earlier, except where wires share a port (`shares`): a wire that begins later leaves more of
the port to the others.
"""

from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple, assert_never

from chimera_ir.ir import ops
from chimera_ir.ir.ids import Micro, Stage, WeightGroup, Worker
from chimera_ir.ir.kinds import Kind
from chimera_ir.ir.levels import Program
from chimera_ir.predict.charges import Charges
from chimera_ir.profile.cluster import Link


class Role(Enum):
    """Role of an event; the docstring of this module says how each role behaves."""

    BEGIN = auto()
    COMPUTE = auto()
    STEP = auto()
    POST = auto()
    NOTICE = auto()
    WIRE = auto()
    FLIGHT = auto()
    SUM = auto()
    WAIT = auto()
    MOVE = auto()


class Node(NamedTuple):
    """An event, with its role, the instruction that causes it, the workers that take part, and its length in seconds.

    An event with the role "begin" has the lane's first instruction. The workers of a wire and of a flight are the
    sender and the receiver, those of a notice the receiver and the sender.
    """

    role: Role
    instruction: ops.Instruction
    workers: tuple[Worker, ...]
    seconds: float


class Port(NamedTuple):
    """One direction of a link at a worker: where messages leave (``leaving``), or where they arrive.

    A link to the ``host`` has one port for both directions; ``worker`` is then the first of the workers that share the
    link. In `Events.ports`, where a move has two ports, it stands as both of them.
    """

    worker: Worker
    leaving: bool
    link: Link
    host: bool = False


class Events(NamedTuple):
    """All events of a program; outside ``nodes``, an event is given by its index in ``nodes``.

    ``before[e]`` has the events that event e waits for. ``posted[e]``, for a message, a sum, a move or a wait for one
    of these, has the events after which it is posted: one at each end of a message, one at each member of a sum.
    ``lanes`` has the events of each worker in order: its begin, if it has any instruction, then computes and waits, and
    the posts and steps that take time. ``ports[e]``, for a wire or a move on a shared link, has its two ports; the
    ``seconds`` of such an event are those that it would take alone on its link.
    """

    nodes: Sequence[Node]
    before: Sequence[Sequence[int]]
    posted: dict[int, list[int]]
    lanes: Sequence[Sequence[int]]
    ports: dict[int, tuple[Port, Port]]

    def after(self) -> list[list[int]]:
        """Lists, for each event, the events that wait for it."""
        after: list[list[int]] = [[] for _ in self.nodes]
        for number, before in enumerate(self.before):
            for other in before:
                after[other].append(number)
        return after


def events_of(program: Program, charges: Charges) -> Events:
    """The events of a verified program with lengths from ``charges``, in time linear in its instructions."""
    gathered = _Gathered(charges)
    for number, lane in enumerate(program.lanes):
        gathered.lane(Worker(number), lane)
    return Events(gathered.nodes, gathered.before, gathered.posted, gathered.lanes, gathered.ports)


class _Gathered:
    """Collects events lane by lane.

    The first lane that posts a message or a sum adds its event; other lanes only add what that event waits for.
    """

    def __init__(self, charges: Charges) -> None:
        self.nodes: list[Node] = []
        self.before: list[list[int]] = []
        self.posted: dict[int, list[int]] = {}
        self.lanes: list[list[int]] = []
        self.ports: dict[int, tuple[Port, Port]] = {}
        self._charges = charges
        self._wires: dict[ops.Message, int] = {}
        self._sums: dict[tuple[WeightGroup, int | None], int] = {}

    def lane(self, worker: Worker, instructions: Sequence[ops.Instruction]) -> None:
        """Adds the events of a worker; events of other workers that they wait for may be added later."""
        lane: list[int] = []

        def follow(role: Role, instruction: ops.Instruction, seconds: float = 0.0, awaited: int | None = None) -> None:
            event = self._add(role, instruction, (worker,), seconds, lane[-1:])
            lane.append(event)
            if awaited is not None:
                self.before[event].append(awaited)
                self.posted[event] = self.posted[awaited]

        for first in instructions[:1]:
            follow(Role.BEGIN, first)
        # ``now`` is the last event of the lane, which the next one waits for. The last wire to each worker and the last
        # sum are kept as well, because wires on a link and the sums of a worker run one after another.
        on_link: dict[Worker, list[int]] = {}
        last_sum: list[int] = []
        last_move: list[int] = []
        moves: dict[tuple[Kind, tuple[Micro, ...], Stage], int] = {}
        for instruction in instructions:
            if overhead := self._charges.overhead(worker, instruction):
                follow(Role.POST, instruction, overhead)
            now = lane[-1:]
            match instruction:
                case ops.Compute(kind, micros, stage) if kind.moves:
                    move = self._move(instruction, worker, [*now, *last_move])
                    self.posted[move] = now
                    moves[kind, micros, stage], last_move = move, [move]
                case ops.WaitMove(kind, micros, stage):
                    follow(Role.WAIT, instruction, awaited=moves[kind, micros, stage])
                case ops.Compute() | ops.Pair():
                    follow(Role.COMPUTE, instruction, self._charges.compute(instruction))
                case ops.Send(message, to):
                    wire = self._wire(instruction, worker, to)
                    self._post(wire, now, on_link.get(to, []))
                    on_link[to] = [wire]
                case ops.Recv(message, source):
                    # The wire has to wait for the notice; its flight, which has the next index, takes the latency.
                    wire = self._wire(ops.Send(message, worker), source, worker)
                    alpha = self.nodes[wire + 1].seconds
                    notice = self._add(Role.NOTICE, instruction, (worker, source), alpha, now)
                    self.before[wire].append(notice)
                    self.posted[wire] += now
                case ops.WaitSend(message):
                    follow(Role.WAIT, instruction, awaited=self._wires[message])
                case ops.WaitRecv(message):
                    follow(Role.WAIT, instruction, awaited=self._wires[message] + 1)
                case ops.AllReduce(group):
                    if self._charges.ranks(group) > 1:
                        total = self._sum(instruction)
                        self._post(total, now, last_sum)
                        last_sum = [total]
                case ops.WaitAllReduce(group, version=version):
                    is_alone = self._charges.ranks(group) == 1
                    follow(Role.WAIT, instruction, awaited=None if is_alone else self._sums[group, version])
                case ops.Step(group):
                    if seconds := self._charges.step(group):
                        follow(Role.STEP, instruction, seconds)
                case ops.Stash() | ops.Drop():
                    pass
                case _:
                    assert_never(instruction)
        self.lanes.append(lane)

    def _add(
        self, role: Role, instruction: ops.Instruction, workers: tuple[Worker, ...], seconds: float, before: list[int]
    ) -> int:
        self.nodes.append(Node(role, instruction, workers, seconds))
        self.before.append(before)
        return len(self.nodes) - 1

    def _post(self, event: int, now: list[int], queue: list[int]) -> None:
        self.before[event] += now + queue
        self.posted[event] += now

    def _wire(self, send: ops.Send, source: Worker, target: Worker) -> int:
        """Returns the event that is the wire of a message, which ``send`` takes from worker ``source`` to ``target``.

        The first call for a message adds its wire and its flight, which has the next index.
        """
        message = send.message
        if message not in self._wires:
            link, ends = self._charges.link(source, target), (source, target)
            wire = self._add(Role.WIRE, send, ends, link.beta * self._charges.size(message), [])
            self._add(Role.FLIGHT, send, ends, link.alpha, [wire])
            self._wires[message] = wire
            self.posted[wire] = self.posted[wire + 1] = []
            if link.shared:
                self.ports[wire] = Port(source, True, link), Port(target, False, link)
        return self._wires[message]

    def _move(self, move: ops.Compute, worker: Worker, before: list[int]) -> int:
        first, factor = self._charges.host_link(worker)
        event = self._add(Role.MOVE, move, (worker,), factor * self._charges.compute(move), before)
        if self._charges.host_is_shared:
            link = self._charges.setting.host.link
            self.ports[event] = Port(first, True, link, host=True), Port(first, False, link, host=True)
        return event

    def _sum(self, launch: ops.AllReduce) -> int:
        key = launch.group, launch.version
        if key not in self._sums:
            members = self._charges.header.members(launch.group)
            self._sums[key] = self._add(Role.SUM, launch, members, self._charges.all_reduce(launch.group), [])
            self.posted[self._sums[key]] = []
        return self._sums[key]
