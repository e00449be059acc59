"""A discrete-event simulator of a program on a cluster: the oracle of the replay, which shares no code with it.

Lanes are processes, links and members of sums have queues, and one clock moves from happening to happening. It computes
the costs anew, from section 3.4, and does not know in which order a link or a sum will be asked for.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from heapq import heappop, heappush
from math import log2

from chimera_ir.ir.levels import Program
from chimera_ir.ir.ops import (
    AllReduce,
    Compute,
    Instruction,
    Pair,
    Recv,
    Send,
    Step,
    WaitAllReduce,
    WaitMove,
    WaitRecv,
    WaitSend,
    Worker,
)
from chimera_ir.predict.setting import Setting
from chimera_ir.profile.cluster import Link


class Signal:
    """Something that happens once; whoever asks is called then, or at once if it has."""

    def __init__(self) -> None:
        self.given = False
        self.asking: list[Callable[[], None]] = []

    def ask(self, call: Callable[[], None]) -> None:
        if self.given:
            call()
        else:
            self.asking.append(call)

    def give(self) -> None:
        self.given = True
        for call in self.asking:
            call()


@dataclass(eq=False)
class Stream:
    """A message under way: how many seconds of it are left if it were alone."""

    left: float
    ports: tuple[object, object]
    through: Callable[[], None]
    share: Fraction = Fraction(0)


class Rivals:
    """Messages under way that share ports. All get more at the same pace, until a port of theirs is full."""

    def __init__(self, simulator: "Simulator") -> None:
        self.simulator = simulator
        self.streams: list[Stream] = []
        self.since = 0.0
        self.changes = 0

    def begin(self, stream: Stream) -> None:
        self.go_on()
        self.streams.append(stream)
        self.divide()

    def end(self, stream: Stream) -> None:
        self.go_on()
        self.streams.remove(stream)
        self.divide()
        stream.through()

    def go_on(self) -> None:
        for stream in self.streams:
            stream.left -= float(stream.share) * (self.simulator.now - self.since)
        self.since = self.simulator.now

    def divide(self) -> None:
        for stream in self.streams:
            stream.share = Fraction(0)
        growing = [*self.streams]
        ports = {port for stream in self.streams for port in stream.ports}
        while growing:
            room, count = {}, {}
            for port in ports:
                room[port] = 1 - sum(stream.share for stream in self.streams if port in stream.ports)
                count[port] = sum(port in stream.ports for stream in growing)
            more = min(room[port] / count[port] for port in ports if count[port])
            for stream in growing:
                stream.share += more
            full = {port for port in ports if count[port] and room[port] == more * count[port]}
            growing = [stream for stream in growing if not full.intersection(stream.ports)]
        self.changes += 1
        changes = self.changes
        for stream in self.streams:
            self.simulator.after(
                max(0.0, stream.left / float(stream.share)),
                lambda s=stream: self.end(s) if self.changes == changes else None,
            )


class Simulator:
    """Runs a program; afterwards ``computes`` are (worker, operation, start, end), and so are ``steps`` and ``moves``;
    ``ended`` says when each lane was through, and ``sums`` are (stage, version, start, end).

    Each worker has a link to the host of its own."""

    def __init__(self, program: Program, setting: Setting) -> None:
        self.program, self.header, self.setting = program, program.header, setting
        self.cut = 2 if self.header.halves else self.header.slices
        self.now = 0.0
        self.agenda: list[tuple[float, int, Callable[[], None]]] = []
        self.counted = 0
        self.computes: list[tuple[int, Instruction, float, float]] = []
        self.steps: list[tuple[int, Instruction, float, float]] = []
        self.moves: list[tuple[int, Instruction, float, float]] = []
        self.sums: list[tuple[tuple[int, ...], int | None, float, float]] = []
        self.ended: dict[int, float] = {}
        self.left: dict[object, Signal] = defaultdict(Signal)
        self.arrived: dict[object, Signal] = defaultdict(Signal)
        self.summed: dict[object, Signal] = defaultdict(Signal)
        self.halves_met: dict[object, int] = defaultdict(int)
        self.on_link: dict[tuple[int, int], deque[tuple[int, Send, Link]]] = defaultdict(deque)
        self.launched: dict[int, deque[AllReduce]] = defaultdict(deque)
        self.running: set[AllReduce] = set()
        self.rivals = Rivals(self)
        for worker in range(len(program.lanes)):
            self.go_on(worker, self.lane(worker))
        while self.agenda:
            self.now, _, call = heappop(self.agenda)
            call()
        assert len(self.ended) == len(program.lanes), "stuck"

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        self.counted += 1
        heappush(self.agenda, (self.now + seconds, self.counted, call))

    def go_on(self, worker: int, lane: Iterator[Signal]) -> None:
        awaited = next(lane, None)
        if awaited is None:
            self.ended[worker] = self.now
        else:
            awaited.ask(lambda: self.go_on(worker, lane))

    def lane(self, worker: int) -> Iterator[Signal]:
        moved: dict[tuple[object, ...], Signal] = {}
        free = Signal()
        free.give()
        for each in self.program.lanes[worker]:
            match each:
                case Compute(kind, micros, stage) if kind.letter.startswith(("offload", "reload")):
                    if self.setting.cluster.host is not None:
                        yield self.busy(self.setting.cluster.host.link.overhead)
                    done = moved[kind.letter, micros, stage] = Signal()
                    free.ask(lambda operation=each, done=done: self.move(worker, operation, done))
                    free = done
                case WaitMove(kind, micros, stage):
                    yield moved[kind.letter, micros, stage]
                case Compute() | Pair():
                    start, done = self.now, Signal()
                    self.after(self.compute(each), done.give)
                    yield done
                    self.computes.append((worker, each, start, self.now))
                case Send():
                    link = self.link(worker, each.to)
                    yield self.busy(link.overhead)
                    self.meet(each, link, worker)
                case Recv(message, source):
                    send = Send(message, Worker(worker))
                    link = self.link(source, worker)
                    yield self.busy(link.overhead)
                    self.after(link.alpha, lambda s=send, k=link, w=source: self.meet(s, k, w))
                case WaitSend(message):
                    yield self.left[message]
                case WaitRecv(message):
                    yield self.arrived[message]
                case AllReduce(group) if self.ranks(group) > 1:
                    yield self.busy(self.setting.cluster.sums.overhead)
                    self.launched[worker].append(each)
                    self.serve()
                case WaitAllReduce(group, version=version) if self.ranks(group) > 1:
                    yield self.summed[group, version]
                case Step((stage,)):
                    start = self.now
                    yield self.busy(self.step(stage))
                    self.steps.append((worker, each, start, self.now))

    def move(self, worker: int, operation: Compute, done: Signal) -> None:
        """A copy between a worker and its host begins; one after the other, beside the lane."""
        start = self.now

        def over() -> None:
            self.moves.append((worker, operation, start, self.now))
            done.give()

        self.after(self.transfer(operation), over)

    def busy(self, seconds: float) -> Signal:
        """What the lane waits for while it is kept."""
        done = Signal()
        self.after(seconds, done.give)
        return done

    def meet(self, send: Send, link: Link, source: int) -> None:
        """One end of a message is there; with the second it asks for the link."""
        self.halves_met[send.message] += 1
        if self.halves_met[send.message] == 2:
            queue = self.on_link[source, send.to]
            queue.append((source, send, link))
            if len(queue) == 1:
                self.transmit(queue)

    def transmit(self, queue: deque[tuple[int, Send, Link]]) -> None:
        source, send, link = queue[0]

        def through() -> None:
            self.after(link.alpha, self.arrived[send.message].give)
            queue.popleft()
            if queue:
                self.transmit(queue)
            self.left[send.message].give()

        seconds = link.beta * self.size(send)
        if link.shared and seconds:
            self.rivals.begin(Stream(seconds, (("out", source, link), ("in", send.to, link)), through))
        else:
            self.after(seconds, through)

    def serve(self) -> None:
        """Starts every sum that is first in the queue of all its members."""
        for queue in list(self.launched.values()):
            if queue and queue[0] not in self.running:
                launch = queue[0]
                members = {pipe.workers[stage] for pipe in self.header.pipes for stage in launch.group}
                if all(self.launched[w] and self.launched[w][0] == launch for w in members):
                    self.running.add(launch)
                    self.after(self.all_reduce(launch.group), self.over(launch, members, self.now))

    def over(self, launch: AllReduce, members: set[int], start: float) -> Callable[[], None]:
        def call() -> None:
            for worker in members:
                self.launched[worker].popleft()
            self.sums.append((launch.group, launch.version, start, self.now))
            self.summed[launch.group, launch.version].give()
            self.serve()

        return call

    def compute(self, each: Compute | Pair) -> float:
        """A pair takes as long as both, unless the profile has times of pairs: the longer of its stages' counts."""
        if isinstance(each, Pair):
            both = (each.forward, each.backward)
            known = [self.setting.stages[one.stage].at[self.setting.micro_batch_size].times.get("pair") for one in both]
            if None in known:
                return self.compute(each.forward) + self.compute(each.backward)
            weights = [self.weight(one) for one in both]
            return max(known) * sum(weights) / 2 / self.cut
        costs = self.setting.stages[each.stage].at[self.setting.micro_batch_size].times
        forward, backward = costs["F"], costs["B"]
        first, second = (costs.get(half, backward / 2) for half in "IW")
        again = max(0.0, costs["recomputing"] - backward)
        times = {"F": forward, "B": backward, "I": first, "W": second, "recompute": again}
        one = times[each.kind.letter]
        return one * self.weight(each) / self.cut

    def weight(self, each: Compute) -> int:
        """How many of weight 1 the micro-batches of an operation take as long as."""
        weights = self.header.weights or (1,)
        return sum(int(weights[micro % len(weights)]) for micro in each.micros)

    def transfer(self, each: Compute) -> float:
        """All that is kept of micro-batches but what stays, over the link to the host; at once without such a link.

        Between the halves of a backward that is without what the first half frees, and with gradients.
        """
        host, kept = self.setting.cluster.host, self.setting.stages[each.stage].at[self.setting.micro_batch_size].kept
        if host is None:
            return 0.0
        whole = kept.activations - kept.resident
        between = kept.activations - kept.released + kept.operands - kept.resident_operands
        size = between if each.kind.letter.endswith("_operands") else whole
        return host.link.alpha + host.link.beta * size * len(each.micros) / self.cut

    def step(self, stage: int) -> float:
        return self.setting.stages[stage].step

    def size(self, send: Send) -> float:
        message = send.message
        of = min(message.source, message.target)
        costs = self.setting.stages[of].at[self.setting.micro_batch_size]
        one = costs.output if message.source < message.target else costs.gradient
        return sum(one for _ in message.micros) / self.cut

    def link(self, source: int, target: int) -> Link:
        """Between nodes if any copy of the two workers is on two nodes."""
        workers, W, cluster = self.header.workers, self.setting.copies, self.setting.cluster
        nodes = -(-workers * W // cluster.per_node)
        of_node = workers * W // nodes if workers * W % nodes == 0 else cluster.per_node
        for w in range(W):
            ranks = [k * W + w if self.setting.replica_layout else w * workers + k for k in (source, target)]
            if ranks[0] // of_node != ranks[1] // of_node:
                return cluster.between
        return cluster.within

    def ranks(self, group: tuple[int, ...]) -> int:
        return self.setting.copies * len({pipe.workers[stage] for pipe in self.header.pipes for stage in group})

    def all_reduce(self, group: tuple[int, ...]) -> float:
        """Of what stages share, at most as much as the smallest of them has."""
        link, r = self.setting.cluster.sums, self.ranks(group)
        size = min(self.setting.stages[stage].gradients for stage in group)
        return 2 * log2(r) * link.alpha + 2 * (r - 1) * link.beta * size / r
