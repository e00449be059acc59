"""Entry points of the commands. Ctrl-C ends them even while they are importing modules.

Most of a short call is imports. They make no garbage, so Python's garbage collector is off while they run, and skips
their objects later. It skips all objects at the end of the process, when the system takes back all memory at once.
"""

import atexit
import gc
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import NoReturn

from chimera_ir.garbage import uncollected

INTERRUPTED = 130


def _run(module: str, *arguments: str) -> NoReturn:
    """Imports ``module`` of the commands, and calls its ``main`` with the arguments."""
    atexit.register(gc.freeze)
    try:
        with uncollected():
            main: Callable[..., NoReturn] = import_module(f"chimera_ir.commands.{module}").main
            gc.freeze()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    main(*arguments)


# All commands, as ``chimera COMMAND`` and as ``python -m chimera_ir COMMAND``; then ``chimera-compile`` and so on.
chimera = partial(_run, "group")
module = partial(_run, "group", "python -m chimera_ir")
compile_ = partial(_run, "compile_command")
plan = partial(_run, "plan_command")
profile = partial(_run, "profile_command")
trace = partial(_run, "trace_command")
