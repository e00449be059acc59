"""A backend that keeps NCCL's rules on the CPU, for tests: what may hang on GPUs hangs here, and says where.

    train.py --backend strict --backend-module tests/e2e/strict.py

gloo forgives much: it finds a message by its tag, and takes it before anyone asks. The rules that are kept instead:

- A communicator has one stream, whose operations run in the order in which they were posted. Point-to-point operations
  in a communicator of several ranks have one for each pair (ProcessGroupNCCL keeps a communicator per pair of ranks).
- Messages have no tags (ProcessGroupNCCL::send ignores them): the n-th send to a rank meets its n-th receive.
- A send is over when its receive has been reached (NCCL user guide, "Point-to-point communication").
- The first operation of a communicator blocks the host until all of its ranks are there, and makes it.
- A wait holds up what the rank computes after it, not its streams. NCCL's wait does not block the host; but what is
  posted after a wait starts no sooner than what was computed before it, so here the host waits.

By environment variables: ``STRICT_DELAY`` is the longest of the random delays before operations, in seconds, with
``STRICT_SEED``. A device has ``STRICT_QUEUES`` hardware queues (CUDA_DEVICE_MAX_CONNECTIONS): streams that share one
begin their operations in the order of posting. With ``STRICT_ALONE`` a rank runs one collective at a time, in the order
of posting: nothing says that the kernels of two fit on a device (NCCL user guide, "Using multiple NCCL communicators
concurrently"). A rank that waits longer than ``STRICT_PATIENCE`` seconds says which operation is at the head of each of
its streams.

Every message carries what it is. A receive that meets another message is an error.
"""

import os
import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = float(os.environ.get("STRICT_PATIENCE", "30"))
DELAY = float(os.environ.get("STRICT_DELAY", "0"))
QUEUES = int(os.environ.get("STRICT_QUEUES", "0"))
ALONE = "STRICT_ALONE" in os.environ
_LIMIT = timedelta(seconds=2 * PATIENCE)


class Posted(dist.Work):
    """An operation of a stream."""

    def __init__(self, what: str, body: Callable[[], object], collective: bool = False) -> None:
        super().__init__()
        self.what, self.collective = what, collective
        self._body = body
        self._over = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Runs it; ``wait`` raises what it raises."""
        try:
            self._body()
        except BaseException as error:  # of any kind: the thread that waits for it must hear of it
            self._error = error
        self._over.set()

    def wait(self, timeout: timedelta = _LIMIT) -> bool:
        """Returns when it is over."""
        if not self._over.wait(PATIENCE):
            raise RuntimeError(f"{self.what} hangs; at the heads of the streams: {DEVICE.heads()}")
        if self._error is not None:
            raise RuntimeError(f"{self.what}: {self._error}") from self._error
        return True

    def is_completed(self) -> bool:
        """Whether it is over."""
        return self._over.is_set()


class Stream:
    """Operations one after the other, in a thread; ``number`` is that of the stream on its device."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.waiting: deque[Posted] = deque()
        self._queue = number % QUEUES if QUEUES else number
        self._posted = threading.Semaphore(0)
        self._delays = random.Random(f"{os.environ.get('STRICT_SEED', '0')} {name}")
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def post(self, operation: Posted) -> Posted:
        """Puts an operation at the end."""
        DEVICE.enter(operation, self._queue)
        self.waiting.append(operation)
        self._posted.release()
        return operation

    def _run(self) -> None:
        while True:
            self._posted.acquire()
            operation = self.waiting[0]
            DEVICE.begin(operation, self._queue)
            threading.Event().wait(self._delays.uniform(0, DELAY))
            operation.run()
            self.waiting.popleft()
            DEVICE.end(operation)


