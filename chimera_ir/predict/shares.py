"""Times of messages that share a worker's port.

A port is one direction of a worker's link to the network. Messages in a port at the same time share its bandwidth, as
TCP connections do: all get equal shares, except for a message to which the port at its other end allows less (max-min
fairness, Bertsekas and Gallager, Data Networks, section 6.5.2). The event in which a message takes up bandwidth is
called its wire.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from heapq import heappop, heappush
from math import inf

from chimera_ir.predict.events import Events, Port


def with_shared_ports(events: Events) -> Events:
    """Returns the events, in which wires take longer where several share a port.

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

    ``under_way`` maps a wire to the seconds that its rest would take alone on its ports. ``seconds_of`` maps each
    finished wire to the seconds that it took. ``next`` is the time at which the next wire ends if no other begins
    before, and the number of that wire.
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
        """Begins wire ``number`` at time ``now``; alone it would take ``seconds``."""
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
