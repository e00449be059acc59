"""Messages: what arrives is what was sent, and what is said of one that does not arrive."""

import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chimera_runtime.errors import PeerLost
from chimera_runtime.ranks.devices import CpuAccelerator
from chimera_runtime.ranks.messages import (
    BlockingWait,
    LinkToHost,
    Names,
    Numbers,
    Peer,
    Readout,
    StagedGroup,
    Staging,
    from_host,
    tag_of,
    unrecorded,
)
from chimera_runtime.ranks.world import World
from chimera_runtime.values.nested import Tensors
from tests.unit.runtime.gpu_model import STREAMS, ModelEvent, ModelGpu
from tests.unit.runtime.thread_ranks import groups

MICROS = st.integers(0, 2**40)
STAGES = st.integers(2, 1000)


def names(timeout: float = 20.0) -> Names:
    return Names(rank=3, worker=1, stages=4, timeout=timeout)


@pytest.fixture
def pair(alone: World) -> Iterator[tuple[Peer, Peer]]:
    """Two ranks: the first one's way to the second, and back."""
    with groups(2) as members:
        yield tuple(Peer(1 - r, 1 - r, members[r], members[r], names(), BlockingWait(20.0)) for r in range(2))  # type: ignore[misc]


@pytest.fixture
def impatient(alone: World) -> Iterator[Peer]:
    """A way to a rank that says nothing; each wait is over soon."""
    with groups(2) as members:
        yield Peer(1, 1, members[0], members[0], names(0.05), BlockingWait(0.05))


# Tags.


@given(micro=MICROS, stages=STAGES, data=st.data())
def test_the_words_for_a_tag_are_the_message_it_stands_for(micro: int, stages: int, data: st.DataObject) -> None:
    source = data.draw(st.integers(0, stages - 1))
    target = data.draw(st.sampled_from([s for s in range(stages) if s != source]))
    tag = tag_of(micro, source, target, "y" if source < target else "dx", stages)
    operation = Names(0, 0, stages, 1.0).operation("recv", tag)
    assert operation == f"recv m{micro} s{source}->s{target}"
    operation = Names(0, 0, stages, 1.0, slices=3).operation("recv", tag)
    assert operation == f"recv m{micro // 3} q{micro % 3} s{source}->s{target}"


@given(stages=STAGES, messages=st.lists(st.tuples(MICROS, st.integers(0, 999), st.booleans()), max_size=20))
def test_no_two_messages_share_a_tag(stages: int, messages: list[tuple[int, int, bool]]) -> None:
    """Tags differ in micro-batches, in a stage, or in the value that crosses the same two stages."""
    distinct = set[tuple[int, int, int, str]]()
    for micro, number, back in messages:
        source, target = divmod(number % stages**2, stages)
        distinct.add((micro, source, target, "dx" if back else "y"))
    assert len({tag_of(*message, stages) for message in distinct}) == len(distinct)


@given(st.lists(MICROS, min_size=1, max_size=5))
def test_of_several_micro_batches_the_first_names_the_message(micros: list[int]) -> None:
    assert tag_of(tuple(micros), 1, 2, "y", 4) == tag_of(micros[0], 1, 2, "y", 4)


# What arrives.


def over(*transfers: Any) -> None:
    for transfer in transfers:
        transfer.wait()


@pytest.mark.parametrize("micro", [5, 2**40], ids=["", "of a long run, whose tags outgrow those of a transport"])
def test_tensors_arrive_as_they_were_sent_all_of_a_message(pair: tuple[Peer, Peer], micro: int) -> None:
    there, back = pair
    message = (torch.arange(6.0).reshape(2, 3), torch.tensor([1, -1]), torch.tensor([1 + 2j, 3j]), torch.tensor(True))
    buffers = tuple(torch.zeros_like(tensor) for tensor in message)
    tag = tag_of(micro, 0, 1, "y", 4)
    received = back.irecv(buffers, tag)
    over(received, there.isend(message, tag))
    assert received.tensors is buffers
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(buffers, message, strict=True))


