"""Errors whose messages say what happened and what to do, and the exit statuses of a rank."""

from collections.abc import Sequence

FAILED = 1
MISUSED = 2
OUR_FAULT = 70
INTERRUPTED = 130
TERMINATED = 143


class PeerLost(Exception):
    """Error for a wait for another rank that failed or timed out; the message names rank, operation and peer.

    ``peers`` are the ranks that were waited for, if these are known.
    """

    def __init__(self, message: str, peers: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.peers = tuple(peers)


class BadModel(Exception):
    """Error for a model file that does something that its interface does not allow."""


class Misuse(Exception):
    """Error for a mistake in the command line, the model file or the data."""


class RanksDiffer(Misuse):
    """Error for ranks that differ in something that must be equal on all of them."""


class BadCheckpoint(Exception):
    """Error for a checkpoint that cannot be written or read."""


class Unwritable(Exception):
    """Error for a file or stream that an option asks for and that cannot be written."""


class CheckFailed(Exception):
    """Error for ranks that compute something else than one process."""


class NotFinite(Exception):
    """Error for an update whose loss is not a finite number, with ``--stop-on-nan``."""
