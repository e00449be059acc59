"""Stages that have no part in a micro-batch: which they are, by the program and by inputs that lack."""

import pytest

from chimera_runtime.program.absence import Absence
from chimera_runtime.program.job import Feed, Job
from tests.unit.runtime.thread_ranks import job

FEEDS = (Feed(0, 1), Feed(1, 3), Feed(2, 3), Feed(3, 4), Feed(1, 5))
NAMED = (("image", 0, 2), ("sound", 2, 3), ("text", 3, 5), ("head", 5, 6))


def graph(**changed: object) -> Job:
    """Images and sound feed a text, and images alone a head."""
    return job(**{"stages": 6, "placement": ((0,) * 6,), "feeds": FEEDS, "named": NAMED, "micro_batches": 4} | changed)


@pytest.mark.parametrize(
    ("sources", "stages"), [((), ()), ((0,), (0, 1, 5)), ((2,), (2,)), ((0, 2), (0, 1, 2, 3, 4, 5))]
)
def test_groups_that_only_groups_without_a_part_feed_have_none(
    sources: tuple[int, ...], stages: tuple[int, ...]
) -> None:
    assert graph().without(sources) == {*stages}


def test_an_input_of_its_own_decides_about_a_group_that_others_feed_as_well() -> None:
    of_its_own = graph(feeds=(Feed(0, 1), Feed(3, 4), Feed(1, 4), Feed(2, 4), Feed(1, 5)))
    assert of_its_own.sources == (0, 2, 3)
    assert of_its_own.without([3]) == {3, 4}
    assert of_its_own.without([0, 2]) == {0, 1, 2, 5}


def test_stages_that_are_there_at_times() -> None:
    assert graph().at_times == {0, 1, 2, 5}, "one of both inputs is there, and so is the text"
    assert graph(named=()).at_times == set(), "no group has a name, so no input is by name"
    assert job(stages=3, placement=((0,) * 3,), named=(("a", 0, 3),)).at_times == set()


def test_what_the_program_leaves_out_comes_again_in_each_update() -> None:
    chain = job(stages=3, placement=((0,) * 3,), micro_batches=3, parts=2, slices=2)
    some = Job(**{**vars(chain), "named": (("image", 0, 1), ("text", 1, 3)), "absent": (("image", ((2, 4),)),)})
    absence = Absence(some)
    assert [micro for micro in range(12) if not absence.has(micro, 0)] == [2, 3, 8, 9]
    assert all(absence.has(micro, 1) for micro in range(12))
    assert not absence.has((2, 3), 0)
    assert absence.is_felt


def test_what_inputs_leave_out_is_counted_in_whole_micro_batches() -> None:
    absence = Absence(graph(parts=2, slices=2))
    assert not absence.is_felt
    assert absence.has(0, 0)
    absence.by_data = [frozenset(), frozenset({0, 1, 5}), frozenset(), frozenset()]
    assert [micro for micro in range(8) if not absence.has(micro, 0)] == [2, 3]
    assert absence.is_last_sink(0, 5)
    assert [absence.is_last_sink(micro, 4) for micro in (0, 2)] == [False, True]
