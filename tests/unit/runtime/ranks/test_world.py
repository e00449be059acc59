"""Places of ranks, communicators, and what ranks leave for one another."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
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
from chimera_runtime.ranks.communicators import CHOICES, DIRECTED, PAIR, channels, chosen
from chimera_runtime.ranks.messages import Peer, StagedGroup
from chimera_runtime.ranks.world import (
    A_DAY,
    ProcessGroups,
    World,
    _agree_on_program,
    _backend,
    begin,
    join_group,
    staging_of,
)
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
    controls = [world.control_group for world in two]
    together([partial(controls[0].send, message, 1, "a test"), partial(controls[1].recv, received, 0, "for a test")])
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


# Pipelines over a part of the ranks: the communicators of all are made together, once all ranks have come.


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], str]]:
    """This is rank 2 of four; the communicators that are made, each by its ranks and backend."""
    made: list[tuple[list[int], str]] = []

    def new_group(ranks: list[int], timeout: Any, backend: str) -> Any:
        assert timeout == A_DAY
        made.append((ranks, backend))
        return f"{ranks}"

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    return made


def test_all_ranks_make_the_communicators_of_all_pipelines_in_one_order(four: list[tuple[list[int], str]]) -> None:
    store = HashStore()
    for rank, members in enumerate(("[0, 1]", "[0, 1]", "", "[2, 3]")):
        store.set(f"members/{rank}", members)
    groups = ProcessGroups(0, (2, 3), store, 20.0)
    assert str(groups.everyone()) == "[2, 3]"
    assert groups.make([1], "nccl") is None
    assert four == [([0, 1], "gloo"), ([2, 3], "gloo"), ([1], "nccl"), ([3], "nccl")]


def test_a_rank_that_makes_no_pipeline_is_named_in_time(four: list[tuple[list[int], str]]) -> None:
    store = HashStore()
    store.set("members/0", "[0, 1]")
    with pytest.raises(PeerLost) as lost:
        ProcessGroups(0, (2, 3), store, 0.05)
    assert str(lost.value) == (
        "rank 2: wait for all ranks of the default process group to make a pipeline: no answer from rank 1 within "
        "0.05 s (timeout)"
    )
    assert (lost.value.peers, four) == ((1,), [])


def test_pipelines_over_all_ranks_need_not_ask(alone: World) -> None:
    assert ProcessGroups(0, (0,), HashStore(), 0.05).members == (0,)


# A process with sums of gloo ends with the status that it has earned.


ROOT = Path(__file__).resolve().parents[4]

PROCESS = """
import sys, torch, torch.distributed as dist
from chimera_runtime.ranks.world import wait_for_gloo_at_exit
sys.setswitchinterval(1000)  # no thread gets the interpreter before this one sleeps
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
if sys.argv[1] == "waits":
    wait_for_gloo_at_exit()
dist.all_reduce(torch.ones(1), async_op=True)
sum(range(10_000_000))
"""


@pytest.mark.full
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone shows what threads do")
def test_a_sum_that_is_over_when_the_process_ends_does_not_end_it_with_an_abort() -> None:
    done = subprocess.run([sys.executable, "-c", PROCESS, "waits"], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_thread_that_goes_on_waiting_or_works_holds_the_end_up_for_a_limited_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(world_module, "_EXIT_LIMIT", 0.3)
    states = iter([{}, {"7": (True, "1")}, {"7": (True, "2")}, {"7": (False, "2")}, {"7": (False, "2")}])
    monkeypatch.setattr(world_module, "_switches", lambda: next(states, {"7": (True, "3")}))
    world_module.wait_for_gloo()
    assert next(states, None) is None, "it has looked until the thread slept twice in a row"
    monkeypatch.setattr(world_module, "_switches", lambda: {"7": (True, str(time.monotonic()))})
    start = time.monotonic()
    world_module.wait_for_gloo()
    assert 0.3 <= time.monotonic() - start < 5


def test_threads_of_others_are_not_waited_for() -> None:
    is_over = threading.Event()
    thread = threading.Thread(target=is_over.wait)
    thread.start()
    assert str(thread.native_id) not in world_module._switches()
    is_over.set()


# The communicators of messages, and which programs may have them.


RING = replace(job(workers=3, stages=3, placement=((0, 1, 2),)), links=((0, 1), (1, 0), (1, 2), (2, 0), (2, 1)))


class Maker:
    """Makes a name for each communicator, for the rank that asks, and remembers in which order."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.made: list[tuple[int, ...]] = []

    def __call__(self, ranks: Sequence[int], backend: str) -> Any:
        assert backend == "nccl"
        self.made.append(tuple(ranks))
        return f"{len(self.made)}" if self.rank in ranks else None


