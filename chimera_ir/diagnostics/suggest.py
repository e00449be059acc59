"""Suggestions of a known name for an unknown one."""

from collections.abc import Iterable
from difflib import get_close_matches

_LONGEST = 64
"""Most characters of a name that is compared with others."""


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most similar to ``name``, if any is similar enough.

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
