"""Errors whose messages say what happened and what to do, and the exit statuses of a rank."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

FAILED = 1
MISUSED = 2
OUR_FAULT = 70
INTERRUPTED = 130
TERMINATED = 143


class ScriptPlace(NamedTuple):
    """A ``line`` of a rank's script that was running, and the values that the ``counters`` of its loops had then.

    The counters count micro-batches from the first one of ``update``. Without a flush this is the first update since
    the pipelines were last empty.
    """

    update: int
    line: int
    counters: Mapping[str, int]


def visible(text: str) -> str:
    """The text with escapes for characters that a terminal would obey instead of show; ends of lines and tabs stay."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in "\n\t" else character.encode("unicode_escape").decode()
        for character in text
    )


class ShownError(Exception):
    """An error whose message may have names of files, parameters and modules, and is shown as `visible`."""

    def __str__(self) -> str:
        return visible(super().__str__())


class PlacedError(ShownError):
    """Error that ends a rank; ``place`` is the line of the rank's script that was running, if one was.

    `blame.Located` sets it when it clears the traceback.
    """

    place: ScriptPlace | None = None


class PeerLost(PlacedError):
    """A wait for another rank failed or timed out; the message names rank, operation and peer.

    ``peers`` are the ranks that were waited for, if these are known.
    """

    def __init__(self, message: str, peers: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.peers = tuple(peers)


class BadModel(PlacedError):
    """The model file does something that its interface does not allow; the message says what, and what to do."""


class Misuse(PlacedError):
    """A mistake in the command line, the model file or the data; the message says what is wrong, and what to do."""


class Refused(Misuse, PeerLost):
    """Another rank has refused a call that this rank makes as well; the message has its number and its words."""


class RanksDiffer(Misuse):
    """Ranks differ in something that must be equal on them; the message says in what, where, and what to do."""


class BadCheckpoint(PlacedError):
    """A checkpoint cannot be written or read; the message says why, and what to do."""


class Unwritable(ShownError):
    """A file or stream that an option asks for cannot be written."""


class CheckFailed(ShownError):
    """``--check`` or `Pipeline.check` has found that the ranks compute something else than one process does."""


class NotFinite(ShownError):
    """The loss of an update is not a finite number, and ``--stop-on-nan`` is given."""
