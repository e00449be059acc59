"""Short messages between workers of one machine: over a socket, in the sender's own thread, as soon as they are sent.

gloo wakes a thread of its own on either side: the receiver tells that it is ready, then the payload comes. For a long
message that is little, and its thread copies while the stage computes. A short one is sooner in a buffer of the kernel
than any thread awake, so it goes there: eagerly, as MPI has it, whether or not its receiver is ready, and its send is
over at once.

Workers of one machine are those that can connect: the sockets' names begin with a zero byte and so belong to a network
namespace, not to a file system.
"""

import ctypes
import os
import secrets
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue

import torch

from runtime import Names, Peer, Pending, Tensors, Transfer

SHORT = 2**16
"""Bytes that a short message has at most. At least six of them fit a socket, if the kernel grants the buffer below."""

_BUFFER = 2**18
_TAG = 8
_LEAST = _TAG + SHORT + 2**10
_NAME = "\0chimera-"
_CREDENTIALS = struct.Struct("iII")
_LONGEST = 2**31 - 1

Ask = Callable[[str, int], str]
"""What another rank has left under a key."""

Tell = Callable[[str, str], None]
"""Leaves something for the others under a key."""


class Connection:
    """To another rank of this machine: whole messages, in the order in which they were posted."""

    def __init__(self, connected: socket.socket, timeout: float) -> None:
        connected.setblocking(True)
        self._socket = connected
        self._timeout = timeout
        self._readable = select.poll()
        self._readable.register(connected, select.POLLIN)
        self._room = bytearray(_TAG + SHORT)
        self._pinned = ctypes.c_char.from_buffer(self._room, _TAG)
        self._payload = ctypes.addressof(self._pinned)
        self._early: dict[int, bytes] = {}
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        self._queued = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._failure: OSError | None = None

    def post(self, tag: int, tensors: Tensors) -> None:
        """Sends a message. Where the socket is full, because the peer computes, a thread waits until there is room.

        Raises
        ------
        OSError
            If the peer has closed the connection, or the kernel cannot send it.
        """
        if self._failure is not None:
            raise self._failure
        message = b"".join([tag.to_bytes(_TAG, "little"), *map(_bytes, tensors)])
        if not self._queued:
            try:
                self._socket.send(message, socket.MSG_DONTWAIT)
                return
            except BlockingIOError:
                pass
        self._later(message)

    def _later(self, message: bytes) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._send_queued, daemon=True, name="connection")
            self._thread.start()
        with self._lock:
            self._queued += 1
        self._queue.put(message)

    def _send_queued(self) -> None:
        """Sends what is queued, up to the first failure, which is the next post's."""
        while (message := self._queue.get()) is not None:
            try:
                self._socket.send(message)
            except OSError as error:
                self._failure = error
                return
            with self._lock:
                self._queued -= 1

    def take(self, tag: int, buffers: Tensors) -> None:
        """Waits for a message; others that come before it are kept until they are asked for.

        Raises
        ------
        RuntimeError
            If it has not come when the time is up, or the peer has closed the connection.
        """
        count = self._kept(tag) if tag in self._early else self._receive(tag)
        if count != sum([b.nbytes for b in buffers]):
            raise RuntimeError(f"a message of {count} bytes has come, for buffers of another size")
        start = self._payload
        for buffer in buffers:
            ctypes.memmove(buffer.data_ptr(), start, buffer.nbytes)
            start += buffer.nbytes

    def _kept(self, tag: int) -> int:
        payload = self._early.pop(tag)
        self._room[_TAG : _TAG + len(payload)] = payload
        return len(payload)

    def _receive(self, tag: int) -> int:
        """How long the payload is that has come into its place."""
        deadline = time.monotonic() + self._timeout
        while True:
            count = self._next(1000 * (deadline - time.monotonic()))
            found = int.from_bytes(self._room[:_TAG], "little")
            if found == tag:
                return count - _TAG
            self._early[found] = bytes(self._room[_TAG:count])

    def _next(self, milliseconds: float) -> int:
        """How long the message is that has come; what a peer sent before it ended comes before the news of that."""
        if not self._readable.poll(min(max(milliseconds, 0), _LONGEST)):
            raise RuntimeError("timed out")
        try:
            try:
                count = self._socket.recv_into(self._room)
            except ConnectionResetError:
                count = self._socket.recv_into(self._room)
        except OSError as error:
            raise RuntimeError(str(error)) from error
        if not count:
            raise RuntimeError("connection closed")
        return count

    def close(self) -> None:
        """Ends the connection at both ends; what is queued is lost."""
        self._queue.put(None)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class _Receipt:
    """A posted receipt of a short message, which costs nothing before it is waited for."""

    __slots__ = ("_buffers", "_connection", "_tag")

    def __init__(self, connection: Connection, tag: int, buffers: Tensors) -> None:
        self._connection = connection
        self._tag = tag
        self._buffers = buffers

    def wait(self, _timeout: timedelta = timedelta(), /) -> None:
        """Returns when the message is in its buffers. The time-out is the connection's; errors as in its `take`."""
        self._connection.take(self._tag, self._buffers)