def test_a_transport_is_given_complex_numbers_as_pairs_of_real_ones(pair: tuple[Peer, Peer]) -> None:
    """NCCL knows no others."""

    class Transport:
        def send(self, tensors: list[torch.Tensor], _rank: int, _tag: int) -> None:
            posted.extend(tensors)

        recv = send

    posted: list[torch.Tensor] = []
    there, message = pair[0], (torch.tensor([1 + 2j, 3j]), torch.ones(1))
    there._outgoing = there._incoming = Transport()  # type: ignore[assignment]
    there.isend(message, 0)
    there.irecv(message, 0)
    assert [tensor.tolist() for tensor in posted] == [[[1, 2], [0, 3]], [1]] * 2
    assert posted[2].untyped_storage().data_ptr() == message[0].untyped_storage().data_ptr()


def test_messages_find_their_buffers_in_whatever_order_they_are_posted(pair: tuple[Peer, Peer]) -> None:
    there, back = pair
    tags = [tag_of(micro, 0, 1, "y", 4) for micro in range(3)]
    sends = [there.isend((torch.tensor([float(tag)]),), tag) for tag in tags]
    receives = {tag: back.irecv((torch.zeros(1),), tag) for tag in reversed(tags)}
    over(*receives.values(), *sends)
    assert {tag: transfer.tensors[0].item() for tag, transfer in receives.items()} == {tag: tag for tag in tags}


def test_a_message_without_tensors_is_over_at_once(pair: tuple[Peer, Peer]) -> None:
    nothing: Tensors = ()
    pair[0].isend(nothing, 0).wait()
    pair[1].irecv(nothing, 0).wait()


# What is said of one that does not arrive.


def test_a_wait_that_takes_too_long_names_rank_operation_and_peer(impatient: Peer) -> None:
    transfer = impatient.irecv((torch.zeros(1),), tag_of(7, 2, 1, "dx", 4))
    with pytest.raises(PeerLost) as lost:
        transfer.wait()
    assert str(lost.value) == (
        "rank 3 (worker 1): wait recv m7 s2->s1: rank 1: no answer within 0.05 s (timeout); "
        "it may be stuck, or slower than that"
    )
    assert lost.value.peers == (1,)


def test_after_a_loss_nothing_more_can_be_posted_and_that_says_so_too(impatient: Peer) -> None:
    with pytest.raises(PeerLost):
        impatient.irecv((torch.zeros(1),), 0).wait()
    for post, verb in ((impatient.isend, "send"), (impatient.irecv, "recv")):
        with pytest.raises(PeerLost, match=rf"wait {verb} m2 s0->s1: rank 1: "):
            post((torch.zeros(1),), tag_of(2, 0, 1, "y", 4)).wait()


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        ("[/x/buffer.cc:79] Timed out waiting 50ms for recv", "no answer within 20 s (timeout); it may be stuck"),
        ("Wait timeout: timed out", "no answer within 20 s (timeout)"),
        ("Connection closed by peer", "the connection was closed; it has died or ended"),
        ("Read error: Connection reset by peer", "the connection was closed; it has died or ended"),
        ("unexpected EOF", "the connection was closed"),
        ("writev: Broken pipe", "the connection was closed; it has died or ended"),
        ("something else\nwith a second line", "something else"),
    ],
)
def test_what_a_transport_says_is_told_in_the_words_of_a_user(error: str, cause: str) -> None:
    lost = names().lost("recv m0 s0->s1", [5], RuntimeError(error))
    assert str(lost).startswith(f"rank 3 (worker 1): wait recv m0 s0->s1: rank 5: {cause}")
    assert "\n" not in str(lost)


@pytest.mark.parametrize(("peers", "words"), [([], "the other ranks"), ([4], "rank 4"), ([4, 5, 7], "ranks 4, 5, 7")])
def test_those_who_were_waited_for_are_counted(peers: list[int], words: str) -> None:
    lost = names().lost("all_reduce s0", peers, RuntimeError("closed"))
    assert f"wait all_reduce s0: {words}: closed" in str(lost)
    assert lost.peers == tuple(peers)


