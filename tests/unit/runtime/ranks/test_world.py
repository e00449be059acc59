"""Places of ranks, communicators, and what ranks leave for one another."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from chimera_runtime.errors import Misuse, PeerLost
from chimera_runtime.program.job import Job, Place
from chimera_runtime.ranks import world as world_module
from chimera_runtime.ranks.messages import Peer, StagedGroup
from chimera_runtime.ranks.world import World, _agree_on_program, _backend, begin, join_group, staging_of
from tests.unit.runtime.gpu_model import ModelGpu
from tests.unit.runtime.thread_ranks import alone_job, job, together, worlds

TIMEOUT = 20.0


# Places.


@given(workers=st.integers(1, 9), copies=st.integers(1, 9), layout=st.sampled_from(["pipeline", "replica"]))
def test_every_rank_is_one_worker_of_one_copy(workers: int, copies: int, layout: str) -> None:
    places = [Place(rank, workers, copies, layout) for rank in range(workers * copies)]
    assert {(place.copy, place.worker) for place in places} == {(c, w) for c in range(copies) for w in range(workers)}
    for place in places:
        assert place.rank_of(place.copy, place.worker) == place.rank
        assert [*place.ranks] == [other.rank for other in places]


def test_neighbours_are_of_one_pipeline_or_of_one_stage() -> None:
    assert [Place(rank, 3, 2, "pipeline").worker for rank in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [Place(rank, 3, 2, "replica").worker for rank in range(6)] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(("layout", "ranks"), [("pipeline", [0, 3, 4, 7]), ("replica", [0, 1, 6, 7])])
def test_a_stage_is_held_by_ranks_of_every_copy(alone: World, layout: str, ranks: list[int]) -> None:
    """Both pipes of a bidirectional schedule: worker 3 holds the first stage of the second."""
    both = job(workers=4, stages=4, placement=((0, 1, 2, 3), (3, 2, 1, 0)))
    with worlds(alone, both) as found:
        place = Place(0, 4, 2, layout)
        world = replace(found[0], control_group=replace(found[0].control_group, place=place))
        assert world.ranks_of(0) == ranks


# Joining.


def refused(of: Job, size: int, backend: str = "gloo") -> str:
    with pytest.raises(Misuse) as error:
        begin(of, HashStore(), 0, size, "pipeline", backend, TIMEOUT)
    assert not dist.is_initialized()
    return str(error.value)


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (1, "two runs on 2 workers and there is 1 rank; start a multiple of 2: --nproc-per-node=2"),
        (3, "two runs on 2 workers and there are 3 ranks; start a multiple of 2: --nproc-per-node=2 or 4"),
    ],
)
def test_ranks_that_make_no_whole_copies_are_told_which_numbers_do(size: int, words: str) -> None:
    assert refused(job(), size) == words


def test_ranks_of_different_programs_do_not_start() -> None:
    """As where one machine has an older copy of the directory."""
    store = HashStore()
    store.set("here/1", "another")
    with pytest.raises(Misuse, match="the ranks run different programs: compile again"):
        begin(job(), store, 0, 2, "pipeline", "gloo", 1.0)


def test_who_has_joined_knows_its_place_and_needs_no_communicator_alone(alone: World) -> None:
    assert (alone.place.rank, alone.place.worker, alone.place.copy, alone.place.copies) == (0, 0, 0, 1)
    assert alone.sums == {(0,): (None, (0,)), (1,): (None, (0,))}
    assert alone.channels == {}
    assert alone.device == torch.device("cpu")
    alone.control_group.barrier("for nobody")


def test_a_group_that_is_there_is_joined_with_communicators_of_ones_own(alone: World) -> None:
    """As often as one likes: what one leaves in the store is not read by the next."""
    first, second = (join_group(alone_job(), None, "pipeline", None, TIMEOUT) for _ in range(2))
    assert first.control_group.members == (0,)
    assert first.device == torch.device("cpu")
    assert len({first.control_group.group, second.control_group.group, dist.group.WORLD}) == 3
    first.control_group.store.set("key", "value")
    assert not second.control_group.store.check(["key"])
    for world in (first, second):
        world.control_group.barrier("for nobody")
        world.close()
    assert dist.is_initialized()


def test_who_is_in_no_group_is_told(alone: World) -> None:
    with pytest.raises(Misuse, match="this rank is not in the group that it gave"):
        join_group(alone_job(), dist.GroupMember.NON_GROUP_MEMBER, "pipeline", None, TIMEOUT)


def test_communicators_that_the_program_is_not_proven_for_are_refused(alone: World) -> None:
    with pytest.raises(Misuse, match="communicators pair: gloo finds messages by their tags"):
        join_group(alone_job(), None, "pipeline", None, TIMEOUT, "pair")
    with pytest.raises(Misuse, match="communicators ring: it is one of directed, pair"):
        join_group(alone_job(), None, "pipeline", None, TIMEOUT, "ring")


# The store.


def test_what_nobody_leaves_is_given_up_with_who_was_waited_for(alone: World) -> None:
    with pytest.raises(PeerLost) as lost:
        alone.control_group.wait_for_key("key", 3, "for the weights", 0.03)
    assert str(lost.value) == ("rank 0 (worker 0): wait for the weights: no answer from rank 3 within 0.03 s (timeout)")
    assert lost.value.peers == (3,)


# Outside of the schedule.


@pytest.fixture
def two(alone: World) -> Iterator[list[World]]:
    with worlds(alone, job()) as ranks:
        yield ranks


def test_a_tensor_is_sent_outside_of_the_schedule_as_it_is(two: list[World]) -> None:
    """Also one that is a view, and one that has a gradient."""
    message = torch.arange(6.0).reshape(2, 3).requires_grad_().t()
    received = torch.zeros(3, 2)
    together(
        [
            lambda: two[0].control_group.send(message, 1, "a test"),
            lambda: two[1].control_group.recv(received, 0, "for a test"),
        ]
    )
    assert torch.equal(received, message.detach())


def test_all_ranks_meet(two: list[World]) -> None:
    together([lambda world=world: world.control_group.barrier("for each other") for world in two])  # type: ignore[misc]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda control: control.recv(torch.zeros(1), 1, "for a test"),
            "wait for a test: rank 1: no answer within 0.05 s",
        ),
        (lambda control: control.barrier("for the end"), "wait for the end: rank 1: no answer within 0.05 s"),
    ],
)
def test_a_rank_that_does_not_answer_is_given_up(alone: World, call: Any, words: str) -> None:
    with worlds(alone, job(), timeout=0.05) as ranks, pytest.raises(PeerLost) as lost:
        call(ranks[0].control_group)
    assert words in str(lost.value)


def test_a_worker_reaches_another_of_its_own_copy(alone: World) -> None:
    with worlds(alone, job(), copies=2) as ranks:
        peers: list[Any] = []
        for rank in ranks:
            channels = dict.fromkeys([(0, 1), (1, 0)], rank.control_group.group)
            peers.append(replace(rank, channels=channels).peer(1 - rank.place.worker))
        assert all(isinstance(peer, Peer) for peer in peers)
        assert [peer._target for peer in peers] == [peer._source for peer in peers] == [1, 0, 3, 2]


# Backends.


@pytest.mark.parametrize(
    ("made_with", "device", "used"),
    [
        ("strict", "cpu", "strict"),
        ("gloo", "cpu", "gloo"),
        ("gloo", "cuda", "gloo"),
        ("cpu:gloo,cuda:nccl", "cuda", "nccl"),
        ("mpi", "cpu", "gloo"),
    ],
)
def test_messages_take_the_backend_that_somebody_registered(
    made_with: str, device: str, used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda _: made_with)
    monkeypatch.setitem(dist.Backend._plugins, "STRICT", None)
    assert _backend(None, torch.device(device)) == used


@pytest.mark.parametrize(
    ("device", "backend", "is_staged"), [("cpu", "gloo", False), ("cuda", "gloo", True), ("cuda", "nccl", False)]
)
def test_messages_of_a_gpu_by_gloo_are_staged(
    alone: World, device: str, backend: str, is_staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world_module, "Accelerator", lambda _device: ModelGpu())
    staging = staging_of(torch.device(device), backend)
    assert (staging is not None) is is_staged
    with worlds(alone, job()) as ranks:
        peer = replace(ranks[0], staging=staging).peer(1)
        assert isinstance(peer._outgoing, StagedGroup) is isinstance(peer._incoming, StagedGroup) is is_staged


def test_where_gloo_does_not_keep_the_time_a_monitor_does(alone: World) -> None:
    seen: list[Any] = []

    class Watching:
        def settle(self, work: Any, lost: Any) -> None:
            seen.append((work, lost))

        def close(self) -> None:
            seen.append("closed")

    control = replace(alone.control_group, monitor=Watching(), group=dist.group.WORLD)  # type: ignore[arg-type]
    world = replace(alone, control_group=control)
    world.control_group.wait("work", "what is lost")  # type: ignore[arg-type]
    world.close()
    assert seen == [("work", "what is lost"), "closed"]


def test_after_a_time_out_whatever_a_rank_waits_for_raises_its_error(alone: World) -> None:
    class Late:
        def check(self) -> None:
            raise PeerLost("rank 0 (worker 0): wait recv m0 s1->s0: rank 1: no answer", [1])

    control = replace(alone.control_group, monitor=Late())  # type: ignore[arg-type]
    world = replace(alone, control_group=control)
    for call in (world.control_group.check, world.synchronize, lambda: world.control_group.barrier("for all")):
        with pytest.raises(PeerLost, match="wait recv m0"):
            call()
    alone.control_group.check()
    alone.synchronize()


def test_ranks_that_give_other_arguments_do_not_start() -> None:
    store = HashStore()

    def said(rank: int) -> str:
        with pytest.raises(Misuse) as error:
            _agree_on_program(job(), Place(rank, 2, 1, "pipeline"), store, 5.0, {"seed": rank, "varying": False})
        return str(error.value)

    assert {*together([partial(said, rank) for rank in range(2)])} == {
        "seed is 0 on rank 0 and 1 on rank 1: every rank makes the pipeline with the same arguments"
    }
