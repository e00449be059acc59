"""Weights of the whole model in one file under the model's own names, to be read and written by other programs too.

model.pt               a state dict: torch.load(path, weights_only=True)
model.safetensors      as Hugging Face has it; needs the package safetensors
"""

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
from chimera_runtime.errors import stage as mistakes
from chimera_runtime.ranks.agreement import ObjectExchange
from chimera_runtime.state.state import State
from chimera_runtime.values.files import replacing, require_regular

_SAFE = ".safetensors"

_EXTRA = "_extra_state"
"""Suffix that torch gives the name of a value of ``get_extra_state``."""

_PATIENCE = 3600.0
"""Seconds that ranks wait for one that reads or writes the file; the end of a rank is noticed at once."""


def require_writable(path: Path) -> None:
    """Raises `Misuse` if the path is no file, its directory is missing, or safetensors is needed and not installed."""
    if path.suffix == _SAFE:
        _safetensors()
    if path.exists() and not path.is_file():
        raise mistakes.weights_cannot_be_written(path=path, reason=mistakes.NOT_REGULAR)
    if not path.parent.is_dir():
        raise mistakes.directory_is_missing(path=path)


def export_weights(state: State, path: Path, names: Mapping[str, str] | None = None) -> None:
    """Gathers the model on rank 0, which writes the file; an error of any rank is raised on all ranks.

    ``names`` has for each name in the file that of an entry of the model, if not all entries are to be written. Where
    pipelines in several rows of a mesh hold parts of one model, the first row writes it.
    """
    exchange = ObjectExchange(state.control_group.group, f"{path}", _PATIENCE)

    def require() -> None:
        state.require_values()
        state.saved()  # raises errors of a module before ranks wait for one another
        if exchange.rank == 0:
            require_writable(path)

    exchange.gather_results(require)
    firsts = None if names is None else {name: state.aliases.get(of, of) for name, of in names.items()}
    values = state.whole(None if firsts is None else {*firsts.values()})
    if values and firsts is not None:
        values = {name: values[of].clone() for name, of in firsts.items()}
    complaint = None
    if values is None:
        complaint = state.wait_for_verdict(_PATIENCE)
    elif exchange.rank == 0:
        complaint = _complaint(path, values, state)
    complaint = next(filter(None, exchange.all_gather(complaint)), None)
    state.publish_verdict(complaint)
    if complaint is not None:
        raise BadCheckpoint(complaint)


def load_weights(state: State, path: Path) -> list[str]:
    """Loads on each rank the weights that it holds; returns the names in the file that no rank has."""
    exchange = ObjectExchange(state.control_group.group, f"{path}", _PATIENCE)
    extra = set[str]().union(*exchange.gather_results(lambda: state.extra))

    def load() -> set[str]:
        with _opened(path, extra) as values:
            state.take(values)
            return {*values}

    names = exchange.gather_results(load, lambda words: f"{path}: {words}")[exchange.rank]
    return sorted(names.difference(*exchange.all_gather(state.names)))


def _complaint(path: Path, values: dict[str, Any], state: State) -> str | None:
    try:
        _require_readable(path, values)
        _write(path, values, state)
    except Exception as error:  # safetensors has a class of its own, and the other ranks wait for this one
        return str(mistakes.weights_cannot_be_written(path=path, reason=getattr(error, "strerror", None) or str(error)))
    return None


def _require_readable(path: Path, values: Mapping[str, Any]) -> None:
    """Raises `Misuse` if a value could not be read back from a file of this format; tensors always can."""
    others = {name: value for name, value in values.items() if not isinstance(value, torch.Tensor)}
    if path.suffix == _SAFE and others:
        name, value = next(iter(others.items()))
        raise mistakes.entry_cannot_be_exported(name=name, kind=type(value).__name__, why=mistakes.NOT_OF_SAFETENSORS)
    for name, value in others.items():
        file = BytesIO()
        torch.save(value, file)
        try:
            torch.load(BytesIO(file.getvalue()), weights_only=True)
        except pickle.UnpicklingError as error:
            raise mistakes.entry_cannot_be_exported(
                name=name, kind=type(value).__name__, why=mistakes.NOT_WEIGHTS_ONLY
            ) from error


def _write(path: Path, tensors: dict[str, Any], state: State) -> None:
    with replacing(path) as fresh, fresh.open("wb") as file:
        if path.suffix == _SAFE:
            _safetensors().save_file(tensors, fresh, metadata={"format": "pt"})
        else:
            aliases = {alias: tensors[name] for alias, name in state.aliases.items() if name in tensors}
            torch.save(tensors | aliases, file)


@contextmanager
def _opened(path: Path, extra: Container[str]) -> Iterator[Mapping[str, Any]]:
    """Opens a file of weights: values by name, read from the disk when used; tensors, but for those in ``extra``."""
    try:
        require_regular(path)
    except OSError as error:
        raise mistakes.weights_cannot_be_read(error) from error
    if path.suffix == _SAFE:
        try:
            opened = _safetensors().safe_open(path, framework="pt")
        except OSError as error:
            raise mistakes.weights_cannot_be_read(error) from error
        except import_module("safetensors").SafetensorError as error:
            raise mistakes.not_safetensors(error=error) from error
        with opened as file:
            yield {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except OSError as error:
        raise mistakes.weights_cannot_be_read(error) from error
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        raise BadCheckpoint(mistakes.TORCH_CANNOT_READ) from error
    if not isinstance(tensors, Mapping) or not all(
        isinstance(name, str) and (isinstance(value, torch.Tensor) or name in extra or name.endswith(_EXTRA))
        for name, value in tensors.items()
    ):
        raise BadCheckpoint(mistakes.NOT_A_STATE_DICT)
    yield tensors


def _safetensors() -> Any:
    try:
        return import_module("safetensors.torch")
    except ImportError as error:
        raise Misuse(mistakes.SAFETENSORS_IS_NOT_INSTALLED) from error
