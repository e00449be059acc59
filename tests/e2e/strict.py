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
- What the rank computes is a stream as well, and a wait is an entry in it that holds up what comes after. The host goes
  on at once (ProcessGroupNCCL::WorkNCCL::synchronize), until it reads what is computed: `strict_computations`.
- What is not waited for is under way: no computation, and no operation of another stream, may write what it reads, or
  touch what it writes (torch.distributed.isend: undefined), nor may its memory be given back by ``tensor.data = ..``.
  This is looked at for each operation of torch, as torch.cuda._sanitizer does, and depends on no delay.
- A device has ``STRICT_QUEUES`` hardware queues (CUDA_DEVICE_MAX_CONNECTIONS): streams that share one begin their
  operations in the order of posting. The first queue is that of what the rank computes, too (NVIDIA/nccl#783).
- With ``STRICT_ALONE`` a rank runs one collective at a time, in the order of posting: nothing says that the kernels of
  two fit on a device (NCCL user guide, "Using multiple NCCL communicators concurrently").

By environment variables: ``STRICT_DELAY`` is the longest of the random delays before operations, in seconds, with
``STRICT_SEED``; one computation of fifty is delayed. With ``STRICT_LATE`` computations are as late as they may be: the
stream runs nothing that neither the host nor another stream waits for. What a rank waits for longer than
``STRICT_PATIENCE`` seconds, or half as long again for a message, is an error that says which operation is at the head
of each of its streams; for the first operation of a communicator that is longer than ``STRICT_MEETING``, as ranks may
start one after another. An error of the stream of computations is raised where the host next waits or reads; if that
takes two seconds, it ends the rank.

Every message carries what it is: micro-batch, stages and update, of chimera_runtime; of other programs the tag. The
micro-batch implies the pipe, as they are counted over all pipes, and the stages the kind: to the next stage go
activations, to the one before gradients. A receive that meets another message is an error.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a rank runs this file alone
from tests.e2e.strict_computations import at_once, put_off
from tests.e2e.strict_device import DEVICE, LIMIT, MEETING, Posted, Stream
from tests.e2e.strict_names import NOW, listen

START = timedelta(minutes=1)
"""How long a communicator waits until all of its ranks have started, on a machine that is busy with others."""


class Communicator(dist.ProcessGroup):
    """A process group with the rules above; gloo carries what they allow."""

    def __init__(self, store: dist.Store, rank: int, size: int, name: str, members: Sequence[int]) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._name = rank, size, name
        self._members = list(members) or list(range(size))
        self._store = store
        self._carrier = dist.ProcessGroupGloo(store, rank, size, LIMIT)
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

    def shutdown(self) -> None:
        """What has been posted and computed is over, but for what nobody has waited for."""
        DEVICE.computing.finish()

    def _stream(self, ranks: tuple[int, ...]) -> Stream:
        """The stream of some of its ranks; the first time this returns when all of them ask for it."""
        if ranks not in self._streams:
            key = "/".join(map(str, ranks))
            self._store.set(f"strict/{key}/{self._rank}", "here")
            try:
                self._store.wait([f"strict/{key}/{rank}" for rank in ranks], timedelta(seconds=MEETING))
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
        tensor, number, name = tensors[0].detach(), self._next(self._rank, target), NOW.message(tag)
        peer = self._members[target]

        def body() -> None:
            mine, wanted = _canary(name, tensor), _canary()
            self._carrier.recv([wanted], target, 3 * number).wait()
            self._carrier.send([mine], target, 3 * number + 1).wait()
            _check(mine, wanted, f"rank {peer}")
            self._carrier.send([tensor], target, 3 * number + 2).wait()

        return self._pair(target).post(Posted(f"send {name} to rank {peer}", body, [(tensors[0], False)], False))

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> Posted:
        """Posts the receipt of the next message."""
        tensor, number, name = tensors[0].detach(), self._next(source, self._rank), NOW.message(tag)
        peer = self._members[source]

        def body() -> None:
            wanted, came = _canary(name, tensor), _canary()
            self._carrier.send([wanted], source, 3 * number).wait()
            self._carrier.recv([came], source, 3 * number + 1).wait()
            _check(came, wanted, f"rank {self._members[self._rank]}")
            self._carrier.recv([tensor], source, 3 * number + 2).wait()

        return self._pair(source).post(Posted(f"recv {name} from rank {peer}", body, [(tensors[0], True)], False))

    def _next(self, source: int, target: int) -> int:
        self._counts[source, target] += 1
        return self._counts[source, target]

    def _collective(
        self,
        what: str,
        size: torch.Tensor,
        touched: Sequence[tuple[torch.Tensor, bool]],
        begun: Callable[[], dist.Work],
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

        posted = Posted(f"{name} of {size.numel()} numbers", checked, touched, True)
        return self._stream(tuple(range(self._size))).post(posted)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Posted:
        """As every rank of the communicator posts it, in one order."""
        touched = [(tensor, True) for tensor in tensors]
        return self._collective("all_reduce", tensors[0], touched, lambda: self._carrier.allreduce(tensors, opts))

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> Posted:
        """As `allreduce`, for weights whose optimizer is sharded."""
        touched = [(tensor, False) for tensor in inputs]
        touched += [(tensor, True) for of_input in outputs for tensor in of_input]
        return self._collective(
            "all_gather", inputs[0], touched, lambda: self._carrier.allgather(outputs, inputs, opts)
        )


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
    put_off()
    _meet(options.store, options.group_rank, options.group_size)
    return Communicator(
        options.store, options.group_rank, options.group_size, options.group_id, options.global_ranks_in_group
    )


def _meet(store: dist.Store, rank: int, size: int) -> None:
    """Returns when all ranks are there: how much later than another one a rank starts is no matter of the rules."""
    store.set(f"strict/came/{rank}", "here")
    store.wait([f"strict/came/{other}" for other in range(size)], START)


def _compare_at_once() -> None:
    """Has the host itself compare results, which are copies, with training in one process, which posts nothing."""
    if (check := sys.modules.get("chimera_runtime.check.check")) is not None:
        slices = check.side_by_side
        check.compare, slices.compare_slices = at_once(check.compare), at_once(slices.compare_slices)


def _read_late() -> None:
    """Has chimera_runtime read losses as those of a GPU, at the end of an update: until then the host goes on."""
    names = ("world", "messages", "devices")
    world, messages, devices = (sys.modules.get(f"chimera_runtime.ranks.{name}") for name in names)
    if world is not None and messages is not None and devices is not None:
        world.reader_of = lambda _device: messages.Readout(devices.CpuAccelerator())


listen()
_compare_at_once()
_read_late()
dist.Backend.register_backend("strict", _create, extended_api=True, devices=["cpu"])