def test_the_profiler_of_torch_does_not_see_what_is_posted_and_sees_what_follows() -> None:
    x = torch.ones(2)
    with torch.profiler.profile() as profile:
        assert torch.equal(unrecorded(torch.add, x, x, alpha=2), 3 * x)
    names = {event.name for event in profile.events()}
    assert "aten::mul" in names
    assert "aten::add" not in names


# Staging: values are right however late or early a GPU does its work, and only because of the events.


ORDERS = [lazy for count in range(len(STREAMS) + 1) for lazy in combinations(STREAMS, count)]
"""Each stream as late or as early as it may be."""

LIMIT = timedelta(seconds=20)
UPDATES, MESSAGES, SLOTS, WIDTH = 4, 4, 2, 3


@pytest.fixture
def members(alone: World) -> Iterator[Sequence[Any]]:
    with groups(2) as connected:
        yield connected


class Rank:
    """A rank with a GPU."""

    def __init__(self, rank: int, members: Sequence[Any], gpu: ModelGpu) -> None:
        self.gpu = gpu
        self.staging = Staging(gpu)
        self.group = members[rank]
        names = Names(rank, rank, 2, 20.0)
        self.peer = Peer(
            1 - rank, 1 - rank, self.group, self.group, names, BlockingWait(20.0), partial(StagedGroup, self.staging)
        )
        self.slots = [torch.zeros(WIDTH) for _ in range(SLOTS)]
        self.total = torch.zeros(WIDTH)
        self.seen: list[list[float]] = []
        self.notes: list[tuple[int, int, int]] = []

    def compute(self, tensor: torch.Tensor, number: float) -> None:
        self.gpu.compute(lambda: tensor.fill_(number))

    def look(self, tensor: torch.Tensor) -> None:
        self.gpu.compute(lambda: self.seen.append(tensor.tolist()))


def talk(there: Rank, back: Rank) -> None:
    """Updates of messages one way, of which there are more than slots, and of a sum; see `EXPECTED`."""
    for update in range(UPDATES):
        posted: list[tuple[Any, Any]] = []
        for micro in range(MESSAGES):
            message = torch.zeros(WIDTH)
            there.compute(message, number_of(update, micro))
            received = back.peer.irecv((back.slots[micro % SLOTS],), micro)
            posted.append((received, there.peer.isend((message,), micro)))
            if micro:
                arrive(back, *posted[-2])
        arrive(back, *posted[-1])
        for rank in (there, back):
            rank.compute(rank.total, update + 1.0)
        sums = [rank.staging.all_reduce(rank.total, rank.group) for rank in (there, back)]
        for rank, work in zip((there, back), sums, strict=True):
            work.wait(LIMIT)
            assert work.content.tolist() == [2 * (update + 1.0)] * WIDTH
            rank.look(rank.total)
        # What the host has waited for, and how much pinned memory there is.
        for rank in (there, back):
            rank.notes.append((rank.gpu.blocked["MainThread"], rank.gpu.blocked["staging"], len(rank.gpu.sizes)))
    for rank in (there, back):
        rank.gpu.finish()
        rank.staging.close()


def number_of(update: int, micro: int) -> float:
    return 10.0 * update + micro + 1


EXPECTED = (
    [[2 * (update + 1.0)] * WIDTH for update in range(UPDATES)],
    [
        [number] * WIDTH
        for update in range(UPDATES)
        for number in (*(number_of(update, micro) for micro in range(MESSAGES)), 2 * (update + 1.0))
    ],
)
"""What the two ranks see."""


def arrive(back: Rank, received: Any, sent: Any) -> None:
    received.wait()
    (tensor,) = received.tensors
    back.look(tensor)
    sent.wait()


def ran(members: Sequence[Any], lazy: tuple[str, ...], ignored: Any = "") -> tuple[Rank, Rank]:
    there, back = (Rank(rank, members, ModelGpu(lazy, ignored)) for rank in range(2))
    talk(there, back)
    return there, back


