"""Settings of all tests: which only `make test-all` runs, fixed examples, no terminal of the user's."""

import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.repeatable import PROFILE

settings.load_profile(PROFILE)

signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell takes away from what it runs in the background

for variable in ("COLUMNS", "FORCE_COLOR", "NO_COLOR"):
    os.environ.pop(variable, None)

TESTS = Path(__file__).resolve().parent
CORE = "e2e/test_core.py"
FULL = (
    *("e2e", "literature", "property", "test_docs.py", "test_every_kind.py", "test_page_scripts.py"),
    *(
        f"unit/test_{name}.py"
        for name in ("bounds", "bundles", "cli_process", "communicators", "compare", "order_bounds")
    ),
    *(f"unit/test_{name}.py" for name in ("output", "plan", "planned", "planned_splits", "profiler", "run", "scripts")),
    *(f"unit/test_{name}.py" for name in ("search", "spread", "standard_streams", "waiting")),
    *("unit/runtime/data/test_data_workers.py", "unit/runtime/huggingface", "unit/runtime/tools/fail/test_faults.py"),
    *("unit/runtime/tools/open", "unit/runtime/tools/test_launch.py"),
)
"""Folders and files whose tests all have the mark `full`: they start processes, need more than torch, or take long."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-goldens", action="store_true", help="write what the compiler says as what is expected")


@pytest.fixture
def update_goldens(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-goldens"))


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Keeps pytest from importing files of tests/ in search of examples in docstrings: those are in the packages."""
    collectors = yield
    return [collector for collector in collectors if type(collector).__name__ != "DoctestModule"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    paths = [TESTS / name for name in FULL]
    for item in items:
        if item.path != TESTS / CORE and any(item.path.is_relative_to(path) for path in paths):
            item.add_marker("full")
