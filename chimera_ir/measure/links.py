"""Measurement of messages and sums between the ranks that torchrun started; a round is one exchange."""

import json
import os
import platform
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import log, log2, sinh, sqrt
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from chimera_ir.measure import stations
from chimera_ir.measure.stages import FEWEST, Samples, ShowProgress, percent, rounded, too_noisy
from chimera_ir.measure.stations import round_trips
from chimera_ir.output import OutputRefused
from chimera_ir.plural import counted
from chimera_ir.profile.cluster import Cluster, HostLink, Link
from chimera_ir.profile.quantity import show_size, show_time
from chimera_runtime.errors import MISUSED, OUR_FAULT, Misuse, PeerLost
from chimera_runtime.program.job import Job
from chimera_runtime.ranks.devices import device_of
from chimera_runtime.ranks.messages import MessageTransfer, Names, Peer
from chimera_runtime.ranks.rendezvous import find_store, wait_for_key
from chimera_runtime.ranks.world import World, begin, join_group
from chimera_runtime.tools.fail.faults import Faults
from chimera_runtime.tools.watch.memory import share_of

# alpha and beta from measured times: the straight line that passes nearest to them.

OFF = 0.2
"""The largest share of a measured time by which a line may be off at some size without a remark."""


SCATTER = 0.1
"""The largest deviation of a time from the line, as a share of the time, that counts as chance."""

_ROUNDS = 3000
_FREE_ROUNDS = 300
_NOTHING = 1e-9


@dataclass(frozen=True, slots=True)
class Point:
    """Seconds of an exchange of ``size`` bytes between ``ranks`` ranks, uncertain by the share ``uncertainty``."""

    size: int
    ranks: int
    seconds: float
    uncertainty: float = 0.0


def messages(points: Sequence[Point]) -> Link:
    """The link whose alpha and beta fit messages best, by Comm_p2p = alpha + beta L (section 3.4)."""
    return _nearest([(1.0, float(p.size), p) for p in points])


def sums(points: Sequence[Point]) -> Link:
    """The link that fits sums best, by Comm_allreduce = 2 log2(r) alpha + 2 (r-1)/r beta L (section 3.4)."""
    return _nearest([(2 * log2(p.ranks), 2 * (p.ranks - 1) * p.size / p.ranks, p) for p in points])


def _nearest(terms: Sequence[tuple[float, float, Point]]) -> Link:
    """The link with the alpha and beta, never negative, that come nearest to all measured times.

    A term is (x, y, point): the line says m = alpha x + beta y where the measured time is t, the seconds of the point.
    The sum of h(log(m/t) / s) over all terms is made as small as possible. Times span many powers of ten, so the
    logarithm of m/t counts: a line twice too high is as bad as a line half as high as it should be. Its unit s is
    SCATTER plus the point's uncertainty. h is Huber's function: squares up to one, absolute values beyond, so that one
    size with an unusual time hardly bends the line.

    A round reduces a weighted sum of m/t + t/m, which is convex and close to squares of logarithms. It multiplies alpha
    and beta by the square root of the terms that pull them up over the terms that pull them down, as in non-negative
    factorizations. The weights give the sum the slope of h; in the first rounds, which find a start, all are 1.
    """
    alpha = min(point.seconds / x for x, _, point in terms) / 2
    beta = min(point.seconds / y for _, y, point in terms) / 2
    for number in range(_ROUNDS):
        up, over, down, under = 0.0, 0.0, 0.0, 0.0
        for x, y, point in terms:
            ratio = (alpha * x + beta * y) / point.seconds
            weight = 1.0 if number < _FREE_ROUNDS else _weight(log(ratio), SCATTER + point.uncertainty)
            pull, push = weight / (ratio * ratio * point.seconds), weight / point.seconds
            up, over = up + pull * x, over + pull * y
            down, under = down + push * x, under + push * y
        alpha, beta = alpha * sqrt(up / down), beta * sqrt(over / under)
    return Link(alpha, beta)


