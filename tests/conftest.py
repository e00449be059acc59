"""Settings of all tests: fixed examples, the option that writes what is expected, no cache of the user's, the order."""

import gc
import os
import signal
from collections.abc import Generator

import pytest
from hypothesis import settings

from tests.repeatable import PROFILE

settings.load_profile(PROFILE)

signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell takes away from what it runs in the background

os.environ["CHIMERA_CACHE"] = ""
"""Nothing that a test compiles comes from the user's cache, or goes there; processes inherit that."""

gc.disable()  # until all tests are collected: what pytest makes of them is kept

for variable in ("COLUMNS", "FORCE_COLOR", "NO_COLOR"):
    os.environ.pop(variable, None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-goldens", action="store_true", help="write what the compiler says as what is expected")


@pytest.fixture
def update_goldens(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-goldens"))


LONGEST = (
    *("test_examples.py", "test_training.py", "test_benchmarks.py", "test_transformers.py", "test_strict.py"),
    *("test_failures.py", "test_docs.py", "test_checkpoints.py", "test_gpu.py", "test_nodes.py", "test_adoption.py"),
    *("test_foretold.py", "test_run.py", "test_split_backwards.py", "test_streams.py", "test_memory.py"),
    *("test_trace.py", "test_packaging.py", "test_caching.py", "test_cli.py", "test_stream_mutations.py"),
    *("test_replay.py", "test_communicators.py", "test_plan.py", "test_codegen.py", "test_tables.py"),
)
"""Files in which a worker is longest, the longest first. A worker has a file to itself: one that began such a file last
would work on while the others have nothing to do."""


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Keeps pytest from importing files of tests/ in search of examples in docstrings: those are in the packages."""
    collectors = yield
    return [collector for collector in collectors if type(collector).__name__ != "DoctestModule"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts the tests by their files: `LONGEST`, then the others as they are."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


def pytest_collection_finish() -> None:
    """Lets collections of garbage pass over everything there is so far, and come less often than Python's do.

    A pass of the compiler makes many small objects and no cycles; torch and ten thousand tests would be searched anew
    each time.
    """
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)
    gc.enable()
