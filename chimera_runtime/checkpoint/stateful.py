"""Objects of a loop that have a state, and functions that get, compare, pickle and restore their states."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from chimera_runtime.blame import ModelError, UserCode
from chimera_runtime.errors import FAILED, BadCheckpoint, Misuse
from chimera_runtime.errors import checkpoint as mistakes
from chimera_runtime.state.state import packed
from chimera_runtime.values.fingerprint import shown


class Stateful(Protocol):
    """An object with a state that can be saved: a scheduler, a scaler, a data loader."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the object, which is saved with pickle."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Takes a state that `state_dict` returned, also in another process."""


def states_of(what: str, values: Mapping[str, Stateful]) -> dict[str, Any]:
    """Asks objects for their states, by name."""
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
    """Returns states as short texts, key by key; texts are equal exactly if the values are."""
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
