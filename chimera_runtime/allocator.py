"""Memory of the CPU: what an update frees stays with the rank, and the next update takes it again.

The C library hands large pieces of freed memory back to the kernel, which clears every page anew when it is next asked
for one. The memory of a pipeline grows and shrinks with each update, by an M_a for each micro-batch that is under way.
"""

import ctypes
import os
from collections.abc import Mapping

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""As in malloc.h of the GNU C library."""

_SETTINGS = ("trim_threshold", "mmap_threshold", "mmap_max")
"""Those of its malloc that may say otherwise."""


def keep_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """Lets this process keep what its main thread frees, for itself; says whether the C library was told.

    It is not where it is not GNU's, nor where the environment has settings of that kind: those stand. What other
    threads free still goes back to the kernel, and nothing changes where another malloc has been preloaded.
    """
    tunables = environ.get("GLIBC_TUNABLES", "")
    if any(f"MALLOC_{name.upper()}_" in environ or f"glibc.malloc.{name}=" in tunables for name in _SETTINGS):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, -1)) and bool(mallopt(_M_MMAP_MAX, 0))
