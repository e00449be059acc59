"""``--torch-profile DIR``: records a few updates by torch.profiler, with a range for each line of the program."""

import os
from pathlib import Path
from typing import Any

import torch

from chimera_runtime.errors import tools as mistakes
from chimera_runtime.tools.open.files import locked

BEFORE = 1
"""Updates of a run that are left out: in the first one torch makes its caches."""

RECORDED = 3


MARKER = ".chimera-profile"


def prepare(store: Any, directory: Path) -> None:
    """Makes the directory. Raises `Misuse` if that fails, or another run records there."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if os.environ.get("LOCAL_RANK", "0") == "0" and not locked(directory / MARKER, store):
            raise mistakes.directory_cannot_be_written(
                "--torch-profile", directory, mistakes.DIRECTORY_IS_OF_ANOTHER_RUN
            )
    except OSError as error:
        raise mistakes.directory_cannot_be_written("--torch-profile", directory, error.strerror) from None


def torch_profile(directory: Path, rank: int, updates: int) -> torch.profiler.profile:
    """Makes a profiler that records the updates of a run from the second to the fourth; call ``step`` after each.

    Run the updates within the profiler as a context, which writes ``rank_<r>.json``, a Chrome trace for Perfetto or
    chrome://tracing.

    Raises `Misuse` if the run has fewer than two updates.
    """
    if updates <= BEFORE:
        raise mistakes.updates_are_too_few_to_profile(updates)
    file = directory / f"rank_{rank}.json"
    return torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=0, warmup=BEFORE, active=RECORDED, repeat=1),
        on_trace_ready=lambda profile: profile.export_chrome_trace(str(file)),
    )
