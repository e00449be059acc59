"""What the tests of the runtime share: a process group to be alone in, and one thread for torch."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from chimera_runtime.ranks.world import World, begin, join_group
from tests.unit.runtime import kept, one_rank
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


@pytest.fixture
def opened(alone: World) -> Iterator[Callable[..., Any]]:
    """Makes pipelines, or what else is to be closed, over the only rank."""
    with ExitStack() as stack:
        yield lambda kind, *arguments, **options: stack.enter_context(closing(kind(*arguments, **options)))


@pytest.fixture(scope="session")
def one_worker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program with two stages on one worker, see `kept`."""
    return kept.compiled(tmp_path_factory.mktemp("one-worker") / "out")


@pytest.fixture(scope="session")
def interleaved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline with four micro-batches, see `one_rank`."""
    return kept.compiled(tmp_path_factory.mktemp("interleaved") / "out", one_rank.N)
