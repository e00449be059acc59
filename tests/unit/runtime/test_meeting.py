"""The store: ranks meet there, and leave there what others learn."""

import os

import pytest
from torch.distributed import HashStore

from chimera_runtime.errors import Misuse
from chimera_runtime.meeting import exchange, learn, meet

TIMEOUT = 20.0


def test_what_another_rank_leaves_is_learned() -> None:
    store = HashStore()
    store.set("key", "value")
    assert learn(store, "key", 1, "rank 0: wait", TIMEOUT) == b"value"


def test_all_ranks_get_what_each_leaves_in_the_order_of_ranks() -> None:
    store = HashStore()
    store.set("key/0", "a")
    assert exchange(store, "key", 1, 2, "b", "rank 1: wait", TIMEOUT) == ["a", "b"]


def test_a_program_that_torchrun_did_not_start_says_how_to(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(Misuse, match=r"start train.py with torchrun, as in: torchrun --nproc-per-node"):
        meet(TIMEOUT)


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
            meet(0.5)


def test_rank_and_size_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in settings.items():
        monkeypatch.setitem(os.environ, name, value)
    store, rank, size = meet(TIMEOUT)
    store.set("key", "value")
    assert (rank, size, store.get("key")) == (0, 1, b"value")
