"""Which stages feed and are fed at run time."""

import pytest

from chimera_runtime.program.rank_facts import fed, feeding
from tests.unit.runtime.thread_ranks import job


def test_stages_are_a_chain() -> None:
    three = job(stages=3, placement=((0, 0, 0),))
    assert three.fed == ((1,), (2,), ())
    assert three.feeding == ((), (0,), (1,))
    assert (three.sources, three.sinks) == ((0,), (2,))


@pytest.mark.parametrize("stages", [1, 2, 5])
def test_a_stage_feeds_exactly_those_that_it_feeds_into(stages: int) -> None:
    edges = {(source, target) for source in range(stages) for target in fed(stages)[source]}
    assert edges == {(source, target) for target in range(stages) for source in feeding(stages)[target]}
    assert len(edges) == stages - 1
