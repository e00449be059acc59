"""Short messages over sockets: bytes arrive as they were sent, in whatever order, and nothing waits that must not."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from runtime import Names, Peer, PeerLost, waiter
from support import connections
from support.connections import SHORT, Connection, NearPeer, connect
from support.job import Job, Place
from support.world import connections as connected_to

TIMEOUT = 20.0

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sockets with names of their own are Linux's")


class Board:
    """A store in memory; ``changed`` is what becomes of a text that is left."""

    def __init__(self, changed: Callable[[str, str], str] = lambda _, text: text) -> None:
        self._said: dict[str, str] = {}
        self._changed = changed

    def tell(self, key: str, text: str) -> None:
        self._said[key] = self._changed(key, text)

    def ask(self, key: str, _other: int) -> str:
        deadline = time.monotonic() + TIMEOUT
        while key not in self._said:
            assert time.monotonic() < deadline, f"nobody says {key}"
            time.sleep(0.001)
        return self._said[key]


Connected = Callable[..., list[dict[int, Connection]]]


@pytest.fixture
def connected() -> Iterator[Connected]:
    """Connects ranks, each with its neighbours."""
    made: list[Connection] = []

    def connect_all(
        neighbours: dict[int, list[int]], board: Board | None = None, timeout: float = TIMEOUT
    ) -> list[dict[int, Connection]]:
        board = board or Board()
        with ThreadPoolExecutor(len(neighbours)) as ranks:
            calls = [ranks.submit(connect, r, near, board.tell, board.ask, timeout) for r, near in neighbours.items()]
            found = [call.result(TIMEOUT) for call in calls]
        made.extend(one for each in found for one in each.values())
        return found

    yield connect_all
    for one in made:
        one.close()


@pytest.fixture
def pair(connected: Connected) -> tuple[Connection, Connection]:
    left, right = connected({0: [1], 1: [0]})
    return left[1], right[0]


def empty(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.zeros_like(t) for t in tensors)


def test_every_rank_has_a_connection_to_each_of_its_neighbours(connected: Connected) -> None:
    found = connected({0: [1, 2, 1], 1: [0, 2], 2: [1, 0], 3: []})
    assert [sorted(each) for each in found] == [[1, 2], [0, 2], [0, 1], []]
    for a, b in [(0, 1), (0, 2), (1, 2)]:
        sent, received = torch.tensor([a, b]), torch.zeros(2, dtype=torch.int64)
        found[b][a].post(7, (sent,))
        found[a][b].take(7, (received,))
        assert received.equal(sent)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [("pipeline", [[1], [0, 2], [1], [4], [3, 5], [4]]), ("replica", [[2], [3], [0, 4], [1, 5], [2], [3]])],
)
def test_ranks_connect_within_their_copy_along_the_links(layout: str, expected: list[list[int]]) -> None:
    """Two copies of three workers, of which the middle one exchanges with both others."""
    links = ((0, 1), (1, 0), (1, 2), (2, 1))
    job, store = Job("", "", 3, 3, 1, 1, (), (), ((0, 1, 2),), links, 0, ()), HashStore()
    with ThreadPoolExecutor(6) as ranks:
        calls = [ranks.submit(connected_to, job, Place(r, 3, 2, layout), store, TIMEOUT) for r in range(6)]
        found = [call.result(TIMEOUT) for call in calls]
    assert [sorted(each) for each in found] == expected
    for each in found:
        for one in each.values():
            one.close()


def test_tensors_of_all_kinds_arrive_bit_for_bit(pair: tuple[Connection, Connection]) -> None:
    torch.manual_seed(0)
    sent = (
        torch.randn(3, 5),
        torch.randn(7, dtype=torch.complex64),
        torch.randn(4).bfloat16(),
        torch.tensor([True, False, True]),
        torch.zeros(0, 4),
        torch.tensor(2**40 + 1),
        torch.full((2,), float("nan"), dtype=torch.float64),
    )
    received = empty(sent)
    pair[0].post(2**50, sent)
    pair[1].take(2**50, received)
    assert [bytes(t.reshape(-1).view(torch.uint8)) for t in received] == [
        bytes(t.reshape(-1).view(torch.uint8)) for t in sent
    ]


def test_messages_are_taken_by_their_tags(pair: tuple[Connection, Connection]) -> None:
    for tag in range(5):
        pair[0].post(tag, (torch.full((tag + 1,), float(tag)),))
    for tag in (3, 0, 4, 1, 2):
        received = torch.zeros(tag + 1)
        pair[1].take(tag, (received,))
        assert received.tolist() == [float(tag)] * (tag + 1)


def test_a_sender_never_waits_for_a_receiver_that_computes(pair: tuple[Connection, Connection]) -> None:
    """Of the longest messages far more are sent than any socket holds, while nobody takes one."""
    many = 300
    for tag in range(many):
        pair[0].post(tag, (torch.full((SHORT // 4,), float(tag)),))
    received = torch.zeros(SHORT // 4)
    for tag in range(many):
        pair[1].take(tag, (received,))
        assert received.eq(tag).all()


def test_messages_keep_their_order_while_the_queue_fills_and_empties(pair: tuple[Connection, Connection]) -> None:
    """All have one tag, so the first that is there is taken; the receiver rests and hurries in turns."""
    many, seen = 400, []

    def receive() -> None:
        received = torch.zeros(SHORT // 8)
        for number in range(many):
            time.sleep(0.002 if number // 40 % 2 else 0)
            pair[1].take(7, (received,))
            seen.append(int(received[-1]))

    receiver = threading.Thread(target=receive)
    receiver.start()
    for number in range(many):
        time.sleep(0.001 if number // 50 % 2 else 0)
        pair[0].post(7, (torch.full((SHORT // 8,), float(number)),))
    receiver.join(TIMEOUT)
    assert seen == [*range(many)]


def test_who_sends_may_change_the_tensor_at_once(pair: tuple[Connection, Connection]) -> None:
    sent = torch.zeros(SHORT // 4)
    for tag in range(40):
        pair[0].post(tag, (sent.fill_(tag),))
    received = torch.zeros(SHORT // 4)
    for tag in range(40):
        pair[1].take(tag, (received,))
        assert received.eq(tag).all()


def test_a_buffer_of_another_size_is_refused(pair: tuple[Connection, Connection]) -> None:
    pair[0].post(0, (torch.zeros(4),))
    with pytest.raises(RuntimeError, match="16 bytes"):
        pair[1].take(0, (torch.zeros(5),))


@pytest.mark.parametrize(
    "changed",
    [
        lambda key, text: "0" * 32 if key == "near/1" else text,
        lambda key, text: "" if key == "near/1" else text,
    ],
    ids=["on another machine", "without such sockets"],
)
def test_ranks_that_cannot_connect_have_no_connection_and_both_know_it(
    connected: Connected, changed: Callable[[str, str], str]
) -> None:
    assert connected({0: [1], 1: [0]}, Board(changed)) == [{}, {}]


def test_connections_that_the_system_refuses_are_none(connected: Connected, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(connections.socket, "socket", refuse)
    assert connected({0: [1], 1: [0]}) == [{}, {}]


def test_a_kernel_with_buffers_too_small_for_a_message_has_no_connections(
    connected: Connected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_BUFFER", SHORT // 4)
    assert connected({0: [1], 1: [0]}) == [{}, {}]


def test_who_is_another_user_is_not_talked_to(connected: Connected, monkeypatch: pytest.MonkeyPatch) -> None:
    user = os.geteuid()
    monkeypatch.setattr(connections.os, "geteuid", lambda: user + 1)
    assert connected({0: [1], 1: [0]}) == [{}, {}]


def test_other_systems_have_no_connections(connected: Connected, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections.sys, "platform", "darwin")
    assert connected({0: [1, 2], 1: [0], 2: [0]}) == [{}, {}, {}]


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_another_user_who_connects_first_is_turned_away(connected: Connected) -> None:
    """A stranger takes part as rank 0 would, before that one does."""
    stranger = (
        "import os, socket, sys, time; os.setuid(65534); s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET);"
        "s.connect(chr(0) + 'chimera-' + sys.argv[1]); s.send(bytes(8)); print('in', flush=True); time.sleep(60)"
    )
    left: list[subprocess.Popen[str]] = []

    def intrude(key: str, text: str) -> str:
        if key == "near/1":
            command = [sys.executable, "-c", stranger, text]
            left.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            out = left[0].stdout
            assert out is not None
            assert out.readline() == "in\n"
        return text

    try:
        first, second = connected({0: [1], 1: [0]}, Board(intrude))
    finally:
        for process in left:
            process.kill()
            process.communicate()
    received = torch.zeros(1)
    first[1].post(0, (torch.ones(1),))
    second[0].take(0, (received,))
    assert received.item() == 1


def peer(connection: Connection, monkeypatch: pytest.MonkeyPatch) -> NearPeer:
    """Rank 1 as rank 0 sees it; a message that is left to gloo says so."""

    def begin(self: Any, rank: int, _out: object, _in: object, names: Names, settle: Any) -> None:
        self._rank, self._names, self.settle = rank, names, settle

    monkeypatch.setattr(Peer, "__init__", begin)
    monkeypatch.setattr(Peer, "isend", lambda *_: "gloo")
    monkeypatch.setattr(Peer, "irecv", lambda *_: "gloo")
    return NearPeer(connection, 1, Names(0, 0, 2, 0.2), waiter("gloo", 0.2))


def test_long_messages_are_left_to_gloo_at_both_ends(
    pair: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (peer(each, monkeypatch) for each in pair)
    half = torch.ones(SHORT // 8)
    for tensors, way in [((half, half), "near"), ((half, half, torch.ones(1)), "gloo"), ((torch.zeros(0),), "near")]:
        sent: Any = one.isend(tensors, 0)
        due: Any = other.irecv(empty(tensors), 0)
        assert (sent == "gloo", due == "gloo") == (way == "gloo",) * 2
        if way == "near":
            sent.wait()
            due.wait()
            assert all(map(torch.equal, due.tensors, tensors))
            assert sent.tensors == ()


def test_a_peer_that_ends_is_named_by_receiver_and_sender(
    pair: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = peer(pair[0], monkeypatch)
    pair[1].close()
    with pytest.raises(PeerLost, match=r"wait recv m0 s1->s0: rank 1: the connection was closed") as lost:
        one.irecv((torch.zeros(1),), 3).wait()
    assert lost.value.peers == (1,)
    with pytest.raises(PeerLost, match=r"wait send m0 s0->s1: rank 1: the connection was closed"):
        one.isend((torch.zeros(1),), 0)


@pytest.mark.parametrize("unread", [0, 1])
def test_what_a_peer_sent_before_it_ended_is_there(pair: tuple[Connection, Connection], unread: int) -> None:
    for tag in range(unread):
        pair[0].post(tag, (torch.ones(1),))
    pair[1].post(0, (torch.ones(1),))
    pair[1].close()
    received = torch.zeros(1)
    pair[0].take(0, (received,))
    assert received.item() == 1


def test_a_peer_that_is_silent_is_named_when_the_time_is_up(
    connected: Connected, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, _ = connected({0: [1], 1: [0]}, timeout=0.2)
    with pytest.raises(PeerLost, match=r"rank 1: no answer within 0.2 s \(--timeout\)"):
        peer(left[1], monkeypatch).irecv((torch.zeros(1),), 3).wait()


def test_other_messages_do_not_prolong_the_time(connected: Connected) -> None:
    left, right = connected({0: [1], 1: [0]}, timeout=0.5)
    ended = threading.Event()

    def chatter() -> None:
        for tag in range(1000):
            if ended.wait(0.1):
                return
            right[0].post(tag, (torch.zeros(1),))

    other = threading.Thread(target=chatter)
    other.start()
    try:
        with pytest.raises(RuntimeError, match="timed out"):
            left[1].take(10**6, (torch.zeros(1),))
    finally:
        ended.set()
        other.join(TIMEOUT)


def test_what_the_kernel_refuses_is_said_in_its_words(
    pair: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the thread could not send is the next post's error."""
    one = peer(pair[0], monkeypatch)
    monkeypatch.setattr(connections, "SHORT", 2**22)
    with pytest.raises(PeerLost, match=r"wait send m0 s0->s1: rank 1: .*Message too long"):
        one.isend((torch.zeros(2**19),), 0)
    pair[0]._later(bytes(2**22))
    deadline = time.monotonic() + TIMEOUT
    while pair[0]._failure is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(PeerLost, match="Message too long"):
        one.isend((torch.zeros(1),), 0)


