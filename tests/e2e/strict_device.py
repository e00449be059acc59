"""The device of a rank under the strict backend: streams, each a thread with a queue, and what they may do at a time.

The stream of computations has entries: operations of torch, and waits for what was posted. What is posted to another
stream starts when all is over that was entered before. The rules, and the environment variables that set them, are at
the top of `strict`.
"""

import os
import random
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

PATIENCE = float(os.environ.get("STRICT_PATIENCE", "30"))
MEETING = float(os.environ.get("STRICT_MEETING", "30"))
DELAY = float(os.environ.get("STRICT_DELAY", "0"))
QUEUES = int(os.environ.get("STRICT_QUEUES", "0"))
ALONE = "STRICT_ALONE" in os.environ
LATE = "STRICT_LATE" in os.environ
SEED = os.environ.get("STRICT_SEED", "0")
LIMIT = timedelta(seconds=2 * PATIENCE)
_BEHIND = 1.5
"""How much longer than a collective a message is waited for: of both that hang, the collective may be the cause."""
_SELDOM = 50
"""One computation of so many is delayed."""
_GRACE = 2.0
"""Seconds in which the host may come to hear of an error by itself."""
_UNWAITED = "nothing has waited for that"
_address = torch.Tensor.data_ptr


class Access(NamedTuple):
    """Bytes from ``start`` to before ``stop`` that an operation reads, or ``writes``."""

    start: int
    stop: int
    writes: bool

    def disturbs(self, other: "Access") -> bool:
        """Whether the order of the two matters."""
        return (self.writes or other.writes) and self.start < other.stop and other.start < self.stop

    def __str__(self) -> str:
        return "writes" if self.writes else "reads"


def access(tensor: torch.Tensor, writes: bool) -> Access:
    """The bytes of a tensor, and those between them."""
    count = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = _address(tensor)
    return Access(start, start + count * tensor.element_size() if tensor.numel() else start, writes)


class Posted(dist.Work):
    """An operation of a stream, and the memory that it may touch until it has been waited for."""

    def __init__(
        self, what: str, body: Callable[[], object], touched: Sequence[tuple[torch.Tensor, bool]], collective: bool
    ) -> None:
        super().__init__()
        self.what, self.collective = what, collective
        self.tensors = [tensor for tensor, _ in touched]
        self.memory = [access(tensor, writes) for tensor, writes in touched]
        self.event = 0
        self._body = body
        self._over = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Runs it; what comes after a wait for it fails with what it raises."""
        try:
            self._body()
        except BaseException as error:  # of any kind: the thread that waits for it must hear of it
            self._error = error
        self._over.set()

    def wait(self, _timeout: timedelta = LIMIT) -> bool:
        """Returns at once: what is computed from now on comes after it."""
        DEVICE.wait_for(self)
        return True

    def finish(self) -> None:
        """Returns when it is over: the wait for it, in the stream of computations."""
        if not self._over.wait(PATIENCE if self.collective else _BEHIND * PATIENCE):
            raise RuntimeError(f"{self.what} hangs; at the heads of the streams: {DEVICE.heads()}")
        if self._error is not None:
            raise RuntimeError(f"{self.what}: {self._error}") from self._error

    def is_completed(self) -> bool:
        """Whether it is over."""
        return self._over.is_set()

    def abort(self) -> None:
        """Lets go of whoever waits for it, who is not told."""
        self._over.set()


class Stream:
    """Operations one after the other, in a thread; ``number`` is that of the stream on its device."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.waiting: deque[Posted] = deque()
        self.unwaited: list[Posted] = []
        self._queue = number % QUEUES if QUEUES else number
        self._posted = threading.Semaphore(0)
        self._delays = random.Random(f"{SEED} {name}")
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def post(self, operation: Posted) -> Posted:
        """Puts an operation at the end; it starts no sooner than what the rank computed before."""
        DEVICE.require_untouched(operation.what, operation.memory, self)
        self.unwaited.append(operation)
        DEVICE.enter(operation, self._queue)
        self.waiting.append(operation)
        self._posted.release()
        return operation

    def _run(self) -> None:
        while True:
            self._posted.acquire()
            operation = self.waiting[0]
            if not DEVICE.begin(operation, self._queue):
                return
            threading.Event().wait(self._delays.uniform(0, DELAY))
            operation.run()
            self.waiting.popleft()
            DEVICE.end(operation)


