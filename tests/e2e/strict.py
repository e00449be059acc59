"""A backend that keeps NCCL's rules on the CPU, for tests: what may hang on GPUs hangs here, and says where.

    train.py --backend strict --backend-module tests/e2e/strict.py

gloo forgives much: it finds a message by its tag, and takes it before anyone asks. The rules that are kept instead:

- A communicator has one stream, whose operations run in the order in which they were posted. Point-to-point operations
  in a communicator of several ranks have one for each pair (ProcessGroupNCCL keeps a communicator per pair of ranks).
- Messages have no tags (ProcessGroupNCCL::send ignores them): the n-th send to a rank meets its n-th receive.
- A send is over when its receive has been reached (NCCL user guide, "Point-to-point communication").
- The first operation of a communicator blocks the host until all of its ranks are there, and makes it
  (pytorch/pytorch#108378).
- What is posted starts no sooner than all that was computed before (ProcessGroupNCCL::syncStream).
- A wait holds up what the rank computes after it, and no stream of a communicator.
- What is not waited for is under way: no computation, and no operation of another stream, may write what it reads, or
  touch what it writes (torch.distributed.isend: undefined). This is looked at for each operation of torch, as
  torch.cuda._sanitizer does, and depends on no delay.
- A device has ``STRICT_QUEUES`` hardware queues (CUDA_DEVICE_MAX_CONNECTIONS): streams that share one begin their
  operations in the order of posting. The first queue is that of what the rank computes, too (NVIDIA/nccl#783).
- With ``STRICT_ALONE`` a rank runs one collective at a time, in the order of posting: nothing says that the kernels of
  two fit on a device (NCCL user guide, "Using multiple NCCL communicators concurrently").

On a GPU the stream of computations is a queue, and a wait an entry in it. Here that stream is the host itself: eager
torch on the CPU cannot put off what it computes. The order of starts is the same: what the host computes or posts after
a wait starts after it on a GPU as well. But for the first operation of a communicator: a GPU does not hold up the host,
which may come to it earlier there, and never later.

By environment variables: ``STRICT_DELAY`` is the longest of the random delays before operations, in seconds, with
``STRICT_SEED``. A rank that waits longer than ``STRICT_PATIENCE`` seconds says which operation is at the head of each
of its streams.

Every message carries what it is: micro-batch, stages and update, of chimera_runtime; of other programs the tag. The
micro-batch implies the pipe, as they are counted over all pipes, and the stages the kind: to the next stage go
activations, to the one before gradients. A receive that meets another message is an error.
"""

import os
import random
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a rank runs this file alone
from tests.e2e.strict_names import NOW, listen

PATIENCE = float(os.environ.get("STRICT_PATIENCE", "30"))
DELAY = float(os.environ.get("STRICT_DELAY", "0"))
QUEUES = int(os.environ.get("STRICT_QUEUES", "0"))
ALONE = "STRICT_ALONE" in os.environ
_LIMIT = timedelta(seconds=2 * PATIENCE)


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
    start = tensor.data_ptr()
    return Access(start, start + count * tensor.element_size() if tensor.numel() else start, writes)


class Posted(dist.Work):
    """An operation of a stream, and the memory that it may touch until it has been waited for."""

    def __init__(
        self, what: str, body: Callable[[], object], memory: Sequence[Access], collective: bool = False
    ) -> None:
        super().__init__()
        self.what, self.memory, self.collective = what, memory, collective
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
        DEVICE.waited_for(self)
        return True

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
        self._delays = random.Random(f"{os.environ.get('STRICT_SEED', '0')} {name}")
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def post(self, operation: Posted) -> Posted:
        """Puts an operation at the end; it starts no sooner than what the rank computed before."""
        DEVICE.reach(operation.what, operation.memory, self)
        self.unwaited.append(operation)
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
        """The next one; which queue it is in follows from how many there are. Number 0 are the computations."""
        self.streams.append(Stream(name, len(self.streams) + 1))
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

    def reach(self, what: str, memory: Sequence[Access], stream: Stream | None = None) -> None:
        """Returns when the stream of computations may reach something: all before it in its hardware queue have begun.

        That is an operation of torch, or the moment that an operation of a stream has to come after.

        Raises
        ------
        RuntimeError
            If that does not happen, or something that was not waited for is in its way.
        """
        self._require_untouched(what, memory, stream)
        with self._changed:
            if QUEUES and not self._changed.wait_for(lambda: not self._queues[0], PATIENCE):
                raise RuntimeError(
                    f"{what} hangs behind {self._queues[0][0].what} in its hardware queue; at the heads of the "
                    f"streams: {self.heads()}"
                )

    def _require_untouched(self, what: str, memory: Sequence[Access], stream: Stream | None) -> None:
        """Passes if nothing that an operation touches is in use by what was not waited for, in other streams."""
        for posted in (posted for other in self.streams if other is not stream for posted in other.unwaited):
            for mine in memory:
                for theirs in posted.memory:
                    if mine.disturbs(theirs):
                        raise RuntimeError(
                            f"{what} {mine} memory that {posted.what} {theirs}, and nothing has waited for that"
                        )

    def waited_for(self, operation: Posted) -> None:
        """What is computed or posted from now on comes after an operation, and after those before it in its stream."""
        for stream in self.streams:
            if operation in stream.unwaited:
                del stream.unwaited[: stream.unwaited.index(operation) + 1]

    def _fits(self, operation: Posted) -> bool:
        return not (ALONE and operation.collective) or self._collectives[0] is operation

    def heads(self) -> str:
        """The operations that the streams wait for."""
        heads = [f"{stream.name}: {stream.waiting[0].what}" for stream in self.streams if stream.waiting]
        return "; ".join(heads) or "none"


