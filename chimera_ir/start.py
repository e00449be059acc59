"""Entry points of the commands. Their imports take a moment, in which Ctrl-C must end them as it does later.

Most of a short call is imports. They make no garbage, so the collector stays off meanwhile and never looks at them; at
the end of the process it looks at nothing, as the system takes back all memory at once.
"""

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from chimera_ir.garbage import uncollected

INTERRUPTED = 130


@contextmanager
def _importing() -> Iterator[None]:
    atexit.register(gc.freeze)
    try:
        with uncollected():
            yield
            gc.freeze()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def chimera() -> NoReturn:
    """All commands, as ``chimera COMMAND``."""
    with _importing():
        from chimera_ir.commands.group import NAME, main
    main(NAME)


def module() -> NoReturn:
    """All commands, as ``python -m chimera_ir COMMAND``."""
    with _importing():
        from chimera_ir.commands.group import main
    main("python -m chimera_ir")


def compile_() -> NoReturn:
    """``chimera-compile``, an alias of ``chimera compile``."""
    with _importing():
        from chimera_ir.commands.compile_command import main
    main()


def plan() -> NoReturn:
    """``chimera-plan``, an alias of ``chimera plan``."""
    with _importing():
        from chimera_ir.commands.plan_command import main
    main()


def profile() -> NoReturn:
    """``chimera-profile``, an alias of ``chimera profile``."""
    with _importing():
        from chimera_ir.commands.profile_command import main
    main()


def trace() -> NoReturn:
    """``chimera-trace``, an alias of ``chimera trace``."""
    with _importing():
        from chimera_ir.commands.trace_command import main
    main()