@pytest.mark.parametrize("lazy", ORDERS)
def test_what_is_seen_is_what_was_sent_however_late_a_stream_is(members: Sequence[Any], lazy: tuple[str, ...]) -> None:
    """The host of the computing waits for gloo alone; the thread once for each message that is sent and for each sum.

    A GPU that keeps up takes no more pinned memory after the first update.
    """
    ranks = ran(members, lazy)
    assert tuple(rank.seen for rank in ranks) == EXPECTED
    for rank, messages in zip(ranks, (MESSAGES + 1, 1), strict=True):
        hosts, threads, rooms = zip(*rank.notes, strict=True)
        assert hosts == (0,) * UPDATES
        assert threads == tuple(messages * (update + 1) for update in range(UPDATES))
        assert lazy or len({*rooms}) == 1


@pytest.mark.parametrize(
    "ignored",
    [("wait", "computing"), ("wait", "outgoing"), ("wait", "incoming"), "synchronise", "is_over"],
)
def test_without_any_of_the_events_something_else_is_seen(members: Sequence[Any], ignored: Any) -> None:
    """In some order that a GPU may take."""

    def is_wrong(lazy: tuple[str, ...]) -> bool:
        try:
            return tuple(rank.seen for rank in ran(members, lazy, ignored)) != EXPECTED
        except AssertionError:
            return True

    assert any(map(is_wrong, ORDERS))


def test_a_receive_that_is_posted_ahead_is_with_gloo_before_anything_is_computed(members: Sequence[Any]) -> None:
    """So gloo can have it, while the GPU still computes on the message before."""
    back = Rank(1, members, ModelGpu(STREAMS))
    back.compute(back.slots[0], 1.0)
    back.look(back.slots[0])
    received = StagedGroup(back.staging, members[1]).recv([back.slots[0]], 0, 7)
    members[0].send([torch.full((WIDTH,), 5.0)], 1, 7).wait(LIMIT)
    received.work.wait(LIMIT)
    assert received.content.tolist() == [5.0] * WIDTH
    assert back.seen == []
    back.gpu.finish()
    assert back.seen == [[1.0] * WIDTH]


def test_messages_to_a_rank_keep_their_order(members: Sequence[Any]) -> None:
    """Those of one tag are matched by it."""
    there = Rank(0, members, ModelGpu(STREAMS))
    tensors = [torch.full((WIDTH,), float(number)) for number in range(8)]
    transfer = there.peer.isend(tuple(tensors), 3)
    rooms = [torch.zeros(WIDTH) for _ in tensors]
    for room in rooms:
        members[1].recv([room], 0, 3).wait(LIMIT)
    transfer.wait()
    assert [room[0].item() for room in rooms] == [*range(8)]


@pytest.mark.parametrize(
    "message",
    [
        torch.tensor(True),
        torch.tensor([[1, -2], [3, 4]]),
        torch.arange(300.0).to(torch.bfloat16),
        torch.tensor([1 + 2j]),
        torch.zeros(0),
        torch.arange(6.0).view(2, 3).t(),
    ],
)
def test_tensors_of_every_kind_arrive_as_they_are(members: Sequence[Any], message: torch.Tensor) -> None:
    there, back = (Rank(rank, members, ModelGpu(STREAMS)) for rank in range(2))
    room = torch.zeros_like(message)
    received = back.peer.irecv((room,), 0)
    over(received, there.peer.isend((message,), 0))
    back.gpu.finish()
    assert torch.equal(room, message)


def test_rows_of_all_ranks_are_gathered(members: Sequence[Any]) -> None:
    ranks = [Rank(rank, members, ModelGpu(STREAMS)) for rank in range(2)]
    rows = [torch.zeros(2, WIDTH) for _ in ranks]
    for number, (rank, room) in enumerate(zip(ranks, rows, strict=True)):
        rank.compute(room[number], number + 1.0)
    works = [
        rank.staging.all_gather(room, number, rank.group)
        for number, (rank, room) in enumerate(zip(ranks, rows, strict=True))
    ]
    for rank, work in zip(ranks, works, strict=True):
        work.wait(LIMIT)
        rank.gpu.finish()
    assert [room.tolist() for room in rows] == [[[1.0] * WIDTH, [2.0] * WIDTH]] * 2


