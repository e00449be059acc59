"""Runs a program as a rank that is a node of its own: torchrun --nproc-per-node=4 tests/gpu/node.py PROGRAM [options].

NCCL lets no two ranks of a host share a GPU. Ranks that it takes for different hosts may, and their messages pass
through sockets.
"""

import os
import sys

RANK = os.environ["RANK"]
OF_A_NODE = {
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_RANK": RANK,
    "GROUP_WORLD_SIZE": os.environ["WORLD_SIZE"],
}

os.environ |= OF_A_NODE | {"NCCL_HOSTID": f"rank {RANK}", "NCCL_SOCKET_IFNAME": "lo"}
os.execv(sys.executable, (sys.executable, *sys.argv[1:]))
