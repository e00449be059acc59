"""Processes that do not outlive the one that started them, however that ends."""

import ctypes
import sys

_PR_SET_PDEATHSIG = 1
"""From Linux's <sys/prctl.h>."""


def signal_when_parent_ends(number: int) -> bool:
    """From now on this process gets the signal when the thread ends that started it; False if no one knows how.

    Linux alone does.
    """
    if not sys.platform.startswith("linux"):
        return False
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    return True
