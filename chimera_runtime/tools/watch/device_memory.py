"""``--memory-limit device``: what a rank may have of the GPU that it is on."""

import json
import os

import torch

from chimera_runtime.errors import Misuse
from chimera_runtime.ranks.control_group import ControlGroup


def smallest_share(control_group: ControlGroup, device: torch.device) -> int:
    """The bytes that every rank may have: of GPU memory by ranks on it, the least of all; every rank calls it.

    Raises
    ------
    Misuse
        If a rank is on the CPU.
    PeerLost
        If another rank does not answer within the time-out.
    """
    if device.type != "cuda":
        raise Misuse("--memory-limit device: the ranks are on the CPU; give a size, as in --memory-limit 16GiB")
    control_group.store.set(f"memory/share/{control_group.place.rank}", json.dumps(share_of(device)))
    what = "for the memory of its device"
    return min(
        int(json.loads(control_group.wait_for_key(f"memory/share/{rank}", rank, what)))
        for rank in control_group.place.ranks
    )


def share_of(device: torch.device) -> int:
    """The bytes of a GPU that are for each rank on it."""
    _, total = torch.cuda.mem_get_info(device)
    return total // sharing(device.index)


def sharing(index: int) -> int:
    """How many ranks of this machine are on the GPU of a number: they take the GPUs in turn."""
    ranks = range(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return max(1, sum(rank % torch.cuda.device_count() == index for rank in ranks))