@dataclass(frozen=True)
class Entry:
    """What the stream of computations comes to: its number, counted from 1, and the memory that it touches."""

    number: int
    what: str
    memory: Sequence[Access]
    run: Callable[[], object]


class Computing:
    """The stream of computations. After an error it runs nothing more."""

    def __init__(self, device: "Device") -> None:
        self._device = device
        self._changed = threading.Condition()
        self._entries: deque[Entry] = deque()
        self._count = self._over = self._wanted = 0
        self._copies: list[tuple[int, Access]] = []
        self._error: RuntimeError | None = None
        self._is_told = threading.Event()
        self._delays = random.Random(f"{SEED} computations")
        threading.Thread(target=self._run, name="computations", daemon=True).start()

    def put(self, what: str, memory: Sequence[Access], run: Callable[[], object]) -> int:
        """Enters something; returns its number."""
        with self._changed:
            self._count += 1
            self._entries.append(Entry(self._count, what, memory, run))
            if not LATE:
                self._want(self._count)
            return self._count

    def event(self) -> int:
        """The number of what was entered last."""
        return self._count

    def wait(self, number: int) -> bool:
        """Returns when the stream has come so far, or has failed; says whether it has come so far."""
        with self._changed:
            self._want(number)
            self._changed.wait_for(lambda: self._over >= number or self._error is not None)
            return self._over >= number

    def synchronise(self, memory: Sequence[Access] | None = None) -> None:
        """Holds up the host until all is over: at once, if some memory is given that nothing under way touches.

        Raises
        ------
        RuntimeError
            If something has failed.
        """
        if memory is None or self.is_under_way(memory):
            number = self._count
            if not self.wait(number):
                self.require_well()
            self._copies = [copy for copy in self._copies if copy[0] > number]

    def require_well(self) -> None:
        """Raises as `synchronise` does, without waiting."""
        if self._error is not None:
            self._is_told.set()
            raise RuntimeError(str(self._error)) from self._error

    def is_under_way(self, memory: Sequence[Access]) -> bool:
        """Whether the stream has yet to do something that touches some memory."""
        with self._changed:
            return any(_meet(entry.memory, memory) for entry in self._entries)

    def copied(self, target: Access, number: int) -> None:
        """What was entered last with this number is a copy that the host need not wait for."""
        self._copies.append((number, target))

    def require_copied(self, memory: Sequence[Access]) -> None:
        """Passes if the host has waited for the copies to some memory that it looks into.

        Raises
        ------
        RuntimeError
            If not.
        """
        if _meet([target for _, target in self._copies], memory):
            raise RuntimeError(f"the host reads memory that a copy writes which does not block it, and {_UNWAITED}")

    def finish(self) -> None:
        """Returns when all is over.

        Raises
        ------
        RuntimeError
            If something has failed of which the host has not heard.
        """
        if not self._is_told.is_set():
            self.synchronise()

    def head(self) -> str:
        """What the stream is at; nothing if it has nothing to do."""
        with self._changed:
            return self._entries[0].what if self._entries else ""

    def _want(self, number: int) -> None:
        if number > self._wanted:
            self._wanted = number
            self._changed.notify_all()

    def _run(self) -> None:
        with torch._C._AutoDispatchBelowADInplaceOrView():
            while self._error is None:
                with self._changed:
                    self._changed.wait_for(lambda: self._wanted > self._over)
                    entry = self._entries[0]
                if DELAY and self._delays.randrange(_SELDOM) == 0:
                    threading.Event().wait(self._delays.uniform(0, DELAY))
                error = self._failure(entry)
                with self._changed:
                    self._error = error
                    if error is None:
                        self._entries.popleft()
                        self._over = entry.number
                    self._changed.notify_all()
        if not self._is_told.wait(_GRACE):
            sys.stderr.write(f"{self._error}\n")
            sys.stderr.flush()
            os._exit(1)

    def _failure(self, entry: Entry) -> RuntimeError | None:
        try:
            self._device.reach(entry)
            entry.run()
        except Exception as error:
            return RuntimeError(str(error))
        return None


