"""Devices: what a backend is for, what is asked for, and ranks that share a GPU."""

import os
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from chimera_runtime.errors import Misuse
from chimera_runtime.ranks.devices import device_of, known_device, require_own_gpu
from chimera_runtime.ranks.world import begin
from tests.unit.runtime.thread_ranks import alone_job

for name, kinds in {"of_cpus": ["cpu"], "of_gpus": ["cuda"], "of_both": ["cpu", "cuda"]}.items():
    dist.Backend.register_backend(name, lambda *_: None, devices=kinds)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A machine with two GPUs; the list has those that were made current."""
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    return current


@pytest.mark.parametrize(
    ("backend", "on", "local", "device"),
    [
        ("gloo", None, 0, "cpu"),
        ("gloo", "cpu", 0, "cpu"),
        ("gloo", "cuda", 1, "cuda:1"),
        ("gloo", "cuda", 5, "cuda:1"),
        ("nccl", None, 1, "cuda:1"),
        ("nccl", "cuda", 0, "cuda:0"),
        ("of_cpus", None, 0, "cpu"),
        ("of_gpus", None, 1, "cuda:1"),
        ("of_both", None, 0, "cpu"),
        ("of_both", "cuda", 1, "cuda:1"),
    ],
)
def test_a_rank_is_where_its_backend_is_or_where_it_is_asked_to_be(
    backend: str, on: str | None, local: int, device: str, gpus: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With gloo ranks share GPUs."""
    monkeypatch.setenv("LOCAL_RANK", str(local))
    assert device_of(backend, on) == torch.device(device)
    assert gpus == ([] if device == "cpu" else [torch.device(device).index])


@pytest.mark.parametrize(
    ("backend", "on", "setting", "left"),
    [("nccl", None, None, "EAGER"), ("nccl", None, "LAZY", "LAZY"), ("gloo", "cuda", None, None)],
)
def test_kernels_are_loaded_when_cuda_starts_unless_somebody_wants_otherwise_or_no_message_is_on_the_device(
    backend: str, on: str | None, setting: str | None, left: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The setting has to be there before torch asks for a device."""
    at_start: list[str | None] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: at_start.append(os.environ.get("CUDA_MODULE_LOADING")) or 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("CUDA_MODULE_LOADING", setting or "")
    if setting is None:
        monkeypatch.delenv("CUDA_MODULE_LOADING")
    device_of(backend, on)
    assert at_start == [left]


@pytest.mark.parametrize(
    ("backend", "on", "words"),
    [
        (
            "nccl",
            None,
            "--backend nccl needs one GPU per rank; this machine has 2, and torchrun starts 3 here: choose "
            "--nproc-per-node=2, or use --device cuda --backend gloo, with which ranks share a GPU",
        ),
        ("nccl", "cpu", "--device cpu: --backend nccl is for cuda; leave --device out"),
        ("of_cpus", "cuda", "--device cuda: --backend of_cpus is for cpu; leave --device out"),
    ],
)
def test_what_a_backend_is_not_for_is_refused(
    backend: str, on: str | None, words: str, gpus: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(Misuse) as error:
        device_of(backend, on)
    assert str(error.value).startswith(words)
    assert gpus == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("backend", "on", "words"),
    [
        ("nccl", None, "--backend nccl needs one GPU per rank, and "),
        ("gloo", "cuda", "--device cuda needs a GPU, and "),
    ],
)
def test_a_rank_without_a_gpu_is_told_before_it_joins(backend: str, on: str | None, words: str) -> None:
    with pytest.raises(Misuse) as error:
        begin(alone_job(), HashStore(), 0, 1, "pipeline", backend, 20.0, on)
    why = "torch finds none on this machine" if torch.version.cuda else "this torch is built without CUDA"
    assert str(error.value) == f"{words}{why}: use --device cpu --backend gloo"
    assert not dist.is_initialized()


def test_every_rank_of_a_machine_with_too_few_gpus_is_told(gpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that could have a GPU: none of them waits for those that end."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(
        Misuse, match="--backend nccl needs one GPU per rank; this machine has 2, and torchrun starts 4 here"
    ):
        device_of("nccl")
    assert device_of("gloo", "cuda") == torch.device("cuda", 0)
    assert gpus == [0]


@pytest.mark.parametrize(
    ("asked", "count", "words"),
    [
        ("nosuch", 0, "device='nosuch': torch knows no such device; it is cpu, cuda or as in cuda:1"),
        ("cuda", 0, "device='cuda' needs a GPU, and "),
        ("cuda:5", 0, "device='cuda:5' needs a GPU, and "),
        ("cuda:2", 2, "device='cuda:2': this machine has 2, and they count from cuda:0"),
    ],
)
def test_a_device_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, asked: str, count: int, words: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(Misuse) as refused:
        known_device(asked)
    assert str(refused.value).startswith(words)


def test_a_gpu_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert known_device("cuda") == torch.device("cuda", 3)
    assert known_device(torch.device("cuda", 1)) == torch.device("cuda", 1)
    assert known_device("cpu") == torch.device("cpu")


def test_two_ranks_on_one_gpu_are_refused_on_the_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever number each of them knows it by."""

    class Properties(NamedTuple):
        uuid: str

    store, uuids = HashStore(), {0: "GPU-a", 1: "GPU-b"}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties(uuids[device.index]))
    require_own_gpu(store, 0, torch.device("cuda", 0))
    require_own_gpu(store, 1, torch.device("cuda", 1))
    uuids[0] = "GPU-b"
    monkeypatch.setenv("NCCL_HOSTID", "another host")
    require_own_gpu(store, 3, torch.device("cuda", 0))
    monkeypatch.delenv("NCCL_HOSTID")
    with pytest.raises(Misuse, match=r"ranks 1 and 2 are on one GPU, cuda:0 of rank 2, .* torch\.cuda\.set_device"):
        require_own_gpu(store, 2, torch.device("cuda", 0))
