"""torchrun as the parent of this process: if it is killed, its ranks end as well."""

import os
import signal
from pathlib import Path

from chimera_runtime.errors import TERMINATED
from chimera_runtime.ranks.parent_death import signal_when_parent_ends

_PARENT = os.getppid()
"""Number of the parent when the package was imported, before torch."""
_IS_TORCHRUN = "TORCHELASTIC_RUN_ID" in os.environ


def end_with_parent() -> None:
    """Asks the kernel to send this process a SIGTERM when torchrun ends, however that happens.

    Does nothing on other systems than Linux, or if torchrun has not started this process.
    """
    if _IS_TORCHRUN and signal_when_parent_ends(signal.SIGTERM) and has_ended():
        os._exit(TERMINATED)


def has_ended() -> bool:
    """Whether the torchrun that started this process is gone, or is ending; False if it was started otherwise."""
    return _IS_TORCHRUN and (os.getppid() != _PARENT or _is_zombie(_PARENT))


def _is_zombie(process: int) -> bool:
    """Whether the main thread of a process has ended, by /proc; its other threads may run on for a moment."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return False
