"""Fewer hardware queues than by default are remarked on where something on the device waits for other ranks."""

import pytest

from chimera_runtime.ranks.devices import cuda_queue_warning


@pytest.mark.parametrize("count", ["1", "7"])
def test_few_queues_are_remarked_on_with_what_may_happen_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, count: str
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", count)
    (remark,) = cuda_queue_warning("nccl", "cuda")
    assert remark.startswith(f"CUDA_DEVICE_MAX_CONNECTIONS is {count}: ")
    assert "may hang until the timeout; unset CUDA_DEVICE_MAX_CONNECTIONS, or set it to 8 or more" in remark


@pytest.mark.parametrize("count", ["8", "32", "", "no number"])
def test_enough_are_not_nor_what_cuda_does_not_know(monkeypatch: pytest.MonkeyPatch, count: str) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", count)
    assert cuda_queue_warning("nccl", "cuda") == []


@pytest.mark.parametrize("place", [("gloo", "cuda"), ("gloo", "cpu"), ("strict", "cpu")])
def test_it_does_not_matter_where_the_device_waits_for_nobody(
    monkeypatch: pytest.MonkeyPatch, place: tuple[str, str]
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert cuda_queue_warning(*place) == []


def test_by_default_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    assert cuda_queue_warning("nccl", "cuda") == []
