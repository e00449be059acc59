"""Time-outs where a wait does not block the host: the error is raised where that is possible, else the rank ends."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from chimera_runtime.errors import FAILED, PeerLost
from chimera_runtime.ranks.messages import Names, Peer, tag_of
from chimera_runtime.ranks.monitor import Monitor
from chimera_runtime.ranks.world import World
from chimera_runtime.stage.gradient_sums import GradientSum
from tests.patience import PATIENCE
from tests.unit.runtime.thread_ranks import groups

TIMEOUT = 0.3


class Enqueued(dist.Work):
    """An operation as NCCL has it: a wait returns at once, and it is over when it is over."""

    def __init__(self) -> None:
        super().__init__()
        self.over = threading.Event()

    def wait(self, *_limit: object) -> bool:
        return True

    def is_completed(self) -> bool:
        return self.over.is_set()


class Endless:
    """A communicator whose operations are never over by themselves."""

    def __init__(self) -> None:
        self.posted: list[Enqueued] = []

    def send(self, _tensors: list[torch.Tensor], _rank: int, _tag: int) -> Enqueued:
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
        return self.has_ended.wait(20 * TIMEOUT)


@pytest.fixture
def ends() -> Ends:
    return Ends()


@pytest.fixture
def monitor(ends: Ends) -> Iterator[Monitor]:
    made = Monitor(TIMEOUT, ends, grace=0.0)
    yield made
    made.close()


@pytest.fixture
def peer(alone: World, monitor: Monitor) -> Iterator[Peer]:
    """A way to a rank that does not answer."""
    with groups(2) as members:
        names = Names(3, 1, 4, TIMEOUT, check=monitor.check)
        made = Peer(1, 1, members[0], members[0], names, monitor.settle)
        made._outgoing = made._incoming = Endless()
        yield made


@pytest.mark.parametrize("verb", ["send", "recv"])
def test_a_message_that_does_not_come_ends_the_rank_which_goes_on_meanwhile(peer: Peer, ends: Ends, verb: str) -> None:
    transfer = (peer.isend if verb == "send" else peer.irecv)((torch.zeros(1),), tag_of(7, 2, 1, "dx", 4))
    start = time.monotonic()
    transfer.wait()
    assert ends.has_come()
    assert time.monotonic() - start >= TIMEOUT
    (error,) = ends.errors
    assert str(error) == (
        f"rank 3 (worker 1): wait {verb} m7 s2->s1: rank 1: no answer within 0.3 s (timeout); "
        "it may be stuck, or slower than that"
    )
    assert error.peers == (1,)


def test_a_post_on_a_communicator_that_a_time_out_has_aborted_raises_the_error_of_the_time_out(
    peer: Peer, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first use of a kernel may hold up the host in a computation, from the time-out to the abort."""

    def refuse(*_: object) -> None:
        raise RuntimeError("NCCL communicator was aborted on rank 0.")

    peer.irecv((torch.zeros(1),), tag_of(7, 2, 1, "dx", 4)).wait()
    assert ends.has_come()
    monkeypatch.setattr(peer._outgoing, "send", refuse)
    with pytest.raises(PeerLost, match=r"wait recv m7 s2->s1: rank 1: no answer within 0\.3 s"):
        peer.isend((torch.zeros(1),), 0)


def test_a_message_that_was_posted_and_is_not_waited_for_may_take_any_time(peer: Peer, ends: Ends) -> None:
    """The clock of a backend runs from the post."""
    peer.irecv((torch.zeros(1),), 0)
    time.sleep(2 * TIMEOUT)
    assert not ends.errors


def test_a_message_that_comes_in_time_is_forgotten(peer: Peer, ends: Ends) -> None:
    transfers = [peer.irecv((torch.zeros(1),), tag) for tag in range(4)]
    for work in peer._incoming.posted:
        work.over.set()
    for transfer in transfers:
        transfer.wait()
    time.sleep(2 * TIMEOUT)
    assert not ends.errors
    peer.irecv((torch.zeros(1),), 4).wait()
    assert ends.has_come(), "the thread looks on"


def test_of_several_the_first_that_is_not_over_is_told(peer: Peer, ends: Ends) -> None:
    transfers = [peer.irecv((torch.zeros(1),), tag_of(micro, 2, 1, "dx", 4)) for micro in range(3)]
    peer._incoming.posted[0].over.set()
    for transfer in transfers:
        transfer.wait()
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
    words = r"wait for the first use: the other ranks: no answer within 0\.3 s"
    with pytest.raises(PeerLost, match=words), monitor.watching(lost):
        assert ends.has_come()
    assert len(ends.errors) == 1


