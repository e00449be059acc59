"""What ranks tell each other of checkpoints: heard by all in order, and a rank that is gone is an error."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore
from torch.distributed import distributed_c10d as registry

from chimera_runtime.blame import ModelError, UserCode
from chimera_runtime.errors import FAILED, BadCheckpoint, Misuse, PeerLost
from chimera_runtime.ranks.agreement import ObjectExchange
from chimera_runtime.ranks.world import World
from tests.unit.runtime.thread_ranks import groups, together


@contextmanager
def talks(size: int, timeout: float = 20.0) -> Iterator[list[ObjectExchange]]:
    """Those of so many ranks, each of them on a thread."""
    with groups(size) as members:
        wrapped = [dist.ProcessGroup(HashStore(), rank, size) for rank in range(size)]
        for rank, (group, member) in enumerate(zip(wrapped, members, strict=True)):
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, member)
            registry._world.pg_map[group] = ("gloo", None)
            registry._world.pg_group_ranks[group] = {0: rank}  # a thread's number in the default group is 0
        try:
            yield [ObjectExchange(group, "a checkpoint", timeout) for group in wrapped]
        finally:
            for group in wrapped:
                del registry._world.pg_map[group], registry._world.pg_group_ranks[group]


def test_all_hear_what_each_says_in_the_order_of_ranks(alone: World) -> None:
    with talks(3) as ranks:
        heard = together([partial(exchange.all_gather, {"rank": exchange.rank}) for exchange in ranks])
        assert heard == [[{"rank": 0}, {"rank": 1}, {"rank": 2}]] * 3


@pytest.mark.parametrize(("complaints", "first"), [((None, "b", "c"), "b"), (("a", None, None), "a")])
def test_the_first_complaint_of_any_is_raised_by_all(
    alone: World, complaints: tuple[str | None, ...], first: str
) -> None:
    def raised(exchange: ObjectExchange, complaint: str | None) -> str:
        with pytest.raises(BadCheckpoint) as error:
            exchange.require_none(complaint, BadCheckpoint)
        return str(error.value)

    with talks(3) as ranks:
        together([partial(exchange.require_none, None, BadCheckpoint) for exchange in ranks])
        calls = [partial(raised, exchange, complaint) for exchange, complaint in zip(ranks, complaints, strict=True)]
        assert together(calls) == [first] * 3


def test_a_rank_that_does_not_answer_is_an_error_that_says_for_what(
    alone: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with talks(1) as (exchange,):

        def gone(*_: object, **__: object) -> None:
            raise RuntimeError("Connection closed by peer [127.0.0.1]:1234\nand more")

        monkeypatch.setattr("torch.distributed.all_gather_object", gone)
        with pytest.raises(PeerLost) as lost:
            exchange.all_gather(1)
    assert str(lost.value) == (
        "rank 0: wait for what other ranks say of a checkpoint: Connection closed by peer [127.0.0.1]:1234"
    )


def test_a_rank_that_does_not_come_is_named_in_time(alone: World) -> None:
    with talks(2, 0.2) as (exchange, _), pytest.raises(PeerLost) as lost:
        exchange.all_gather(1)
    assert str(lost.value) == (
        "rank 0: wait for what other ranks say of a checkpoint: no answer from rank 1 within 0.2 s (timeout)"
    )


def test_what_fails_on_one_rank_fails_on_all_with_what_that_one_says(alone: World) -> None:
    """Its own error on that rank, one with its words on the others; else each has what the call returns on each."""

    def outcome(exchange: ObjectExchange, error: Exception | None) -> Any:
        def call() -> int:
            if error is not None:
                raise error
            return exchange.rank

        try:
            return exchange.gather_results(call, lambda words: f"the checkpoint: {words}")
        except (Misuse, BadCheckpoint, ModelError) as raised:
            return raised

    def of_user() -> Exception:
        try:
            with UserCode("state_dict()", FAILED):
                raise KeyError("key")
        except ModelError as error:
            return error

    with talks(2) as ranks:

        def outcomes(*errors: Exception | None) -> list[Any]:
            return together([partial(outcome, exchange, error) for exchange, error in zip(ranks, errors, strict=True)])

        assert outcomes(None, None) == [[0, 1], [0, 1]]
        misuse, broken = Misuse("wrong"), of_user()
        first, second = outcomes(None, misuse)
        assert (type(first), str(first), second) == (Misuse, "wrong", misuse)
        first, second = outcomes(broken, None)
        assert first is broken
        assert isinstance(second, BadCheckpoint)
        assert str(second).startswith("state_dict(): ")
        assert "KeyError: 'key'" in str(second)
        expected = ["the checkpoint: rank 1: ValueError: what", "the checkpoint: gone"]
        assert [*map(str, outcomes(None, ValueError("what")))] == expected[:1] * 2
        assert [*map(str, outcomes(BadCheckpoint("gone"), None))] == expected[1:] * 2
        assert [*map(str, outcomes(BadCheckpoint("gone"), ValueError("what")))] == expected[::-1]
