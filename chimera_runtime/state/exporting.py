"""The model's weights in one file under the model's own names: for others to read, and as others have written them.

model.pt               a state dict: torch.load(path, weights_only=True)
model.safetensors      as Hugging Face has it; needs the package safetensors
"""

import os
import pickle
import zipfile
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from chimera_runtime.errors import BadCheckpoint, Misuse
from chimera_runtime.ranks.object_exchange import ObjectExchange
from chimera_runtime.state.state import State

_SAFE = ".safetensors"

_EXTRA = "_extra_state"
"""How torch ends the name of what ``get_extra_state`` returns."""

_PATIENCE = 3600.0
"""Seconds that ranks wait for one that reads or writes the file; one that has ended is noticed at once."""


def require_writable(path: Path) -> None:
    """Passes if weights can be exported to a path, as far as that is known beforehand; errors as when they are."""
    if path.suffix == _SAFE:
        _safetensors()
    if path.exists() and not path.is_file():
        raise BadCheckpoint(f"{path} cannot be written: it is no regular file")
    if not path.parent.is_dir():
        raise BadCheckpoint(f"{path} cannot be written: there is no directory {path.parent}")


def export_weights(state: State, path: Path) -> None:
    """Gathers the model on rank 0, which writes it: errors of any rank are raised on all ranks.

    Where pipelines in several rows of a mesh hold parts of one model, those of the first row write it.
    """
    exchange = ObjectExchange(state.group, f"{path}", _PATIENCE)

    def require() -> None:
        state.require_values()
        state.saved()  # what a module cannot say is known before ranks wait for one another
        if exchange.rank == 0:
            require_writable(path)

    exchange.gather_results(require)
    values = state.whole()
    complaint = None
    if values is None:
        complaint = state.learn_verdict(_PATIENCE)
    elif exchange.rank == 0:
        complaint = _complaint(path, values, state)
    complaint = next(filter(None, exchange.all_gather(complaint)), None)
    state.tell_verdict(complaint)
    if complaint is not None:
        raise BadCheckpoint(complaint)


def load_weights(state: State, path: Path) -> list[str]:
    """Every rank reads what it holds: the names in the file that none of them does; errors are raised on all ranks."""
    exchange = ObjectExchange(state.group, f"{path}", _PATIENCE)
    extra = set[str]().union(*exchange.gather_results(lambda: state.extra))

    def taken() -> set[str]:
        with _opened(path, extra) as values:
            state.take(values)
            return {*values}

    there = exchange.gather_results(taken, lambda words: f"{path}: {words}")[exchange.rank]
    return sorted(there.difference(*exchange.all_gather(state.names)))


def _complaint(path: Path, values: dict[str, Any], state: State) -> str | None:
    """Writes the file; returns what has gone wrong."""
    try:
        _require_readable(path, values)
        _write(path, values, state)
    except Exception as error:  # safetensors has a class of its own, and the other ranks wait for this one
        return f"{path} cannot be written: {getattr(error, 'strerror', None) or error}"
    return None


def _require_readable(path: Path, values: Mapping[str, Any]) -> None:
    """Passes if what is no tensor can be read again from a file of this format."""
    others = {name: value for name, value in values.items() if not isinstance(value, torch.Tensor)}
    if path.suffix == _SAFE and others:
        name, value = next(iter(others.items()))
        raise BadCheckpoint(
            f"{name}, which the model has in its state_dict, is a {type(value).__name__}, and safetensors has tensors "
            "alone: choose another suffix"
        )
    for name, value in others.items():
        file = BytesIO()
        torch.save(value, file)
        try:
            torch.load(BytesIO(file.getvalue()), weights_only=True)
        except pickle.UnpicklingError as error:
            raise BadCheckpoint(
                f"{name}, which the model has in its state_dict, is a {type(value).__name__}, which torch.load does "
                "not read with weights_only=True: keep tensors, numbers, texts, lists or dicts of these there"
            ) from error


def _write(path: Path, tensors: dict[str, Any], state: State) -> None:
    """Writes a file of this rank's own, which then replaces the one that is there: another rank may write the same."""
    beside = path.with_name(f".{path.name}.{state.rank}.writing")
    try:
        with beside.open("wb") as file:
            if path.suffix == _SAFE:
                _safetensors().save_file(tensors, beside, metadata={"format": "pt"})
            else:
                torch.save(tensors | {alias: tensors[name] for alias, name in state.aliases.items()}, file)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def _opened(path: Path, extra: Container[str]) -> Iterator[Mapping[str, Any]]:
    """The values of a file, each read when it is asked for: tensors, but for the names that are ``extra``."""
    if path.suffix == _SAFE:
        with _safe(path) as file:
            yield _Safe(file)
        return
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except OSError as error:
        raise BadCheckpoint(error.strerror or str(error)) from error
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        raise BadCheckpoint("it is no state dict that torch.load reads with weights_only=True") from error
    if not isinstance(tensors, Mapping) or not all(
        isinstance(name, str) and (isinstance(value, torch.Tensor) or name in extra or name.endswith(_EXTRA))
        for name, value in tensors.items()
    ):
        raise BadCheckpoint("it is no state dict: one has tensors by their names, and nothing else")
    yield tensors


class _Safe(Mapping[str, torch.Tensor]):
    """The tensors of a file of safetensors."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._names = dict.fromkeys(file.keys())

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        tensor: torch.Tensor = self._file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _safe(path: Path) -> Any:
    try:
        return _safetensors().safe_open(path, framework="pt")
    except OSError as error:
        raise BadCheckpoint(error.strerror or str(error)) from error
    except import_module("safetensors").SafetensorError as error:
        raise BadCheckpoint(f"it is no file of safetensors: {error}") from error


def _safetensors() -> Any:
    try:
        return import_module("safetensors.torch")
    except ImportError as error:
        raise Misuse(
            "files of safetensors need a package: pip install safetensors, or choose another suffix"
        ) from error
