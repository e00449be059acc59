"""Memory that a process frees: kept, or given back to the kernel and cleared anew."""

import os
import platform
import subprocess
import sys

import pytest

from chimera_runtime.ranks.devices import give_back, keep_memory
from chimera_runtime.tools.watch.memory import resident
from tests.patience import PATIENCE

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
