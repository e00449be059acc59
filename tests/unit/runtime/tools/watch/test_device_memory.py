"""The share of a rank in the memory of its GPU, by numbers that stand in for torch.cuda's."""

from dataclasses import replace

import pytest
import torch

from chimera_runtime.errors import Misuse
from chimera_runtime.ranks.world import World
from chimera_runtime.tools.watch.memory import share_of, smallest_share
from tests.unit.runtime.thread_ranks import job, together, worlds

GIB = 2**30


@pytest.mark.parametrize(
    ("gpus", "ranks", "totals", "share"),
    [
        (2, 2, {0: 80 * GIB, 1: 80 * GIB}, 80 * GIB),
        (2, 2, {0: 80 * GIB, 1: 24 * GIB}, 24 * GIB),
        (2, 5, {0: 60 * GIB, 1: 60 * GIB}, 20 * GIB),
    ],
)
def test_ranks_on_a_gpu_share_it_and_the_smallest_share_is_for_all(
    alone: World, gpus: int, ranks: int, totals: dict[int, int], share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, totals[device.index]))
    with worlds(alone, job()) as both:
        on_gpus = [replace(world, device=torch.device("cuda", world.place.rank % gpus)) for world in both]
        assert min(share_of(world.device) for world in on_gpus) == share
        assert (
            together([lambda world=world: smallest_share(world.control_group, world.device) for world in on_gpus])
            == [share] * 2
        )  # type: ignore[misc]


def test_on_the_cpu_a_size_is_needed(alone: World) -> None:
    with pytest.raises(Misuse, match="the ranks are on the CPU; give a size, as in --memory-limit 16GiB"):
        smallest_share(alone.control_group, alone.device)
