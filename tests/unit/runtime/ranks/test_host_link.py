"""Moves to the host and back: values are right however late or early a GPU does its work, and due to the events."""

from itertools import combinations
from typing import Any

import pytest
import torch

from chimera_runtime.ranks.devices import CpuAccelerator
from chimera_runtime.ranks.messages import LinkToHost
from tests.unit.runtime.gpu_model import ModelGpu

MICROS, WIDTH = 6, 700
STREAMS = ("computing", "outgoing")
ORDERS = [lazy for count in range(len(STREAMS) + 1) for lazy in combinations(STREAMS, count)]
"""Each stream as late or as early as it may be; the link has the first stream that the model gives out."""


def run(gpu: ModelGpu) -> tuple[LinkToHost, list[list[float]]]:
    """Moves the memory of each micro-batch out and back; memory that was free in between is written.

    Two micro-batches are on the host at a time. Returns the link and what the device has read in the end.
    """
    link, seen = LinkToHost(gpu), list[list[float]]()  # type: ignore[arg-type]
    waiting: list[tuple[float, Any]] = []

    def write(tensor: torch.Tensor, number: float) -> None:
        gpu.compute(lambda: tensor.fill_(number))

    def back(number: float, rooms: Any) -> None:
        memory = torch.zeros(WIDTH)
        write(memory, -2.0)  # what was computed in it before
        copied = link.to_device([memory.view(torch.uint8)], rooms)
        link.wait(copied)
        link.free(rooms)
        gpu.compute(lambda: seen.append(memory.unique().tolist()))

    for micro in range(MICROS):
        memory = torch.zeros(WIDTH)
        write(memory, micro + 1.0)
        rooms, copied = link.to_host([memory.view(torch.uint8)])
        link.wait(copied)
        write(memory, -1.0)  # the memory was free
        waiting.append((micro + 1.0, rooms))
        if micro % 2:
            for number, of_micro in waiting:
                back(number, of_micro)
            waiting.clear()
    gpu.finish()
    return link, seen


EXPECTED = [[micro + 1.0] for micro in range(MICROS)]


@pytest.mark.parametrize("lazy", ORDERS)
def test_what_comes_back_is_what_was_moved_however_late_a_stream_is(lazy: tuple[str, ...]) -> None:
    gpu = ModelGpu(lazy)
    link, seen = run(gpu)
    assert seen == EXPECTED
    assert not gpu.blocked, "the host waits for no copy"
    assert (link.held, link.peak, link.pinned) == (0, 2 * 4 * WIDTH, sum(gpu.sizes))


@pytest.mark.parametrize("ignored", [("wait", "computing"), ("wait", "outgoing")])
def test_without_any_of_the_events_something_else_comes_back(ignored: Any) -> None:
    """In some order that a GPU may take."""
    assert any(run(ModelGpu(lazy, ignored))[1] != EXPECTED for lazy in ORDERS)


def test_a_gpu_that_keeps_up_uses_pinned_memory_again() -> None:
    gpu = ModelGpu()
    run(gpu)
    assert gpu.sizes == [4096, 4096]


def test_a_cpu_copies_at_once() -> None:
    link, memory = LinkToHost(CpuAccelerator()), torch.arange(8, dtype=torch.uint8)
    rooms, copied = link.to_host([memory])
    memory.zero_()
    link.wait(copied)
    link.to_device([memory], rooms)
    assert memory.tolist() == [*range(8)]
