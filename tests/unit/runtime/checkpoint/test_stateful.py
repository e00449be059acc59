"""Objects with a state: what differs between ranks is named; an error of theirs is the user's, one of ours is not."""

from typing import Any

import pytest

from chimera_runtime.blame import ModelError
from chimera_runtime.checkpoint.content import give, packed_states, require_equal, shown_states, states_of
from chimera_runtime.errors import BadCheckpoint, Misuse


class Thing:
    def __init__(self, error: Exception | None = None) -> None:
        self.state, self._error = {"scale": 2.0}, error

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._error is not None:
            raise self._error
        self.state = state


def test_states_are_said_by_name_and_taken() -> None:
    assert states_of("shared", {"a": Thing()}) == {"a": {"scale": 2.0}}
    thing = Thing()
    give(thing, {"scale": 1.0}, "shared['a']")
    assert thing.state == {"scale": 1.0}
    with pytest.raises(Misuse, match=r"shared\['a'\] cannot be saved"):
        packed_states("shared", {"a": lambda: None})


def test_errors_of_an_object_are_told_as_such() -> None:
    with pytest.raises(ModelError, match=r"load_state_dict\(\) of shared\['a'\]: .*ValueError: no"):
        give(Thing(ValueError("no")), {}, "shared['a']")
    with pytest.raises(BadCheckpoint, match=r"^another length$"):
        give(Thing(BadCheckpoint("another length")), {}, "shared['a']")


def test_what_differs_is_named_with_its_ranks() -> None:
    one, other = shown_states({"a": {"scale": 2.0, "n": 1}}), shown_states({"a": {"scale": 4.0, "n": 1}})
    require_equal("shared", [(0, one), (2, one)], "of_rank=")
    with pytest.raises(Misuse) as refused:
        require_equal("shared", [(0, one), (1, one), (2, other)], "of_rank=")
    assert str(refused.value) == (
        "shared['a'] is not the same on rank 0 and on rank 2: scale is 2.0 and 4.0; of_rank= keeps what differs"
    )
    assert shown_states({"a": [1]}) != shown_states({"a": [2]})
