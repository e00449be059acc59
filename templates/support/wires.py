"""Short messages between workers of one machine: over a socket, in the sender's own thread, as soon as they are sent.

gloo wakes a thread of its own on either side, twice for a message: the receiver tells that it is ready, then the
payload comes. For a long message that is little, and its thread copies while the stage computes. A short one is sooner
in a buffer of the kernel than any thread awake, so it goes there: eagerly, as MPI has it, whether or not its receiver
is ready, and its send is over at once.

Workers of one machine are those that can connect: names of sockets begin with a zero byte and so belong to a network
namespace, not to a file system.
"""

import ctypes
import os
import secrets
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import closing, nullcontext, suppress
from datetime import timedelta
from queue import SimpleQueue

import torch

from runtime import Names, Peer, Pending, Tensors, Transfer

SHORT = 2**16
"""Bytes that a short message has at most. Six of these are under way at once, if the kernel allows the buffer below."""

_BUFFER = 2**18

_TAG = 8
_NAME = "\0chimera-"
_CREDENTIALS = struct.Struct("3i")
_TIME = struct.Struct("ll")

Ask = Callable[[str, int], str]
"""What another rank has left under a key."""

Tell = Callable[[str, str], None]
"""Leaves something for the others under a key."""


class Wire:
    """A connection to another rank of this machine: whole messages in the order in which they were posted."""

    def __init__(self, connected: socket.socket, timeout: float) -> None:
        connected.setblocking(True)
        limit = divmod(max(1, round(1e6 * timeout)), 10**6)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIME.pack(*limit))
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        self._socket = connected
        self._room = bytearray(_TAG + SHORT)
        self._payload = ctypes.addressof(ctypes.c_char.from_buffer(self._room, _TAG))
        self._early: dict[int, bytes] = {}
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        self._queued = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def post(self, tag: int, tensors: Tensors) -> None:
        """Sends a message. Where the socket is full, because the peer computes, a thread waits until there is room.

        Raises
        ------
        OSError
            If the peer has closed the connection.
        """
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
            self._thread = threading.Thread(target=self._send_queued, daemon=True, name="wire")
            self._thread.start()
        with self._lock:
            self._queued += 1
        self._queue.put(message)

    def _send_queued(self) -> None:
        """Sends what is queued; that the peer has gone will be noticed by whoever waits for it."""
        while (message := self._queue.get()) is not None:
            with suppress(OSError):
                self._socket.sendall(message)
            with self._lock:
                self._queued -= 1

    def take(self, tag: int, buffers: Tensors) -> None:
        """Waits for a message; others that come before it are kept until they are asked for.

        Raises
        ------
        RuntimeError
            If nothing comes for as long as the time-out, or the peer has closed the connection.
        """
        count = self._kept(tag) if tag in self._early else self._receive(tag)
        start = self._payload
        if count != sum([b.nbytes for b in buffers]):
            raise RuntimeError(f"a message of {count} bytes has come, for buffers of another size")
        for buffer in buffers:
            ctypes.memmove(buffer.data_ptr(), start, buffer.nbytes)
            start += buffer.nbytes

    def _kept(self, tag: int) -> int:
        payload = self._early.pop(tag)
        self._room[_TAG : _TAG + len(payload)] = payload
        return len(payload)

    def _receive(self, tag: int) -> int:
        """How long the payload is that has come into its place."""
        while True:
            try:
                count = self._socket.recv_into(self._room)
            except BlockingIOError:
                raise RuntimeError("timed out") from None
            except OSError as error:
                raise RuntimeError("connection lost") from error
            if not count:
                raise RuntimeError("connection closed")
            found = int.from_bytes(self._room[:_TAG], "little")
            if found == tag:
                return count - _TAG
            self._early[found] = bytes(self._room[_TAG:count])

    def close(self) -> None:
        """Ends the connection."""
        self._queue.put(None)
        self._socket.close()