def _weight(off: float, scale: float) -> float:
    """The slope of h(off / scale) over that of e^off + e^-off: the weight of a term, with ``off`` = log(m/t)."""
    size = abs(off)
    if size < _NOTHING:
        return 1 / (2 * scale * scale)
    return min(size / scale, 1.0) / scale / (2 * sinh(size))


# A cluster from measured times of messages and sums: alpha and beta, and how far to trust them.

_LEAST = 1e-15
"""Seconds per byte that no measurement can tell from 0."""


_SHARED = 1.5
"""The factor on the time of two messages at once from which a link counts as shared: halfway from 1 to 2."""


@dataclass(frozen=True, slots=True)
class Host:
    """Host of a rank: machine, number of its torchrun agent, and memory, which may be ``shared`` by its ranks."""

    name: str
    agent: int
    memory: int
    shared: bool

    @property
    def place(self) -> str:
        """Name of the node, from machine and agent, because a machine with several agents counts as several nodes."""
        return f"{self.name}/{self.agent}"


@dataclass(frozen=True, slots=True)
class PairTimes:
    """Seconds of messages within nodes or between them, by bytes.

    A message takes half a ping-pong, posting included; ``posts`` are the times of posting alone. ``streams`` has the
    times from one arrival to the next of messages that are sent right after one another, ``fan_out`` those of the
    largest size where the sender sends to a second rank at the same time; None if no rank has two such neighbours.
    """

    messages: Mapping[int, Samples]
    streams: Mapping[int, Samples]
    posts: Mapping[int, Samples]
    fan_out: Samples | None

    @property
    def slowdown(self) -> float:
        """Factor by which a message takes longer if its sender sends to two ranks at once; 0 if not measured."""
        return self.fan_out.median / self.streams[max(self.streams)].median if self.fan_out else 0.0


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """Measured times of messages and sums, in seconds, on the hosts of the ranks (``nodes``).

    ``messages`` has them by whether they are within a node, ``sums`` by number of ranks and bytes. A sum lasts from the
    start of its last launch to its end; ``launches`` are the times of launching sums of the smallest size. ``moves``
    has transfers between a rank and its host, by bytes; ``moves_at_once`` has those of the largest size while all ranks
    make them.
    """

    nodes: tuple[Host, ...]
    messages: Mapping[bool, PairTimes]
    sums: Mapping[int, Mapping[int, Samples]]
    launches: Samples
    moves: Mapping[int, Samples]
    moves_at_once: Samples

    @property
    def crowded(self) -> float:
        """Factor by which a transfer to the host takes longer if all ranks make transfers."""
        return self.moves_at_once.median / self.moves[max(self.moves)].median


@dataclass(frozen=True, slots=True)
class Described:
    """A cluster, its measurements as lines of a table, and remarks on their quality."""

    cluster: Cluster
    table: tuple[str, ...]
    remarks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Series:
    """Times of one kind of exchange, and of streams of it, by size in bytes, with the line fitted to the former."""

    what: str
    samples: Mapping[int, Samples]
    streams: Mapping[int, Samples]
    line: Callable[[int], float]

    def off(self, size: int) -> float:
        return self.line(size) / self.samples[size].median - 1


