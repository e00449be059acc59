"""The longest files come first: a worker that began one of them last would work on while the others have nothing."""

import pytest

LONGEST = (
    "test_examples.py",
    "test_training.py",
    "test_benchmarks.py",
    "test_transformers.py",
    "test_strict.py",
    "test_failures.py",
    "test_checkpoints.py",
    "test_gpu.py",
    "test_nodes.py",
    "test_run.py",
    "test_split_backwards.py",
    "test_streams.py",
    "test_memory.py",
    "test_trace.py",
    "test_packaging.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts the tests by their files, the others as they are."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))
