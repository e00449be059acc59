"""Time-outs where a wait does not block the host: the rank ends with a message of ours, in time."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from chimera_runtime.errors import FAILED, PeerLost
from chimera_runtime.messages import Names, Peer, tag_of
from chimera_runtime.monitor import Monitor
from chimera_runtime.sums import GradientSum
from chimera_runtime.world import World
from tests.unit.runtime.ranks import groups

TIMEOUT = 0.3


class Enqueued(dist.Work):
    """An operation as NCCL has it: a wait returns at once, and it is over when it is over."""

    def __init__(self) -> None:
        super().__init__()
        self.over = threading.Event()

    def wait(self, *_limit: object) -> bool:
        """Tells the device to wait."""
        return True

    def is_completed(self) -> bool:
        """Whether the device has come to it."""
        return self.over.is_set()


class Endless:
    """A communicator whose operations are never over by themselves."""

    def __init__(self) -> None:
        self.posted: list[Enqueued] = []

    def send(self, _tensors: list[torch.Tensor], _rank: int, _tag: int) -> Enqueued:
        """Posts what is never over."""
        self.posted.append(Enqueued())
        return self.posted[-1]

    recv = send


class Ends:
    """What a monitor is to call: takes the place of the end of the rank."""

    def __init__(self) -> None:
        self.errors: list[PeerLost] = []
        self.has_ended = threading.Event()

    def __call__(self, error: PeerLost) -> None:
        """The rank would end here."""
        self.errors.append(error)
        self.has_ended.set()

    def has_come(self) -> bool:
        """Whether the rank has ended, or does so soon."""
        return self.has_ended.wait(20 * TIMEOUT)


@pytest.fixture
def ends() -> Ends:
    return Ends()


@pytest.fixture
def monitor(ends: Ends) -> Iterator[Monitor]:
    made = Monitor(TIMEOUT, ends)
    yield made
    made.close()


@pytest.fixture
def peer(alone: World, monitor: Monitor) -> Iterator[Peer]:
    """A way to a rank that does not answer."""
    with groups(2) as members:
        made = Peer(1, 1, members[0], members[0], Names(3, 1, 4, TIMEOUT), monitor.settle)
        made._outgoing = made._incoming = Endless()
        yield made


@pytest.mark.parametrize("verb", ["send", "recv"])
def test_a_message_that_does_not_come_ends_the_rank_which_goes_on_meanwhile(peer: Peer, ends: Ends, verb: str) -> None:
    transfer = (peer.isend if verb == "send" else peer.irecv)((torch.zeros(1),), tag_of(7, 2, 1, 4))
    start = time.monotonic()
    transfer.wait()
    assert time.monotonic() - start < TIMEOUT, "the wait itself returns at once"
    assert ends.has_come()
    assert time.monotonic() - start >= TIMEOUT
    (error,) = ends.errors
    assert str(error) == (
        f"rank 3 (worker 1): wait {verb} m7 s2->s1: rank 1: no answer within 0.3 s (--timeout); "
        "it may be stuck, or slower than that"
    )
    assert error.peers == (1,)


def test_a_message_that_was_posted_and_is_not_waited_for_may_take_any_time(peer: Peer, ends: Ends) -> None:
    """The clock of a backend runs from the post."""
    peer.irecv((torch.zeros(1),), 0)
    time.sleep(2 * TIMEOUT)
    assert not ends.errors


def test_a_message_that_comes_in_time_is_forgotten(peer: Peer, ends: Ends) -> None:
    transfers = [peer.irecv((torch.zeros(1),), tag) for tag in range(4)]
    for transfer in transfers:
        transfer.wait()
    for work in peer._incoming.posted:
        work.over.set()
    time.sleep(2 * TIMEOUT)
    assert not ends.errors
    peer.irecv((torch.zeros(1),), 4).wait()
    assert ends.has_come(), "the thread looks on"


def test_of_several_the_first_that_is_not_over_is_told(peer: Peer, ends: Ends) -> None:
    for micro in range(3):
        peer.irecv((torch.zeros(1),), tag_of(micro, 2, 1, 4)).wait()
    peer._incoming.posted[0].over.set()
    assert ends.has_come()
    assert "wait recv m1 s2->s1" in str(ends.errors[0])


def test_a_sum_that_is_not_over_names_all_others(
    alone: World, monitor: Monitor, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: Enqueued())
    weight = torch.nn.Parameter(torch.ones(1))
    weight.sum().backward()
    group = dist.group.WORLD
    sums = GradientSum("s1", [weight], group, (0, 3, 5), Names(3, 1, 4, TIMEOUT), monitor.settle)
    sums.collect()
    sums.launch().wait()
    assert ends.has_come()
    assert str(ends.errors[0]).startswith("rank 3 (worker 1): wait all_reduce s1: ranks 0, 5: no answer within 0.3 s")


def test_what_blocks_the_host_has_the_time_out_too(monitor: Monitor, ends: Ends) -> None:
    def lost(error: Exception) -> PeerLost:
        return Names(0, 0, 2, TIMEOUT).lost("for the first use", (), error)

    with monitor.watching(lost):
        pass
    with monitor.watching(lost):
        assert ends.has_come()
    assert "wait for the first use: the other ranks: no answer within 0.3 s" in str(ends.errors[0])
    assert len(ends.errors) == 1


def test_a_rank_without_tools_ends_with_the_message_and_a_status() -> None:
    """Also where its main thread never comes back from a call."""
    program = (
        "import threading; from chimera_runtime.monitor import Monitor; from chimera_runtime.messages import Names\n"
        "lost = lambda error: Names(0, 0, 2, 0.1).lost('recv m0 s1->s0', [1], error)\n"
        "with Monitor(0.1).watching(lost): threading.Lock().acquire() and threading.Event().wait(60)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == FAILED
    assert done.stderr == (
        "rank 0 (worker 0): wait recv m0 s1->s0: rank 1: no answer within 0.1 s (--timeout); "
        "it may be stuck, or slower than that\n"
    )
