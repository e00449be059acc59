"""What ranks compare: a difference is found on all of them, by its kind, and told with the values of each."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore
from torch.distributed import distributed_c10d as registry

from chimera_runtime.blame import ModelError, UserCode
from chimera_runtime.errors import FAILED, BadCheckpoint, Misuse, PeerLost, RanksDiffer
from chimera_runtime.program.job import Job
from chimera_runtime.ranks import agreement
from chimera_runtime.ranks.agreement import (
    POSITION,
    STEPS,
    TERMS,
    Enquiry,
    Fact,
    FactComparison,
    Facts,
    ObjectExchange,
    added_over_all,
    gathered,
    largest_in_copy,
    receive_value,
    send_value,
    settings_of,
    weights_of,
)
from chimera_runtime.ranks.world import World
from chimera_runtime.values.nested import leaves
from tests.unit.runtime.thread_ranks import alone_job, groups, job, together, worlds

BOTH = job(placement=((0, 1), (1, 0)))


def fact(number: int, **text: str) -> Fact:
    return number, lambda: text


def summed(of: list[FactComparison], facts: list[Facts]) -> list[float]:
    added = [one.numbers(known) for one, known in zip(of, facts, strict=True)]
    return [sum(numbers) for numbers in zip(*added, strict=True)]


def test_weight_groups_that_several_ranks_hold_are_shared(alone: World) -> None:
    with worlds(alone, job()) as (world, _), worlds(alone, BOTH) as (other, _), worlds(alone, alone_job()) as (single,):
        assert FactComparison(world.control_group, world.job).shared == ()
        assert FactComparison(other.control_group, other.job).shared == ((0,), (1,))
        assert (
            FactComparison(single.control_group, single.job).shared,
            FactComparison(single.control_group, single.job).numbers({TERMS: fact(1)}),
        ) == ((), [])


@pytest.mark.parametrize("key", [TERMS, STEPS, POSITION, ("data", 0, 1), settings_of((1,)), weights_of((0,))])
def test_a_difference_shows_by_its_kind_and_what_is_the_same_does_not(alone: World, key: agreement.Key) -> None:
    with worlds(alone, BOTH) as ranks:
        both = [FactComparison(world.control_group, world.job) for world in ranks]
        assert both[0].differing(summed(both, [{key: fact(77)}, {key: fact(77)}])) == []
        assert both[0].differing(summed(both, [{key: fact(77)}, {}])) == [], "the other one knows nothing of it"
        assert both[0].differing(summed(both, [{key: fact(77)}, {key: fact(78)}])) == [key]
        assert both[0].differing(summed(both, [{key: fact(0)}, {key: fact(1)}])) == [key]


def test_variants_of_what_one_rank_alone_uses_are_harmless(alone: World) -> None:
    """Each rank may draw its own augmentation of inputs that the first stage alone reads, unless targets go with it."""
    inputs, targets, keywords = (("data", 0, part) for part in range(3))

    def differing(job_: Job, *keys: agreement.Key) -> list[agreement.Key]:
        with worlds(alone, job_) as ranks:
            both = [FactComparison(world.control_group, world.job) for world in ranks]
            return both[0].differing(summed(both, [{key: fact(77 + n) for key in keys} for n in range(2)]))

    assert differing(job(), inputs) == differing(job(), targets) == []
    assert differing(job(), inputs, targets) == [inputs, targets]
    assert differing(job(), keywords) == [keywords], "any stage may take them"
    assert differing(BOTH, inputs) == [inputs]
    assert differing(job(), inputs, STEPS) == [STEPS]


def test_sums_over_thousands_of_ranks_are_exact(alone: World) -> None:
    with worlds(alone, BOTH) as (world, _):
        one = FactComparison(world.control_group, world.job)
        for digest in (1, 2**19 + 1, 2**20 - 1):
            numbers = one.numbers({TERMS: fact(digest)})
            other = one.numbers({TERMS: fact(12345)})
            assert one.differing([4096 * number for number in numbers]) == []
            assert one.differing([4095 * n + m for n, m in zip(numbers, other, strict=True)]) == [TERMS]


def test_all_ranks_say_the_same_with_the_values_of_each(alone: World) -> None:
    with worlds(alone, BOTH, copies=2) as ranks:
        key = settings_of((1,))

        def said(world: World) -> str:
            rate = "0.2" if world.place.rank == 2 else "0.1"
            return str(
                FactComparison(world.control_group, world.job).error(
                    1, "update 7", [key], {key: fact(0, lr=rate, momentum="0.9")}
                )
            )

        messages = together([partial(said, world) for world in ranks])
        assert {*messages} == {
            "update 7: optimizers of different ranks step stage 1 in different ways (lr is 0.1 on ranks 0, 1 and 3 and "
            "0.2 on rank 2): give what several ranks hold the same optimizer with the same settings on all of them, "
            "and step schedulers on every rank"
        }


def test_data_are_compared_within_a_copy(alone: World) -> None:
    with worlds(alone, BOTH, copies=2) as ranks:
        key = ("data", 1, 0)

        def said(world: World) -> str:
            facts = {key: fact(0, sample=f"{world.place.rank}")} if world.place.copy else {}
            return str(FactComparison(world.control_group, world.job).error(1, "update 7", [key], facts))

        (message,) = {*together([partial(said, world) for world in ranks])}
        assert "ranks of copy 1 are given different inputs (sample is 2 on rank 2 and 3 on rank 3)" in message


def test_a_rank_that_does_not_answer_is_named(alone: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_PATIENCE", 0.05)
    with worlds(alone, BOTH) as (world, _):
        error = FactComparison(world.control_group, world.job).error(
            1, "update 7", [TERMS], {TERMS: fact(0, **{agreement.SCALE: "8.0"})}
        )
        assert isinstance(error, RanksDiffer)
        assert str(error) == (
            "update 7: ranks differ in what they give step (scale of the GradScaler is 8.0 on rank 0, no answer from "
            "rank 1): call pipe.unscale_(scaler, optimizer) on every rank before scaler.step(optimizer)"
        )


# Results of ranks put together: sums over all, outputs of a copy on each of its ranks.


def test_numbers_are_added_over_all_ranks_of_all_copies(alone: World) -> None:
    with worlds(alone, job(), copies=2) as ranks:
        calls = [partial(added_over_all, world.control_group, 10.0**rank, rank) for rank, world in enumerate(ranks)]
        assert together(calls) == [[1111.0, 6.0]] * 4


def gathered_by(ranks: list[World], workers: Sequence[int], *of_ranks: dict[int, Any]) -> list[dict[int, Any]]:
    calls = [partial(gathered, rank.control_group, workers, mine) for rank, mine in zip(ranks, of_ranks, strict=True)]
    return together(calls)


def test_outputs_are_on_every_rank_of_their_copy_in_order(alone: World) -> None:
    """Both workers know some, in two copies that know nothing of each other."""
    with worlds(alone, job(), copies=2) as ranks:
        outputs = [(rank, micro) for rank, micros in enumerate(((3, 0), (2, 1)) * 2) for micro in micros]
        of_ranks: list[dict[int, Any]] = [{} for _ in ranks]
        for rank, micro in outputs:
            of_ranks[rank][micro] = (torch.full((2,), 10.0 * rank + micro), "plain")
        of_copies = gathered_by(ranks, [0, 1], *of_ranks)
    for first, both in ((0, of_copies[:2]), (2, of_copies[2:])):
        expected = [10.0 * first, 10.0 * (first + 1) + 1, 10.0 * (first + 1) + 2, 10.0 * first + 3]
        for outputs_of_copy in both:
            assert list(outputs_of_copy) == [0, 1, 2, 3]
            assert [tensor.tolist() for tensor, _ in outputs_of_copy.values()] == [[number] * 2 for number in expected]
            assert {text for _, text in outputs_of_copy.values()} == {"plain"}


def test_outputs_are_gathered_where_there_is_no_numpy(alone: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def numpy(*_: object, **__: object) -> None:
        raise RuntimeError("Numpy is not available")

    monkeypatch.setattr(torch.Tensor, "numpy", numpy)
    with worlds(alone, job()) as ranks:
        both = gathered_by(ranks, [0], {0: torch.ones(2)}, {})
    assert [outputs[0].tolist() for outputs in both] == [[1.0, 1.0]] * 2


def test_of_a_view_only_its_part_travels(alone: World) -> None:
    large = torch.arange(1e6)
    with worlds(alone, job()) as ranks:
        both = gathered_by(ranks, [0], {0: large[5:7]}, {})
    assert [outputs[0].tolist() for outputs in both] == [[5.0, 6.0]] * 2
    assert both[1][0].untyped_storage().nbytes() == 8


def test_a_rank_that_sends_no_outputs_is_named(alone: World) -> None:
    with worlds(alone, job(), timeout=0.2) as ranks, pytest.raises(PeerLost, match="for the outputs of an evaluation"):
        gathered(ranks[0].control_group, [1], {})


def test_values_of_any_dtype_and_layout_in_memory_are_sent(alone: World) -> None:
    """gloo itself knows few dtypes, and no gaps in memory."""
    dtypes = torch.bool, torch.int16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64
    value = {
        "turned": torch.arange(6.0).view(2, 3).t(),
        "channels last": torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "nothing": [None, torch.zeros(0, 2), torch.tensor(3)],
        (1, "of"): [torch.ones(3).to(dtype) for dtype in dtypes],
    }
    with worlds(alone, job()) as (first, second):
        send = partial(send_value, first.control_group, value, 1, "for a test")
        _, received = together([send, partial(receive_value, second.control_group, 0, "for a test")])
    assert received.keys() == value.keys()
    assert received["nothing"][0] is None
    for sent, came in zip(leaves(value), leaves(received), strict=True):
        if sent is not None:
            assert (came.shape, came.dtype) == (sent.shape, sent.dtype)
            assert torch.equal(came.to(torch.complex128), sent.to(torch.complex128))


def test_rank_0_asks_and_all_others_get_the_outcome(alone: World) -> None:
    with worlds(alone, job(), copies=2) as ranks:

        def take_part(world: World) -> list[object]:
            answers = {"sum": lambda *numbers: torch.tensor(sum(numbers) + world.place.rank)}
            enquiry = Enquiry(world.control_group, "asked", answers, "for rank 0")
            if world.place.rank:
                return enquiry.serve()
            of_ranks = [enquiry.ask(rank, "sum", 10, 20).item() for rank in (3, 0, 1, 2)]
            enquiry.end(True, of_ranks)
            return [True, of_ranks]

        assert together([partial(take_part, world) for world in ranks]) == [[True, [33, 30, 31, 32]]] * 4


# What ranks tell each other of checkpoints: heard by all in order, and a rank that is gone is an error.


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


def test_a_rank_that_is_gone_or_does_not_come_is_an_error_that_says_for_what(
    alone: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object, **__: object) -> None:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1234\nand more")

    waits = "rank 0: wait for what other ranks say of a checkpoint: "
    with talks(2, 0.2) as (exchange, _), pytest.raises(PeerLost) as lost:
        exchange.all_gather(1)
    assert str(lost.value) == f"{waits}no answer from rank 1 within 0.2 s (timeout)"
    monkeypatch.setattr("torch.distributed.all_gather_object", gone)
    with talks(1) as (exchange,), pytest.raises(PeerLost) as lost:
        exchange.all_gather(1)
    assert str(lost.value) == f"{waits}Connection closed by peer [127.0.0.1]:1234"


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


def test_ranks_of_a_copy_find_the_largest_numbers_without_the_others(alone: World) -> None:
    with worlds(alone, job(), copies=2) as ranks:
        calls = [
            partial(largest_in_copy, world.control_group, torch.tensor([n, 3 - n])) for n, world in enumerate(ranks)
        ]
        largest = {world.place.copy: found.tolist() for world, found in zip(ranks, together(calls), strict=True)}
    numbers = [[[n, 3 - n] for n, world in enumerate(ranks) if world.place.copy == copy] for copy in range(2)]
    assert largest == {
        copy: [max(column) for column in zip(*of_copy, strict=True)] for copy, of_copy in enumerate(numbers)
    }