def made(of: Job, rank: int, communicators: str, copies: int = 1) -> tuple[dict[tuple[int, int], Any], Maker]:
    maker = Maker(rank)
    return channels(of, Place(rank, 3, copies, "pipeline"), "nccl", maker, communicators), maker


@pytest.mark.parametrize(
    ("rank", "communicators", "all_ranks", "mine"),
    [
        (1, DIRECTED, [*RING.links], {(0, 1): "1", (1, 0): "2", (1, 2): "3", (2, 1): "5"}),
        (1, PAIR, [(0, 1), (0, 2), (1, 2)], {(0, 1): "1", (1, 0): "1", (1, 2): "3", (2, 1): "3"}),
        (0, PAIR, [(0, 1), (0, 2), (1, 2)], {(0, 1): "1", (1, 0): "1", (0, 2): "2", (2, 0): "2"}),
    ],
)
def test_each_direction_has_one_or_both_share_one(
    rank: int, communicators: str, all_ranks: list[tuple[int, ...]], mine: dict[tuple[int, int], str]
) -> None:
    found, maker = made(RING, rank, communicators)
    assert (maker.made, found) == (all_ranks, mine)


@pytest.mark.parametrize("communicators", CHOICES)
def test_all_ranks_make_all_of_them_in_one_order_and_have_those_of_their_copy(communicators: str) -> None:
    makers = [made(RING, rank, communicators, copies=2) for rank in range(6)]
    assert len({tuple(maker.made) for _, maker in makers}) == 1
    assert len(makers[0][1].made) == 2 * (5 if communicators == DIRECTED else 3)
    for (first, _), (second, _) in zip(makers[:3], makers[3:], strict=True):
        assert first.keys() == second.keys()
        assert not {*first.values()} & {*second.values()}


def test_gloo_needs_none() -> None:
    assert channels(RING, Place(0, 3, 1, "pipeline"), "gloo", Maker(0), DIRECTED) == {}


@pytest.mark.parametrize(
    ("proven", "backend", "asked", "choice"),
    [
        *(((DIRECTED,), backend, DIRECTED, DIRECTED) for backend in ("gloo", "nccl", "strict")),
        (CHOICES, "nccl", PAIR, PAIR),
        *(((DIRECTED,), backend, None, DIRECTED) for backend in ("gloo", "nccl")),
        *((CHOICES, backend, None, PAIR) for backend in ("gloo", "nccl")),
    ],
)
def test_what_is_proven_may_be_asked_for_and_by_default_it_is_the_fewest(
    proven: tuple[str, ...], backend: str, asked: str | None, choice: str
) -> None:
    assert chosen(replace(RING, communicators=proven), backend, asked) == choice


@pytest.mark.parametrize(
    ("of", "backend", "communicators", "words"),
    [
        (RING, "nccl", PAIR, "two could wait for ever with one communicator for both directions"),
        (replace(RING, communicators=CHOICES), "gloo", PAIR, "gloo finds messages by their tags, so there is nothing"),
        (RING, "nccl", "single", "communicators single: it is one of directed, pair"),
    ],
)
def test_what_could_wait_for_ever_or_means_nothing_is_refused(
    of: Job, backend: str, communicators: str, words: str
) -> None:
    with pytest.raises(Misuse) as error:
        chosen(of, backend, communicators)
    assert words in str(error.value)
