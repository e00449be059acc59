"""Entries of a checkpoint: their paths in the nested state, and the conversion of values to entries and back.

Also functions that get, compare, pickle and restore the states of objects of a training loop.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from chimera_runtime.blame import ModelError, UserCode
from chimera_runtime.errors import FAILED, BadCheckpoint, Misuse
from chimera_runtime.errors import checkpoint as mistakes
from chimera_runtime.state.state import packed, unpacked
from chimera_runtime.values.fingerprint import shown


class Stateful(Protocol):
    """An object with a state that can be saved: a scheduler, a scaler, a data loader."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the object, which is saved with pickle."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Takes a state that `state_dict` returned, also in another process."""


def states_of(what: str, values: Mapping[str, Stateful]) -> dict[str, Any]:
    """Calls ``state_dict()`` of each object in ``values``, and returns the states by the names of the objects.

    If the call raises an error, the error's message has the object as ``what['name']``, for example
    ``of_rank['name']``.
    """
    states = {}
    for name, value in values.items():
        with UserCode(f"state_dict() of {what}[{name!r}]", FAILED):
            states[name] = value.state_dict()
    return states


def packed_states(what: str, states: Mapping[str, Any]) -> dict[str, bytes]:
    """Pickles states; errors as of `packed`."""
    return {name: packed(state, f"{what}[{name!r}]") for name, state in states.items()}


def give(value: Stateful, state: Any, what: str) -> None:
    """Loads a saved state into an object, by its ``load_state_dict``; ``what`` names the object in errors."""
    try:
        with UserCode(f"load_state_dict() of {what}", FAILED):
            value.load_state_dict(state)
    except ModelError as error:
        if isinstance(error.__cause__, BadCheckpoint | Misuse):  # a loader of ours says what is wrong
            raise error.__cause__ from None
        raise


def shown_states(states: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Returns, for each state, its values as short texts by key; two texts are equal exactly if their values are.

    A state that is no mapping has one text, under the key ``it``.
    """
    return {
        name: {str(key): shown(value) for key, value in state.items()}
        if isinstance(state, Mapping)
        else {"it": shown(state)}
        for name, state in states.items()
    }


def require_equal(what: str, of_ranks: Sequence[tuple[int, Mapping[str, Mapping[str, str]]]], instead: str) -> None:
    """Raises `Misuse` unless ranks have the same states under the same names.

    ``instead`` are the parameters of `Checkpoints` that take states which differ.
    """
    first, expected = of_ranks[0] if of_ranks else (0, {})
    for rank, states in of_ranks[1:]:
        for name in sorted({*expected, *states}):
            state, different = expected.get(name), states.get(name)
            if state == different:
                continue
            if state is None or different is None:
                without = first if state is None else rank
                raise mistakes.states_are_missing(what, name, rank if state is None else first, without)
            key = next(key for key in sorted({*state, *different}) if state.get(key) != different.get(key))
            values = state.get(key), different.get(key)
            raise mistakes.states_differ(what, name, (first, rank), key, values, instead)


Path = tuple[Any, ...]

_WHOLE = "*"
"""Key of the whole state of a parameter, if its own keys are not all texts."""


def names_in(there: Metadata, kind: str) -> set[str]:
    """Returns the names of all entries of a ``kind``, the first part of a path: ``model``, ``replicas`` or ``extra``.

    The number of the replica before a name is left out.
    """
    return {
        str(path[1]).partition("/")[2] if kind != "model" else str(path[1])
        for path in paths_of(there)
        if path[0] == kind
    }


def room_for(parameter: torch.Tensor, stored: Any) -> Any:
    """Returns an empty tensor into which a saved state of a parameter can be read.

    If the state has the parameter's shape, the tensor is sharded like the parameter. A state that was not saved as a
    tensor gets ``()``.
    """
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
