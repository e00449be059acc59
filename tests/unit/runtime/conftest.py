"""What the tests of the runtime share: a process group to be alone in, and one thread for torch."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from chimera_runtime.ranks.world import World, begin, join_group
from tests.unit.runtime import kept
from tests.unit.runtime.thread_ranks import alone_job


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    """Their tensors are small: threads only get in each other's way, the more so where several tests run at once."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def alone() -> Iterator[World]:
    """The world of the only rank of a program with one worker."""
    hook = sys.excepthook  # to which torch adds the number of the rank
    begin(alone_job(), HashStore(), 0, 1, "pipeline", "gloo", 20.0)
    yield join_group(alone_job(), None, "pipeline", None, 20.0)
    dist.destroy_process_group()
    sys.excepthook = hook


@pytest.fixture(scope="session")
def one_worker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program with two stages on one worker, see `kept`."""
    return kept.compiled(tmp_path_factory.mktemp("one-worker") / "out")
