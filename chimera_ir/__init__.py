"""Compile pipeline schedules, written as text, to verified programs and readable PyTorch ranks.

import chimera_ir

c = chimera_ir.compile("chimera", D=8, N=16)
c.report.makespan
c.write("out")
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chimera_ir.compare.sweep import sweep
    from chimera_ir.compilation import Compilation
    from chimera_ir.errors import CompileError
    from chimera_ir.fitting.scheme_fit import fit_scheme
    from chimera_ir.ir.levels import Schedule
    from chimera_ir.options import Options, compile
    from chimera_ir.planner.planning import rank_schemes
    from chimera_ir.source import Source

__all__ = [
    "Compilation",
    "CompileError",
    "Options",
    "Schedule",
    "Source",
    "__version__",
    "compile",
    "fit_scheme",
    "rank_schemes",
    "sweep",
]

__version__ = "0.1.0"

_HOMES = {
    "Compilation": "compilation",
    "compile": "options",
    "CompileError": "errors",
    "fit_scheme": "fitting.scheme_fit",
    "Options": "options",
    "rank_schemes": "planner.planning",
    "Schedule": "ir.levels",
    "Source": "source",
    "sweep": "compare.sweep",
}
"""Maps each public name to the module that defines it.

The module is imported when the name is first used, so that ``import chimera_ir`` is cheap.
"""


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__]