DEVICE = Device()


class Computations(TorchDispatchMode):
    """What the rank computes, operation by operation: each has the device's leave before it runs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation of torch."""
        kwargs = kwargs or {}
        if not func.is_view and not func.__name__.startswith(("new_", "empty")) and "_like" not in func.__name__:
            DEVICE.reach(str(func), [*_touched(func, args, kwargs)])
        return func(*args, **kwargs)


def _touched(func: Any, args: Any, kwargs: Any) -> Iterator[Access]:
    for number, argument in enumerate(func._schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        writes = (argument.alias_info is not None and argument.alias_info.is_write) or func.namespace == "c10d"
        for tensor in value if isinstance(value, list | tuple) else [value]:
            if (
                type(tensor) in (torch.Tensor, torch.nn.Parameter)
                and tensor.layout == torch.strided
                and not tensor.is_meta
            ):
                yield access(tensor, writes)


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

    def abort(self) -> None:
        """What is under way ends, with whatever has come by then; waits return and raise nothing, as NCCL's do."""
        for stream in self._streams.values():
            for operation in [*stream.waiting]:
                operation.abort()

    def _pair(self, other: int) -> Stream:
        return self._stream((min(self._rank, other), max(self._rank, other)))

    def send(self, tensors: list[torch.Tensor], target: int, tag: int = 0) -> Posted:
        """Posts a message, which is over when its receive has been reached."""
        (tensor,), number, name = tensors, self._next(self._rank, target), NOW.message(tag)
        peer = self._members[target]

        def body() -> None:
            mine, wanted = _canary(name, tensor), _canary()
            self._carrier.recv([wanted], target, 3 * number).wait()
            self._carrier.send([mine], target, 3 * number + 1).wait()
            _check(mine, wanted, f"rank {peer}")
            self._carrier.send([tensor], target, 3 * number + 2).wait()

        return self._pair(target).post(Posted(f"send {name} to rank {peer}", body, [access(tensor, False)]))

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> Posted:
        """Posts the receipt of the next message."""
        (tensor,), number, name = tensors, self._next(source, self._rank), NOW.message(tag)
        peer = self._members[source]

        def body() -> None:
            wanted, came = _canary(name, tensor), _canary()
            self._carrier.send([wanted], source, 3 * number).wait()
            self._carrier.recv([came], source, 3 * number + 1).wait()
            _check(came, wanted, f"rank {self._members[self._rank]}")
            self._carrier.recv([tensor], source, 3 * number + 2).wait()

        return self._pair(source).post(Posted(f"recv {name} from rank {peer}", body, [access(tensor, True)]))

    def _next(self, source: int, target: int) -> int:
        self._counts[source, target] += 1
        return self._counts[source, target]

    def _collective(
        self, what: str, size: torch.Tensor, memory: Sequence[Access], begun: Callable[[], dist.Work]
    ) -> Posted:
        """Posts a collective of all ranks, which has to be the same one on all of them."""
        name = f"{what}{NOW.of_update()}"

        def checked() -> None:
            mine = _canary(name, size)
            all_ = [_canary() for _ in range(self._size)]
            self._carrier.allgather([all_], [mine]).wait()
            for rank, other in enumerate(all_):
                _check(mine, other, f"rank {self._members[rank]}")
            begun().wait()

        posted = Posted(f"{name} of {size.numel()} numbers", checked, memory, collective=True)
        return self._stream(tuple(range(self._size))).post(posted)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Posted:
        """As every rank of the communicator posts it, in one order."""
        memory = [access(tensor, True) for tensor in tensors]
        return self._collective("all_reduce", tensors[0], memory, lambda: self._carrier.allreduce(tensors, opts))

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> Posted:
        """As `allreduce`, for weights whose optimizer is sharded."""
        memory = [access(tensor, False) for tensor in inputs]
        memory += [access(tensor, True) for of_input in outputs for tensor in of_input]
        return self._collective("all_gather", inputs[0], memory, lambda: self._carrier.allgather(outputs, inputs, opts))


_LENGTH = 160
"""Bytes of what a message says it is."""


def _canary(name: str = "", tensor: torch.Tensor | None = None) -> torch.Tensor:
    """What a message is, for one that carries a tensor; room for that without one."""
    text = "" if tensor is None else f"{name}: {tensor.numel()} numbers, {tensor.dtype}"
    return torch.tensor([*text.encode().ljust(_LENGTH)[:_LENGTH]], dtype=torch.uint8)


def _check(came: torch.Tensor, wanted: torch.Tensor, where: str) -> None:
    if not torch.equal(came, wanted):
        said, asked = (bytes(canary.tolist()).decode().strip() for canary in (came, wanted))
        raise RuntimeError(f"on {where} ({said}) meets ({asked}): without tags, what is next is what comes")


def _create(options: Any, _own: object) -> Communicator:
    if not DEVICE.streams and not _COMPUTATIONS:
        _COMPUTATIONS.append(Computations().__enter__())
    return Communicator(
        options.store, options.group_rank, options.group_size, options.group_id, options.global_ranks_in_group
    )


_COMPUTATIONS: list[Computations] = []
listen()
dist.Backend.register_backend("strict", _create, extended_api=True, devices=["cpu"])
