"""Measured times of messages and sums as a cluster: alpha and beta, and how far to trust them."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from chimera_ir.measure import fit
from chimera_ir.measure.fit import OFF, Point
from chimera_ir.measure.samples import Samples, percent, rounded, too_noisy
from chimera_ir.plural import counted
from chimera_ir.profile.cluster import Cluster, Link, Short
from chimera_ir.profile.quantity import show_size, show_time

_TICK = 1e-9
_LEAST = 1e-15
"""Seconds per byte: a bandwidth that no measurement can tell from an unlimited one."""


_SHARED = 1.5
"""From how much longer on links are shared: halfway between not at all and entirely."""


@dataclass(frozen=True, slots=True)
class Node:
    """Where a rank runs: the machine's name, which of torchrun's agents started it, and the memory that it may have.

    ``shared`` memory is for all ranks of the machine together.
    """

    name: str
    agent: int
    memory: int
    shared: bool

    @property
    def place(self) -> str:
        """The same for ranks of one node: of one machine, and of one agent, where a machine plays several nodes."""
        return f"{self.name}/{self.agent}"


@dataclass(frozen=True, slots=True)
class Measured:
    """What was found: ``nodes`` by rank; times of messages by (within a node, size), of sums by (ranks, size).

    A message's time is half that of a ping-pong, a sum's is from its last launch; both with what posting takes, of
    which ``posts`` has the times, of messages, and ``launches``, of the smallest sums. ``streams`` are the times
    between messages that follow each other; ``forks`` are those of the largest size, while their sender sends as many
    to another rank, by (within a node) where a rank has two neighbours to send to. ``short`` says up to which size
    messages go another way than longer ones, by (within a node) where they do; then there are two sizes at least of
    either.
    """

    nodes: tuple[Node, ...]
    messages: Mapping[tuple[bool, int], Samples]
    streams: Mapping[tuple[bool, int], Samples]
    forks: Mapping[bool, Samples]
    sums: Mapping[tuple[int, int], Samples]
    posts: Mapping[tuple[bool, int], Samples]
    launches: Samples
    short: Mapping[bool, int]


@dataclass(frozen=True, slots=True)
class Described:
    """A cluster, the measurements behind it as lines of a table, and what is to be said of their quality."""

    cluster: Cluster
    table: tuple[str, ...]
    remarks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Series:
    """Times of one kind by size, and what the fitted line says of a size; messages have been sent in streams, too."""

    what: str
    taken: Mapping[int, Samples]
    streams: Mapping[int, Samples]
    line: Callable[[int], float]

    def off(self, size: int) -> float:
        """By which share of the measured time the line is off."""
        return self.line(size) / self.taken[size].median - 1


def described(name: str, measured: Measured) -> Described:
    """The cluster that the ranks ran on."""
    links = {within: _message_link(measured, within) for within in sorted({within for within, _ in measured.messages})}
    launch = measured.launches.median
    sums = _rounded(
        fit.sums([_point(size, ranks, one, launch) for (ranks, size), one in measured.sums.items()]), launch
    )
    series = [one for within, link in links.items() for one in _messages(measured, within, link)]
    series += [_sums(measured, ranks, sums) for ranks in sorted({ranks for ranks, _ in measured.sums})]
    between = links[False] if False in links else replace(links[True], short=None)
    inside = links[True] if True in links else links[False]
    per_node = sorted(Counter(node.place for node in measured.nodes).values())
    cluster = Cluster(name, len(measured.nodes), per_node[-1], _memory(measured.nodes), 0, between, inside, sums)
    remarks = [remark for one in series for remark in _remarks(one)]
    if per_node[0] != per_node[-1]:
        remarks.append(
            f"nodes have {per_node[0]} to {counted(per_node[-1], 'rank')}; the file says {per_node[-1]} for all of them"
        )
    table = [] if len(links) > 1 else [_alike(True in links, short=True in measured.short)]
    table += [_two_ways(within, up_to) for within, up_to in sorted(measured.short.items())]
    table += [line for one in series for line in _table(one)]
    table += [_at_once(measured, within) for within in links]
    return Described(cluster, tuple(table), tuple(remarks))


def _alike(within: bool, short: bool) -> str:
    if not within:
        return "Every rank had a node of its own: [links.within] is what was measured between them."
    said = "All ranks were on one node: [links.between] is what was measured within it"
    return f"{said}, of messages that are not short." if short else f"{said}."


def _two_ways(within: bool, up_to: int) -> str:
    at = f"[links.{'within' if within else 'between'}.short]"
    return f"Messages of up to {show_size(up_to)} {_where(within)} went over sockets, longer ones over gloo: see {at}."


def _message_link(measured: Measured, within: bool) -> Link:
    up_to = measured.short.get(within, 0)
    sizes = sorted(size for where, size in measured.messages if where == within)
    link = _line(measured, within, [size for size in sizes if size > up_to])
    link = replace(link, shared=_fork(measured, within) > _SHARED)
    if not up_to:
        return link
    short = _line(measured, within, [size for size in sizes if size <= up_to])
    return replace(link, short=Short(up_to, replace(short, eager=True)))


def _line(measured: Measured, within: bool, sizes: Sequence[int]) -> Link:
    """The link of messages of these sizes, ascending; posts are those of the smallest."""
    post = measured.posts[within, sizes[0]].median
    return _rounded(fit.messages([_point(size, 2, measured.messages[within, size], post) for size in sizes]), post)


def _fork(measured: Measured, within: bool) -> float:
    """How much longer messages take if their sender sends as many to another rank; 0 if that was not measured."""
    if within not in measured.forks:
        return 0.0
    alone = measured.streams[within, max(size for where, size in measured.streams if where == within)]
    return measured.forks[within].median / alone.median


def _at_once(measured: Measured, within: bool) -> str:
    where, longer = _where(within), _fork(measured, within)
    if not longer:
        return f"Whether messages {where} share anything was not measured: no rank had two neighbours there."
    return f"Messages {where} to two ranks at once take {longer:.2f} times as long as to one."


def _point(size: int, ranks: int, samples: Samples, post: float) -> Point:
    """What is left to fit without the posting; a measurement that says less than nothing of it counts as a little."""
    return Point(size, ranks, max(samples.median - post, samples.median / 100), samples.uncertainty)


def _messages(measured: Measured, within: bool, link: Link) -> Iterator[_Series]:
    """The short ones, if they have a line of their own, and the others."""
    up_to = measured.short.get(within, 0)
    for what, short in (("short messages", True), ("messages", False)):
        taken, streams = (
            {size: one for (where, size), one in of.items() if where == within and (size <= up_to) == short}
            for of in (measured.messages, measured.streams)
        )
        if taken:
            yield _Series(f"{what} {_where(within)}", taken, streams, link.message)


def _where(within: bool) -> str:
    return "within a node" if within else "between nodes"


def _sums(measured: Measured, ranks: int, link: Link) -> _Series:
    taken = {size: one for (count, size), one in measured.sums.items() if count == ranks}
    return _Series(
        f"sums over {counted(ranks, 'rank')}", taken, {}, lambda size: link.overhead + link.all_reduce(size, ranks)
    )


def _rounded(link: Link, overhead: float) -> Link:
    """As it will be read, with four digits; what the clock cannot tell from nothing is nothing."""
    return Link(
        rounded(link.alpha) if link.alpha > _TICK else 0.0,
        1 / rounded(1 / link.beta) if link.beta > _LEAST else 0.0,
        rounded(overhead),
    )


def _memory(nodes: Sequence[Node]) -> int:
    """Per worker, where it has least, in whole MiB."""
    together = Counter(node.name for node in nodes)
    least = min(node.memory // together[node.name] if node.shared else node.memory for node in nodes)
    return least >> 20 << 20


def _table(series: _Series) -> Iterator[str]:
    streams = f" {'in a stream':>12}" if series.streams else ""
    yield f"{series.what + ',':<29} {'median':>9} {'spread':>7} {'line off by':>12}{streams}"
    for size, one in sorted(series.taken.items()):
        stream = f" {_time(series.streams[size]):>12}" if series.streams else ""
        off = round(series.off(size), 2) + 0.0
        yield f"{show_size(size):>29} {_time(one):>9} {percent(one.spread):>7} {off:>+12.0%}{stream}"


def _time(samples: Samples) -> str:
    return show_time(rounded(samples.median, 3))


def _remarks(series: _Series) -> Iterator[str]:
    yield from too_noisy(series.what, [(show_size(size), one) for size, one in sorted(series.taken.items())])
    off = [(size, share) for size in sorted(series.taken) if abs(share := series.off(size)) > OFF]
    if off:
        sizes = ", ".join(f"{percent(share)} at {show_size(size)}" for size, share in off)
        yield f"{series.what}: the straight line is off by more than {percent(OFF)}: {sizes}"
