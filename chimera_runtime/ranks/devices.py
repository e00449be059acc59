"""The device of a rank: the one that its backend is for, or the one that the user names."""

import os

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from chimera_runtime.errors import ranks as mistakes

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

    Raises `Misuse` if the backend is for another kind of device, or a GPU is missing.
    """
    kinds = dist.Backend.backend_capability.get(backend, ["cpu"])
    is_cuda = on == "cuda" if on is not None else "cpu" not in kinds
    if backend != "gloo" and on is not None and on not in kinds:
        raise mistakes.device_is_not_of_the_backend(f"{on}", backend, kinds)
    if not is_cuda:
        return torch.device("cpu")
    if backend != "gloo":
        os.environ.setdefault(LOADING_VARIABLE, EAGER)
    index = _local_index(backend)
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def known_device(asked: torch.device | str) -> torch.device:
    """Returns the device that ``asked`` names; for a GPU without a number, torch's current one.

    Raises `Misuse` if torch knows no such device, or the machine has none.
    """
    try:
        device = torch.device(asked)
    except RuntimeError as error:
        raise mistakes.device_is_unknown(str(asked)) from error
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count()
    if not count:
        raise mistakes.device_needs_a_gpu(str(asked), _why_none())
    if device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    if device.index >= count:
        raise mistakes.device_number_is_too_high(str(asked), count)
    return device


def require_own_gpu(store: Store, rank: int, device: torch.device) -> None:
    """Raises `Misuse` if another rank uses the same GPU; all ranks that share ``store`` call it.

    NCCL refuses two ranks of one host on one GPU, or hangs. Ranks with different values of NCCL_HOSTID count as ranks
    of different hosts, as they do for NCCL.
    """
    key = f"gpu/{os.environ.get('NCCL_HOSTID', '')}/{torch.cuda.get_device_properties(device).uuid}"
    if store.add(f"{key}/ranks", 1) == 1:
        store.set(f"{key}/first", str(rank))
        return
    first = store.get(f"{key}/first").decode()
    raise mistakes.gpu_is_shared(first, rank, str(device))


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
