"""What messages and sums cost between the ranks that torchrun started: alpha and beta of both."""

import json
import os
import platform
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from chimera_ir.measure import machine
from chimera_ir.measure.network import Measured, Node
from chimera_ir.measure.samples import FEWEST, Samples, Told
from chimera_ir.plural import counted
from runtime import Names, Peer, Transfer
from support.connections import SHORT
from support.faults import Misuse
from support.job import Job
from support.world import World, join, learn

WARM_UP = 3
"""Rounds that do not count, of every size."""

PAUSE = 0.01
"""Seconds that a rank rests before it sends or launches, as it would be computing.

What has just talked talks fast: processors are awake, and what they need is in their caches.
"""

FEWEST_SIZES = 2
"""So many sizes at least determine a line."""

_SECOND = 1.0
_TICK = 1e-9
_PAIRS = 4
_FLOAT = 4

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for: sizes in bytes, multiples of four; ``rounds`` of each are measured at most.

    Sums are over ``sum_ranks`` neighbours; if that is None, over all ranks and over pairs.
    """

    sizes: tuple[int, ...]
    rounds: int
    backend: str
    timeout: float
    sum_ranks: int | None = None


class _Said(Names):
    """Says of a message how large it was; no line of a schedule stands behind it."""

    def operation(self, verb: str, tag: int) -> str:
        """The direction and the number of a message."""
        return f"{verb} of message {tag}"


def measure(store: Store, rank: int, size: int, request: Request, told: Told) -> Measured | None:
    """What the links cost, on rank 0; every rank calls it. Pairs take turns, everybody else waits meanwhile.

    Raises
    ------
    Misuse
        If a GPU is missing, or there are not so many ranks as sums are asked for.
    PeerLost
        If another rank has died, or does not answer within the time-out.
    """
    nodes = _nodes(store, rank, size, request)
    pairs = chosen_pairs([node.place for node in nodes])
    groups = _groups(size, pairs, request.sum_ranks)
    world = join(_job(size, pairs, groups), store, rank, size, "pipeline", request.backend, request.timeout)
    world = replace(world, names=_Said(rank, rank, len(groups), request.timeout))
    kinds = {(a, b): _kind(nodes, a, b) for a, b in pairs}
    sooner = connected_kinds(kinds, _connected(world, pairs))
    used = {peer: each for peer, each in world.near.items() if _kind(nodes, rank, peer) in sooner}
    world = replace(world, near=used)
    sizes = {within: chosen_sizes(request.sizes, within in sooner) for within in kinds.values()}
    forks = chosen_forks(pairs, [node.place for node in nodes])
    steps = sum(len(sizes[kinds[pair]]) for pair in pairs) + len(groups) * len(request.sizes) + len(forks)
    bench = _Bench(world, request, told, steps)
    messages: dict[tuple[bool, int], list[float]] = {}
    streams: dict[tuple[bool, int], list[float]] = {}
    posts: dict[tuple[bool, int], list[float]] = {}
    for pair, within in kinds.items():
        for count in sizes[within]:
            found = bench.pair(pair, count)
            for every, taken in zip((messages, streams, posts), found, strict=True):
                every.setdefault((within, count), []).extend(taken)
    sums: dict[tuple[int, int], list[float]] = {}
    launches: list[float] = []
    for number, group in enumerate(groups):
        for count in request.sizes:
            taken, posted = bench.group(number, group, count)
            launches += posted if count == min(request.sizes) else []
            sums.setdefault((len(group), count), []).extend(taken)
    forked = {within: bench.fork(hub, ends, max(sizes[within])) for within, (hub, ends) in forks.items()}
    world.meet("for everybody to finish")
    dist.destroy_process_group()
    if rank != 0:
        return None
    return Measured(
        nodes=nodes,
        messages=_samples(messages),
        streams=_samples(streams),
        forks=_samples(forked),
        sums=_samples(sums),
        posts=_samples(posts),
        launches=Samples(tuple(launches)),
        short=dict.fromkeys(sooner, SHORT),
    )


def chosen_pairs(names: Sequence[str]) -> list[tuple[int, int]]:
    """The pairs of ranks to measure, from the name of every rank's node: a few neighbours within nodes and between.

    Examples
    --------
    >>> chosen_pairs(["a", "a", "b", "b"])
    [(0, 1), (2, 3), (0, 2)]
    """
    within = [(a, b) for a, b in pairwise(range(len(names))) if names[a] == names[b]]
    first = {name: rank for rank, name in reversed([*enumerate(names)])}
    between = [*pairwise(sorted(first.values()))]
    return within[:_PAIRS] + between[:_PAIRS]


def chosen_forks(pairs: Sequence[tuple[int, int]], names: Sequence[str]) -> dict[bool, tuple[int, tuple[int, int]]]:
    """A rank that has pairs with two others, and those: within a node (True) and between nodes, where there is one.

    Examples
    --------
    >>> chosen_forks([(0, 1), (1, 2), (0, 3)], ["a", "a", "a", "b"])
    {True: (1, (0, 2))}
    """
    found: dict[bool, tuple[int, tuple[int, int]]] = {}
    for (a, hub), (same, b) in pairwise(pairs):
        within = names[a] == names[hub]
        if hub == same and within == (names[hub] == names[b]):
            found.setdefault(within, (hub, (a, b)))
    return found


def chosen_sizes(sizes: Sequence[int], connected: bool) -> list[int]:
    """The sizes of messages to measure, ascending: two short and two longer ones at least, if connected.

    Examples
    --------
    >>> chosen_sizes([64, 256, 1024], connected=True)
    [64, 256, 1024, 262144, 1048576]
    >>> chosen_sizes([64, 256, 1024], connected=False)
    [64, 256, 1024]
    """
    found = {*sizes}
    if connected and sum(size <= SHORT for size in sizes) < FEWEST_SIZES:
        found |= {SHORT // 4, SHORT}
    if connected and sum(size > SHORT for size in sizes) < FEWEST_SIZES:
        found |= {4 * SHORT, 16 * SHORT}
    return sorted(found)


def connected_kinds(kinds: Mapping[tuple[int, int], bool], connected: Mapping[int, Collection[int]]) -> set[bool]:
    """The kinds of links, within nodes (True) or between them, of which all pairs are ``connected``, which is by rank.

    Examples
    --------
    >>> connected_kinds({(0, 1): True, (2, 3): True, (0, 2): False}, {0: [1], 2: [0, 3]})
    {True}
    """
    without = {kind for (a, b), kind in kinds.items() if b not in connected[a]}
    return {*kinds.values()} - without


def _connected(world: World, pairs: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    """Of the first of each pair, the ranks that it is connected to: all ranks know the same."""
    rank, what = world.place.rank, "for its connections"
    world.store.set(f"connected/{rank}", json.dumps(sorted(world.near)))
    return {a: json.loads(world.learn(f"connected/{a}", a, what, world.timeout)) for a, _ in pairs}


def _kind(nodes: Sequence[Node], rank: int, other: int) -> bool:
    """Whether two ranks are on one node."""
    return nodes[rank].place == nodes[other].place


def _groups(size: int, pairs: Sequence[tuple[int, int]], ranks: int | None) -> list[tuple[int, ...]]:
    """Who sums with whom."""
    if ranks is None:
        return [tuple(range(size)), *(pair for pair in pairs if size > 2)]
    if not 2 <= ranks <= size:
        raise Misuse(f"--sum-ranks {ranks}: torchrun started {counted(size, 'rank')}; choose 2 to {size}")
    return [tuple(range(first, first + ranks)) for first in range(0, size - ranks + 1, ranks)][:_PAIRS]


def _samples(taken: dict[K, list[float]]) -> dict[K, Samples]:
    return {key: Samples(tuple(values)) for key, values in taken.items() if values}


def _nodes(store: Store, rank: int, size: int, request: Request) -> tuple[Node, ...]:
    cuda = request.backend == "nccl" and torch.cuda.is_available()
    local, agent = (int(os.environ.get(name, "0")) for name in ("LOCAL_RANK", "GROUP_RANK"))
    memory = torch.cuda.get_device_properties(local).total_memory if cuda else machine.memory()
    store.set(f"node/{rank}", json.dumps([platform.node(), agent, memory, not cuda]))
    what = f"rank {rank}: wait for all ranks to start"
    return tuple(Node(*json.loads(learn(store, f"node/{r}", r, what, request.timeout))) for r in range(size))


def _job(size: int, pairs: Sequence[tuple[int, int]], groups: Sequence[tuple[int, ...]]) -> Job:
    """Every rank a worker, every pair a link in both directions, every group a "stage" that its members hold."""
    placement = tuple(tuple(group[min(p, len(group) - 1)] for group in groups) for p in range(size))
    links = tuple(sorted({*pairs, *((b, a) for a, b in pairs)}))
    return Job("chimera-profile", "", size, len(groups), 1, 1, (), (), placement, links, 0, ())


class _Bench:
    """The measurements, each made by the ranks concerned while the others wait for it to end."""

    def __init__(self, world: World, request: Request, told: Told, steps: int) -> None:
        self._world = world
        self._request = request
        self._told = told
        self._steps = steps
        self._done = 0
        self._tag = 0

    def pair(self, pair: tuple[int, int], size: int) -> tuple[list[float], list[float], list[float]]:
        """Halves of ping-pongs without their pauses, gaps between messages of a stream, and seconds of a post."""
        me, (a, b) = self._world.place.rank, pair
        self._tag = 0
        if me in pair:
            peer = self._world.peer(b if me == a else a)
            buffers = tuple(self._zeros(size) for _ in range(3))
            exchange = self._ping if me == a else self._pong
            exchange(peer, buffers, WARM_UP)
            trips, _ = exchange(peer, buffers, WARM_UP)
            rounds = self._agreed(a, 2 * PAUSE + median(trips))
            taken, posts = exchange(peer, buffers, rounds)
            gaps = self._send([peer], buffers, rounds) if me == a else self._receive(peer, buffers, rounds)
            self._say(taken, posts, gaps)
        (trips, posted, _), (pauses, answered, gaps) = self._hear(a), self._hear(b)
        self._end(f"messages of {size} B between ranks {a} and {b}")
        return [(trip - pause) / 2 for trip, pause in zip(trips, pauses, strict=True)], gaps, posted + answered

    def fork(self, hub: int, ends: tuple[int, int], size: int) -> list[float]:
        """Gaps between messages of two streams that leave the hub at once, at both ends."""
        me = self._world.place.rank
        self._tag = 0
        if me in (hub, *ends):
            buffers = tuple(self._zeros(size) for _ in range(2))

            def stream(rounds: int) -> list[float]:
                if me == hub:
                    return self._send([self._world.peer(end) for end in ends], buffers, rounds)
                return self._receive(self._world.peer(hub), buffers, rounds)

            start = time.perf_counter()
            stream(WARM_UP)
            rounds = self._agreed(hub, (time.perf_counter() - start) / WARM_UP)
            self._say([], [], stream(rounds))
        heard = [self._hear(end) for end in ends]
        self._end(f"streams of {size} B from rank {hub} to ranks {ends[0]} and {ends[1]}")
        return [gap for _, _, gaps in heard for gap in gaps]

    def group(self, number: int, members: Sequence[int], size: int) -> tuple[list[float], list[float]]:
        """Seconds from the last member's launch to its end, and seconds of a launch."""
        if self._world.place.rank in members:
            self._sum(number, size, WARM_UP)
            taken, _ = self._sum(number, size, WARM_UP)
            rounds = self._agreed(members[0], PAUSE + median(taken))
            self._say(*self._sum(number, size, rounds), [])
        heard = [self._hear(member) for member in members]
        self._end(f"sums of {size} B over {counted(len(members), 'rank')}")
        shortest = [min(of_all) for of_all in zip(*(taken for taken, _, _ in heard), strict=True)]
        return shortest, [post for _, posts, _ in heard for post in posts]

    def _agreed(self, first: int, seconds: float) -> int:
        """How many rounds take about a second, if one takes so many ``seconds`` at the first of the ranks concerned."""
        key = f"rounds/{self._done}"
        if self._world.place.rank == first:
            self._world.store.set(key, str(max(FEWEST, min(self._request.rounds, int(_SECOND / max(seconds, _TICK))))))
        return int(self._world.learn(key, first, "for the number of rounds", self._world.timeout))

    def _ping(self, peer: Peer, buffers: tuple[torch.Tensor, ...], rounds: int) -> tuple[list[float], list[float]]:
        """Seconds from a message to its answer, and of a post: half of what both posts of a round take."""
        taken, posts = [], []
        for tag in self._tags(rounds):
            begin = time.perf_counter()
            answer = peer.irecv(buffers[:1], tag)
            expecting = time.perf_counter() - begin
            time.sleep(PAUSE)
            start = time.perf_counter()
            sent = peer.isend(buffers[1:2], tag)
            posts.append((expecting + time.perf_counter() - start) / 2)
            answer.wait()
            self._finish()
            taken.append(time.perf_counter() - start)
            sent.wait()
        return taken, posts

    def _pong(self, peer: Peer, buffers: tuple[torch.Tensor, ...], rounds: int) -> tuple[list[float], list[float]]:
        """Seconds from a message to when its answer is posted, which are not the link's; no posts."""
        taken = []
        for tag, arriving in self._arriving(peer, buffers, rounds):
            arriving.wait()
            self._finish()
            arrived = time.perf_counter()
            time.sleep(PAUSE)
            taken.append(time.perf_counter() - arrived)
            peer.isend(buffers[2:], tag).wait()
        return taken, []

    def _send(self, peers: Sequence[Peer], buffers: tuple[torch.Tensor, ...], rounds: int) -> list[float]:
        for tag in self._tags(rounds + 1):
            for sent in [peer.isend(buffers[1:2], tag) for peer in peers]:
                sent.wait()
        self._finish()
        return []

    def _receive(self, peer: Peer, buffers: tuple[torch.Tensor, ...], rounds: int) -> list[float]:
        ends = []
        for _, arriving in self._arriving(peer, buffers, rounds + 1):
            arriving.wait()
            self._finish()
            ends.append(time.perf_counter())
        return [later - earlier for earlier, later in pairwise(ends)]

    def _arriving(self, peer: Peer, buffers: tuple[torch.Tensor, ...], rounds: int) -> Iterator[tuple[int, Transfer]]:
        """Receipts, each posted before the one before it is waited for."""
        ahead = None
        for tag in self._tags(rounds):
            posted = peer.irecv((buffers[tag % 2],), tag)
            if ahead is not None:
                yield ahead
            ahead = tag, posted
        if ahead is not None:
            yield ahead

    def _sum(self, number: int, size: int, rounds: int) -> tuple[list[float], list[float]]:
        """Seconds from a launch to the end of a sum, and of the launch."""
        group, members = self._world.sums[number]
        flat, taken, posts = self._zeros(size), [], []
        others = [rank for rank in members if rank != self._world.place.rank]
        operation = f"all_reduce of {size} B"
        for _ in range(rounds):
            time.sleep(PAUSE)
            start = time.perf_counter()
            with self._world.waiting(operation, others):
                work = dist.all_reduce(flat, group=group, async_op=True)
            posts.append(time.perf_counter() - start)
            self._world.settle(work, operation, others)
            self._finish()
            taken.append(time.perf_counter() - start)
        return taken, posts

    def _finish(self) -> None:
        """A wait on NCCL returns before the message is there."""
        if self._world.backend == "nccl":
            torch.cuda.current_stream().synchronize()

    def _zeros(self, size: int) -> torch.Tensor:
        return torch.zeros(size // _FLOAT, device=self._world.device)

    def _tags(self, rounds: int) -> range:
        """Fresh tags, the same on both sides."""
        first, self._tag = self._tag, self._tag + rounds
        return range(first, first + rounds)

    def _say(self, *taken: list[float]) -> None:
        self._world.store.set(f"taken/{self._done}/{self._world.place.rank}", json.dumps(taken))

    def _hear(self, rank: int) -> list[list[float]]:
        """What a rank has measured; only rank 0 needs to know."""
        if self._world.place.rank != 0:
            return [[], [], []]
        key = f"taken/{self._done}/{rank}"
        found: list[list[float]] = json.loads(self._world.learn(key, rank, "for its times", self._world.timeout))
        return found

    def _end(self, what: str) -> None:
        self._world.meet(f"for the {what} to be measured")
        self._done += 1
        self._told(what, self._done, self._steps)