class Device:
    """The hardware queues of this rank's device, and what runs on it."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self._changed = threading.Condition()
        self._queues: dict[int, deque[Posted]] = defaultdict(deque)
        self._collectives: deque[Posted] = deque()

    def stream(self, name: str) -> Stream:
        """The next one; which queue it is in follows from how many there are."""
        self.streams.append(Stream(name, len(self.streams)))
        return self.streams[-1]

    def enter(self, operation: Posted, queue: int) -> None:
        """Puts an operation behind all that were posted before it, in its queue and among the collectives."""
        with self._changed:
            self._queues[queue].append(operation)
            if operation.collective:
                self._collectives.append(operation)

    def begin(self, operation: Posted, queue: int) -> None:
        """Returns when an operation may run: it is the next of its queue, and no collective is in its way."""
        with self._changed:
            self._changed.wait_for(lambda: self._queues[queue][0] is operation and self._fits(operation))
            self._queues[queue].popleft()
            self._changed.notify_all()

    def end(self, operation: Posted) -> None:
        """Lets the next collective begin, if that is what is over."""
        with self._changed:
            if operation.collective:
                self._collectives.remove(operation)
            self._changed.notify_all()

    def _fits(self, operation: Posted) -> bool:
        return not (ALONE and operation.collective) or self._collectives[0] is operation

    def heads(self) -> str:
        """The operations that the streams wait for."""
        heads = [f"{stream.name}: {stream.waiting[0].what}" for stream in self.streams if stream.waiting]
        return "; ".join(heads) or "none"


DEVICE = Device()


class Communicator(dist.ProcessGroup):
    """A process group with the rules above; gloo carries what they allow."""

    def __init__(self, store: dist.Store, rank: int, size: int, name: str, members: Sequence[int]) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._name = rank, size, name
        self._members = list(members) or list(range(size))
        self._store = store
        self._carrier = dist.ProcessGroupGloo(store, rank, size, _LIMIT)
        self._streams: dict[tuple[int, ...], Stream] = {}
        self._counts: dict[tuple[int, int], int] = defaultdict(int)

    def size(self) -> int:
        """The number of ranks."""
        return self._size

    @property
    def group_name(self) -> str:
        """As torch.distributed numbers it."""
        return self._name

    def getBackendName(self) -> str:
        """As it was registered."""
        return "strict"

    def _stream(self, ranks: tuple[int, ...]) -> Stream:
        """The stream of some of its ranks; the first time this returns when all of them ask for it."""
        if ranks not in self._streams:
            key = "/".join(map(str, ranks))
            self._store.set(f"strict/{key}/{self._rank}", "here")
            try:
                self._store.wait([f"strict/{key}/{rank}" for rank in ranks], timedelta(seconds=PATIENCE))
            except RuntimeError as error:
                who = [self._members[rank] for rank in ranks]
                raise RuntimeError(
                    f"the first operation of a communicator of ranks {who} blocks the host, and not all of them come; "
                    f"at the heads of the streams: {DEVICE.heads()}"
                ) from error
            self._streams[ranks] = DEVICE.stream(f"communicator of ranks {[self._members[rank] for rank in ranks]}")
        return self._streams[ranks]

    def _pair(self, other: int) -> Stream:
        return self._stream((min(self._rank, other), max(self._rank, other)))

    def send(self, tensors: list[torch.Tensor], target: int, tag: int = 0) -> Posted:
        """Posts a message, which is over when its receive has been reached."""
        (tensor,), number = tensors, self._next(self._rank, target)

        def body() -> None:
            mine, wanted = _describe(tensor, tag), torch.empty(3, dtype=torch.int64)
            self._carrier.recv([wanted], target, 3 * number).wait()
            self._carrier.send([mine], target, 3 * number + 1).wait()
            _check(mine, wanted, f"rank {self._members[target]}")
            self._carrier.send([tensor], target, 3 * number + 2).wait()

        return self._pair(target).post(Posted(f"send {tag} to rank {self._members[target]}", body))

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> Posted:
        """Posts the receipt of the next message."""
        (tensor,), number = tensors, self._next(source, self._rank)

        def body() -> None:
            wanted, came = _describe(tensor, tag), torch.empty(3, dtype=torch.int64)
            self._carrier.send([wanted], source, 3 * number).wait()
            self._carrier.recv([came], source, 3 * number + 1).wait()
            _check(came, wanted, f"rank {self._members[self._rank]}")
            self._carrier.recv([tensor], source, 3 * number + 2).wait()

        return self._pair(source).post(Posted(f"recv {tag} from rank {self._members[source]}", body))

    def _next(self, source: int, target: int) -> int:
        self._counts[source, target] += 1
        return self._counts[source, target]

    def _collective(self, what: str, size: torch.Tensor, begun: Callable[[], dist.Work]) -> Posted:
        """Posts a collective of all ranks, which has to be the same one on all of them."""

        def checked() -> None:
            mine = _describe(size, sum(map(ord, what)))
            all_ = [torch.empty_like(mine) for _ in range(self._size)]
            self._carrier.allgather([all_], [mine]).wait()
            for rank, other in enumerate(all_):
                _check(mine, other, f"rank {self._members[rank]}")
            begun().wait()

        return self._stream(tuple(range(self._size))).post(Posted(f"{what} of {size.numel()} numbers", checked, True))

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Posted:
        """As every rank of the communicator posts it, in one order."""
        return self._collective("all_reduce", tensors[0], lambda: self._carrier.allreduce(tensors, opts))

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> Posted:
        """As `allreduce`, for weights whose optimizer is sharded."""
        return self._collective("all_gather", inputs[0], lambda: self._carrier.allgather(outputs, inputs, opts))


def _describe(tensor: torch.Tensor, tag: int) -> torch.Tensor:
    return torch.tensor([tag, tensor.numel(), sum(map(ord, str(tensor.dtype)))])


def _check(came: torch.Tensor, wanted: torch.Tensor, where: str) -> None:
    if not torch.equal(came, wanted):
        raise RuntimeError(
            f"on {where} message {int(came[0])} of {int(came[1])} numbers meets operation {int(wanted[0])} for "
            f"{int(wanted[1])}: without tags, what is next is what comes"
        )


def _create(options: Any, _own: object) -> Communicator:
    return Communicator(
        options.store, options.group_rank, options.group_size, options.group_id, options.global_ranks_in_group
    )


dist.Backend.register_backend("strict", _create, extended_api=True, devices=["cpu"])