def test_a_connection_that_is_closed_has_ended_for_its_peer_too(pair: tuple[Connection, Connection]) -> None:
    """Also while the thread waits for room."""
    for tag in range(100):
        pair[0].post(tag, (torch.zeros(SHORT // 4),))
    pair[0].close()
    with pytest.raises(RuntimeError, match="connection closed"):
        pair[1].take(99, (torch.zeros(SHORT // 4),))
    with pytest.raises(ConnectionError):
        pair[1].post(0, (torch.zeros(1),))


def test_a_connection_that_is_closed_leaves_no_thread_behind(pair: tuple[Connection, Connection]) -> None:
    before = threading.active_count()
    for tag in range(100):
        pair[0].post(tag, (torch.zeros(SHORT // 4),))
    assert threading.active_count() == before + 1
    received = torch.zeros(SHORT // 4)
    for tag in range(100):
        pair[1].take(tag, (received,))
    pair[0].close()
    deadline = time.monotonic() + TIMEOUT
    while threading.active_count() > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_names_are_of_no_file_system() -> None:
    listening, name = connections._listener(1, TIMEOUT)
    assert listening is not None
    assert listening.getsockname() == b"\0chimera-" + name.encode()
    assert listening.type == socket.SOCK_SEQPACKET
    listening.close()
