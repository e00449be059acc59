"""The store: ranks find_store there, and leave there what others wait_for_key."""

import os

import pytest
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore

from chimera_runtime.errors import Misuse, PeerLost
from chimera_runtime.ranks import rendezvous
from chimera_runtime.ranks.rendezvous import (
    exchange,
    failures_shared,
    find_store,
    fresh_store,
    require_own_store,
    wait_for_key,
    waits_of,
)

TIMEOUT = 20.0


def test_what_another_rank_leaves_is_learned() -> None:
    store = HashStore()
    store.set("key", "value")
    assert wait_for_key(store, "key", 1, "rank 0: wait", TIMEOUT) == b"value"


def test_all_ranks_get_what_each_leaves_in_the_order_of_ranks() -> None:
    store = HashStore()
    store.set("key/0", "a")
    assert exchange(store, "key", 1, 2, value="b", what="rank 1: wait", seconds=TIMEOUT) == ["a", "b"]


def test_a_program_that_torchrun_did_not_start_says_how_to(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(Misuse, match=r"start the program with torchrun, as in: torchrun --nproc-per-node"):
        find_store(TIMEOUT)


def test_a_store_that_is_not_there_is_said_with_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for settings, said in [
        ({}, r"no store at MASTER_ADDR:MASTER_PORT \(unset:unset\): .*MASTER_ADDR expected"),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}, r"\(127.0.0.1:9\): .*; start with torchrun"),
    ]:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {"RANK": "1", "WORLD_SIZE": "2", **settings}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(Misuse, match=said):
            find_store(0.5)


def test_rank_and_size_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in settings.items():
        monkeypatch.setitem(os.environ, name, value)
    store, rank, size = find_store(TIMEOUT)
    store.set("key", "value")
    assert (rank, size, store.get("key")) == (0, 1, b"value")


def test_ranks_that_are_started_again_read_nothing_of_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = HashStore()
    monkeypatch.setattr(rendezvous, "rendezvous", lambda *_, **__: iter([(shared, 1, 2)]))
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    for attempt in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        given = fresh_store()
        assert (given["rank"], given["world_size"]) == (1, 2)
        assert not given["store"].check(["key"])
        given["store"].set("key", "value")


def test_a_rank_that_fails_at_start_is_told_to_those_that_wait_for_it() -> None:
    store = HashStore()
    store.set("there", "value")
    with pytest.raises(ValueError, match="went wrong"), failures_shared(store, 1):
        raise ValueError("went wrong\nin two lines")
    assert wait_for_key(store, "there", 1, "rank 0: wait", TIMEOUT) == b"value"
    with pytest.raises(PeerLost, match=r"^rank 0: wait for all: rank 1 has failed: went wrong$") as lost:
        wait_for_key(store, "missing", 2, "rank 0: wait for all", TIMEOUT)
    assert lost.value.peers == (1,)


def test_ranks_that_give_up_tell_each_other_what_they_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_LATE_MOMENT", 0.1)
    monkeypatch.setattr(rendezvous, "_LOST_MOMENT", 0.1)
    store = HashStore()
    assert waits_of(store, 0, "rank 0: wait recv", [1], is_late=False) == [], "it has died"
    (silent,) = waits_of(store, 0, "rank 0: wait recv", [1], is_late=True)
    assert silent.startswith("rank 1 is in no call of the pipeline that has timed out")
    for is_late in (True, False):
        notes = waits_of(store, 1, "rank 1: wait for the norm", [0], is_late=is_late)
        assert notes == ["at the same time: rank 0: wait recv"]


@pytest.mark.usefixtures("alone")
def test_the_store_of_all_attempts_is_refused_where_torchrun_may_start_ranks_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require_own_store()
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    require_own_store()  # the store was given
    group = dist.group.WORLD
    assert group is not None
    of_torch = PrefixStore(f"{group.group_name}/", PrefixStore("default_pg", HashStore()))
    monkeypatch.setattr(rendezvous.registry, "_get_default_store", lambda: of_torch)
    with pytest.raises(Misuse, match=r"init_process_group\(BACKEND, \*\*chimera_runtime.fresh_store\(\)\)"):
        require_own_store()
