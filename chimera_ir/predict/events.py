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

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum, auto
from functools import cache
from heapq import heappop, heappush
from itertools import accumulate, chain
from math import inf
from operator import sub
from typing import NamedTuple, assert_never

from chimera_ir.ir import ops
from chimera_ir.ir.kinds import Kind
from chimera_ir.ir.levels import Header, Program, recomputes_all
from chimera_ir.ir.ops import Micro, Stage, WeightGroup, Worker
from chimera_ir.predict.setting import Charges
from chimera_ir.profile.balance import balanced
from chimera_ir.profile.cluster import Link
from chimera_ir.profile.costs import ModelProfile, durations
from chimera_ir.verify.holdings import Holdings

# The fastest split of a profile's layers into stages that fit the memory of the workers.

_TRIES = 5
"""The most splits that are tried; of each the exact bytes are computed."""

Split = tuple[int, ...]
"""The first layer of each stage."""


class StageLoad(NamedTuple):
    """The most that a worker keeps of a stage: copies of its weights, and what waits for a backward.

    In ``waiting`` a whole micro-batch counts as `Header.units`.
    """

    copies: int
    waiting: int


class LayerSplits(NamedTuple):
    """Searches for a fast split of a model's layers into the stages of a header, for micro-batches of ``size`` items.

    ``replicas`` is W. With a ``sharded_optimizer`` and a flush, the ranks of a stage share the optimizer's state.
    """

    model: ModelProfile
    header: Header
    size: int
    replicas: int
    sharded_optimizer: bool

    def candidates(
        self,
        room: Sequence[int],
        loads: Callable[[], Sequence[StageLoad]],
        needed: Callable[[Split], Sequence[int]],
    ) -> Iterator[Split]:
        """Yields a few splits to try, the fastest first; the caller takes the first that fits.

        The first split is the fastest without a limit on memory, the second the fastest within ``room``, the bytes of
        each worker as `_within` counts them, so not exactly. Before each further split the limits are lowered by as
        much as the last split exceeds ``room`` by ``needed``, the exact bytes of each worker with it.
        """
        limits: tuple[int, ...] | None = None
        for _ in range(_TRIES):
            if limits is None:
                split = _fastest(tuple(self._seconds), self.header.stages, self.model.begins)
            else:
                split = self._within(limits, loads())
            if split is None:
                return
            yield split
            if limits is None:
                limits = tuple(room)
            else:
                excess = max(1, max(map(sub, needed(split), room)))
                limits = tuple(limit - excess for limit in limits)

    @property
    def _seconds(self) -> list[float]:
        stages = range(self.header.stages)
        everywhere = all(recomputes_all(pipe, stage) for pipe in self.header.pipes for stage in stages)
        return durations(self.model.layers, self.size, recomputing=everywhere)

    def _within(self, limits: Sequence[int], loads: Sequence[StageLoad]) -> Split | None:
        """The split whose slowest stage takes the least time within ``limits``, bytes by worker; None if none is.

        The bytes of a stage are its weights in all their copies, gradients, optimizer state, and the activations of the
        most micro-batches that wait for a backward at once; messages do not count. The gradients that a first backward
        makes count for the largest stage of a worker.
        """
        header, layers, size = self.header, self.model.layers, self.size
        shards = self.sharded_optimizer and not header.steps_inside
        weights = _until([layer.weights for layer in layers])
        standing = _until([layer.weights + layer.gradients for layer in layers])
        optimizer = _until([layer.optimizer for layer in layers])
        first_gradients = _until([layer.first_gradients for layer in layers])
        shares = [self.replicas * len(workers) if shards else 1 for workers in header.holders]
        activations = _until([layer.at[size].kept.activations for layer in layers])
        again = [all(recomputes_all(pipe, stage) for pipe in header.pipes) for stage in range(header.stages)]

        def needed(stage: int, first: int, end: int) -> int:
            whole = activations[end] - activations[first]
            waiting = layers[first].at[size].kept.input if again[stage] else whole
            return (
                standing[end]
                - standing[first]
                + -(-(optimizer[end] - optimizer[first]) // shares[stage])
                + (loads[stage].copies - 1) * (weights[end] - weights[first])
                + -(-loads[stage].waiting * waiting // header.units)
                + whole * again[stage]
            )

        def once(_stage: int, first: int, end: int) -> int:
            return first_gradients[end] - first_gradients[first]

        return balanced(self._seconds, header.holders, needed, limits, once, self.model.begins)


def loads_of(header: Header, held: Iterable[Holdings]) -> list[StageLoad]:
    """The most that each stage keeps on any worker, from the holdings of each worker."""
    loads = [StageLoad(1, 0)] * header.stages
    for holdings in held:
        for stage, copies in holdings.copies:
            loads[stage] = loads[stage]._replace(copies=max(loads[stage].copies, copies))
        for stage, activations, inputs, begun, *_ in chain.from_iterable(holdings.fullest):
            waiting = begun + (inputs or activations)
            loads[stage] = loads[stage]._replace(waiting=max(loads[stage].waiting, waiting))
    return loads


@cache
def _fastest(seconds: tuple[float, ...], stages: int, begins: tuple[tuple[int, int], ...]) -> Split | None:
    return balanced(seconds, [()] * stages, begins=begins)


def _until(sizes: Sequence[int]) -> list[int]:
    """Running totals: for each layer the sum over all layers before it, and at the end that of all layers."""
    return [0, *accumulate(sizes)]


class Role(IntEnum):
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

    A "begin" has the lane's first instruction. The workers of a wire and of a flight are sender and receiver, those of
    a notice receiver and sender.
    """

    role: Role
    instruction: ops.Instruction
    workers: tuple[Worker, ...]
    seconds: float


class Port(NamedTuple):
    """One direction of a link at a worker: where messages leave (``leaving``), or where they arrive.

    A link to the ``host`` has one port for both directions, at the first of the workers that share the link.
    """

    worker: Worker
    leaving: bool
    link: Link
    host: bool = False


class Events(NamedTuple):
    """All events of a program; outside ``nodes``, an event is given by its index in ``nodes``.

    ``before[e]`` has the events that event e waits for. ``posted[e]``, for a message, a sum, a move or a wait for one,
    has the events after which it is posted, one at each end or member. ``lanes`` has the events of each worker in
    order: its begin, if it has any instruction, computes and waits, and posts and steps that take time. ``ports[e]``,
    for a wire or a move on a shared link, has its two ports; its ``seconds`` are those that it would take alone.
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
    """Collects events lane by lane; the first lane that posts a message or a sum adds its event."""

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
        """The wire of a message that ``send`` takes from ``source`` to ``target``; the next index is its flight."""
        message = send.message
        wire = self._wires.get(message)
        if wire is None:
            link, ends = self._charges.link(source, target), (source, target)
            wire = self._add(Role.WIRE, send, ends, link.beta * self._charges.size(message), [])
            self._add(Role.FLIGHT, send, ends, link.alpha, [wire])
            self._wires[message] = wire
            self.posted[wire] = self.posted[wire + 1] = []
            if link.shared:
                self.ports[wire] = Port(source, True, link), Port(target, False, link)
        return wire

    def _move(self, move: ops.Compute, worker: Worker, before: list[int]) -> int:
        first, factor = self._charges.host_link(worker)
        event = self._add(Role.MOVE, move, (worker,), factor * self._charges.compute(move), before)
        if self._charges.setting.host.workers > 1:
            link = self._charges.setting.host.link
            self.ports[event] = Port(first, True, link, host=True), Port(first, False, link, host=True)
        return event

    def _sum(self, launch: ops.AllReduce) -> int:
        key = launch.group, launch.version
        if key not in self._sums:
            header = self._charges.header
            seconds = self._charges.setting.all_reduce(header, launch.group)
            self._sums[key] = self._add(Role.SUM, launch, header.members(launch.group), seconds, [])
            self.posted[self._sums[key]] = []
        return self._sums[key]


# Times of messages that share a worker's port.
#
# A port is one direction of a worker's link to the network. Messages in a port at the same time share its bandwidth, as
# TCP connections do: all get equal shares, except for a message to which the port at its other end allows less (max-min
# fairness, Bertsekas and Gallager, Data Networks, section 6.5.2). The event in which a message takes up bandwidth is
# called its wire.


def with_shared_ports(events: Events) -> Events:
    """The events, in which wires take longer where several share a port.

    Wires are simulated as fluids: between any two moments at which an event begins or ends, every message under way has
    a constant share of its ports.
    """
    if not events.ports:
        return events
    seconds_of = _wire_seconds(events)
    nodes = [node._replace(seconds=seconds_of.get(number, node.seconds)) for number, node in enumerate(events.nodes)]
    return events._replace(nodes=nodes)


def _wire_seconds(events: Events) -> dict[int, float]:
    """Simulates the events; returns the seconds from the start to the end of each wire that has ports."""
    # A discrete simulation: the next end is that of an event of fixed length or of a wire, and lets others begin.
    flows = _Flows(events.ports)
    after, missing = events.after(), [len(before) for before in events.before]
    agenda: list[tuple[float, int]] = []

    def begin(number: int, now: float) -> None:
        seconds = events.nodes[number].seconds
        if seconds and number in events.ports:
            flows.begin(number, now, seconds)
        else:
            heappush(agenda, (now + seconds, number))

    for number in [number for number, count in enumerate(missing) if not count]:
        begin(number, 0.0)
    while agenda or flows.under_way:
        if agenda and agenda[0][0] <= flows.next[0]:
            now, ended = heappop(agenda)
        else:
            now, ended = flows.end()
        for other in after[ended]:
            missing[other] -= 1
            if not missing[other]:
                begin(other, now)
    return flows.seconds_of


class _Flows:
    """The wires under way, in a simulation of time.

    ``under_way`` has for each wire the seconds that its rest would take alone, ``seconds_of`` for each finished one
    those that it took. ``next`` is when the next wire ends if no other begins before, and its number.
    """

    def __init__(self, ports: Mapping[int, tuple[Port, Port]]) -> None:
        self.seconds_of: dict[int, float] = {}
        self.under_way: dict[int, float] = {}
        self._ports = ports
        self._shares: dict[int, float] = {}
        self._began: dict[int, float] = {}
        self._now = 0.0
        self.next: tuple[float, int] = (inf, -1)

    def begin(self, number: int, now: float, seconds: float) -> None:
        self._flow_until(now)
        self.under_way[number], self._began[number] = seconds, now
        self._share()

    def end(self) -> tuple[float, int]:
        """Moves on to the next time at which a wire ends; returns that time and the wire's number."""
        now, number = self.next
        self._flow_until(now)
        del self.under_way[number]
        self.seconds_of[number] = now - self._began[number]
        self._share()
        return now, number

    def _flow_until(self, now: float) -> None:
        for number, left in self.under_way.items():
            self.under_way[number] = max(0.0, left - (now - self._now) * self._shares[number])
        self._now = now

    def _share(self) -> None:
        self._shares = dict(_fair({number: self._ports[number] for number in self.under_way}))
        ends = ((self._now + left / self._shares[number], number) for number, left in self.under_way.items())
        self.next = min(ends, default=(inf, -1))


def _fair(wires: dict[int, tuple[Port, Port]]) -> Iterator[tuple[int, float]]:
    """Yields the number of each wire, and its max-min fair share of its ports; wires of the fullest port come first."""
    left = {port: 1.0 for ports in wires.values() for port in ports}
    while wires:
        users = Counter(port for ports in wires.values() for port in ports)
        fullest = min(users, key=lambda port: left[port] / users[port])
        share = left[fullest] / users[fullest]
        for number in [number for number, ports in wires.items() if fullest in ports]:
            for port in wires.pop(number):
                left[port] -= share
            yield number, share
