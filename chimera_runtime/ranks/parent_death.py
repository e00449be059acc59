"""Processes that end when the process that started them ends, even if that one is killed."""

import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1
"""Number from <sys/prctl.h> of Linux."""


def signal_when_parent_ends(number: int) -> bool:
    """Asks Linux for a signal when the thread that started this process ends; returns False on other systems."""
    if not sys.platform.startswith("linux"):
        return False
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    return True


class Launcher:
    """Finds out whether torchrun has died, if it has started this process: the process then has another parent."""

    def __init__(self) -> None:
        self._process = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None

    def is_gone(self) -> bool:
        """Whether torchrun has died; takes a tenth of a microsecond."""
        return self._process is not None and self._process != os.getppid()
