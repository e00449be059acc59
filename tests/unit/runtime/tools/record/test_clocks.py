"""Offsets of clocks, however long the questions and answers take."""

from hypothesis import given
from hypothesis import strategies as st

from chimera_runtime.ranks.world import World
from chimera_runtime.tools.record import recorder as clocks
from tests.unit.runtime.thread_ranks import job, together, worlds


@given(
    offset=st.integers(-(10**12), 10**12),
    delays=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), min_size=16, max_size=16),
)
def test_the_offset_of_a_clock_is_within_its_uncertainty(offset: int, delays: list[tuple[int, int]]) -> None:
    """However long question and answer take, and however differently."""
    now, left = 0, iter(delays)

    def ask() -> int:
        nonlocal now
        there, back = next(left)
        theirs = now + there + offset
        now += there + back
        return theirs

    found = clocks.estimate(ask, lambda: now)
    assert abs(found.offset - offset) <= found.uncertainty
    assert found.uncertainty <= min(map(sum, delays)) / 2 + 1


def test_the_round_that_counts_is_the_shortest() -> None:
    times = iter([0, 100, 1000, 1010, 2000, 2500])
    answers = iter([7, 1004, 9])
    assert clocks.estimate(lambda: next(answers), lambda: next(times), rounds=3) == clocks.OffsetEstimate(1005, -1, 5)


def test_rank_0_is_its_own_clock_and_answers_all_others(alone: World) -> None:
    """Threads of one process read one clock: the offset of each is within its uncertainty of 0."""
    with worlds(alone, job(workers=3, stages=3, placement=((0, 1, 2),))) as ranks:
        first, *others = together([lambda world=world: clocks.compare(world.control_group) for world in ranks])  # type: ignore[misc]
    assert (first.offset, first.uncertainty) == (0, 0)
    for offset in others:
        assert abs(offset.offset) <= offset.uncertainty
        assert offset.uncertainty > 0
