"""The device of a rank: what its backend is for, or what is asked for."""

import os

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from chimera_runtime.errors import Misuse


def device_of(backend: str, on: str | None = None) -> torch.device:
    """The device of this rank, which becomes torch's current one if it is a GPU.

    With gloo, whose messages are staged through the host, ranks of a machine that has fewer GPUs share them.

    Parameters
    ----------
    on
        ``cpu`` or ``cuda``: by default the first of these that the backend is for.

    Raises
    ------
    Misuse
        If the backend is for another kind of device, or a GPU is missing.
    """
    kinds = dist.Backend.backend_capability.get(backend, ["cpu"])
    is_cuda = on == "cuda" if on is not None else "cpu" not in kinds
    if backend != "gloo" and on is not None and on not in kinds:
        raise Misuse(f"--device {on}: --backend {backend} is for {', '.join(kinds)}; leave --device out")
    if not is_cuda:
        return torch.device("cpu")
    index = local_index(backend)
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def known_device(asked: torch.device | str) -> torch.device:
    """A device that is there; of GPUs torch's current one, if no number is given.

    Raises
    ------
    Misuse
        If torch knows no such device, or the machine has none.
    """
    try:
        device = torch.device(asked)
    except RuntimeError as error:
        raise Misuse(f"device={str(asked)!r}: torch knows no such device; it is cpu, cuda or as in cuda:1") from error
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count()
    if not count:
        raise Misuse(f"device={str(asked)!r} needs a GPU, and {_why_none()}: use device='cpu' and a group of gloo")
    if device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    if device.index >= count:
        raise Misuse(f"device={str(asked)!r}: this machine has {count}, and they count from cuda:0")
    return device


def require_own_gpu(store: Store, rank: int, device: torch.device) -> None:
    """Passes if no other rank of a store has come here with this GPU: NCCL may hang where two ranks share one.

    Raises
    ------
    Misuse
        If one has.
    """
    key = f"gpu/{torch.cuda.get_device_properties(device).uuid}"
    if store.add(f"{key}/ranks", 1) == 1:
        store.set(f"{key}/first", str(rank))
        return
    first = store.get(f"{key}/first").decode()
    raise Misuse(
        f"ranks {first} and {rank} are on one GPU, {device} of rank {rank}, which NCCL does not allow: before the "
        'pipeline is made call torch.cuda.set_device(int(os.environ["LOCAL_RANK"])), or use a group of gloo, with '
        "which ranks share a GPU"
    )


def _why_none() -> str:
    return "torch finds none on this machine" if torch.version.cuda else "this torch is built without CUDA"


def local_index(backend: str) -> int:
    """The number of this rank's GPU on its machine.

    Raises
    ------
    Misuse
        If there is no GPU, or fewer than ranks where ranks cannot share them.
    """
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    ranks = max(local + 1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    needed = "--device cuda needs a GPU" if backend == "gloo" else f"--backend {backend} needs one GPU per rank"
    if not count:
        raise Misuse(f"{needed}, and {_why_none()}: use --device cpu --backend gloo")
    if backend == "gloo":
        return local % count
    if ranks > count:
        raise Misuse(
            f"{needed}; this machine has {count}, and torchrun starts {ranks} here: choose --nproc-per-node={count}, "
            "or use --device cuda --backend gloo, with which ranks share a GPU"
        )
    return local
