"""Errors whose messages say what happened and what to do, and the exit statuses of a rank."""

from collections.abc import Sequence

FAILED = 1
MISUSED = 2
OUR_FAULT = 70
INTERRUPTED = 130
TERMINATED = 143


class PeerLost(Exception):
    """A wait for another rank failed or timed out; the message names rank, operation and peer.

    ``peers`` are the ranks that were waited for, if these are known.
    """

    def __init__(self, message: str, peers: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.peers = tuple(peers)


class BadModel(Exception):
    """The model file does something that its interface does not allow; the message says what, and what to do."""


class Misuse(Exception):
    """A mistake in the command line, the model file or the data; the message says what is wrong, and what to do."""


class RanksDiffer(Misuse):
    """Ranks differ in something that must be equal on them; the message says in what, where, and what to do."""


class BadCheckpoint(Exception):
    """A checkpoint cannot be written or read; the message says why, and what to do."""


class Unwritable(Exception):
    """A file or stream that an option asks for cannot be written."""


class CheckFailed(Exception):
    """``--check`` has found that the ranks compute something else than one process does."""


class NotFinite(Exception):
    """The loss of an update is not a finite number, and ``--stop-on-nan`` is given."""
