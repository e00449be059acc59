"""The store of torchrun: where ranks meet, and what they leave there for one another."""

import os
import time
from datetime import timedelta

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from chimera_runtime.errors import Misuse, PeerLost

_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.01
"""Seconds between two questions to the store."""


def meet(timeout: float) -> tuple[Store, int, int]:
    """The store, the rank and the world size that torchrun gave.

    Ranks that torchrun has started again may get the store of those before, with all that these said in it.

    Raises
    ------
    Misuse
        If the program was not started by torchrun, or there is no store where the environment says.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise Misuse("start train.py with torchrun, as in: torchrun --nproc-per-node=WORKERS train.py --model MODEL.py")
    limit = timedelta(seconds=timeout)
    try:
        store, rank, size = next(rendezvous("env://", timeout=limit))
    except (ValueError, RuntimeError) as error:
        where = ":".join(os.environ.get(name, "unset") for name in ("MASTER_ADDR", "MASTER_PORT"))
        headline = str(error).partition("\n")[0]
        raise Misuse(f"no store at MASTER_ADDR:MASTER_PORT ({where}): {headline}; start with torchrun") from error
    store = PrefixStore(f"chimera/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    store.set_timeout(limit)
    return store, rank, size


def learn(store: Store, key: str, source: int, what: str, seconds: float) -> bytes:
    """What a rank leaves in the store; asks again and again: a thread that blocks in it would be deaf to signals.

    Raises
    ------
    PeerLost
        If it takes longer than ``seconds``.
    """
    deadline, pause = time.monotonic() + seconds, _FIRST_PAUSE
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise PeerLost(f"{what}: no answer from rank {source} within {seconds:g} s (--timeout)", [source])
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    return bytes(store.get(key))


def exchange(store: Store, key: str, rank: int, size: int, value: str, what: str, seconds: float) -> list[str]:
    """What each rank leaves in the store, under a key of its own; all ranks call it. Errors as in `learn`."""
    store.set(f"{key}/{rank}", value)
    return [learn(store, f"{key}/{other}", other, what, seconds).decode() for other in range(size)]
