"""Fixtures that the tests of pages share: one browser."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.browser import headless


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    with headless() as started:
        yield started
