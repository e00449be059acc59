"""One process of ``chimera-profile stages``: from a model file to its profile."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from chimera_ir.measure import stages
from chimera_ir.measure.samples import ShowProgress
from chimera_ir.measure.stages import StageRequest
from chimera_ir.profile.costs import ModelProfile
from chimera_ir.profile.work import WorkProfile
from runtime import BadModel
from support import blame
from support.allocator import keep_memory
from support.blame import ModelError
from support.faults import Misuse
from support.model import load


class BadFile(Exception):
    """The model cannot be measured; the message says why and what to do."""


def counted(file: Path, request: StageRequest, progress: ShowProgress) -> WorkProfile:
    """The work of a model file's stages.

    Raises
    ------
    BadFile
        If the model is not as its interface wants it, or needs values where there are shapes alone.
    """
    with _refusals(file):
        return stages.counted(load(file), request, progress)


def timed(
    file: Path, request: StageRequest, device: str, threads: int, progress: ShowProgress
) -> tuple[ModelProfile, tuple[str, ...]]:
    """The times of a model file's stages, and which of them are too noisy to use.

    Raises
    ------
    BadFile
        If the model is not as its interface wants it, or the device is not there.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise BadFile("--device cuda: torch finds no GPU here; use --device cpu, or --count")
    torch.set_num_threads(threads)
    if device == "cpu":
        keep_memory()
    with _refusals(file):
        measured = stages.timed(load(file), request, torch.device(device), progress)
    return measured.profile, measured.remarks


@contextmanager
def _refusals(file: Path) -> Iterator[None]:
    try:
        yield
    except (Misuse, BadModel) as error:
        raise BadFile(str(error)) from error
    except ModelError as error:
        raise BadFile(blame.describe(error, file.resolve())) from error
