"""What a user may have meant by a name that is not known."""

from collections.abc import Iterable
from difflib import get_close_matches

_LONGEST = 64
"""Characters of a name that is worth comparing."""


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that looks most like ``name``, if one looks alike.

    Examples
    --------
    >>> closest("shaer", ["min", "share"])
    'share'
    >>> closest("d", ["N", "D"])
    'D'
    >>> closest("zebra", ["N", "D"]) is None
    True
    """
    candidates = sorted(other for other in set(known) - {name} if len(other) <= _LONGEST)
    same = [candidate for candidate in candidates if candidate.lower() == name.lower()]
    near = same or (get_close_matches(name, candidates, n=1, cutoff=0.6) if len(name) <= _LONGEST else [])
    return near[0] if near else None
