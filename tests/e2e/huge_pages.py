"""Importing this moves what the process has written into huge pages, where Linux can.

A process that is forked copies one entry of the table of pages where it copied 512, and takes one away when it ends:
a process with torch is forked and ends in two thirds of the time. This itself takes as long as thirty of them.
"""

import ctypes
from pathlib import Path

_HUGE = 2 << 20
"""Bytes of a huge page."""
_COLLAPSE = 25
"""Linux's MADV_COLLAPSE; where a system has none, nothing happens."""
_MAPS = Path("/proc/self/maps")


def _collapse() -> None:
    madvise = ctypes.CDLL(None).madvise
    for line in _MAPS.read_text().splitlines():
        addresses, permissions, _, _, _, *name = line.split()
        begin, end = (int(address, 16) // _HUGE * _HUGE for address in addresses.split("-"))
        begin += _HUGE  # past a part of one
        if permissions == "rw-p" and name in ([], ["[heap]"]) and begin < end:
            madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _COLLAPSE)


if _MAPS.exists():
    _collapse()
