"""``--torch-profile DIR``: records a few updates by torch.profiler, with a range for each line of the program."""

from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from chimera_runtime.errors import tools as mistakes

BEFORE = 1
"""Updates of a run that are left out: in the first one torch makes its caches."""

RECORDED = 3


class TorchProfile:
    """Records the updates of a run from the second to the fourth, into ``rank_<r>.json`` in a directory.

    The file is a Chrome trace, for Perfetto or chrome://tracing.

    Raises `Misuse` if the run has fewer than two updates, or the directory cannot be made.
    """

    def __init__(self, directory: Path, rank: int, updates: int) -> None:
        if updates <= BEFORE:
            raise mistakes.updates_are_too_few_to_profile(updates)
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise mistakes.directory_cannot_be_written("--torch-profile", directory, error.strerror) from None
        self._file = directory / f"rank_{rank}.json"
        self._profile = torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=0, warmup=BEFORE, active=RECORDED, repeat=1),
            on_trace_ready=self._write,
        )

    def __enter__(self) -> Self:
        self._profile.start()
        return self

    def updated(self) -> None:
        """Tells the profiler that an update has ended; call it after each update."""
        self._profile.step()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._profile.stop()

    def _write(self, profile: torch.profiler.profile) -> None:
        profile.export_chrome_trace(str(self._file))
