"""Two runs of the tests try the same examples."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.repeatable import FACTOR, PROFILE, examples


def drawn(profile: str) -> list[list[int]]:
    """What two runs of a property see under a profile."""
    seen: list[list[int]] = []

    @settings(settings.get_profile(profile), max_examples=20, database=None)
    @given(st.integers(0, 10**9))
    def holds(number: int) -> None:
        seen[-1].append(number)

    for _ in range(2):
        seen.append([])
        holds()
    return seen


def test_two_runs_try_the_same_examples_and_a_search_tries_others() -> None:
    first, second = drawn(PROFILE)
    assert first == second
    assert first not in drawn("search")


def test_a_search_tries_more_examples() -> None:
    usual, search = settings.get_profile(PROFILE), settings.get_profile("search")
    assert search.max_examples == FACTOR * usual.max_examples
    assert examples(7).max_examples == (7 if settings().derandomize else 7 * FACTOR)