# When something fails.


class Stuck(ModelGpu):
    """A GPU that does not come to an event before it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.is_let_go = threading.Event()

    def synchronise(self, event: ModelEvent) -> None:
        self.is_let_go.wait(20)
        raise RuntimeError("CUDA error: an illegal memory access")


def lost(transfer: Any) -> str:
    with pytest.raises(PeerLost) as error:
        transfer.wait()
    return str(error.value)


def test_a_gpu_that_is_stuck_is_not_the_fault_of_a_peer(members: Sequence[Any]) -> None:
    gpu = Stuck()
    names, staging = Names(0, 0, 2, 0.1), Staging(gpu)
    impatient, patient = (
        Peer(1, 1, *members[:1] * 2, names, BlockingWait(s), partial(StagedGroup, staging)) for s in (0.1, 20.0)
    )
    begin = "rank 0 (worker 0): wait send m0 s0->s1: rank 1: "
    message, tag = (torch.zeros(1),), tag_of(0, 0, 1, "y", 2)
    assert (
        lost(impatient.isend(message, tag))
        == f"{begin}the device of this rank has not computed it within 0.1 s (timeout)"
    )
    transfer = patient.isend(message, tag)
    gpu.is_let_go.set()
    assert lost(transfer) == f"{begin}CUDA error: an illegal memory access"


def test_a_peer_that_does_not_answer_is_named_as_without_a_gpu(members: Sequence[Any]) -> None:
    peer = Peer(
        1, 1, members[0], members[0], Names(0, 0, 2, 0.1), BlockingWait(0.1), partial(StagedGroup, Staging(ModelGpu()))
    )
    begin = "rank 0 (worker 0): wait recv m0 s1->s0: rank 1: no answer within 0.1 s (timeout)"
    assert lost(peer.irecv((torch.zeros(1),), tag_of(0, 1, 0, "dx", 2))).startswith(begin)


# Moves to the host and back: values are right however late or early a GPU does its work, and due to the events.


MOVES, LENGTH = 6, 700


def run(gpu: ModelGpu) -> tuple[LinkToHost, list[list[float]]]:
    """Moves the memory of each micro-batch out and back; memory that was free in between is written.

    Two micro-batches are on the host at a time. Returns the link and what the device has read in the end.
    """
    link, seen = LinkToHost(gpu), list[list[float]]()  # type: ignore[arg-type]
    waiting: list[tuple[float, Any]] = []

    def write(tensor: torch.Tensor, number: float) -> None:
        gpu.compute(lambda: tensor.fill_(number))

    def back(number: float, rooms: Any) -> None:
        memory = torch.zeros(LENGTH)
        write(memory, -2.0)  # what was computed in it before
        copied = link.to_device([memory.view(torch.uint8)], rooms)
        link.wait(copied)
        link.free(rooms)
        gpu.compute(lambda: seen.append(memory.unique().tolist()))

    for micro in range(MOVES):
        memory = torch.zeros(LENGTH)
        write(memory, micro + 1.0)
        rooms, copied = link.to_host([memory.view(torch.uint8)])
        link.wait(copied)
        write(memory, -1.0)  # the memory was free
        waiting.append((micro + 1.0, rooms))
        if micro % 2:
            for number, of_micro in waiting:
                back(number, of_micro)
            waiting.clear()
    gpu.finish()
    return link, seen


MOVED = [[micro + 1.0] for micro in range(MOVES)]


@pytest.mark.parametrize("lazy", ORDERS)
def test_what_comes_back_is_what_was_moved_however_late_a_stream_is(lazy: tuple[str, ...]) -> None:
    gpu = ModelGpu(lazy)
    link, seen = run(gpu)
    assert seen == MOVED
    assert not gpu.blocked, "the host waits for no copy"
    assert (link.held, link.peak, link.pinned) == (0, 2 * 4 * LENGTH, sum(gpu.sizes))
    assert lazy or gpu.sizes == [4096, 4096], "one that keeps up uses pinned memory again"


@pytest.mark.parametrize("ignored", [("wait", "computing"), ("wait", "outgoing")])
def test_without_any_of_the_events_something_else_comes_back(ignored: Any) -> None:
    """In some order that a GPU may take."""
    assert any(run(ModelGpu(lazy, ignored))[1] != MOVED for lazy in ORDERS)


def test_a_cpu_copies_at_once() -> None:
    link, memory = LinkToHost(CpuAccelerator()), torch.arange(8, dtype=torch.uint8)
    rooms, copied = link.to_host([memory])
    memory.zero_()
    link.wait(copied)
    link.to_device([memory], rooms)
    assert memory.tolist() == [*range(8)]


# What the host reads of a device: right however late the device is, and waited for no longer than it has to be.


def test_numbers_of_the_host_are_as_they_were_when_they_were_given() -> None:
    total, count = torch.tensor(1.5), torch.tensor([2.0], dtype=torch.float64)
    read = from_host(0, [total, count])
    total.fill_(2.5)
    assert read() == [1.5, 2.0]


@pytest.mark.parametrize("lazy", [(), STREAMS])
def test_numbers_of_a_device_come_in_float64_however_late_it_is(lazy: tuple[str, ...]) -> None:
    gpu = ModelGpu(lazy)
    readout = Readout(gpu)
    loss = torch.tensor(0.1, dtype=torch.float32)
    first = readout(0, [loss, torch.tensor([3.0], dtype=torch.float64)])
    second, third = readout(0, [torch.tensor(7.0)]), readout(1, [torch.tensor([[True]])])
    assert (first(), second(), third()) == ([loss.item(), 3.0], [7.0], [1.0])


def test_the_host_waits_for_what_is_before_the_read_and_for_nothing_behind_it() -> None:
    gpu, done = ModelGpu(STREAMS), list[str]()
    gpu.compute(lambda: done.append("forward"))
    read = Readout(gpu)(0, [torch.ones(())])
    gpu.compute(lambda: done.append("backward"))
    assert done == []
    assert read() == [1.0]
    assert done == ["forward"]
    assert gpu.blocked["MainThread"] == 1


def test_the_numbers_of_an_update_are_waited_for_once_and_those_of_the_next_one_by_themselves() -> None:
    """Updates of a stream overlap: the number of the next one comes between those of this one, and behind them."""
    gpu, done = ModelGpu(STREAMS), list[int]()
    readout, reads = Readout(gpu), list[Numbers]()
    for place, update in enumerate([0, 0, 1, 0, 1]):
        gpu.compute(lambda place=place: done.append(place))  # type: ignore[misc]
        reads.append(readout(update, [torch.tensor(float(place))]))
    assert [reads[place]() for place in (1, 0, 3)] == [[1.0], [0.0], [3.0]]
    assert (done, gpu.blocked["MainThread"]) == ([0, 1, 2, 3], 1)
    gpu.compute(lambda: done.append(5))
    later = readout(0, [torch.tensor(5.0)])
    assert [reads[2](), reads[4]()] == [[2.0], [4.0]]
    assert (done, gpu.blocked["MainThread"]) == ([0, 1, 2, 3, 4], 2)
    assert later() == [5.0]
    assert (done, gpu.blocked["MainThread"]) == ([0, 1, 2, 3, 4, 5], 3)


def test_a_read_that_is_over_is_not_waited_for_and_its_memory_is_used_again() -> None:
    gpu = ModelGpu()
    readout = Readout(gpu)
    for number in range(5):
        assert readout(number // 2, [torch.tensor(float(number))])() == [number]
    assert gpu.blocked["MainThread"] == 0
    assert len(gpu.sizes) == 1
