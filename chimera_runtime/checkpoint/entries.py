"""The entries of a checkpoint by their paths in the nested state, and values on their way there and back."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from chimera_runtime.state.state import packed, unpacked

Path = tuple[Any, ...]

_WHOLE = "*"
"""The state of a parameter whose keys are not all texts."""


def names_in(there: Metadata, kind: str = "model") -> set[str]:
    """The parameters that a checkpoint has; or the buffers, or what else modules have, without their replica."""
    return {
        str(path[1]).partition("/")[2] if kind != "model" else str(path[1])
        for path in paths_of(there)
        if path[0] == kind
    }


def room_for(parameter: torch.Tensor, stored: Any) -> Any:
    """Memory for what an optimizer keeps of a parameter: laid out as that, if it is as large."""
    if not isinstance(stored, TensorStorageMetadata):
        return ()
    dtype = stored.properties.dtype
    if stored.size == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype)
    return torch.empty(stored.size, dtype=dtype)


def entries_of(there: Metadata) -> Iterator[tuple[Path, Any]]:
    """What a checkpoint has, by its path in the nested state."""
    paths = there.planner_data or {}
    for key, stored in there.state_dict_metadata.items():
        yield tuple(paths.get(key, (key,))), stored


def paths_of(there: Metadata) -> Iterator[Path]:
    """The paths of what a checkpoint has."""
    return (path for path, _ in entries_of(there))


def flat(state: Mapping[str, Any], *before: Any) -> Iterator[tuple[Path, Any]]:
    """The values of a nested state with their paths."""
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from flat(value, *before, key)
        else:
            yield (*before, key), value


def absent(path: Path, stored: Mapping[Path, Any]) -> str:
    """What is missing, in the words of the one who trains."""
    kind, name = path[0], path[-1]
    match kind:
        case "model" | "replicas" | "extra":
            near = get_close_matches(str(name), [str(known[1]) for known in stored if known[0] == kind], 1)
            noun = {"model": "parameter", "replicas": "buffer", "extra": "entry of a state_dict"}[kind]
            return f"it has no {noun} {name}, which this model has{f' (but {near[0]})' if near else ''}"
        case "averages":
            return f"it has no average {path[1]!r} of {name}: resume without it, and begin it with these weights"
        case "scheduler":
            return "it has no scheduler, and here is one"
        case "of_rank":
            return (
                f"it has no state of of_rank[{name!r}] for this rank: what each rank has of its own is resumed under "
                "the same schedule with as many copies"
            )
        case _:
            return f"it has no state of {name}, which is to be resumed here"


def packed_state(kept: Mapping[Any, Any]) -> dict[str, Any]:
    """What an optimizer keeps of a parameter, each tensor by itself."""
    if not all(isinstance(key, str) for key in kept):
        return {_WHOLE: packed(dict(kept), "the state of a parameter")}
    return {
        key: value if isinstance(value, torch.Tensor) else packed(value, f"the optimizer's {key}")
        for key, value in kept.items()
    }


def unpacked_state(read: Mapping[str, Any]) -> dict[Any, Any]:
    """The inverse of `packed_state`."""
    values = {key: unpacked(value) if isinstance(value, bytes) else value for key, value in read.items()}
    whole: dict[Any, Any] = values.get(_WHOLE, values)
    return whole


def value_of(stored: Any) -> Any:
    """What was saved, in either format."""
    return unpacked(stored) if isinstance(stored, bytes) else stored[0]
