"""Memory that a process frees: kept, or given back to the kernel and cleared anew."""

import platform
import subprocess
import sys
from collections.abc import Mapping

import pytest

from support.allocator import keep_memory

ROUNDS = """
import resource, sys
import torch
from support.allocator import keep_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

print(keep_memory() if sys.argv[1] == "keep" else None)
for _ in range(8):
    before = faults()
    under_way = [torch.ones(1 << 24) for _ in range(4)] + [torch.ones(1 << 18) for _ in range(64)]
    del under_way
    print(faults() - before)
"""

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the malloc of the GNU C library")


def rounds(how: str, environ: Mapping[str, str]) -> tuple[str, list[int]]:
    """What `keep_memory` said, and the page faults of rounds that take 320 MiB and free it, the first three aside."""
    done = subprocess.run(
        [sys.executable, "-c", ROUNDS, how], env=environ, capture_output=True, text=True, check=True, timeout=120
    )
    said, *counted = done.stdout.split()
    return said, [int(each) for each in counted[3:]]


@pytest.fixture
def environ() -> dict[str, str]:
    """Where the modules of generated programs are found, and no settings of malloc."""
    return {"PYTHONPATH": ":".join(sys.path)}


def test_what_is_freed_is_taken_again_without_a_page_fault(environ: dict[str, str]) -> None:
    """Also what is larger than any threshold of malloc, 32 MiB; without the call every round faults again."""
    said, kept = rounds("keep", environ)
    _, given_back = rounds("give back", environ)
    assert said == "True"
    assert 20 * max(kept) < min(given_back)


@pytest.mark.parametrize(
    "setting",
    [
        {"MALLOC_TRIM_THRESHOLD_": "131072"},
        {"MALLOC_MMAP_MAX_": "65536"},
        {"MALLOC_MMAP_THRESHOLD_": "131072"},
        {"GLIBC_TUNABLES": "glibc.malloc.arena_max=1:glibc.malloc.mmap_max=65536"},
    ],
)
def test_settings_of_the_environment_stand(setting: dict[str, str], environ: dict[str, str]) -> None:
    """Whoever set them wants them."""
    said, given_back = rounds("keep", environ | setting)
    assert said == "False"
    assert min(given_back) > 0


def test_settings_of_something_else_do_not_matter(environ: dict[str, str]) -> None:
    """As the number of arenas, which launchers like to set."""
    said, _ = rounds("keep", environ | {"MALLOC_ARENA_MAX": "2", "GLIBC_TUNABLES": "glibc.malloc.arena_max=2"})
    assert said == "True"


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One without ``mallopt``, as musl or macOS."""
    monkeypatch.setattr("ctypes.CDLL", lambda _: object())
    assert not keep_memory({})
