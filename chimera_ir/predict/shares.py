"""How long messages take that share a worker's port.

A port is one direction of what joins a worker to the network. Messages in it at the same time share its bandwidth, as
streams of TCP do: each gets as much as any other, unless the port at its other end allows less (max-min fairness,
Bertsekas and Gallager, Data Networks, section 6.5.2).
"""

from collections.abc import Iterator, Mapping
from heapq import heappop, heappush
from math import inf

from chimera_ir.predict.events import Events, Port


def contended(found: Events) -> Events:
    """The events, with wires that last as long as they do where ports are shared.

    Simulated as a fluid: between two happenings every message under way has a constant share of its ports.
    """
    if not found.ports:
        return found
    taken = _taken(found)
    nodes = [node._replace(seconds=taken.get(number, node.seconds)) for number, node in enumerate(found.nodes)]
    return found._replace(nodes=nodes)


def _taken(found: Events) -> dict[int, float]:
    """Seconds from the start to the end of every wire that has a port."""
    flows = _Flows(found.ports)
    after, missing = found.after(), [len(before) for before in found.before]
    agenda: list[tuple[float, int]] = []

    def begin(number: int, now: float) -> None:
        seconds = found.nodes[number].seconds
        if seconds and number in found.ports:
            flows.begin(number, now, seconds)
        else:
            heappush(agenda, (now + seconds, number))

    for number in [number for number, count in enumerate(missing) if not count]:
        begin(number, 0.0)
    while agenda or flows.under_way:
        if agenda and agenda[0][0] <= flows.next_end():
            now, ended = heappop(agenda)
        else:
            now, ended = flows.end()
        for other in after[ended]:
            missing[other] -= 1
            if not missing[other]:
                begin(other, now)
    return flows.taken


class _Flows:
    """The wires under way: what is left of each, in seconds if it were alone, and what share of its ports it has."""

    def __init__(self, ports: Mapping[int, tuple[Port, Port]]) -> None:
        self.taken: dict[int, float] = {}
        self.under_way: dict[int, float] = {}
        self._ports = ports
        self._shares: dict[int, float] = {}
        self._began: dict[int, float] = {}
        self._now = 0.0
        self._next: tuple[float, int] = (inf, -1)

    def begin(self, number: int, now: float, seconds: float) -> None:
        """A wire begins, which alone would last so many seconds."""
        self._flow_until(now)
        self.under_way[number], self._began[number] = seconds, now
        self._share()

    def next_end(self) -> float:
        """When the next wire ends, if none begins before."""
        return self._next[0]

    def end(self) -> tuple[float, int]:
        """Goes on to the end of the next wire: when that is, and which."""
        now, number = self._next
        self._flow_until(now)
        del self.under_way[number]
        self.taken[number] = now - self._began[number]
        self._share()
        return now, number

    def _flow_until(self, now: float) -> None:
        for number, left in self.under_way.items():
            self.under_way[number] = max(0.0, left - (now - self._now) * self._shares[number])
        self._now = now

    def _share(self) -> None:
        self._shares = dict(_fair({number: self._ports[number] for number in self.under_way}))
        ends = ((self._now + left / self._shares[number], number) for number, left in self.under_way.items())
        self._next = min(ends, default=(inf, -1))


def _fair(wires: dict[int, tuple[Port, Port]]) -> Iterator[tuple[int, float]]:
    """The max-min fair share of every wire: the wires of the fullest port get equal shares of it, then the others."""
    left = {port: 1.0 for ports in wires.values() for port in ports}
    while wires:
        users: dict[Port, int] = {}
        for ports in wires.values():
            for port in ports:
                users[port] = users.get(port, 0) + 1
        fullest = min(users, key=lambda port: left[port] / users[port])
        share = left[fullest] / users[fullest]
        for number in [number for number, ports in wires.items() if fullest in ports]:
            for port in wires.pop(number):
                left[port] -= share
            yield number, share
