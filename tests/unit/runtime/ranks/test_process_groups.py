"""Pipelines over a part of the ranks: the communicators of all are made together, once all ranks have come."""

from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from chimera_runtime.errors import PeerLost
from chimera_runtime.ranks.world import A_DAY, ProcessGroups, World


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], str]]:
    """This is rank 2 of four; the communicators that are made, each by its ranks and backend."""
    made: list[tuple[list[int], str]] = []

    def new_group(ranks: list[int], timeout: Any, backend: str) -> Any:
        assert timeout == A_DAY
        made.append((ranks, backend))
        return f"{ranks}"

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    return made


def test_all_ranks_make_the_communicators_of_all_pipelines_in_one_order(four: list[tuple[list[int], str]]) -> None:
    store = HashStore()
    for rank, members in enumerate(("[0, 1]", "[0, 1]", "", "[2, 3]")):
        store.set(f"members/{rank}", members)
    groups = ProcessGroups(0, (2, 3), store, 20.0)
    assert str(groups.everyone()) == "[2, 3]"
    assert groups.make([1], "nccl") is None
    assert four == [([0, 1], "gloo"), ([2, 3], "gloo"), ([1], "nccl"), ([3], "nccl")]


def test_a_rank_that_makes_no_pipeline_is_named_in_time(four: list[tuple[list[int], str]]) -> None:
    store = HashStore()
    store.set("members/0", "[0, 1]")
    with pytest.raises(PeerLost) as lost:
        ProcessGroups(0, (2, 3), store, 0.05)
    assert str(lost.value) == (
        "rank 2: wait for all ranks of the default process group to make a pipeline: no answer from rank 1 within "
        "0.05 s (timeout)"
    )
    assert (lost.value.peers, four) == ((1,), [])


def test_pipelines_over_all_ranks_need_not_ask(alone: World) -> None:
    assert ProcessGroups(0, (0,), HashStore(), 0.05).members == (0,)
