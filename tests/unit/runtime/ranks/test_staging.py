"""Staging: values are right however late or early a GPU does its work, and only because of the events."""

import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from itertools import combinations
from typing import Any

import pytest
import torch

from chimera_runtime.errors import PeerLost
from chimera_runtime.ranks.messages import Names, Peer, StagedGroup, Staging, waiter
from chimera_runtime.ranks.world import World
from tests.unit.runtime.gpu_model import STREAMS, ModelEvent, ModelGpu
from tests.unit.runtime.thread_ranks import groups

ORDERS = [lazy for count in range(len(STREAMS) + 1) for lazy in combinations(STREAMS, count)]
"""Each stream as late or as early as it may be."""

LIMIT = timedelta(seconds=20)
UPDATES, MICROS, SLOTS, WIDTH = 4, 4, 2, 3


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
            1 - rank, 1 - rank, self.group, self.group, names, waiter(20.0), partial(StagedGroup, self.staging)
        )
        self.slots = [torch.zeros(WIDTH) for _ in range(SLOTS)]
        self.total = torch.zeros(WIDTH)
        self.seen: list[list[float]] = []
        self.notes: list[tuple[int, int, int]] = []

    def compute(self, tensor: torch.Tensor, number: float) -> None:
        """A kernel that writes a number into a tensor."""
        self.gpu.compute(lambda: tensor.fill_(number))

    def look(self, tensor: torch.Tensor) -> None:
        """A kernel that looks at a tensor."""
        self.gpu.compute(lambda: self.seen.append(tensor.tolist()))


def talk(there: Rank, back: Rank) -> None:
    """Updates of messages one way, of which there are more than slots, and of a sum; see `EXPECTED`."""
    for update in range(UPDATES):
        posted: list[tuple[Any, Any]] = []
        for micro in range(MICROS):
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
        note(there, back)
    for rank in (there, back):
        rank.gpu.finish()
        rank.staging.close()


def note(*ranks: Rank) -> None:
    """What the host has waited for, and how much pinned memory there is, after an update."""
    for rank in ranks:
        rank.notes.append((rank.gpu.blocked["MainThread"], rank.gpu.blocked["staging"], len(rank.gpu.sizes)))


def number_of(update: int, micro: int) -> float:
    """What a message has in it."""
    return 10.0 * update + micro + 1


EXPECTED = (
    [[2 * (update + 1.0)] * WIDTH for update in range(UPDATES)],
    [
        [number] * WIDTH
        for update in range(UPDATES)
        for number in (*(number_of(update, micro) for micro in range(MICROS)), 2 * (update + 1.0))
    ],
)
"""What the two ranks see."""


def arrive(back: Rank, received: Any, sent: Any) -> None:
    """Waits for a message at both ends, and looks at it."""
    received.wait()
    (tensor,) = received.tensors
    back.look(tensor)
    sent.wait()


def ran(members: Sequence[Any], lazy: tuple[str, ...], ignored: Any = "") -> tuple[Rank, Rank]:
    """Two ranks that have talked."""
    there, back = (Rank(rank, members, ModelGpu(lazy, ignored)) for rank in range(2))
    talk(there, back)
    return there, back


@pytest.mark.parametrize("lazy", ORDERS)
def test_what_is_seen_is_what_was_sent_however_late_a_stream_is(members: Sequence[Any], lazy: tuple[str, ...]) -> None:
    assert tuple(rank.seen for rank in ran(members, lazy)) == EXPECTED


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


@pytest.mark.parametrize("lazy", ORDERS)
def test_the_host_of_the_computing_waits_for_gloo_alone(members: Sequence[Any], lazy: tuple[str, ...]) -> None:
    """The thread waits once for each message that is sent and for each sum."""
    for rank, messages in zip(ran(members, lazy), (MICROS + 1, 1), strict=True):
        assert [host for host, _, _ in rank.notes] == [0] * UPDATES
        assert [thread for _, thread, _ in rank.notes] == [messages * (update + 1) for update in range(UPDATES)]


def test_a_gpu_that_keeps_up_takes_no_more_pinned_memory_after_the_first_update(members: Sequence[Any]) -> None:
    for rank in ran(members, ()):
        assert len({rooms for _, _, rooms in rank.notes}) == 1


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
    received, sent = back.peer.irecv((room,), 0), there.peer.isend((message,), 0)
    received.wait()
    sent.wait()
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
        """Waits, and fails then."""
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
        Peer(1, 1, *members[:1] * 2, names, waiter(s), partial(StagedGroup, staging)) for s in (0.1, 20.0)
    )
    begin = "rank 0 (worker 0): wait send m0 s0->s1: rank 1: "
    message = (torch.zeros(1),)
    assert (
        lost(impatient.isend(message, 0))
        == f"{begin}the device of this rank has not computed it within 0.1 s (timeout)"
    )
    transfer = patient.isend(message, 0)
    gpu.is_let_go.set()
    assert lost(transfer) == f"{begin}CUDA error: an illegal memory access"


def test_a_peer_that_does_not_answer_is_named_as_without_a_gpu(members: Sequence[Any]) -> None:
    peer = Peer(
        1, 1, members[0], members[0], Names(0, 0, 2, 0.1), waiter(0.1), partial(StagedGroup, Staging(ModelGpu()))
    )
    begin = "rank 0 (worker 0): wait recv m0 s1->s0: rank 1: no answer within 0.1 s (timeout)"
    assert lost(peer.irecv((torch.zeros(1),), 3)).startswith(begin)
