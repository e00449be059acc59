"""Where the commands begin: their imports take a moment, in which Ctrl-C must end them as it does later."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

INTERRUPTED = 130


@contextmanager
def _interruptible() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def compile_() -> NoReturn:
    """chimera-compile."""
    with _interruptible():
        from chimera_ir.cli import main
    main()


def tables() -> NoReturn:
    """chimera-tables."""
    with _interruptible():
        from chimera_ir.tables import main
    main()


def profile() -> NoReturn:
    """chimera-profile."""
    with _interruptible():
        from chimera_ir.profiler import main
    main()


def trace() -> NoReturn:
    """chimera-trace."""
    with _interruptible():
        from chimera_ir.tracer import main
    main()


def plan() -> NoReturn:
    """chimera-plan."""
    with _interruptible():
        from chimera_ir.planner import main
    main()