class NearPeer(Peer):
    """Another worker on this machine: short messages go over a connection of their own, others as to any peer.

    Both ends know how long a message is, so they agree on its way.
    """

    def __init__(self, connection: Connection, rank: int, names: Names, settle: Callable[[Pending], object]) -> None:
        super().__init__(rank, None, None, names, settle)
        self._connection = connection

    def isend(self, tensors: Tensors, tag: int) -> Transfer:
        """Sends a short message; posts the sending of a longer one.

        Raises
        ------
        PeerLost
            If the peer has ended.
        """
        if not _short(tensors):
            return super().isend(tensors, tag)
        try:
            self._connection.post(tag, tensors)
        except ConnectionError as error:
            raise self.lost("send", tag, ConnectionError("connection closed")) from error
        except OSError as error:
            raise self.lost("send", tag, error) from error
        return Transfer((), [], self, "send", tag)

    def irecv(self, buffers: Tensors, tag: int) -> Transfer:
        """Posts the receipt of a message into buffers of the right shapes."""
        if not _short(buffers):
            return super().irecv(buffers, tag)
        return Transfer(buffers, [_Receipt(self._connection, tag, buffers)], self, "recv", tag)


def _short(tensors: Tensors) -> bool:
    return sum([t.nbytes for t in tensors]) <= SHORT


def _bytes(tensor: torch.Tensor) -> bytes:
    """What is in the memory of a tensor that lies in one piece."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def connect(rank: int, others: Iterable[int], tell: Tell, ask: Ask, timeout: float) -> dict[int, Connection]:
    """Connections to those of the others that are on this machine; of two ranks each calls it with the other in them.

    A rank connects to those above it and says whether it could, so that both ends know the same. Where there are no
    such sockets, there are no connections.

    Raises
    ------
    OSError
        If a rank that has connected cannot be heard within the time-out.
    """
    neighbours = sorted(set(others))
    above, below = [each for each in neighbours if each > rank], [each for each in neighbours if each < rank]
    listener, name = _listener(len(below), timeout)
    try:
        tell(f"near/{rank}", name)
        reached = {other: _reach(ask(f"near/{other}", other), rank, timeout) for other in above}
        for other, found in reached.items():
            tell(f"near/{rank}/{other}", "yes" if found else "no")
        expected = [other for other in below if ask(f"near/{other}/{rank}", other) == "yes"]
        accepted = _accept(listener, len(expected), timeout) if listener else {}
    finally:
        if listener:
            listener.close()
    return {other: Connection(each, timeout) for other, each in (reached | accepted).items() if each}


def _listener(many: int, timeout: float) -> tuple[socket.socket | None, str]:
    """A socket that so many can connect to and its name; none, where there is no such thing."""
    name = secrets.token_hex(16)

    def listen(made: socket.socket) -> bool:
        made.bind(_NAME + name)
        made.listen(many)
        return True

    listener = _made(listen, timeout)
    return listener, name if listener else ""


def _reach(name: str, rank: int, timeout: float) -> socket.socket | None:
    """A connection to the rank that listens under a name, if that is on this machine and of this user."""

    def reach(made: socket.socket) -> bool:
        made.connect(_NAME + name)
        return _ours(made) and made.send(rank.to_bytes(_TAG, "little")) == _TAG

    return _made(reach, timeout) if name else None


def _made(use: Callable[[socket.socket], bool], timeout: float) -> socket.socket | None:
    """A socket that takes whole messages, has room for one at least, and could be used so."""
    if sys.platform != "linux":
        return None
    try:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError:
        return None
    with suppress(OSError):
        made.settimeout(timeout)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        if made.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) >= _LEAST and use(made):
            return made
    made.close()
    return None


def _accept(listener: socket.socket, many: int, timeout: float) -> dict[int, socket.socket]:
    """The connections of so many ranks that have said that they are connected."""
    found: dict[int, socket.socket] = {}
    while len(found) < many:
        accepted, _ = listener.accept()
        if _ours(accepted):
            accepted.settimeout(timeout)
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
            found[int.from_bytes(accepted.recv(_TAG), "little")] = accepted
        else:
            accepted.close()
    return found


def _ours(connected: socket.socket) -> bool:
    """Whether the other end belongs to the same user: anybody on a machine may connect to a name."""
    told = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(told)
    return bool(user == os.geteuid())
