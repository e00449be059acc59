"""Devices: what a backend is for, what is asked for, and ranks that share a GPU."""

import os
import platform
import subprocess
import sys
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from chimera_runtime.errors import Misuse
from chimera_runtime.ranks.devices import (
    Accelerator,
    cuda_warnings,
    device_of,
    give_back,
    keep_memory,
    known_device,
    require_own_gpu,
)
from chimera_runtime.ranks.world import begin
from chimera_runtime.tools.watch.memory import resident
from tests.patience import PATIENCE
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


# torch.cuda as staging uses it: what it is asked for, as far as that can be seen without a GPU.


DEVICE = torch.device("cuda", 1)


class Calls(list[Any]):
    """What torch.cuda was asked for."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """In place of torch.cuda's streams and events."""
    made = Calls()

    class Stream:
        def __init__(self, device: torch.device) -> None:
            made.append(("stream", device))

        def wait_event(self, event: Any) -> None:
            made.append(("wait", self, event))

    class Event:
        def __init__(self, **options: bool) -> None:
            made.append(("event", options))

        def record(self, stream: Stream) -> None:
            made.append(("record", self, stream))

        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            made.append(("synchronise", self))

    @contextmanager
    def on(stream: Stream) -> Any:
        made.append(("on", stream))
        yield
        made.append("off")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("current", device))
    return made


def test_streams_and_events_are_those_of_the_device(calls: Calls) -> None:
    """A thread sleeps while it waits for an event: it does not spin."""
    gpu = Accelerator(DEVICE)
    assert gpu.computing == ("current", DEVICE)  # type: ignore[comparison-overlap]
    stream = gpu.stream()
    event = gpu.record(stream)
    gpu.wait(stream, event)
    gpu.synchronise(event)
    assert gpu.is_over(event) is False
    assert calls == [
        ("stream", DEVICE),
        ("event", {"blocking": True}),
        ("record", event, stream),
        ("wait", stream, event),
        ("synchronise", event),
    ]


def test_a_copy_is_put_into_its_stream_and_does_not_wait(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Accelerator(DEVICE)
    stream: Any = gpu.stream()

    class Target:
        def copy_(self, source: Any, non_blocking: bool) -> None:
            calls.append(("copy", source, non_blocking))

    gpu.copy(stream, Target(), "a tensor")  # type: ignore[arg-type]
    assert calls[1:] == [("on", stream), ("copy", "a tensor", True), "off"]


def test_a_thread_begins_on_the_gpu_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", entered.append)
    Accelerator(DEVICE).enter()
    assert entered == [DEVICE]


def test_pinned_memory_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch, "empty", lambda *sizes, **options: asked.append((sizes, options)))
    Accelerator(DEVICE).pinned(512)
    assert asked == [((512,), {"dtype": torch.uint8, "pin_memory": True})]


# Memory that a process frees: kept, or given back to the kernel and cleared anew.


ROUNDS = """
import ctypes, resource, sys
from chimera_runtime.ranks.devices import keep_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

PR_SET_THP_DISABLE = 41
ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
if sys.argv[1] == "keep":
    assert keep_memory()
for _ in range(8):
    before = faults()
    under_way = [b"x" * (1 << 26)] + [b"x" * (1 << 20) for _ in range(16)]
    del under_way
    print(faults() - before)
"""


class Library:
    """A C library that writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []

    def mallopt(self, what: int, value: int) -> int:
        self.told.append((what, value))
        return 1


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr("ctypes.CDLL", lambda _: made)
    return made


def rounds(how: str) -> list[int]:
    """The page faults of rounds that take 80 MiB in small pages and free them, the first three aside."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", ROUNDS, how], env=environ, capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    return [int(each) for each in done.stdout.split()[3:]]


@pytest.mark.full
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the malloc of the GNU C library")
def test_what_is_freed_is_taken_again_without_a_page_fault() -> None:
    """Also what is larger than any threshold of malloc, 32 MiB; without the call every round faults again."""
    kept, given_back = rounds("keep"), rounds("give back")
    assert 20 * max(kept) < min(given_back)


