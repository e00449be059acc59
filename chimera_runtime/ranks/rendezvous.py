"""Rendezvous: the store of torchrun, in which ranks leave texts for each other."""

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

from chimera_runtime.errors import BadModel, Misuse, PeerLost
from chimera_runtime.errors import start as mistakes

FAILED = "failed"
"""Key under which a rank that has failed leaves its error, for ranks that wait for any key."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.01
"""Shortest and longest time between two looks at the store, in seconds."""

_BETWEEN_FAILURES = 0.05
"""Time between two looks for a failure of another rank, in seconds: each is one more message to the store."""

_LATE_MOMENT, _LOST_MOMENT = 3.0, 1.0
"""Seconds that other ranks have to say what they wait for, after a wait that was late or a connection that closed."""

_MOST = 4
"""Number of other ranks whose waits a message reports."""


def find_store(timeout: float) -> tuple[Store, int, int]:
    """Returns the store, the rank and the world size that torchrun gave; errors as in `fresh_store`."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise Misuse(mistakes.NOT_STARTED_BY_TORCHRUN)
    limit = timedelta(seconds=timeout)
    try:
        store, rank, size = next(rendezvous("env://", timeout=limit))
    except (ValueError, RuntimeError) as error:
        where = ":".join(os.environ.get(name, "unset") for name in ("MASTER_ADDR", "MASTER_PORT"))
        headline = str(error).partition("\n")[0]
        raise mistakes.no_store(where=where, why=headline) from error
    # Ranks that torchrun has started again may get the store that earlier ranks have used, with all of its keys.
    store = PrefixStore(f"chimera/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    store.set_timeout(limit)
    return store, rank, size


def fresh_store(timeout: float = 1800.0) -> dict[str, Any]:
    """The store, rank and world size that torchrun gave, as keyword arguments of ``init_process_group``.

    With ``init_process_group("gloo", **fresh_store())`` ranks that ``torchrun --max-restarts`` has started again read
    nothing that the ranks before have left. Otherwise it does what ``init_process_group("gloo")`` does.

    Parameters
    ----------
    timeout
        Seconds to wait for the store, and for keys that other ranks leave in it.

    Raises
    ------
    Misuse
        If the program was not started by torchrun, or there is no store where the environment says.
    """
    store, rank, size = find_store(timeout)
    return {"store": store, "rank": rank, "world_size": size}


def require_own_store() -> None:
    """Raises `Misuse` if torchrun may start ranks again that get the same store for their default process group.

    The new ranks would look for each other at the addresses of the dead ones, which the store still has.
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
        raise Misuse(mistakes.STORE_OF_RANKS_BEFORE)


def waits_of(store: Store, rank: int, message: str, others: Sequence[int], *, is_late: bool) -> list[str]:
    """Publishes the error message of this rank, and returns a sentence for each of the ``others`` about its wait.

    The others have a moment to give up and publish theirs. If ``is_late``, the wait of this rank timed out and no
    connection was closed: then a rank without a message is in no call of the pipeline, as its sentence says.
    """
    notes, deadline = [], time.monotonic() + (_LATE_MOMENT if is_late else _LOST_MOMENT)
    with suppress(RuntimeError):
        store.set(f"waits/{rank}", message)
        for other in others[:_MOST]:
            while not (has_message := store.check([f"waits/{other}"])) and time.monotonic() < deadline:
                time.sleep(_LONGEST_PAUSE)
            if has_message:
                notes.append(f"at the same time: {store.get(f'waits/{other}').decode()}")
            elif is_late:
                notes.append(
                    f"rank {other} is in no call of the pipeline that has timed out: it may be stopped, in code of its "
                    "own, or in a collective, as dist.barrier(), that not all ranks call"
                )
    return notes


@contextmanager
def failures_shared(store: Store, rank: int) -> Iterator[None]:
    """Leaves an error that is raised inside in the store: ranks that wait in `wait_for_key` raise it as `PeerLost`."""
    try:
        yield
    except PeerLost:
        raise
    except Exception as error:
        headline = str(error).partition("\n")[0] or type(error).__name__
        with suppress(RuntimeError):
            store.set(FAILED, json.dumps([rank, headline, False]))
        raise


def leave_failure(store: Store, rank: int, error: Exception, key: str = FAILED) -> None:
    """Leaves an error in the store, unless another one is there, for ranks that read it by `failure_in`."""
    store.compare_set(key, "", json.dumps([rank, str(error), isinstance(error, Misuse | BadModel)]))


def failure_in(text: str, what: str = "") -> PeerLost:
    """Returns the error that another rank has left, as `PeerLost`; it is `Misuse` as well if the rank has refused."""
    rank, words, is_refusal = json.loads(text)
    return mistakes.peer_has_refused(rank, words) if is_refusal else mistakes.peer_has_failed(what, rank, words)


def wait_for_key(store: Store, key: str, source: int, what: str, seconds: float) -> bytes:
    """Returns what rank ``source`` leaves in the store under ``key``. ``what`` names the wait in the error.

    It polls, because a thread that blocks in the store handles no signals. Raises `PeerLost` if the wait takes longer
    than ``seconds``, or a rank has failed, see `failures_shared`.
    """
    deadline, pause, next_look = time.monotonic() + seconds, _FIRST_PAUSE, 0.0
    while not store.check([key]):
        if (now := time.monotonic()) >= min(next_look, deadline):
            next_look = now + _BETWEEN_FAILURES
            if store.check([FAILED]):
                raise failure_in(store.get(FAILED).decode(), what)
            if now >= deadline:
                raise mistakes.key_is_late(what, source, seconds)
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    return bytes(store.get(key))


def exchange(store: Store, key: str, rank: int, size: int, *, value: str, what: str, seconds: float) -> list[str]:
    """Returns the ``value`` of each of ``size`` ranks, which all call it; arguments as in `wait_for_key`."""
    store.set(f"{key}/{rank}", value)
    return [wait_for_key(store, f"{key}/{other}", other, what, seconds).decode() for other in range(size)]
