"""``--memory-limit device``: what a rank may have of the GPU that it is on."""

import json
import os

import torch

from chimera_runtime.errors import Misuse
from chimera_runtime.ranks.world import World


def smallest_share(world: World) -> int:
    """The bytes that every rank may have: of GPU memory by ranks on it, the least of all; every rank calls it.

    Raises
    ------
    Misuse
        If a rank is on the CPU.
    PeerLost
        If another rank does not answer within the time-out.
    """
    if world.device.type != "cuda":
        raise Misuse("--memory-limit device: the ranks are on the CPU; give a size, as in --memory-limit 16GiB")
    world.control_group.store.set(f"memory/share/{world.place.rank}", json.dumps(share_of(world.device)))
    what = "for the memory of its device"
    return min(
        int(json.loads(world.control_group.wait_for_key(f"memory/share/{rank}", rank, what)))
        for rank in world.place.ranks
    )


def share_of(device: torch.device) -> int:
    """The bytes of a GPU that are for each rank on it."""
    _, total = torch.cuda.mem_get_info(device)
    return total // sharing(device.index)


def sharing(index: int) -> int:
    """How many ranks of this machine are on the GPU of a number: they take the GPUs in turn."""
    ranks = range(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return max(1, sum(rank % torch.cuda.device_count() == index for rank in ranks))
