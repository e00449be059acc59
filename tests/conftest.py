"""What all tests share: fixed examples, one flag that rewrites expected outputs, and nothing kept from call to call."""

import os
import signal

import pytest
from hypothesis import settings

from tests.repeatable import PROFILE

settings.load_profile(PROFILE)

signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell takes away from what it runs in the background

os.environ["CHIMERA_CACHE"] = ""
"""Nothing that a test compiles comes from the user's cache, or goes there; processes inherit that."""


for variable in ("COLUMNS", "FORCE_COLOR", "NO_COLOR"):
    os.environ.pop(variable, None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-goldens", action="store_true", help="write what the compiler says as what is expected")


@pytest.fixture
def update_goldens(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-goldens"))
