"""Processes that do not outlive the one that started them, however that ends."""

import ctypes
import os
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


class Launcher:
    """The process that has started this one, if that is torchrun: it is gone when this process has another parent.

    Ranks that were started otherwise may well outlive the process that started them.
    """

    def __init__(self) -> None:
        self._process = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None

    def is_gone(self) -> bool:
        """Whether torchrun has died; takes a tenth of a microsecond."""
        return self._process is not None and self._process != os.getppid()
