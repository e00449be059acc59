"""A cluster from measured times of messages and sums: alpha and beta, and how far to trust them."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from chimera_ir.measure import fit
from chimera_ir.measure.fit import OFF, Point
from chimera_ir.measure.samples import Samples, percent, rounded, too_noisy
from chimera_ir import plural
from chimera_ir.profile.cluster import Cluster, HostLink, Link
from chimera_ir.profile.quantity import show_size, show_time

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
class LinkTimes:
    """Measured times of messages and sums, in seconds, on the hosts of the ranks (``nodes``).

    The keys of ``messages``, ``streams`` and ``posts`` are (whether within a node, bytes), those of ``sums`` (ranks,
    bytes). A message takes half a ping-pong, posting included. ``streams`` has the times from one arrival to the next
    of messages that are sent right after one another. ``fan_outs`` has the same for the largest size, where the sender
    sends to a second rank at the same time; the key is whether all are within a node. It is empty if no rank has two
    neighbours. A sum lasts from the start of its last launch to its end. ``posts`` are the times of posting messages,
    ``launches`` those of launching sums of the smallest size. ``moves`` has transfers between a rank and its host, by
    bytes; ``moves_at_once`` has those of the largest size while all ranks make them.
    """

    nodes: tuple[Host, ...]
    messages: Mapping[tuple[bool, int], Samples]
    streams: Mapping[tuple[bool, int], Samples]
    fan_outs: Mapping[bool, Samples]
    sums: Mapping[tuple[int, int], Samples]
    posts: Mapping[tuple[bool, int], Samples]
    launches: Samples
    moves: Mapping[int, Samples]
    moves_at_once: Samples


@dataclass(frozen=True, slots=True)
class Described:
    """A cluster, its measurements as lines of a table, and remarks on their quality."""

    cluster: Cluster
    table: tuple[str, ...]
    remarks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Series:
    """Times of one kind of exchange, which ``what`` names, by size in bytes; ``line`` is fitted to them, in seconds.

    ``streams`` has the times of messages in streams, by size.
    """

    what: str
    samples: Mapping[int, Samples]
    streams: Mapping[int, Samples]
    line: Callable[[int], float]

    def off(self, size: int) -> float:
        """Deviation of the line from the measured time, as a share of the measured time."""
        return self.line(size) / self.samples[size].median - 1


def described(name: str, measured: LinkTimes) -> Described:
    """The cluster that the ranks ran on, called ``name``, from the measured times."""
    links = {within: _message_link(measured, within) for within in sorted({within for within, _ in measured.messages})}
    launch = measured.launches.median
    sum_link = _rounded(
        fit.sums([_point(size, ranks, samples, launch) for (ranks, size), samples in measured.sums.items()]), launch
    )
    series = [_messages(measured, within, link) for within, link in links.items()]
    series += [_sums(measured, ranks, sum_link) for ranks in sorted({ranks for ranks, _ in measured.sums})]
    per_node = sorted(Counter(node.place for node in measured.nodes).values())
    host = _host_link(measured, per_node[-1])
    series.append(_Series("transfers to the host", measured.moves, {}, host.link.message))
    between = links[False] if False in links else links[True]
    inside = links[True] if True in links else links[False]
    memory = _memory(measured.nodes)
    cluster = Cluster(name, len(measured.nodes), per_node[-1], memory, 0, between, inside, sums, host=host)
    remarks = [remark for kind in series for remark in _remarks(kind)]
    if per_node[0] != per_node[-1]:
        remarks.append(
            f"nodes have {per_node[0]} to {plural.counted(per_node[-1], 'rank')}; the file says {per_node[-1]} for all of them"
        )
    table: list[str] = []
    if links.keys() == {True}:
        table.append("All ranks were on one node: [links.between] is what was measured within it.")
    elif links.keys() == {False}:
        table.append("Every rank had a node of its own: [links.within] is what was measured between them.")
    table += [line for kind in series for line in _table(kind)]
    table += [_at_once(measured, within) for within in links]
    table.append(f"Transfers of all ranks at once take {_crowded(measured):.2f} times as long as those of one.")
    return Described(cluster, tuple(table), tuple(remarks))


def _message_link(measured: LinkTimes, within: bool) -> Link:
    """The link that fits the messages within a node (``within``) or between nodes.

    Its overhead is the time of posting the smallest message. It is shared if a message takes longer while its sender
    sends to two ranks.
    """
    sizes = sorted(size for where, size in measured.messages if where == within)
    post = measured.posts[within, sizes[0]].median
    line = fit.messages([_point(size, 2, measured.messages[within, size], post) for size in sizes])
    return replace(_rounded(line, post), shared=_slowdown(measured, within) > _SHARED)


def _host_link(measured: LinkTimes, per_node: int) -> HostLink:
    """The link to the host that fits the measured transfers, and how many workers share this link.

    A transfer takes n times as long while all ranks make transfers: then n workers share a link, at most ``per_node``.
    """
    line = fit.messages([_point(size, 1, samples, 0.0) for size, samples in measured.moves.items()])
    return HostLink(_rounded(line, 0.0), min(per_node, max(1, round(_crowded(measured)))))


def _crowded(measured: LinkTimes) -> float:
    """Factor by which a transfer to the host takes longer if all ranks make transfers."""
    return measured.moves_at_once.median / measured.moves[max(measured.moves)].median


def _slowdown(measured: LinkTimes, within: bool) -> float:
    """Factor by which a message takes longer if its sender sends to two ranks at once; 0 if that was not measured."""
    if within not in measured.fan_outs:
        return 0.0
    alone = measured.streams[within, max(size for where, size in measured.streams if where == within)]
    return measured.fan_outs[within].median / alone.median


def _at_once(measured: LinkTimes, within: bool) -> str:
    where, longer = _where(within), _slowdown(measured, within)
    if not longer:
        return f"Whether messages {where} share anything was not measured: no rank had two neighbours there."
    return f"Messages {where} to two ranks at once take {longer:.2f} times as long as to one."


def _point(size: int, ranks: int, samples: Samples, post: float) -> Point:
    """The point of a fit for messages of a size, or for sums over ``ranks``, from the measured times (``samples``).

    Its time is the median less the seconds of posting (``post``), but at least a hundredth of the median.
    """
    return Point(size, ranks, max(samples.median - post, samples.median / 100), samples.uncertainty)


def _messages(measured: LinkTimes, within: bool, link: Link) -> _Series:
    samples, streams = (
        {size: figure for (where, size), figure in figures.items() if where == within}
        for figures in (measured.messages, measured.streams)
    )
    return _Series(f"messages {_where(within)}", samples, streams, link.message)


def _where(within: bool) -> str:
    return "within a node" if within else "between nodes"


def _sums(measured: LinkTimes, ranks: int, link: Link) -> _Series:
    samples = {size: figure for (count, size), figure in measured.sums.items() if count == ranks}
    return _Series(
        f"sums over {plural.counted(ranks, 'rank')}", samples, {}, lambda size: link.overhead + link.all_reduce(size, ranks)
    )


def _rounded(link: Link, overhead: float) -> Link:
    """The link with four significant digits and with this overhead; what the clock cannot tell from 0 becomes 0."""
    return Link(
        rounded(link.alpha) if link.alpha > _TICK else 0.0,
        1 / rounded(1 / link.beta) if link.beta > _LEAST else 0.0,
        rounded(overhead),
    )


def _memory(nodes: Sequence[Host]) -> int:
    """Bytes of memory per worker on the host with the least, in whole MiB."""
    together = Counter(node.name for node in nodes)
    least = min(node.memory // together[node.name] if node.shared else node.memory for node in nodes)
    return least >> 20 << 20


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
