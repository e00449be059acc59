"""What the host reads of a device: right however late the device is, and waited for no longer than it has to be."""

import pytest
import torch

from chimera_runtime.ranks.messages import Readout, from_host
from tests.unit.runtime.gpu_model import STREAMS, ModelGpu


def test_numbers_of_the_host_are_as_they_were_when_they_were_given() -> None:
    total, count = torch.tensor(1.5), torch.tensor([2.0], dtype=torch.float64)
    read = from_host([total, count])
    total.fill_(2.5)
    assert read() == [1.5, 2.0]


@pytest.mark.parametrize("lazy", [(), STREAMS])
def test_numbers_of_a_device_come_in_float64_however_late_it_is(lazy: tuple[str, ...]) -> None:
    gpu = ModelGpu(lazy)
    readout = Readout(gpu)
    loss = torch.tensor(0.1, dtype=torch.float32)
    first = readout([loss, torch.tensor([3.0], dtype=torch.float64)])
    second = readout([torch.tensor(7.0)])
    assert (first(), second()) == ([loss.item(), 3.0], [7.0])


def test_the_host_waits_for_what_is_before_the_read_and_for_nothing_behind_it() -> None:
    gpu, done = ModelGpu(STREAMS), list[str]()
    gpu.compute(lambda: done.append("forward"))
    read = Readout(gpu)([torch.ones(())])
    gpu.compute(lambda: done.append("backward"))
    assert done == []
    assert read() == [1.0]
    assert done == ["forward"]
    assert gpu.blocked["MainThread"] == 1


def test_a_read_that_is_over_is_not_waited_for_and_its_memory_is_used_again() -> None:
    gpu = ModelGpu()
    readout = Readout(gpu)
    for number in range(5):
        assert readout([torch.tensor(float(number))])() == [number]
    assert gpu.blocked["MainThread"] == 0
    assert len(gpu.sizes) == 1