def test_nothing_is_trimmed_and_nothing_mapped_on_its_own(library: Library) -> None:
    """M_TRIM_THRESHOLD and M_MMAP_MAX, whatever is set of something else, as launchers like to set arenas."""
    assert keep_memory({"MALLOC_ARENA_MAX": "2", "GLIBC_TUNABLES": "glibc.malloc.arena_max=2"})
    assert library.told == [(-1, -1), (-4, 0)]


@pytest.mark.parametrize(
    "setting",
    [
        {"MALLOC_TRIM_THRESHOLD_": "131072"},
        {"MALLOC_MMAP_MAX_": "65536"},
        {"MALLOC_MMAP_THRESHOLD_": "131072"},
        {"GLIBC_TUNABLES": "glibc.malloc.arena_max=1:glibc.malloc.mmap_max=65536"},
    ],
)
def test_settings_of_the_environment_stand(library: Library, setting: dict[str, str]) -> None:
    """Whoever set them wants them."""
    assert not keep_memory(setting)
    assert not library.told


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One without ``mallopt``, as musl or macOS."""
    monkeypatch.setattr("ctypes.CDLL", lambda _: object())
    assert not keep_memory({})


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not GNU's")
def test_memory_that_is_free_between_what_is_in_use_goes_back() -> None:
    pieces = [bytearray(b"x" * 100_000) for _ in range(640)]
    pieces[:-1] = []
    before = resident()
    give_back()
    assert before - resident() > 32 << 20


# Settings of CUDA with which programs may hang are warned of, where something on the device waits for other ranks.


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Settings that nothing is said about."""
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")
    return monkeypatch


def test_the_settings_of_train_py_are_not_warned_of() -> None:
    assert cuda_warnings("nccl", "cuda") == []


@pytest.mark.parametrize("count", ["1", "7"])
def test_few_queues_are_warned_of_with_what_may_happen_and_what_to_do(settings: pytest.MonkeyPatch, count: str) -> None:
    settings.setenv("CUDA_DEVICE_MAX_CONNECTIONS", count)
    (warning,) = cuda_warnings("nccl", "cuda")
    assert warning.startswith(f"CUDA_DEVICE_MAX_CONNECTIONS is {count}: ")
    assert "may hang until the timeout; unset CUDA_DEVICE_MAX_CONNECTIONS, or set it to 8 or more" in warning


@pytest.mark.parametrize("count", ["8", "32", "", "no number"])
def test_enough_are_not_nor_what_cuda_does_not_know(settings: pytest.MonkeyPatch, count: str) -> None:
    settings.setenv("CUDA_DEVICE_MAX_CONNECTIONS", count)
    assert cuda_warnings("nccl", "cuda") == []


@pytest.mark.parametrize("loading", ["LAZY", None])
def test_kernels_that_are_loaded_when_they_are_first_launched_are_warned_of(
    settings: pytest.MonkeyPatch, loading: str | None
) -> None:
    """As CUDA does where nothing is set."""
    if loading is None:
        settings.delenv("CUDA_MODULE_LOADING")
    else:
        settings.setenv("CUDA_MODULE_LOADING", loading)
    (warning,) = cuda_warnings("nccl", "cuda")
    assert warning.startswith("CUDA_MODULE_LOADING is LAZY: ")
    assert warning.endswith("set CUDA_MODULE_LOADING=EAGER before Python starts")


@pytest.mark.parametrize("place", [("gloo", "cuda"), ("gloo", "cpu"), ("strict", "cpu")])
def test_nothing_matters_where_the_device_waits_for_nobody(
    settings: pytest.MonkeyPatch, place: tuple[str, str]
) -> None:
    settings.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    settings.setenv("CUDA_MODULE_LOADING", "LAZY")
    assert cuda_warnings(*place) == []
