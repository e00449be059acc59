"""Settings of all tests: fixed examples, the option that writes what is expected, no cache of the user's, the order."""

import gc
import os
import signal
from collections.abc import Generator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests import forking
from tests.repeatable import PROFILE

settings.load_profile(PROFILE)

signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell takes away from what it runs in the background

os.environ["CHIMERA_CACHE"] = ""
"""Nothing that a test compiles comes from the user's cache, or goes there; processes inherit that."""

with suppress(AttributeError, OSError):  # elsewhere than on Linux, or not allowed
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
"""Processes that are woken wait for those that run. A rank that sends wakes the receiver while it holds a lock: stopped
in favour of the receiver, it would leave its own thread of gloo to ask for the lock again and again."""

for variable in ("COLUMNS", "FORCE_COLOR", "NO_COLOR"):
    os.environ.pop(variable, None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-goldens", action="store_true", help="write what the compiler says as what is expected")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Has all workers of pytest-xdist fork from one process that has imported torch, where tests of ranks may run."""
    ranks = TESTS / "e2e"
    asked = (Path(word.partition("::")[0]).resolve() for word in node.config.args)
    if any(path.is_relative_to(ranks) or ranks.is_relative_to(path) for path in asked):
        node.workerinput |= forking.served()


def pytest_configure(config: pytest.Config) -> None:
    if address := getattr(config, "workerinput", {}).get(forking.SERVER):
        forking.use_server(address)


@pytest.fixture
def update_goldens(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-goldens"))


TESTS = Path(__file__).resolve().parent

LONGEST = (
    *("e2e/test_failures", "e2e/test_strict", "e2e/test_checkpoints", "e2e/test_adoption", "e2e/test_ties"),
    *("e2e/test_training", "e2e/test_benchmarks", "e2e/test_transformers", "test_docs", "e2e/test_examples"),
    *("unit/test_cli", "property/test_stream_mutations", "unit/test_plan", "e2e/test_streams", "e2e/test_packaging"),
    *("e2e/test_split_backwards", "e2e/test_meshes", "e2e/test_mini_batches", "e2e/test_pipeline_streams"),
    *("unit/test_communicators", "unit/test_standard_streams", "unit/test_output", "e2e/test_profiling"),
    *("e2e/test_ends", "e2e/test_evaluation", "unit/test_caching", "unit/test_scripts", "literature/test_tables"),
    *("e2e/test_trace", "unit/test_codegen", "unit/test_limits", "e2e/test_check", "property/test_replay"),
    *("e2e/test_memory", "e2e/test_pipeline", "e2e/test_data", "unit/runtime/data/test_loader", "e2e/test_site"),
    *("unit/runtime/data/test_data_workers", "unit/runtime/tools/fail/test_faults", "e2e/test_torch_interface"),
    *("e2e/test_gpu", "property/test_pairs", "e2e/test_run", "e2e/test_layers", "test_architecture"),
    *("test_every_kind", "unit/test_commands", "unit/test_syntax", "property/test_planned", "unit/test_forwards"),
    *("property/test_communicators", "property/test_syntax_roundtrip", "unit/test_profiler"),
    *("unit/test_damaged_traces", "literature/test_several_stages", "property/test_mutations", "e2e/test_differences"),
    *("unit/test_waiting", "property/test_bounds", "property/test_endless_schemes", "property/test_formulas"),
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
    places = {TESTS / f"{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def import_share(config: pytest.Config) -> None:
    """Has each of several workers that collect everything import other files first.

    pytest changes the assertions of a file that it imports, and keeps the bytecode: so a worker changes a share of the
    files, and finds what the others have made of the rest.
    """
    worker = getattr(config, "workerinput", None)
    if worker is None or not any(Path(word).resolve() == TESTS for word in config.args):
        return
    files = sorted(TESTS.rglob("test_*.py"))
    for path in files[int(worker["workerid"].removeprefix("gw")) :: worker["workercount"]]:
        with suppress(Exception, pytest.skip.Exception):  # which are met again where they are reported
            import_module(".".join(path.relative_to(TESTS.parent).with_suffix("").parts))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Collects tests, not garbage; garbage is looked for in what comes later, and less often than Python does.

    A pass of the compiler makes many small objects and no cycles; torch and ten thousand tests would be searched anew
    each time.
    """
    gc.disable()
    import_share(session.config)
    result = yield
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)
    gc.enable()
    return result
