"""Errors whose messages say what happened and what to do, and the exit statuses of a rank."""

import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, Self, TypeVar

T = TypeVar("T")

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


class Wording(Generic[T]):
    """A message with fields, as for ``str.format``; a call with the fields by their names makes an error, or text.

    Further formats show lists and numbers: ``{names:list}`` is ``a, b`` or ``none``, ``{names:joined}`` is ``a,b``,
    ``{names:and}`` is ``a and b``, ``{names:first 1}`` is ``a and 2 more``, ``{names:function}`` is ``functions a, b``,
    ``{steps:step}`` is ``1 step`` or ``3 steps``, and ``{layers:last}`` is the last number of so many, from 0.
    """

    def __init__(self, text: str, make: Callable[[str], T]) -> None:
        self.text, self._make = text, make

    @property
    def fields(self) -> set[str]:
        """Names of the fields, all of which a call gives."""
        return {re.split(r"[.\[]", name)[0] for _, name, _, _ in string.Formatter().parse(self.text) if name}

    def __call__(self, **fields: object) -> T:
        """Makes what has the message, with these fields."""
        return self._make(_Formatter().vformat(self.text, (), fields))


class _Formatter(string.Formatter):
    def format_field(self, value: object, format_spec: str) -> str:
        if isinstance(value, int) and format_spec.isalpha() and len(format_spec) > 1:
            return str(value - 1) if format_spec == "last" else f"{value} {format_spec}{'' if value == 1 else 's'}"
        if not format_spec or isinstance(value, (str, int, float)) or not isinstance(value, Iterable):
            return format(value, format_spec)
        items = [*map(str, value)]
        match format_spec.split():
            case ["list"]:
                return ", ".join(items) or "none"
            case ["joined"]:
                return ",".join(items)
            case ["and"]:
                return " and ".join(items)
            case ["last"]:
                return str(len(items) - 1)
            case ["first", most]:
                hidden = len(items) - int(most)
                return ", ".join(items[: int(most)]) + (f" and {hidden} more" if hidden > 0 else "")
            case _:
                return f"{format_spec}{'s' if len(items) > 1 else ''} {', '.join(items)}"


def worded(text: str) -> Wording[str]:
    """Wording of a remark, or of a part of a message."""
    return Wording(text, str)


class ShownError(Exception):
    """An error whose message may have names of files, parameters and modules, and is shown as `visible`."""

    @classmethod
    def worded(cls, text: str) -> Wording[Self]:
        """Wording whose calls make an error of this class."""
        return Wording(text, cls)

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
