"""Switch of the garbage collector, which passes of the compiler do not need."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Context in which the garbage collector is off; a pass has no use for it.

    The objects that a pass makes stay in use, and do not refer to each other in cycles.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
