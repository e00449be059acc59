"""Objects of a loop with a state of their own, as a checkpoint keeps them: said, compared between ranks, and taken."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from chimera_runtime.blame import ModelError, UserCode
from chimera_runtime.errors import FAILED, BadCheckpoint, Misuse
from chimera_runtime.state.state import packed
from chimera_runtime.values.fingerprint import shown


class Stateful(Protocol):
    """What has a state that can be saved: a scheduler, a scaler, a data loader."""

    def state_dict(self) -> dict[str, Any]:
        """As `load_state_dict` takes it, also in another process; saved with pickle."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Goes on from what `state_dict` returned."""


def states_of(what: str, values: Mapping[str, Stateful]) -> dict[str, Any]:
    """The states of some objects, by their names."""
    states = {}
    for name, value in values.items():
        with UserCode(f"state_dict() of {what}[{name!r}]", FAILED):
            states[name] = value.state_dict()
    return states


def packed_states(what: str, states: Mapping[str, Any]) -> dict[str, bytes]:
    """States as they are now; errors as of `packed`."""
    return {name: packed(state, f"{what}[{name!r}]") for name, state in states.items()}


def give(value: Stateful, state: Any, what: str) -> None:
    """Lets an object go on from a state."""
    try:
        with UserCode(f"load_state_dict() of {what}", FAILED):
            value.load_state_dict(state)
    except ModelError as error:
        if isinstance(error.__cause__, BadCheckpoint | Misuse):  # a loader of ours says what is wrong
            raise error.__cause__ from None
        raise


def shown_states(states: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """What is in some states, key by key, as short texts that are equal where that is."""
    return {
        name: {str(key): shown(value) for key, value in state.items()}
        if isinstance(state, Mapping)
        else {"it": shown(state)}
        for name, state in states.items()
    }


def require_equal(what: str, of_ranks: Sequence[tuple[int, Mapping[str, Mapping[str, str]]]], instead: str) -> None:
    """Passes if ranks have the same states under the same names.

    Raises
    ------
    Misuse
        If they have not; ``instead`` is where such states belong.
    """
    first, expected = of_ranks[0] if of_ranks else (0, {})
    for rank, states in of_ranks[1:]:
        for name in sorted({*expected, *states}):
            state, different = expected.get(name), states.get(name)
            if state == different:
                continue
            if state is None or different is None:
                without = first if state is None else rank
                raise Misuse(
                    f"{what}= has {name!r} on rank {rank if state is None else first}, and not on rank {without}"
                )
            key = next(key for key in sorted({*state, *different}) if state.get(key) != different.get(key))
            raise Misuse(
                f"{what}[{name!r}] is not the same on rank {first} and on rank {rank}: {key} is "
                f"{state.get(key, 'absent')} and {different.get(key, 'absent')}; {instead} keeps what differs"
            )
