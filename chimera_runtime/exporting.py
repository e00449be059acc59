"""The model's weights in one file, with the model's own names: what others read, and what others have written.

    model.pt               a state dict: torch.load(path, weights_only=True)
    model.safetensors      as Hugging Face has it; needs the package safetensors
"""

import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from chimera_runtime.errors import BadCheckpoint, Misuse
from chimera_runtime.pipeline import Pipeline
from chimera_runtime.shards import whole
from chimera_runtime.talk import Talk

_SAFE = ".safetensors"


def export_weights(pipe: Pipeline, path: str | Path) -> None:
    """Writes parameters and buffers of the whole model into a file; every rank calls it, and rank 0 has to hold them.

    What is tied is there under each of its names, but in safetensors under the first alone, as is usual there. Buffers
    are those of the first replica of each stage.

    Raises
    ------
    BadCheckpoint
        If the file cannot be written.
    Misuse
        If it is to be in safetensors, and that is not installed.
    """
    path = Path(path)
    if path.suffix == _SAFE:
        _safetensors()
    tensors = pipe.whole_state_dict()
    complaint = None
    if dist.get_rank() == 0:
        try:
            _write(path, tensors, pipe.aliases)
        except OSError as error:
            complaint = f"{path} cannot be written: {error.strerror or error}"
    Talk(pipe.chat).require_none(complaint, BadCheckpoint)


def load_weights(pipe: Pipeline, path: str | Path) -> list[str]:
    """Takes parameters and buffers from a file as `export_weights` writes it; every rank calls it.

    Of the buffers those are taken that are there. It returns the names in the file that the model does not know.

    Raises
    ------
    BadCheckpoint
        If the file cannot be read, or lacks a parameter, or has it in another shape.
    Misuse
        If it is in safetensors, and that is not installed.
    """
    path = Path(path)
    complaint, names = None, set[str]()
    try:
        with _opened(path) as tensors:
            names = {*tensors}
            pipe.take(tensors)
    except BadCheckpoint as error:
        complaint = f"{path}: {error}"
    talk = Talk(pipe.chat)
    talk.require_none(complaint, BadCheckpoint)
    known = set[str]().union(*talk.heard(pipe.known_names))
    return sorted(names - known)
