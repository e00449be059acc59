"""An independent executor of programs: it moves tokens, and shares no code with `chimera_ir.verify`.

It does what hardware does, as unkindly as it may: a posted receive may spoil its buffer at any moment, a transfer
reads the sender's memory when it happens and not when it is posted, messages travel in random order and time.
Operations check that what they read is what they need; steps that every gradient of their update was summed exactly
once. Gradients add up in one piece of memory per stage, and in one more per tie, which nothing may write between a
launch and its step. Weights are told apart by the steps that made them; a forward remembers those that it read, of its
stage and of its ties, for its backward. A micro-batch meets one version of what stages share. A slice reads the carry
of the slice before it, and its backward the gradient of its own carry, which that of the next slice left. What a
forward or a first half kept is on the worker or on its host; a copy between the two runs at any moment after its
launch, in order, and what is copied is nowhere for sure until the lane has waited for it. Where the header restricts
the kinds of operations there are forwards alone: each must have run once, and nothing is summed. So it is on frozen
stages that nothing trained feeds; a frozen stage behind a trained one makes gradients of its inputs alone. A stage
reads what all stages that feed it have made, and its backward the gradients of all that it feeds.
"""

import random
from collections import Counter, defaultdict
from itertools import product

from chimera_ir.ir.kinds import ACTIVATIONS, GRADIENTS
from chimera_ir.ir.levels import Program
from chimera_ir.ir.ops import (
    AllReduce,
    Compute,
    Drop,
    Pair,
    Recv,
    Send,
    Stash,
    Step,
    WaitAllReduce,
    WaitMove,
    WaitRecv,
    WaitSend,
)
from tests.tokens import SPOILT, Cell, Group, Sum, Transfer, Worker

TRANSPORTS = ("directed", "tagged")
SHARED = "pair"
"""A stream for each pair of workers, in the order of posting: an operation begins when the one before it is over."""

Link = tuple[int, int]
"""The worker that sends and the worker that receives."""


class Wrong(Exception):
    """The program computes, or does, something that it must not."""


