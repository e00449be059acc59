"""What can go wrong: errors whose messages say what happened and what to do, and the statuses that a rank ends with."""

from collections.abc import Sequence

FAILED = 1
MISUSED = 2
OUR_FAULT = 70
INTERRUPTED = 130
TERMINATED = 143


class PeerLost(Exception):
    """A wait for another rank failed or timed out; the message names rank, operation and peer.

    ``peers`` are the ranks that were waited for, as far as they are known.
    """

    def __init__(self, message: str, peers: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.peers = tuple(peers)


class BadModel(Exception):
    """The model file does something that its interface does not allow; the message says what and what to do."""


class Misuse(Exception):
    """Something is wrong with the command line, the model file or the data; the message says what and what to do."""


class RanksDiffer(Misuse):
    """Ranks differ in something that must be the same on them; the message says in what, where, and what to do."""


class BadCheckpoint(Exception):
    """A checkpoint cannot be written, or what is there cannot be read; the message says why and what to do."""
