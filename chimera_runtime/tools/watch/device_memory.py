"""``--memory-limit device``: a rank's share of the memory of its GPU."""

import os

import torch

from chimera_runtime.errors import Misuse
from chimera_runtime.errors.tools import DEVICE_HAS_NO_MEMORY_OF_ITS_OWN
from chimera_runtime.ranks.control_group import ControlGroup


def smallest_share(control_group: ControlGroup, device: torch.device) -> int:
    """Bytes that every rank may have: the smallest share of any rank in its GPU; every rank calls it.

    Raises `Misuse` if a rank is on the CPU. Raises `PeerLost` if another rank does not answer within the time-out.
    """
    if device.type != "cuda":
        raise Misuse(DEVICE_HAS_NO_MEMORY_OF_ITS_OWN)
    return int(min(control_group.collect("memory/share", share_of(device), "for the memory of its device")))


def share_of(device: torch.device) -> int:
    """Bytes of a GPU for each rank on it; the ranks of a machine take its GPUs in turn."""
    _, total = torch.cuda.mem_get_info(device)
    ranks = range(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return total // max(1, sum(rank % torch.cuda.device_count() == device.index for rank in ranks))
