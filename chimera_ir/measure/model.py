"""One process of ``chimera profile stages``: from a model file to its profile."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from chimera_ir.measure import stages
from chimera_ir.measure.stages import ShowProgress, StageRequest, TimedProfile
from chimera_ir.profile.costs import WorkProfile
from chimera_runtime import blame
from chimera_runtime.blame import ModelError
from chimera_runtime.errors import BadModel, Misuse
from chimera_runtime.model.model import ModelFile, load
from chimera_runtime.ranks.devices import keep_memory

_OFFERED: dict[str, list[str]] = {"args": []}
"""The values that functions of a model file can take by name here: ``args``, without any command-line arguments."""


class BadFile(Exception):
    """The model cannot be measured; the message says why and what to do."""


Load = Callable[[tuple[int, ...] | None], ModelFile]
"""Loads a model; the argument has the first layer of each stage, and None stands for stages of equal size."""


def of_file(file: Path) -> Load:
    """Returns a function that loads a model file."""
    return lambda split: load(file, _OFFERED, split)


def of_transformer(source: str, length: int | None) -> Load:
    """Returns a function that loads a model of transformers, with items of ``length`` tokens."""
    from chimera_runtime.huggingface.model_file import without_text

    return lambda split: without_text(source, length, split)


def counted(file: Path, request: StageRequest, progress: ShowProgress) -> WorkProfile:
    """The work of a model file's stages, in floating-point operations.

    Raises `BadFile` if the model is not as its interface wants it, or needs values where there are shapes alone.
    """
    with _refusals():
        work = stages.counted(load(file, _OFFERED, request.split), request, progress)
    return replace(work, counts=replace(work.counts, file=str(file)))


def timed(load_model: Load, request: StageRequest, device: str, threads: int, progress: ShowProgress) -> TimedProfile:
    """The times of a model's stages on ``device``, and which of them are too noisy to use.

    ``threads`` is the number of threads that torch uses on a CPU.

    Raises `BadFile` if the model is not as its interface wants it, or the device is not there.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise BadFile("--device cuda: torch finds no GPU here; use --device cpu, or --count")
    torch.set_num_threads(threads)
    if device == "cpu":
        keep_memory()
    with _refusals():
        model = load_model(request.split)
        measured = stages.timed(model, request, torch.device(device), progress)
    return replace(measured, profile=replace(measured.profile, file=str(model.file)))


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except (Misuse, BadModel) as error:
        raise BadFile(str(error)) from error
    except ModelError as error:
        raise BadFile(blame.describe(error)) from error