def described(name: str, measured: LinkTimes) -> Described:
    """The cluster that the ranks ran on, called ``name``, from the measured times."""
    links = {within: _message_link(times) for within, times in sorted(measured.messages.items())}
    launch = measured.launches.median
    points = [point for ranks, samples in measured.sums.items() for point in _points(ranks, samples, launch)]
    sum_link = _rounded(sums(points), launch)
    series = [
        _Series(f"messages {_where(within)}", times.messages, times.streams, links[within].message)
        for within, times in sorted(measured.messages.items())
    ]
    series += [_sums(ranks, by_size, sum_link) for ranks, by_size in sorted(measured.sums.items())]
    per_node = sorted(Counter(node.place for node in measured.nodes).values())
    host = _host_link(measured, per_node[-1])
    series.append(_Series("transfers to the host", measured.moves, {}, host.link.message))
    between = links[False] if False in links else links[True]
    inside = links[True] if True in links else links[False]
    together = Counter(node.name for node in measured.nodes)
    memory = min(node.memory // together[node.name] if node.shared else node.memory for node in measured.nodes)
    memory = memory >> 20 << 20  # whole MiB
    cluster = Cluster(name, len(measured.nodes), per_node[-1], memory, 0, between, inside, sum_link, host=host)
    remarks = [remark for kind in series for remark in _remarks(kind)]
    if per_node[0] != per_node[-1]:
        remarks.append(
            f"nodes have {per_node[0]} to {counted(per_node[-1], 'rank')}; the file says {per_node[-1]} for all of them"
        )
    table: list[str] = []
    if links.keys() == {True}:
        table.append("All ranks were on one node: [links.between] is what was measured within it.")
    elif links.keys() == {False}:
        table.append("Every rank had a node of its own: [links.within] is what was measured between them.")
    table += [line for kind in series for line in _table(kind)]
    table += [_at_once(within, times) for within, times in sorted(measured.messages.items())]
    table.append(f"Transfers of all ranks at once take {measured.crowded:.2f} times as long as those of one.")
    return Described(cluster, tuple(table), tuple(remarks))


def _message_link(times: PairTimes) -> Link:
    """The fitted link; it is shared if a message takes longer while its sender sends to two ranks."""
    post = times.posts[min(times.posts)].median
    line = messages(_points(2, times.messages, post))
    return replace(_rounded(line, post), shared=times.slowdown > _SHARED)


def _host_link(measured: LinkTimes, per_node: int) -> HostLink:
    """The fitted link to the host; n workers share it if a transfer takes n times as long while all ranks make one."""
    line = messages(_points(1, measured.moves, 0.0))
    return HostLink(_rounded(line, 0.0), min(per_node, max(1, round(measured.crowded))))


def _at_once(within: bool, times: PairTimes) -> str:
    where, longer = _where(within), times.slowdown
    if not longer:
        return f"Whether messages {where} share anything was not measured: no rank had two neighbours there."
    return f"Messages {where} to two ranks at once take {longer:.2f} times as long as to one."


def _points(ranks: int, by_size: Mapping[int, Samples], post: float) -> list[Point]:
    """Points of a fit: medians less the seconds of posting, but at least a hundredth of the median."""
    return [
        Point(size, ranks, max(samples.median - post, samples.median / 100), samples.uncertainty)
        for size, samples in by_size.items()
    ]


def _where(within: bool) -> str:
    return "within a node" if within else "between nodes"


def _sums(ranks: int, by_size: Mapping[int, Samples], link: Link) -> _Series:
    what = f"sums over {counted(ranks, 'rank')}"
    return _Series(what, by_size, {}, lambda size: link.overhead + link.all_reduce(size, ranks))


def _rounded(link: Link, overhead: float) -> Link:
    """The link with four significant digits and with this overhead; what the clock cannot tell from 0 becomes 0."""
    return Link(
        rounded(link.alpha) if link.alpha > _TICK else 0.0,
        1 / rounded(1 / link.beta) if link.beta > _LEAST else 0.0,
        rounded(overhead),
    )


def _table(series: _Series) -> Iterator[str]:
    streams = f" {'in a stream':>12}" if series.streams else ""
    yield f"{series.what + ',':<29} {'median':>9} {'spread':>7} {'line off by':>12}{streams}"
    for size, samples in sorted(series.samples.items()):
        stream = f" {_time(series.streams[size]):>12}" if series.streams else ""
        off = round(series.off(size), 2) + 0.0
        yield f"{show_size(size):>29} {_time(samples):>9} {percent(samples.spread):>7} {off:>+12.0%}{stream}"


def _time(samples: Samples) -> str:
    return show_time(rounded(samples.median, 3))


def _remarks(series: _Series) -> Iterator[str]:
    yield from too_noisy(series.what, [(show_size(size), samples) for size, samples in sorted(series.samples.items())])
    off = [(size, share) for size in sorted(series.samples) if abs(share := series.off(size)) > OFF]
    if off:
        sizes = ", ".join(f"{percent(share)} at {show_size(size)}" for size, share in off)
        yield f"{series.what}: the straight line is off by more than {percent(OFF)}: {sizes}"


WARM_UP = 3
"""Rounds that come first for every size and do not count."""

PAUSE = 0.01
"""Seconds that a rank rests before it sends or launches, as if it computed.

Without the rest, messages would be faster than in training: processors would be awake, and their caches filled.
"""

_SECOND = 1.0
_TICK = 1e-9
_PAIRS = 4
_FLOAT = 4

_BySize = dict[int, list[float]]
"""Seconds by bytes."""


@dataclass(frozen=True, slots=True)
class LinkRequest:
    """Sizes to measure in bytes, multiples of four, each in at most ``rounds`` rounds.

    Sums are over ``sum_ranks`` neighbours or, if that is None, over all ranks and over pairs. Tensors are on
    ``device``, which is ``cpu`` or ``cuda``; by default the one that the backend is for. A rank waits for another one
    for at most ``timeout`` seconds.
    """

    sizes: tuple[int, ...]
    rounds: int
    backend: str
    timeout: float
    sum_ranks: int | None = None
    device: str | None = None


class _MessageNames(Names):
    """Names of messages in errors, by number: here they belong to no line of a program."""

    def operation(self, verb: str, tag: int) -> str:
        return f"{verb} of message {tag}"


def measure(store: Store, rank: int, size: int, request: LinkRequest, progress: ShowProgress) -> LinkTimes | None:
    """Measures messages and sums between ``size`` ranks, and transfers between their devices and their hosts.

    Returns the times on rank 0, and None on other ranks.

    To be called on every rank; pairs of ranks measure one after another.

    Raises `Misuse` if a GPU is missing, or ``sum_ranks`` does not fit the number of ranks. Raises `PeerLost` if another
    rank has died, or does not answer within the time-out.
    """
    # All ranks choose the same pairs and groups, from the nodes that they are on, and connect as in a training.
    nodes = _nodes(store, rank, size, request)
    pairs = chosen_pairs([node.place for node in nodes])
    groups = _groups(size, pairs, request.sum_ranks)
    job = _job(size, pairs, groups)
    _, device = begin(job, store, rank, size, "pipeline", request.backend, request.timeout, request.device)
    world = join_group(job, None, "pipeline", device, request.timeout)
    names = _MessageNames(rank, rank, len(groups), request.timeout)
    world = replace(world, control_group=replace(world.control_group, names=names))
    fan_outs = chosen_fan_outs(pairs, [node.place for node in nodes])
    steps = (len(pairs) + len(groups) + 1) * len(request.sizes) + len(fan_outs) + 1
    bench = _Bench(world, request, progress, steps)
    # Messages of every pair, sums of every group, two streams at once from one rank, transfers of one rank and of all.
    seconds: dict[bool, tuple[_BySize, _BySize, _BySize]] = {}
    for a, b in pairs:
        none: tuple[_BySize, _BySize, _BySize] = defaultdict(list), defaultdict(list), defaultdict(list)
        of_kind = seconds.setdefault(nodes[a].place == nodes[b].place, none)
        for count in request.sizes:
            for by_size, times in zip(of_kind, bench.pair((a, b), count), strict=True):
                by_size[count] += times
    sums: dict[int, _BySize] = {}
    launches: list[float] = []
    for number, group in enumerate(groups):
        for count in request.sizes:
            times, posted = bench.group(number, group, count)
            launches += posted if count == min(request.sizes) else []
            sums.setdefault(len(group), defaultdict(list))[count] += times
    at_once = {within: bench.fan_out(hub, ends, max(request.sizes)) for within, (hub, ends) in fan_outs.items()}
    moves = {count: bench.moves((0,), count) for count in request.sizes}
    moves_at_once = bench.moves(tuple(range(size)), max(request.sizes))
    world.control_group.barrier("for everybody to finish")
    dist.destroy_process_group()
    if rank != 0:
        return None
    fans = {within: Samples(tuple(times)) for within, times in at_once.items() if times}
    return LinkTimes(
        nodes=nodes,
        messages={
            within: PairTimes(_samples(trips), _samples(gaps), _samples(posts), fans.get(within))
            for within, (trips, gaps, posts) in seconds.items()
        },
        sums={ranks: _samples(by_size) for ranks, by_size in sums.items()},
        launches=Samples(tuple(launches)),
        moves=_samples(moves),
        moves_at_once=Samples(tuple(moves_at_once)),
    )


def chosen_pairs(names: Sequence[str]) -> list[tuple[int, int]]:
    """Pairs of ranks to measure, a few neighbours within nodes and a few between; ``names`` has every rank's node.

    Examples
    --------
    >>> chosen_pairs(["a", "a", "b", "b"])
    [(0, 1), (2, 3), (0, 2)]
    """
    within = [(a, b) for a, b in pairwise(range(len(names))) if names[a] == names[b]]
    first = {name: rank for rank, name in reversed([*enumerate(names)])}
    between = [*pairwise(sorted(first.values()))]
    return within[:_PAIRS] + between[:_PAIRS]


def chosen_fan_outs(pairs: Sequence[tuple[int, int]], names: Sequence[str]) -> dict[bool, tuple[int, tuple[int, int]]]:
    """Fan-outs to measure, within a node (True) and between nodes: a rank and the two others to which it sends at once.

    The rank is the one that two pairs of one kind (both within a node, or both between nodes) have in common.

    Examples
    --------
    >>> chosen_fan_outs([(0, 1), (1, 2), (0, 3)], ["a", "a", "a", "b"])
    {True: (1, (0, 2))}
    """
    fan_outs: dict[bool, tuple[int, tuple[int, int]]] = {}
    for (a, hub), (same, b) in pairwise(pairs):
        within = names[a] == names[hub]
        if hub == same and within == (names[hub] == names[b]):
            fan_outs.setdefault(within, (hub, (a, b)))
    return fan_outs


def _groups(size: int, pairs: Sequence[tuple[int, int]], ranks: int | None) -> list[tuple[int, ...]]:
    """Groups of ranks that sum: ``ranks`` neighbours or, if that is None, all ranks, then each of ``pairs``."""
    if ranks is None:
        return [tuple(range(size)), *(pair for pair in pairs if size > 2)]
    if not 2 <= ranks <= size:
        raise Misuse(f"--sum-ranks {ranks}: torchrun started {counted(size, 'rank')}; choose 2 to {size}")
    return [tuple(range(first, first + ranks)) for first in range(0, size - ranks + 1, ranks)][:_PAIRS]


def _samples(times: _BySize) -> dict[int, Samples]:
    return {size: Samples(tuple(values)) for size, values in times.items() if values}


def _nodes(store: Store, rank: int, size: int, request: LinkRequest) -> tuple[Host, ...]:
    device = device_of(request.backend, request.device)
    agent = int(os.environ.get("GROUP_RANK", "0"))
    on_gpu = device.type == "cuda"
    memory = share_of(device) if on_gpu else stations.memory()
    store.set(f"node/{rank}", json.dumps([platform.node(), agent, memory, not on_gpu]))
    what = f"rank {rank}: wait for all ranks to start"
    return tuple(Host(*json.loads(wait_for_key(store, f"node/{r}", r, what, request.timeout))) for r in range(size))


def _job(size: int, pairs: Sequence[tuple[int, int]], groups: Sequence[tuple[int, ...]]) -> Job:
    """A job in which every rank is a worker, every pair two links, and every group a stage that its members hold."""
    placement = tuple(tuple(group[min(p, len(group) - 1)] for group in groups) for p in range(size))
    links = tuple(sorted({*pairs, *((b, a) for a, b in pairs)}))
    return Job("chimera-profile", "", size, len(groups), 1, 1, 1, (), (), placement, links, 0, (), 0)


class _Bench:
    """The measurements, each made by the ranks concerned while the other ranks wait for its end."""

    def __init__(self, world: World, request: LinkRequest, progress: ShowProgress, steps: int) -> None:
        self._world = world
        self._request = request
        self._progress = progress
        self._steps = steps
        self._done = 0
        self._tag = 0

    def pair(self, pair: tuple[int, int], size: int) -> tuple[list[float], list[float], list[float]]:
        """Measures messages of ``size`` bytes between the ranks of ``pair``.

        Returns three lists of seconds: of a message (half a ping-pong, without the pauses); from one arrival to the
        next where messages follow one another without a pause; and of posting a send or a receive.
        """
        me, (a, b) = self._world.place.rank, pair
        self._tag = 0
        if me in pair:
            peer = self._world.peer(b if me == a else a)
            buffers = tuple(self._zeros(size) for _ in range(3))
            exchange = self._ping if me == a else self._pong
            # A warm-up; a few rounds to find how many fit into a second; the rounds that count; a stream.
            exchange(peer, buffers, WARM_UP)
            trips, _ = exchange(peer, buffers, WARM_UP)
            rounds = self._agreed(a, 2 * PAUSE + median(trips))
            seconds, posts = exchange(peer, buffers, rounds)
            gaps = self._send([peer], buffers, rounds) if me == a else self._receive(peer, buffers, rounds)
            self._publish(seconds, posts, gaps)
        what = f"messages of {size} B between ranks {a} and {b}"
        (trips, posted, _), (pauses, answered, gaps) = self._collected(pair, what)
        return [(trip - pause) / 2 for trip, pause in zip(trips, pauses, strict=True)], gaps, posted + answered

    def fan_out(self, hub: int, ends: tuple[int, int], size: int) -> list[float]:
        """Seconds from one arrival to the next at each of the ranks ``ends``, while ``hub`` sends to both."""
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
            self._publish([], [], stream(rounds))
        what = f"streams of {size} B from rank {hub} to ranks {ends[0]} and {ends[1]}"
        return [gap for _, _, gaps in self._collected(ends, what) for gap in gaps]

    def moves(self, ranks: Sequence[int], size: int) -> list[float]:
        """Seconds of a transfer of ``size`` bytes to the host or back, while all of ``ranks`` make such transfers."""
        if self._world.place.rank in ranks:
            measure = round_trips(self._world.device, size)
            measure(WARM_UP)
            rounds = self._agreed(ranks[0], 2 * median(measure(WARM_UP)))
            self._publish(measure(rounds), [], [])
        what = f"transfers of {size} B to the hosts of {counted(len(ranks), 'rank')}"
        return [seconds for times, _, _ in self._collected(ranks, what) for seconds in times]

    def group(self, number: int, members: Sequence[int], size: int) -> tuple[list[float], list[float]]:
        """Seconds from the last launch of a sum of ``size`` bytes over ``members`` to its end, and of the launches."""
        if self._world.place.rank in members:
            self._sum(number, size, WARM_UP)
            seconds, _ = self._sum(number, size, WARM_UP)
            rounds = self._agreed(members[0], PAUSE + median(seconds))
            self._publish(*self._sum(number, size, rounds), [])
        published = self._collected(members, f"sums of {size} B over {counted(len(members), 'rank')}")
        # A sum begins with the last launch, so the rank that launched last has the shortest time.
        shortest = [min(of_all) for of_all in zip(*(seconds for seconds, _, _ in published), strict=True)]
        return shortest, [post for _, posts, _ in published for post in posts]

    def _agreed(self, first: int, seconds: float) -> int:
        """Number of rounds that take about a second, decided by rank ``first``, on which a round takes ``seconds``."""
        key = f"rounds/{self._done}"
        if self._world.place.rank == first:
            rounds = max(FEWEST, min(self._request.rounds, int(_SECOND / max(seconds, _TICK))))
            self._world.control_group.store.set(key, str(rounds))
        return int(self._world.control_group.wait_for_key(key, first, "for the number of rounds"))

    def _ping(self, peer: Peer, buffers: tuple[torch.Tensor, ...], rounds: int) -> tuple[list[float], list[float]]:
        """Sends and waits for answers: seconds until each answer, and mean seconds of posting its receive and send."""
        seconds, posts = [], []
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
            seconds.append(time.perf_counter() - start)
            sent.wait()
        return seconds, posts

    def _pong(self, peer: Peer, buffers: tuple[torch.Tensor, ...], rounds: int) -> tuple[list[float], list[float]]:
        """Answers messages. Returns the seconds from each arrival to the post of the answer, and no times of posts."""
        seconds = []
        for tag, arriving in self._arriving(peer, buffers, rounds):
            arriving.wait()
            self._finish()
            arrived = time.perf_counter()
            time.sleep(PAUSE)
            seconds.append(time.perf_counter() - arrived)
            peer.isend(buffers[2:], tag).wait()
        return seconds, []

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

    def _arriving(
        self, peer: Peer, buffers: tuple[torch.Tensor, ...], rounds: int
    ) -> Iterator[tuple[int, MessageTransfer]]:
        """Yields receives with their tags; the next receive is already posted when one is yielded."""
        ahead = None
        for tag in self._tags(rounds):
            posted = peer.irecv((buffers[tag % 2],), tag)
            if ahead is not None:
                yield ahead
            ahead = tag, posted
        if ahead is not None:
            yield ahead

    def _sum(self, number: int, size: int, rounds: int) -> tuple[list[float], list[float]]:
        """Runs sums over group ``number``. Returns the seconds of each from launch to end, and of each launch."""
        group, members = self._world.sums[number,]
        flat, seconds, posts = self._zeros(size), [], []
        others = [rank for rank in members if rank != self._world.place.rank]
        operation, staging = f"all_reduce of {size} B", self._world.staging
        for _ in range(rounds):
            time.sleep(PAUSE)
            start = time.perf_counter()
            with self._world.control_group.waiting(operation, others):
                work = (
                    dist.all_reduce(flat, group=group, async_op=True)
                    if staging is None
                    else staging.all_reduce(flat, group)
                )
            posts.append(time.perf_counter() - start)
            self._world.control_group.settle(work, operation, others)
            self._finish()
            seconds.append(time.perf_counter() - start)
        return seconds, posts

    def _finish(self) -> None:
        """Waits until a GPU has the message, because the wait for a message returns earlier."""
        if self._world.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def _zeros(self, size: int) -> torch.Tensor:
        return torch.zeros(size // _FLOAT, device=self._world.device)

    def _tags(self, rounds: int) -> range:
        first, self._tag = self._tag, self._tag + rounds
        return range(first, first + rounds)

    def _publish(self, *times: list[float]) -> None:
        self._world.control_group.store.set(f"taken/{self._done}/{self._world.place.rank}", json.dumps(times))

    def _collected(self, ranks: Sequence[int], what: str) -> list[list[list[float]]]:
        """Ends a measurement; the lists of times that ``ranks`` have published, on rank 0; elsewhere empty ones."""
        published: list[list[list[float]]] = [[[], [], []] for _ in ranks]
        if self._world.place.rank == 0:
            keys = {rank: f"taken/{self._done}/{rank}" for rank in ranks}
            texts = (self._world.control_group.wait_for_key(key, rank, "for its times") for rank, key in keys.items())
            published = [json.loads(text) for text in texts]
        self._world.control_group.barrier(f"for the {what} to be measured")
        self._done += 1
        self._progress(what, self._done, self._steps)
        return published


# One rank of ``chimera profile links``: from torchrun to the measured times, or to a message and an exit status.

_NAME = "chimera-profile"


def run(request: LinkRequest, ready: Callable[[], None], progress: ShowProgress) -> LinkTimes | None:
    """Returns the times of messages and sums on rank 0, None on others.

    Rank 0 calls ``ready`` first, and every rank ``progress`` after each step.

    Does not return if anything fails on any rank: all ranks end, with one message.
    """
    store, rank, size = find_store(request.timeout)
    faults = Faults(store, rank, _NAME)
    faults.watch_signals(size)
    try:
        if size < 2:
            raise Misuse("links lie between ranks: start at least two, as in --nproc-per-node=2")
        if rank == 0:
            ready()
        return measure(store, rank, size, request, progress)
    except (Misuse, OutputRefused) as error:
        faults.end(str(error), MISUSED)
    except PeerLost as error:
        faults.lost(error)
    except (RuntimeError, dist.DistError) as error:
        faults.fail(error)
    except Exception as error:
        faults.end(f"rank {rank}: our own fault\n{''.join(traceback.format_exception(error))}", OUR_FAULT)
