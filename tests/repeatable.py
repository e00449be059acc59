"""Property tests try the same examples in every run; a search tries others, and ten times as many.

    pytest tests/property                                                        # what `make test` tries
    pytest tests/property --hypothesis-profile=search                            # others each time
    pytest tests/property --hypothesis-profile=search --hypothesis-seed=7        # those of seed 7

A search that fails prints the smallest example it finds, and keeps it in `.hypothesis/` for the next search: write it
down as `@example(..)`, so that every run tries it.
"""

from hypothesis import settings

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
    return settings(max_examples=number if settings().derandomize else FACTOR * number)
