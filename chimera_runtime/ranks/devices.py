"""The device of a rank: the one that its backend is for, or the one that the user names."""

import ctypes
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from chimera_runtime.errors import start as mistakes

# The accelerator: the CUDA streams, events, copies and pinned memory of a GPU that staging and off-loading use.
#
# A stream runs its operations in order; two streams wait for each other by events alone.


class Accelerator:
    """A GPU and its streams. Only `synchronise` and `pinned` block the host. Tests put a model of one in its place."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def enter(self) -> None:
        """Selects the device: by default the thread would make a context on the first GPU, which takes memory there."""
        torch.cuda.set_device(self._device)

    @property
    def computing(self) -> torch.cuda.Stream:
        """The stream of the calling thread's torch operations: a training loop may compute in a stream of its own."""
        return torch.cuda.current_stream(self._device)

    def stream(self) -> torch.cuda.Stream:
        """Makes a stream that does not wait for torch's default stream."""
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def record(self, stream: torch.cuda.Stream, event: torch.cuda.Event | None = None) -> torch.cuda.Event:
        """Returns an event that is over once all operations that are in a stream now are over: ``event``, if given."""
        if event is None:
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """Makes later operations of a stream wait for an event; the host does not wait."""
        stream.wait_event(event)

    def copy(self, stream: torch.cuda.Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        """Puts a copy between the GPU and pinned memory into a stream, without autograd."""
        with torch.cuda.stream(stream), torch.no_grad():
            target.copy_(source, non_blocking=True)

    def pinned(self, size: int) -> torch.Tensor:
        """Allocates ``size`` bytes of pinned host memory, which torch caches and never frees."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def is_over(self, event: torch.cuda.Event) -> bool:
        """Whether an event is over, without a wait."""
        return bool(event.query())  # type: ignore[no-untyped-call]

    def synchronise(self, event: torch.cuda.Event) -> None:
        """Returns when an event is over; the calling thread sleeps until then."""
        event.synchronize()


class CpuAccelerator(Accelerator):
    """A CPU in the place of a GPU: it copies at once and makes no events, so that there is none to wait for."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    @property
    def computing(self) -> Any:
        """None: a CPU has no streams, and does everything in the order of the calls."""
        return None

    def stream(self) -> Any:
        """Returns None, as `computing` does."""
        return None

    def record(self, stream: Any, event: Any = None) -> Any:
        """Returns None, which stands for an event that is over."""
        return None

    def wait(self, stream: Any, event: Any) -> None:
        """Does nothing: the event is over."""

    def copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies ``source`` into ``target``, unseen by autograd."""
        with torch.no_grad():
            target.copy_(source)

    def pinned(self, size: int) -> torch.Tensor:
        """Allocates ``size`` bytes of ordinary memory, as a CPU needs no other."""
        return torch.empty(size, dtype=torch.uint8)

    def is_over(self, event: Any) -> bool:
        """Returns True: a CPU makes no events that could still be open."""
        return True


def accelerator_of(device: torch.device) -> Accelerator:
    """Makes the accelerator of a device."""
    return Accelerator(device) if device.type == "cuda" else CpuAccelerator()


# Allocator of the CPU: memory that an update frees stays with the rank for the next update.
#
# The C library hands large pieces of freed memory back to the kernel, which clears every page anew when it is next
# asked for one. The memory of a pipeline grows and shrinks with each update, by an M_a for each micro-batch that is
# under way. An update of examples/gpt.py with eight micro-batches under way has 19,586 page faults, and 102 with memory
# kept; a forward took 55 ms instead of 75. Peak memory (VmHWM) differs by 1 % at most.

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""Numbers from malloc.h of the GNU C library."""

_SETTINGS = ("trim_threshold", "mmap_threshold", "mmap_max")
"""Settings of malloc in glibc; if the user has chosen any of them, `keep_memory` changes nothing."""


def give_back() -> None:
    """Gives the memory that is free back to the kernel, if the C library is GNU's."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """Makes the C library keep the memory that the main thread frees; returns True if the library now does so.

    Nothing is done if the library is not GNU's, or if the environment has such settings already.
    """
    tunables = environ.get("GLIBC_TUNABLES", "")
    if any(f"MALLOC_{name.upper()}_" in environ or f"glibc.malloc.{name}=" in tunables for name in _SETTINGS):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, -1)) and bool(mallopt(_M_MMAP_MAX, 0))


QUEUES_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
DEFAULT_QUEUES = 8
"""Hardware queues of a device, over which CUDA distributes its streams."""

LOADING_VARIABLE, EAGER = "CUDA_MODULE_LOADING", "EAGER"
"""Time at which kernels are loaded: ``EAGER`` when CUDA starts, by default when each is first launched.

To load a kernel, CUDA may wait for the kernels that run. If one of them receives a message that is posted ahead, the
host waits, in the middle of its computation, for the rank that sends the message, and that rank may wait for this one
(gpus.md, "Kernels are loaded").
"""


def device_of(backend: str, on: str | None = None) -> torch.device:
    """Returns the device of this rank, and makes it torch's current one if it is a GPU.

    ``on`` is ``cpu`` or ``cuda``, by default the first of these that the backend is for. With gloo, whose messages are
    staged through the host, ranks of a machine that has fewer GPUs share them.
    """
    kinds = dist.Backend.backend_capability.get(backend, ["cpu"])
    is_cuda = on == "cuda" if on is not None else "cpu" not in kinds
    if backend != "gloo" and on is not None and on not in kinds:
        raise mistakes.device_is_not_of_the_backend(device=f"{on}", backend=backend, kinds=kinds)
    if not is_cuda:
        return torch.device("cpu")
    if backend != "gloo":
        os.environ.setdefault(LOADING_VARIABLE, EAGER)
    index = _local_index(backend)
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def known_device(asked: torch.device | str) -> torch.device:
    """Returns the device that ``asked`` names, or raises `Misuse`; for a GPU without a number, torch's current one."""
    try:
        device = torch.device(asked)
    except RuntimeError as error:
        raise mistakes.device_is_unknown(device=str(asked)) from error
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count()
    if not count:
        raise mistakes.device_needs_a_gpu(device=str(asked), why=_why_none())
    if device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    if device.index >= count:
        raise mistakes.device_number_is_too_high(device=str(asked), count=count)
    return device


def require_own_gpu(store: Store, rank: int, device: torch.device) -> None:
    """Raises `Misuse` if another rank uses the same GPU, which NCCL refuses; all ranks that share ``store`` call it.

    Ranks with different values of NCCL_HOSTID count as ranks of different hosts, as they do for NCCL.
    """
    key = f"gpu/{os.environ.get('NCCL_HOSTID', '')}/{torch.cuda.get_device_properties(device).uuid}"
    if store.add(f"{key}/ranks", 1) == 1:
        store.set(f"{key}/first", str(rank))
        return
    first = store.get(f"{key}/first").decode()
    raise mistakes.gpu_is_shared(first=first, rank=rank, device=str(device))


def _why_none() -> str:
    return "torch finds none on this machine" if torch.version.cuda else "this torch is built without CUDA"


def _local_index(backend: str) -> int:
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    ranks = max(local + 1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if not count:
        raise mistakes.no_gpu(backend, _why_none())
    if backend == "gloo":
        return local % count
    if ranks > count:
        raise mistakes.too_few_gpus(backend, count, ranks)
    return local


def cuda_warnings(backend: str, device_type: str) -> list[str]:
    """Returns a warning for each setting of CUDA with which ranks may wait for one another until the time-out.

    With gloo nothing on the device waits for another rank. With other backends a receive that is posted ahead may block
    later operations of its hardware queue, or the loading of a kernel, and with them the send that it waits for.
    """
    if backend == "gloo" or device_type != "cuda":
        return []
    queues, loading = os.environ.get(QUEUES_VARIABLE, ""), os.environ.get(LOADING_VARIABLE, "LAZY")
    warnings = []
    if queues.isdecimal() and int(queues) < DEFAULT_QUEUES:
        warnings.append(
            f"{QUEUES_VARIABLE} is {queues}: with fewer than {DEFAULT_QUEUES} queues a message that is received ahead "
            "may hold up the computation that it waits for, and programs may hang until the timeout; unset "
            f"{QUEUES_VARIABLE}, or set it to {DEFAULT_QUEUES} or more"
        )
    if loading.upper() != EAGER:
        warnings.append(
            f"{LOADING_VARIABLE} is {loading}: the first launch of a kernel may wait for messages that are received "
            f"ahead, and programs may hang until the timeout; set {LOADING_VARIABLE}={EAGER} before Python starts"
        )
    return warnings
