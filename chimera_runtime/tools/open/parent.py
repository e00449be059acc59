"""The process that started this one, torchrun: where it is killed, its ranks do not stay behind."""

import os
import signal
from pathlib import Path

from chimera_runtime.errors import TERMINATED
from chimera_runtime.ranks.parent_death import signal_when_parent_ends

_PARENT = os.getppid()
"""As it was when the package was imported, before torch was."""
_IS_TORCHRUN = "TORCHELASTIC_RUN_ID" in os.environ


def end_with_parent() -> None:
    """From now on this process gets a SIGTERM when torchrun ends before it, however that happens.

    Linux alone knows how; elsewhere, and where torchrun did not start it, nothing happens.
    """
    if _IS_TORCHRUN and signal_when_parent_ends(signal.SIGTERM) and has_ended():
        os._exit(TERMINATED)


def has_ended() -> bool:
    """Whether the torchrun that started this process is gone, or is ending; False if it was started otherwise."""
    return _IS_TORCHRUN and (os.getppid() != _PARENT or _is_zombie(_PARENT))


def _is_zombie(process: int) -> bool:
    """Whether its main thread has ended, as far as /proc says; other threads may be there for a moment."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return False
