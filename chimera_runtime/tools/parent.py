"""The process that started this one, torchrun: where it is killed, its ranks do not stay behind."""

import ctypes
import os
import signal
import sys

from chimera_runtime.errors import TERMINATED

_PR_SET_PDEATHSIG = 1
"""From Linux's <sys/prctl.h>."""

_PARENT = os.getppid()
"""As it was when this was imported, before torch was."""


def end_with_parent() -> None:
    """From now on this process gets a SIGTERM when torchrun ends before it, however that happens.

    Linux alone knows how; elsewhere, and where torchrun did not start it, nothing happens.
    """
    if not sys.platform.startswith("linux") or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if has_ended():
        os._exit(TERMINATED)


def has_ended() -> bool:
    """Whether the process that started this one is gone."""
    return os.getppid() != _PARENT