class Device:
    """The streams of this rank, the hardware queues that they are in, and what runs."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.computing = Computing(self)
        self._changed = threading.Condition()
        self._queues: dict[int, deque[Posted]] = defaultdict(deque)
        self._collectives: deque[Posted] = deque()

    def stream(self, name: str) -> Stream:
        """The next one; which queue it is in follows from how many there are. Number 0 are the computations."""
        self.streams.append(Stream(name, len(self.streams) + 1))
        return self.streams[-1]

    def enter(self, operation: Posted, queue: int) -> None:
        """Puts an operation behind all that were posted before it, in its queue and among the collectives."""
        operation.event = self.computing.event()
        with self._changed:
            self._queues[queue].append(operation)
            if operation.collective:
                self._collectives.append(operation)

    def begin(self, operation: Posted, queue: int) -> bool:
        """Returns when an operation may run; says whether it may, after all that was computed before it.

        It is the next of its queue then, and no collective is in its way.
        """
        if not self.computing.wait(operation.event):
            return False
        with self._changed:
            self._changed.wait_for(lambda: self._queues[queue][0] is operation and self._fits(operation))
            self._queues[queue].popleft()
            self._changed.notify_all()
        return True

    def end(self, operation: Posted) -> None:
        """Lets the next collective begin, if that is what is over."""
        with self._changed:
            if operation.collective:
                self._collectives.remove(operation)
            self._changed.notify_all()

    def reach(self, entry: Entry) -> None:
        """Returns when the stream of computations may begin an entry: all before it in its hardware queue have begun.

        Raises
        ------
        RuntimeError
            If that does not happen.
        """
        if not QUEUES:
            return
        queue = self._queues[0]
        with self._changed:
            if not self._changed.wait_for(lambda: not queue or queue[0].event >= entry.number, PATIENCE):
                raise RuntimeError(
                    f"{entry.what} hangs behind {queue[0].what} in its hardware queue; at the heads of the streams: "
                    f"{self.heads()}"
                )

    def require_untouched(self, what: str, memory: Sequence[Access], stream: Stream | None = None) -> None:
        """Passes if nothing that an operation touches is in use by what was not waited for, in other streams.

        Raises
        ------
        RuntimeError
            If something is.
        """
        for posted in (posted for other in self.streams if other is not stream for posted in other.unwaited):
            for tensor, theirs in zip(posted.tensors, posted.memory, strict=True):
                if _address(tensor) != theirs.start:
                    raise RuntimeError(f"memory that {posted.what} {theirs} is given back, and {_UNWAITED}")
                for mine in memory:
                    if mine.disturbs(theirs):
                        raise RuntimeError(f"{what} {mine} memory that {posted.what} {theirs}, and {_UNWAITED}")

    def wait_for(self, operation: Posted) -> None:
        """What is computed or posted from now on comes after an operation, and after those before it in its stream."""
        memory = [*operation.memory]
        for stream in self.streams:
            if operation in stream.unwaited:
                over = stream.unwaited[: stream.unwaited.index(operation) + 1]
                memory = [touched for posted in over for touched in posted.memory]
                del stream.unwaited[: len(over)]
        self.computing.require_well()
        self.computing.put(f"wait {operation.what}", memory, operation.finish)

    def _fits(self, operation: Posted) -> bool:
        return not (ALONE and operation.collective) or self._collectives[0] is operation

    def heads(self) -> str:
        """The operations that the streams wait for."""
        heads = [("computations", self.computing.head())]
        heads += [(stream.name, stream.waiting[0].what) for stream in self.streams if stream.waiting]
        return "; ".join(f"{name}: {what}" for name, what in heads if what) or "none"


def _meet(some: Sequence[Access], others: Sequence[Access]) -> bool:
    return any(mine.disturbs(other) for mine in some for other in others)


DEVICE = Device()