class Executor:
    """Runs a program on one transport with one random order of all that can happen."""

    def __init__(self, program: Program, transport: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.transport = transport
        self.stages = program.header.stages
        self.slices = program.header.slices
        self.updates = program.header.updates
        self.trains = not program.header.only
        self.streams = program.header.asynchronous
        self.micros = sorted(m for pipe in program.header.pipes for m in pipe.micros)
        stages_of = {name: range(start, stop) for name, start, stop in program.header.named}
        self.absent = {(m, s) for name, micros in program.header.absent for m in micros for s in stages_of[name]}
        self.where = {
            (m, s): w
            for pipe in program.header.pipes
            for m in pipe.micros
            for s, w in enumerate(pipe.workers)
            if (m, s) not in self.absent
        }
        self.again = {
            (m, s)
            for pipe in program.header.pipes
            for s in pipe.recompute
            for m in next((some for stage, some in pipe.recomputed if stage == s), pipe.micros)
        }
        # The edges of the graph of stages, and all stages that feed one, also through others.
        starts = {start for _, start, _ in program.header.named} if program.header.feeds else set()
        edges = [(s - 1, s) for s in range(1, self.stages) if s not in starts]
        edges += [(source, target) for source, target, _ in program.header.feeds]
        self.before = {s: [source for source, target in edges if target == s] for s in range(self.stages)}
        self.after = {s: sorted(target for source, target in edges if source == s) for s in range(self.stages)}
        self.ways: dict[int, set[int]] = {}
        for s in range(self.stages):
            self.ways[s] = {s}.union(*(self.ways[source] for source in self.before[s]))
        # Stages with nothing trained in front of them keep nothing, and get no gradients.
        self.frozen = {*program.header.frozen}
        self.forward_only = {s for s in range(self.stages) if self.ways[s] <= self.frozen}
        groups: list[Group] = [*((s,) for s in range(self.stages) if s not in self.frozen), *program.header.ties]
        self.members = {group: {pipe.workers[s] for pipe in program.header.pipes for s in group} for group in groups}
        self.groups = {s: [group for group in groups if s in group] for s in range(self.stages)}
        self.workers = [Worker(number, lane) for number, lane in enumerate(program.lanes)]
        self.sent: dict[Link, dict[object, Transfer]] = {}
        self.posted: dict[Link, dict[object, Transfer]] = {}
        self.queues: defaultdict[tuple[int, int], list[tuple[Link, Transfer]]] = defaultdict(list)
        self.read: dict[tuple[int, Group], int] = {}
        self.sums: dict[Group, list[Sum]] = {group: [] for group in groups}
        self.added = dict.fromkeys(groups, 0)

    def run(self) -> bool:
        """Whether all lanes finish.

        Raises `Wrong` if something is computed from the wrong thing, or left undone at the end.
        """
        while True:
            events = [(self.step, (w,)) for w in self.workers if w.place < len(w.lane) and not self.blocked(w)]
            events += [(self.transfer, each) for each in self.transferable()]
            events += [(self.add, (group,)) for group in self.sums if self.addable(group)]
            events += [(w.host.copy, ()) for w in self.workers if w.host.copies]
            if not events:
                break
            action, arguments = self.random.choice(events)
            action(*arguments)
            if action == self.step and self.random.random() < 0.5:
                (worker,) = arguments
                while worker.place < len(worker.lane) and not self.blocked(worker):
                    self.step(worker)
        if any(w.place < len(w.lane) for w in self.workers):
            return False
        self.check_end()
        return True

    def check_end(self) -> None:
        for worker in self.workers:
            for each in (*worker.sends.values(), *worker.recvs.values()):
                self.demand(each.waited, "worker {} never waits for {}", worker.number, each.tag)
            members = (group for group in self.members if worker.number in self.members[group])
            due = dict.fromkeys(members, self.updates) if self.trains else {}
            run = set() if self.trains else {cell for cell, w in self.where.items() if w == worker.number}
            self.demand(
                set(worker.kept) == run, "worker {} ran {}, not {}", worker.number, sorted(worker.kept), sorted(run)
            )
            self.demand(worker.stepped == due, "worker {} stepped {}, not {}", worker.number, worker.stepped, due)
            self.demand(not worker.stashed, "worker {} keeps {}", worker.number, worker.stashed)
            alone = {(m, s) for (m, s), w in self.where.items() if w == worker.number and s in self.forward_only}
            self.demand(worker.alone == alone, "worker {} ran {} alone", worker.number, sorted(worker.alone))
            left = worker.host.left
            self.demand(not left, "worker {} leaves {} on its host, or on the way", worker.number, left)
            self.demand(not worker.halves, "worker {} never uses {}", worker.number, list(worker.halves))
            self.demand(not (self.trains and worker.carried), "worker {} never uses its carries", worker.number)

    # ---- the network

    def transferable(self) -> list[tuple[Link, Transfer, Transfer]]:
        """What may arrive next: of each queue its head, or any message of which both ends are posted."""
        if self.transport == SHARED:
            return self.begun()
        pairs = []
        for link, sends in self.sent.items():
            recvs = self.posted.get(link)
            if not sends or not recvs:
                continue
            if self.transport == "directed":
                pairs.append((link, next(iter(sends.values())), next(iter(recvs.values()))))
            else:
                pairs += [(link, send, recvs[tag]) for tag, send in sends.items() if tag in recvs]
        return pairs

    def queue(self, worker: int, peer: int) -> list[tuple[Link, Transfer]]:
        """What a worker has posted and is not over, of what shares a stream with its messages with a peer."""
        return self.queues[worker, peer]

    def begun(self) -> list[tuple[Link, Transfer, Transfer]]:
        """The messages of which both ends are at the heads of their streams."""
        heads = {(worker, queue[0][0]): queue[0][1] for (worker, *_), queue in self.queues.items() if queue}
        both = sorted(link for _, link in heads if all((worker, link) in heads for worker in link))
        return [(link, heads[link[0], link], heads[link[1], link]) for link in dict.fromkeys(both)]

    def transfer(self, link: Link, send: Transfer, recv: Transfer) -> None:
        for ends in (link, link[::-1]) if self.transport == SHARED else ():
            self.queue(*ends).pop(0)
        del self.sent[link][send.tag], self.posted[link][recv.tag]
        recv.cell.value = send.arriving if send.cell.value == send.expected else SPOILT
        send.done = recv.done = True

    def addable(self, group: Group) -> bool:
        """Whether all members have launched the first sum of a group that is not over."""
        sums, turn = self.sums[group], self.added[group]
        return turn < len(sums) and sums[turn].parts.keys() == self.members[group]

    def add(self, group: Group) -> None:
        self.sums[group][self.added[group]].done = True
        self.added[group] += 1

    # ---- the lanes

    def blocked(self, worker: Worker) -> bool:
        match worker.lane[worker.place]:
            case WaitSend(message):
                self.demand(message in worker.sends, "worker {} waits for an unknown send {}", worker.number, message)
                return not worker.sends[message].done
            case WaitRecv(message):
                self.demand(
                    message in worker.recvs, "worker {} waits for an unknown receive {}", worker.number, message
                )
                return not worker.recvs[message].done
            case WaitAllReduce(group, version=version):
                number = group, version or 1
                self.demand(number in worker.launched, "worker {} waits for an unknown sum {}", worker.number, number)
                return not worker.launched[number].done
            case WaitMove() as wait:
                self.demand(worker.host.knows(wait), "worker {} waits for an unknown copy {}", worker.number, wait)
                return not worker.host.over(wait)
        return False

    def step(self, worker: Worker) -> None:
        instruction = worker.lane[worker.place]
        worker.place += 1
        match instruction:
            case Compute():
                self.compute(worker, instruction)
            case Pair(forward, backward):  # at once: neither may need what the other makes, so the order is no matter
                self.demand(len(forward.micros) == len(backward.micros), f"a pair of unequal sizes: {instruction}")
                for each in self.random.sample([forward, backward], 2):
                    self.compute(worker, each)
            case Send(message, to):
                kind = "act" if message.source < message.target else "grad"
                block = self.made(worker, kind, message.micros[0], message.source, message.target)
                is_there = block is not None and {*message.micros} <= {*block[1]}
                self.demand(is_there, "worker {} sends {} before it has it", worker.number, message)
                self.demand(message not in worker.sends, "{} is sent twice", message)
                cell, value = worker.outputs[block]
                arriving = value if block[1] == message.micros else (value[0], message.micros, *value[2:])
                worker.sends[message] = Transfer(message, cell, value, arriving)
                self.sent.setdefault((worker.number, to), {})[message] = worker.sends[message]
                self.queue(worker.number, to).append(((worker.number, to), worker.sends[message]))
            case Recv(message, source, slot):
                self.demand(message not in worker.recvs, "{} is received twice", message)
                cell = worker.slots.setdefault((message.source, message.target, slot), Cell())
                if self.random.random() < 0.8:
                    cell.value = SPOILT
                worker.recvs[message] = Transfer(message, cell)
                self.posted.setdefault((source, worker.number), {})[message] = worker.recvs[message]
                self.queue(worker.number, source).append(((source, worker.number), worker.recvs[message]))
            case WaitSend(message):
                self.demand(not worker.sends[message].waited, "{} is waited for twice", message)
                worker.sends[message].waited = True
            case WaitRecv(message):
                self.demand(not worker.recvs[message].waited, "{} is waited for twice", message)
                worker.recvs[message].waited = True
            case WaitMove() as wait:
                worker.host.wait(wait)
            case AllReduce(group, version=version):
                self.launch(worker, group, version or 1)
            case WaitAllReduce(group, version=version):
                number = group, version or 1
                self.demand(number not in worker.summed, "the sum {} is waited for twice", number)
                worker.summed[number] = worker.launched[number]
            case Step(group, version=version):
                self.update(worker, group, version or 1)
            case Stash(group, version):
                self.demand((group, version) not in worker.stashed, "{} of {} is stashed twice", version, group)
                self.demand(
                    version == worker.stepped[group], "{} has {}, not {}", group, worker.stepped[group], version
                )
                worker.stashed[group, version] = worker.stepped[group]
            case Drop(group, version):
                self.demand((group, version) in worker.stashed, "{} of {} is not stashed", version, group)
                del worker.stashed[group, version]

    def compute(self, worker: Worker, operation: Compute) -> None:
        micros, stage = operation.micros, operation.stage
        if operation.kind.letter.startswith(("offload", "reload")):
            self.demand(operation.version is None, "a copy reads no weights")
            self.demand(worker.host.launch(operation), "{} on worker {}: it is not there", operation, worker.number)
            return
        weights = self.weights(worker, stage, operation.version)
        if operation.kind.letter == "F":
            self.forward(worker, micros, stage, weights)
        if operation.kind.letter == "recompute":
            self.forward_again(worker, micros, stage, weights)
        if operation.kind.letter in "BI":
            self.input_gradient(worker, micros, stage, weights)
        if operation.kind.letter in "BW":
            self.weight_gradient(worker, micros, stage, weights)

    def weights(self, worker: Worker, stage: int, version: int | None) -> tuple[int, ...]:
        """The weights that an operation reads, of its stage and its ties, as the number of steps that made them."""
        self.demand((version is not None) == self.streams, "a version where there is none, or none where there is")
        return tuple(self.weights_of(worker, group, version) for group in self.groups[stage])

    def weights_of(self, worker: Worker, group: Group, version: int | None) -> int:
        newest = worker.stepped[group]
        if version is None or version == newest:
            self.demand(self.streams or newest == 0, "it reads new weights")
            return newest
        self.demand((group, version) in worker.stashed, "{} of {} is read, {} is there", version, group, newest)
        return worker.stashed[group, version]

    def forward(self, worker: Worker, micros: tuple[int, ...], stage: int, weights: tuple[int, ...]) -> None:
        """Over several micro-batches it reads and makes one piece of memory; each backward needs what it read."""
        for (group, version), micro in product(zip(self.groups[stage], weights, strict=True), micros):
            known = self.read.setdefault((micro, group), version)
            self.demand(known == version, "{} meets {} and {} of what {} share", micro, known, version, group)
        data = Cell(("data", micros))
        sources = [source for source in self.before[stage] if (micros[0], source) not in self.absent]
        read = [part for source in sources for part in self.input(worker, "act", micros, source, stage)]
        read = read or [(data, data.value)]
        for micro in micros:
            self.demand(self.where[micro, stage] == worker.number, "forward on the wrong worker")
            self.demand((micro, stage) not in worker.kept.keys() | worker.alone, "forward twice")
            self.carry(worker, micro, stage)
            worker.carried |= {("c", micro, stage)} if (micro + 1) % self.slices else set()
            if stage in self.forward_only:
                worker.alone.add((micro, stage))
                worker.carried.discard(("c", micro - 1, stage))
                continue
            worker.kept[micro, stage] = (read, weights)
            worker.inputs |= {(micro, stage)} & self.again
            if (micro, stage) not in self.again:
                worker.host.places["activations", micro, stage] = "worker"
        output = ("act", micros, stage)
        if sources and self.random.random() < 0.5:  # the output is a view of an input
            cell, value = self.random.choice(read)
            if {*micros} <= {*value[1]}:
                worker.outputs[output] = (cell, cell.value)
            else:  # of more micro-batches than it read together
                worker.outputs[output] = (Cell(output), output)
        else:
            worker.outputs[output] = (Cell(output), output)

    def forward_again(self, worker: Worker, micros: tuple[int, ...], stage: int, weights: tuple[int, ...]) -> None:
        """From the input that the forward read; what it keeps may be the memory of the input."""
        for micro in micros:
            self.demand((micro, stage) in worker.inputs, "recomputed without its forward, or twice")
            read, before = worker.kept[micro, stage]
            is_same = before == weights and all(cell.value == value for cell, value in read)
            self.demand(is_same, "{} on {} recomputes something else", micro, stage)
            worker.inputs.remove((micro, stage))
            worker.host.places["activations", micro, stage] = "worker"
            self.carry(worker, micro, stage)

    def carry(self, worker: Worker, micro: int, stage: int) -> None:
        """The carry of the slice before must be there, for a forward and as long as its backward is to come."""
        first = micro % self.slices == 0
        self.demand(first or ("c", micro - 1, stage) in worker.carried, "{} on {} finds no carry", micro, stage)

    def made(self, worker: Worker, kind: str, micro: int, source: int, target: int) -> tuple | None:
        """Finds what a worker has made of a micro-batch, and of those taken together with it, for another stage."""
        ends = (source, target) if kind == "grad" else (source,)
        if (kind, (micro,), *ends) in worker.outputs:
            return (kind, (micro,), *ends)
        return next((key for key in worker.outputs if key[0] == kind and micro in key[1] and key[2:] == ends), None)

    def input(
        self, worker: Worker, kind: str, micros: tuple[int, ...], source: int, target: int
    ) -> list[tuple[Cell, object]]:
        """The memory and the value of an operation's input, if it is what it must be: of all its micro-batches.

        It is one piece, or several, which were made, or sent, one by one.
        """
        parts, left, letter = [], micros, ACTIVATIONS if kind == "act" else GRADIENTS
        while left:
            if self.where[micros[0], source] == worker.number:
                key = self.made(worker, kind, left[0], source, target)
                self.demand(key is not None, "{} {} {} is not there", kind, left, source)
                block, (cell, value) = key[1], worker.outputs[key]
            else:
                recvs = (m for m in worker.recvs if (m.source, m.value) == (source, letter) and left[0] in m.micros)
                # Activations come once for all stages of the worker.
                message = next((m for m in recvs if kind == "act" or m.target == target), None)
                is_there = message is not None and worker.recvs[message].waited
                self.demand(is_there, "{} {} {} was not waited for", kind, left, source)
                block, cell = message[0], worker.recvs[message].cell
                value = cell.value
            piece = tuple(micro for micro in left if micro in block)
            self.demand(left[: len(piece)] == piece, "{} {} {} is in another order", kind, left, source)
            is_right = cell.value == value and self.means(value, kind, piece, source, target)
            self.demand(is_right, "{} {} {} is {}", kind, piece, source, cell.value)
            parts.append((cell, value))
            left = left[len(piece) :]
        return parts

    def means(self, value: object, kind: str, micros: tuple[int, ...], source: int, target: int) -> bool:
        """Whether a token is the result of a stage; a view keeps the token of the stage it began with."""
        if not (isinstance(value, tuple) and value[0] == kind and {*micros} <= {*value[1]}):
            return False
        return value[2:] == (source, target) if kind == "grad" else value[2] in self.ways[source]

    def input_gradient(self, worker: Worker, micros: tuple[int, ...], stage: int, weights: tuple[int, ...]) -> None:
        """What the weight gradient still needs may be the memory of all that this half reads."""
        readers = [after for after in self.after[stage] if (micros[0], after) not in self.absent]
        given = [part for after in readers for part in self.input(worker, "grad", micros, after, stage)]
        for micro in micros:
            self.demand((micro, stage) in worker.kept.keys() - worker.inputs, "backward before its forward")
            place = worker.host.places.pop(("activations", micro, stage))
            self.demand(place == "worker", "backward of {} on {}, which is {}", micro, stage, place)
            read, before = worker.kept.pop((micro, stage))
            is_there = all(cell.value == value for cell, value in read)
            self.demand(is_there, "the activations of {} on {} were overwritten", micro, stage)
            same = before == weights
            self.demand(same, "forward of {} on {} with {}, backward with {}", micro, stage, before, weights)
            if stage not in self.frozen:
                worker.halves[micro, stage] = [*read, *given]
                worker.host.places["operands", micro, stage] = "worker"
            self.carry(worker, micro, stage)
            used = {("c", micro, stage), ("dc", micro, stage)} if (micro + 1) % self.slices else set()
            self.demand(used <= worker.carried, "the gradient of the carry of {} on {} lacks", micro, stage)
            worker.carried = worker.carried - used | ({("dc", micro - 1, stage)} if micro % self.slices else set())
        for before in self.before[stage]:
            key = ("grad", micros, stage, before)
            worker.outputs[key] = (Cell(key), key)

    def weight_gradient(self, worker: Worker, micros: tuple[int, ...], stage: int, weights: tuple[int, ...]) -> None:
        for group in self.groups[stage]:
            self.demand(group not in worker.busy, "the gradients of {} change while they are summed", group)
        for micro in micros:
            is_there = worker.host.places.pop(("operands", micro, stage), "") == "worker"
            self.demand(is_there, "the operands of {} on {} are not there", micro, stage)
            for cell, value in worker.halves.pop((micro, stage)):
                self.demand(cell.value == value, "what the weight gradient of {} on {} needs is gone", micro, stage)
            for group in self.groups[stage]:
                worker.gradients.setdefault(group, Counter())[micro, stage] += 1

    def launch(self, worker: Worker, group: Group, version: int) -> None:
        self.demand(worker.number in self.members.get(group, ()), "worker {} does not hold {}", worker.number, group)
        self.demand((group, version) not in worker.launched, "{} is summed twice for {}", group, version)
        self.demand(group not in worker.busy, "two sums of {} at once", group)
        turn = sum(each == group for each, _ in worker.launched)
        if len(self.sums[group]) == turn:
            self.sums[group].append(Sum())
        worker.busy.add(group)
        worker.launched[group, version] = self.sums[group][turn]
        self.sums[group][turn].parts[worker.number] = worker.gradients.pop(group, Counter())

    def update(self, worker: Worker, group: Group, version: int) -> None:
        self.demand((group, version) in worker.summed, "{} steps without its sum", group)
        self.demand(
            worker.stepped[group] == version - 1, "{} steps from {} to {}", group, worker.stepped[group], version
        )
        total: Counter = Counter()
        for part in worker.summed[group, version].parts.values():
            total.update(part)
        size = len(self.micros) // self.updates
        due = product(range((version - 1) * size, version * size), group)
        wanted = Counter(cell for cell in due if cell not in self.absent)
        self.demand(total == wanted, "{} steps with {}", group, total)
        worker.stepped[group] += 1
        worker.busy.discard(group)

    def demand(self, holds: bool, otherwise: str, *facts: object) -> None:
        if not holds:
            raise Wrong(otherwise.format(*facts))


def verdict(program: Program, transport: str, seed: int) -> str:
    """``finished``, ``stuck``, or what is wrong."""
    try:
        return "finished" if Executor(program, transport, seed).run() else "stuck"
    except Wrong as wrong:
        return f"wrong: {wrong}"


def verdicts(program: Program, seeds: int) -> set[str]:
    """The verdicts on both transports with several random timings, up to the first that is not ``finished``."""
    verdicts = set[str]()
    for transport, seed in product(TRANSPORTS, range(seeds)):
        if verdicts <= {"finished"}:
            verdicts.add(verdict(program, transport, seed))
    return verdicts
