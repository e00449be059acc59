"""The contents of a lane, for the script of a rank."""

from types import SimpleNamespace
from typing import Any

import pytest

from chimera_runtime.lane import Lane
from chimera_runtime.lane.lane import LaneComponents
from chimera_runtime.program.rank_facts import Route


def lane(**parts: Any) -> Lane:
    loads = parts.get("loads", (lambda first, micro: ("x", first, micro), lambda first, micro: ("y", first, micro)))
    return Lane(LaneComponents(*(parts.get(name, {}) for name in ("stages", "incoming", "outgoing")), *loads))


def test_stages_are_found_by_number_and_links_by_both_stages_and_the_other_worker() -> None:
    """Two links between the same stages lead to different workers where a stage has replicas."""
    found = lane(
        stages={0: "first", 3: "last"},
        incoming={Route(1, 0, 1): "from 1", Route(1, 0, 2): "from 2"},
        outgoing={Route(0, 1, 1): "to 1", Route(3, 2, 1): "back"},
    )
    assert [found.stage(0), found.stage(3)] == ["first", "last"]
    assert [found.incoming(1, 0, worker=1), found.incoming(1, 0, worker=2)] == ["from 1", "from 2"]
    assert [found.outgoing(0, 1, worker=1), found.outgoing(3, 2, worker=1)] == ["to 1", "back"]
    for absent in (lambda: found.stage(1), lambda: found.incoming(0, 1, worker=1), lambda: found.outgoing(1, 0, 1)):
        with pytest.raises(KeyError):
            absent()


def test_micro_batches_are_loaded_from_the_first_of_the_update_that_has_begun() -> None:
    begun: list[int] = []
    counted = lane(stages={0: SimpleNamespace(begin=begun.append), 1: SimpleNamespace(begin=begun.append)})
    assert counted.input(2) == ("x", 0, 2)
    counted.begin(5)
    assert begun == [5, 5]
    assert counted.input(2) == ("x", 5, 2)
    assert counted.target(0) == ("y", 5, 0)


def test_several_micro_batches_are_loaded_as_a_tuple() -> None:
    assert lane().input((1, 3)) == (("x", 0, 1), ("x", 0, 3))
    assert lane().target((2,)) == (("y", 0, 2),)
