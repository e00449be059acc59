"""Entries of a checkpoint by their paths in the nested state, and the conversion of values to entries and back."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from chimera_runtime.errors import checkpoint as mistakes
from chimera_runtime.state.state import packed, unpacked

Path = tuple[Any, ...]

_WHOLE = "*"
"""Key of the whole state of a parameter, if its own keys are not all texts."""


def names_in(there: Metadata, kind: str) -> set[str]:
    """Returns the names of the parameters in a checkpoint; or of buffers or other entries, without the replica."""
    return {
        str(path[1]).partition("/")[2] if kind != "model" else str(path[1])
        for path in paths_of(there)
        if path[0] == kind
    }


def room_for(parameter: torch.Tensor, stored: Any) -> Any:
    """Makes an empty tensor to read a state of a parameter into; if shapes are equal, sharded like the parameter."""
    if not isinstance(stored, TensorStorageMetadata):
        return ()
    dtype = stored.properties.dtype
    if stored.size == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype)
    return torch.empty(stored.size, dtype=dtype)


def entries_of(there: Metadata) -> Iterator[tuple[Path, Any]]:
    """Yields the entries of a checkpoint, each with its path in the nested state."""
    paths = there.planner_data or {}
    for key, stored in there.state_dict_metadata.items():
        yield tuple(paths.get(key, (key,))), stored


def paths_of(there: Metadata) -> Iterator[Path]:
    """Yields the paths of the entries of a checkpoint."""
    return (path for path, _ in entries_of(there))


def flat(state: Mapping[str, Any], *before: Any) -> Iterator[tuple[Path, Any]]:
    """Yields the values of a nested state with their paths."""
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from flat(value, *before, key)
        else:
            yield (*before, key), value


def absent(path: Path, stored: Mapping[Path, Any]) -> str:
    """Returns the complaint about an entry that a checkpoint does not have."""
    kind, name = path[0], path[-1]
    match kind:
        case "model" | "replicas" | "extra":
            names = [str(other[1]) for other in stored if other[0] == kind]
            return mistakes.model_entry_is_missing(kind, str(name), names)
        case "averages":
            return mistakes.average_is_missing(path[1], str(name))
        case "scheduler":
            return mistakes.SCHEDULER_IS_MISSING
        case "of_rank":
            return mistakes.state_of_rank_is_missing(name)
        case _:
            return mistakes.state_is_missing(str(name))


def packed_state(state: Mapping[Any, Any]) -> dict[str, Any]:
    """Converts the state of a parameter to entries, each tensor to one of its own."""
    if not all(isinstance(key, str) for key in state):
        return {_WHOLE: packed(dict(state), "the state of a parameter")}
    return {
        key: value if isinstance(value, torch.Tensor) else packed(value, f"the optimizer's {key}")
        for key, value in state.items()
    }


def unpacked_state(read: Mapping[str, Any]) -> dict[Any, Any]:
    """Converts entries to the state of a parameter: the inverse of `packed_state`."""
    values = {key: unpacked(value) if isinstance(value, bytes) else value for key, value in read.items()}
    whole: dict[Any, Any] = values.get(_WHOLE, values)
    return whole


def value_of(stored: Any) -> Any:
    """Returns the value of an entry, in either format."""
    return unpacked(stored) if isinstance(stored, bytes) else stored[0]
