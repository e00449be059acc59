"""Measurement of transfers between a rank's device and the memory of its host."""

import time
from collections.abc import Callable

import torch


def round_trips(device: torch.device, size: int) -> Callable[[int], list[float]]:
    """Returns a function that moves ``size`` bytes to the host and back, in as many rounds as it is told.

    It returns half of the seconds of each round. Host memory is pinned if the device is a GPU. On a CPU both copies are
    within its memory, as in training there.
    """
    on_gpu = device.type == "cuda"
    here = torch.zeros(size, dtype=torch.uint8, device=device)
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=on_gpu)

    def measure(rounds: int) -> list[float]:
        seconds = []
        for _ in range(rounds):
            start = time.perf_counter()
            host.copy_(here, non_blocking=on_gpu)
            here.copy_(host, non_blocking=on_gpu)
            if on_gpu:
                torch.cuda.current_stream(device).synchronize()
            seconds.append((time.perf_counter() - start) / 2)
        return seconds

    return measure