class _Receipt:
    """A posted receipt of a short message, which costs nothing before it is waited for."""

    __slots__ = ("_buffers", "_tag", "_wire")

    def __init__(self, wire: Wire, tag: int, buffers: Tensors) -> None:
        self._wire = wire
        self._tag = tag
        self._buffers = buffers

    def wait(self, _timeout: timedelta = timedelta(), /) -> None:
        """Returns when the message is in its buffers. The wire has a time-out of its own; errors as in `Wire.take`."""
        self._wire.take(self._tag, self._buffers)


class NearPeer(Peer):
    """Another worker on this machine: short messages go over a wire, all others as to any peer.

    Both ends know how long a message is, so they agree on its way.
    """

    def __init__(self, wire: Wire, rank: int, names: Names, settle: Callable[[Pending], object]) -> None:
        super().__init__(rank, None, None, names, settle)
        self._wire = wire

    def isend(self, tensors: Tensors, tag: int) -> Transfer:
        """Sends a short message; posts the sending of a longer one."""
        if not _short(tensors):
            return super().isend(tensors, tag)
        try:
            self._wire.post(tag, tensors)
        except OSError as error:
            raise self.lost("send", tag, ConnectionError("connection closed")) from error
        return Transfer((), [], self, "send", tag)

    def irecv(self, buffers: Tensors, tag: int) -> Transfer:
        """Posts the receipt of a message into buffers of the right shapes."""
        if not _short(buffers):
            return super().irecv(buffers, tag)
        return Transfer(buffers, [_Receipt(self._wire, tag, buffers)], self, "recv", tag)


def _short(tensors: Tensors) -> bool:
    return sum([t.nbytes for t in tensors]) <= SHORT


def _bytes(tensor: torch.Tensor) -> bytes:
    """What is in the memory of a tensor that lies in one piece."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def connect(rank: int, others: Iterable[int], tell: Tell, ask: Ask, timeout: float) -> dict[int, Wire]:
    """Wires to those of the others that are on this machine; of two ranks each calls it with the other among them.

    A rank connects to those above it and says whether it could, so that both ends know the same. Where there are no
    such sockets, there are no wires.
    """
    neighbours = sorted(set(others))
    above, below = [each for each in neighbours if each > rank], [each for each in neighbours if each < rank]
    name = secrets.token_hex(16) if sys.platform == "linux" else ""
    with closing(_listener(name, len(below))) if name else nullcontext() as listener:
        tell(f"wire/{rank}", name)
        reached = {other: _reach(ask(f"wire/{other}", other), rank, timeout) for other in above}
        for other, wire in reached.items():
            tell(f"wire/{rank}/{other}", "yes" if wire else "no")
        expected = [other for other in below if ask(f"wire/{other}/{rank}", other) == "yes"]
        accepted = _accept(listener, len(expected), timeout) if listener else {}
    return {other: Wire(each, timeout) for other, each in (reached | accepted).items() if each is not None}


def _listener(name: str, many: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(_NAME + name)
    listener.listen(many)
    return listener


def _reach(name: str, rank: int, timeout: float) -> socket.socket | None:
    """A connection to the rank that listens under a name, if that is on this machine and of this user."""
    if not name or sys.platform != "linux":
        return None
    reached = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    reached.settimeout(timeout)
    with suppress(OSError):
        reached.connect(_NAME + name)
        if _ours(reached):
            reached.sendall(rank.to_bytes(_TAG, "little"))
            return reached
    reached.close()
    return None


def _accept(listener: socket.socket, many: int, timeout: float) -> dict[int, socket.socket]:
    """The connections of so many ranks that have said that they are connected."""
    found: dict[int, socket.socket] = {}
    while len(found) < many:
        accepted, _ = listener.accept()
        if _ours(accepted):
            accepted.settimeout(timeout)
            found[int.from_bytes(accepted.recv(_TAG), "little")] = accepted
        else:
            accepted.close()
    return found


def _ours(connected: socket.socket) -> bool:
    """Whether the other end belongs to the same user: anybody on a machine may connect to a name."""
    told = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(told)
    return bool(user == os.geteuid())
