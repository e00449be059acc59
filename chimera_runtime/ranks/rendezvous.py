"""The store of torchrun: where ranks meet, and what they leave there for one another."""

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as registry
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from chimera_runtime.errors import Misuse, PeerLost

_FAILED = "failed"
"""What a rank leaves, in place of all that others wait for, if it fails before the first update."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.01
"""Seconds between two questions to the store."""

_LATE_MOMENT, _LOST_MOMENT = 3.0, 1.0
"""Seconds that ranks get to say what they wait for: that wait for each other, or that have closed a connection."""

_MOST = 4
"""Of how many other ranks a message tells what they wait for."""


def meet(timeout: float) -> tuple[Store, int, int]:
    """The store, the rank and the world size that torchrun gave.

    Ranks that torchrun has started again may get the store of those before, with all that these said in it.

    Raises
    ------
    Misuse
        If the program was not started by torchrun, or there is no store where the environment says.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise Misuse(
            "start the program with torchrun, as in: torchrun --nproc-per-node=WORKERS train.py --model MODEL.py"
        )
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


def fresh_store(timeout: float = 1800.0) -> dict[str, Any]:
    """The store, rank and world size that torchrun gave, as keyword arguments of ``init_process_group``.

    With ``init_process_group("gloo", **fresh_store())`` ranks that ``torchrun --max-restarts`` has started again read
    nothing that the ranks before have left; else it does what ``init_process_group("gloo")`` does.

    Parameters
    ----------
    timeout
        Seconds to wait for the store, and for what other ranks are to leave in it.

    Raises
    ------
    Misuse
        If the program was not started by torchrun, or there is no store where the environment says.
    """
    store, rank, size = meet(timeout)
    return {"store": store, "rank": rank, "world_size": size}


def require_own_store() -> None:
    """Passes if the store of the default process group is not that of the ranks which torchrun may start after these.

    Raises
    ------
    Misuse
        If it is, and torchrun has been told to start ranks again: they would look for each other at addresses of dead
        ranks.
    """
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) < 1:
        return
    group = dist.group.WORLD
    assert group is not None
    store, name = registry._get_default_store(), group.group_name
    shared = getattr(store, "_underlying_non_prefix_store", store)
    key = f"chimera/shared/{dist.get_rank()}"
    store.set(key, "")
    is_shared = PrefixStore(f"{name}/", PrefixStore("default_pg", shared)).check([key])
    store.delete_key(key)
    if is_shared:
        raise Misuse(
            "ranks that torchrun starts again (--max-restarts) would look for each other where the ranks before were, "
            "and fail: make the process group by init_process_group(BACKEND, **chimera_runtime.fresh_store())"
        )


def waits_of(store: Store, rank: int, message: str, others: Sequence[int], is_late: bool) -> list[str]:
    """What others wait for, in words, once this rank has given up with a message, which the others learn.

    They have a moment to give up as well. If the wait was over because it ``is_late``, and not because a connection was
    closed, a rank that says nothing is not in a call of the pipeline.
    """
    notes, deadline = [], time.monotonic() + (_LATE_MOMENT if is_late else _LOST_MOMENT)
    with suppress(RuntimeError):
        store.set(f"waits/{rank}", message)
        for other in others[:_MOST]:
            while not (has_said := store.check([f"waits/{other}"])) and time.monotonic() < deadline:
                time.sleep(_LONGEST_PAUSE)
            if has_said:
                notes.append(f"at the same time: {store.get(f'waits/{other}').decode()}")
            elif is_late:
                notes.append(
                    f"rank {other} is in no call of the pipeline that has timed out: it may be stopped, in code of its "
                    "own, or in a collective, as dist.barrier(), that not all ranks call"
                )
    return notes


@contextmanager
def failures_told(store: Store, rank: int) -> Iterator[None]:
    """Leaves an error inside for the ranks that wait for this one in `learn`, which raise it as `PeerLost`."""
    try:
        yield
    except PeerLost:
        raise
    except Exception as error:
        headline = str(error).partition("\n")[0] or type(error).__name__
        with suppress(RuntimeError):
            store.set(_FAILED, json.dumps([rank, headline]))
        raise


def learn(store: Store, key: str, source: int, what: str, seconds: float) -> bytes:
    """What a rank leaves in the store; asks again and again: a thread that blocks in it would be deaf to signals.

    Raises
    ------
    PeerLost
        If it takes longer than ``seconds``, or a rank has failed, see `failures_told`.
    """
    deadline, pause = time.monotonic() + seconds, _FIRST_PAUSE
    while not store.check([key]):
        if store.check([_FAILED]):
            rank, headline = json.loads(store.get(_FAILED))
            raise PeerLost(f"{what}: rank {rank} has failed: {headline}", [rank])
        if time.monotonic() > deadline:
            raise PeerLost(f"{what}: no answer from rank {source} within {seconds:g} s (timeout)", [source])
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    return bytes(store.get(key))


def exchange(store: Store, key: str, rank: int, size: int, value: str, what: str, seconds: float) -> list[str]:
    """What each rank leaves in the store, under a key of its own; all ranks call it. Errors as in `learn`."""
    store.set(f"{key}/{rank}", value)
    return [learn(store, f"{key}/{other}", other, what, seconds).decode() for other in range(size)]
