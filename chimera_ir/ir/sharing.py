"""Communicators of messages: which messages share one."""

from collections.abc import Collection
from enum import Enum
from typing import assert_never

from chimera_ir.ir.ids import Worker


class Communicators(Enum):
    """The messages that share a communicator; the values are the names in report.json.

    ``DIRECTED``: those from one worker to another. ``PAIR``: those between two workers, in both directions. ``SINGLE``:
    all.
    """

    DIRECTED = "directed"
    PAIR = "pair"
    SINGLE = "single"

    def stream(self, worker: Worker, peer: Worker, sends: bool) -> tuple[int, ...]:
        """The stream of a worker for what it sends to a peer, or receives from it."""
        match self:
            case Communicators.DIRECTED:
                return worker, peer, sends
            case Communicators.PAIR:
                return worker, peer
            case Communicators.SINGLE:
                return (worker,)
            case _:
                assert_never(self)

    def count(self, links: Collection[tuple[int, int]]) -> int:
        """The communicators for the messages of one copy of the workers, by its senders and receivers."""
        match self:
            case Communicators.DIRECTED:
                return len(links)
            case Communicators.PAIR:
                return len({frozenset(link) for link in links})
            case Communicators.SINGLE:
                return min(1, len(links))
            case _:
                assert_never(self)