# The main thread, when it comes back.


class Abortable(Endless):
    """A communicator whose operations end when it is aborted: their waits return, and nothing says that they failed."""

    def __init__(self) -> None:
        super().__init__()
        self.is_aborted = threading.Event()

    def abort(self) -> None:
        """Lets go of the device."""
        for work in self.posted:
            work.over.set()
        self.is_aborted.set()


class Stubborn:
    """A communicator whose abort waits, as NCCL's may, for a kernel of another one."""

    def __init__(self, other: Abortable) -> None:
        self._other = other

    def abort(self) -> None:
        """Comes back when the other one has been aborted."""
        self._other.is_aborted.wait(20)


class Unabortable:
    """A communicator of a backend that knows no abort."""

    def abort(self) -> None:
        """Raises what torch.distributed.Backend does where a backend has not written its own."""
        raise RuntimeError("Backend strict does not support abort")


def lost(error: Exception) -> PeerLost:
    return Names(3, 1, 4, TIMEOUT).lost("recv m7 s2->s1", [1], error)


def raised(call: Callable[[], object]) -> str:
    with pytest.raises(PeerLost) as error:
        call()
    return str(error.value)


MESSAGE = (
    "rank 3 (worker 1): wait recv m7 s2->s1: rank 1: no answer within 0.3 s (timeout); "
    "it may be stuck, or slower than that"
)


def test_a_call_that_the_abort_lets_go_raises_the_error_and_the_rank_goes_on(ends: Ends) -> None:
    group = Abortable()
    monitor = Monitor(TIMEOUT, ends, [Stubborn(group), Unabortable(), object(), group], grace=20)  # type: ignore[list-item]
    work = group.send([], 0, 0)
    monitor.settle(work, lost)
    assert work.over.wait(20), "as a call that reads from the device"
    assert raised(monitor.check) == MESSAGE
    assert raised(lambda: monitor.settle(group.send([], 0, 0), lost)) == MESSAGE, "and at every further call"
    time.sleep(2 * TIMEOUT)
    assert not ends.errors


def test_a_wait_that_fails_by_the_abort_has_the_words_of_the_time_out(ends: Ends) -> None:
    class Failing(Enqueued):
        def wait(self, *_limit: object) -> bool:
            self.over.wait(20)
            raise RuntimeError("NCCL communicator was aborted on rank 3")

    group = Abortable()
    group.posted.append(Failing())
    monitor = Monitor(TIMEOUT, ends, [group], grace=20.0)  # type: ignore[list-item]
    assert raised(lambda: monitor.settle(group.posted[0], lost)) == MESSAGE
    assert not ends.errors


def test_what_blocks_the_host_raises_the_error_when_the_abort_lets_it_go(ends: Ends) -> None:
    group = Abortable()
    monitor = Monitor(TIMEOUT, ends, [group], grace=20.0)  # type: ignore[list-item]

    def use() -> None:
        with monitor.watching(lost):
            group.is_aborted.wait(20)

    assert raised(use) == MESSAGE
    assert not ends.errors


@pytest.mark.parametrize("group", [Abortable(), Unabortable()])
def test_a_main_thread_that_does_not_come_back_ends_with_the_rank(ends: Ends, group: Any) -> None:
    monitor = Monitor(TIMEOUT, ends, [group], grace=TIMEOUT)
    start = time.monotonic()
    monitor.settle(Enqueued(), lost)
    assert ends.has_come()
    assert time.monotonic() - start >= 2 * TIMEOUT
    assert [str(error) for error in ends.errors] == [MESSAGE]


def test_a_rank_without_tools_ends_with_the_message_and_a_status() -> None:
    """Also where its main thread never comes back from a call."""
    program = (
        "import threading; from chimera_runtime.ranks.monitor import Monitor\n"
        "from chimera_runtime.ranks.messages import Names\n"
        "lost = lambda error: Names(0, 0, 2, 0.1).lost('recv m0 s1->s0', [1], error)\n"
        "with Monitor(0.1, grace=0.1).watching(lost): threading.Lock().acquire() and threading.Event().wait(60)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == FAILED
    assert done.stderr == (
        "rank 0 (worker 0): wait recv m0 s1->s0: rank 1: no answer within 0.1 s (timeout); "
        "it may be stuck, or slower than that\n"
    )
