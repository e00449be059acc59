"""Property tests try the same examples in every run; a search tries others, and ten times as many.

    pytest tests/property                                                        # what `make test` tries
    pytest tests/property --hypothesis-profile=search                            # others each time
    pytest tests/property --hypothesis-profile=search --hypothesis-seed=7        # those of seed 7

Of mutants, which are changes of programs, a run tries a third, and of every program some of each kind of change, the
same in every run; a search tries all (`some`). The same goes for sizes: a property of all schemes or of many streams
has one size or two of each in a run (`also`, `part`), and all in a search. So it is with trainings on ranks: a run has
each reason for one once, and every scheme of the library in `tests/e2e/test_ties.py` or `tests/e2e/test_streams.py`; a
search has the other combinations.

A search that fails prints the smallest example it finds, and keeps it in `.hypothesis/` for the next search: write it
down as `@example(..)`, so that every run tries it.
"""

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TypeVar

from hypothesis import settings

T = TypeVar("T")

PROFILE = "repeatable"
"""The profile of every run that asks for no other."""

FACTOR = 10
"""How many times as many examples a search tries."""

settings.register_profile(PROFILE, derandomize=True, database=None, deadline=None)

_USUAL = settings.get_profile("default")
"""What Hypothesis does where nobody decides; where it sees continuous integration, it decides for itself."""

settings.register_profile("search", _USUAL, max_examples=FACTOR * _USUAL.max_examples, deadline=None, print_blob=True)


def examples(number: int) -> settings:
    """A property test with so many examples; in a search, with `FACTOR` times as many. A busy machine is no failure."""
    return settings(max_examples=tries(number))


def searching() -> bool:
    """Whether this run is a search."""
    return not settings().derandomize


def tries(number: int) -> int:
    """So many, and in a search `FACTOR` times as many."""
    return FACTOR * number if searching() else number


def either(usual: int, searched: int) -> int:
    """A size in every run, and another one in a search."""
    return searched if searching() else usual


def also(usual: Iterable[T], searched: Iterable[T]) -> list[T]:
    """Cases of every run, and others that a search tries as well."""
    return [*usual, *(searched if searching() else ())]


def part(cases: Iterable[T], every: int) -> list[T]:
    """Of many cases the first and as many as ``every`` so many give, the same in every run; in a search all."""
    return [*cases][:: 1 if searching() else every]


def some(mutants: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
    """Three of each kind of mutants, and a third of the others, the same in every run; in a search all."""
    rng, seen, share = random.Random(0), Counter[str](), 1 if searching() else 1 / 3
    for kind, mutant in mutants:
        seen[kind] += 1
        if seen[kind] <= 3 or rng.random() < share:
            yield kind, mutant
