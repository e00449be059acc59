"""The entries of a checkpoint: what an optimizer keeps of a parameter goes there and back, of whatever type."""

from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from chimera_runtime.checkpoint.content import (
    absent,
    entries_of,
    flat,
    names_in,
    packed_state,
    unpacked_state,
    value_of,
)
from chimera_runtime.errors import Misuse
from chimera_runtime.state.state import packed


def test_the_state_of_a_parameter_comes_back_with_its_types() -> None:
    kept: dict[Any, Any] = {"step": 3, "exp": torch.ones(2), "parts": [torch.zeros(1)], "names": {"a": (1, "b")}}
    stored = packed_state(kept)
    assert isinstance(stored["exp"], torch.Tensor)
    assert all(isinstance(value, bytes) for key, value in stored.items() if key != "exp")
    assert unpacked_state(stored) == kept
    odd = {0: torch.ones(1), "x": None}
    assert unpacked_state(packed_state(odd)) == odd
    with pytest.raises(Misuse, match="the optimizer's made cannot be saved"):
        packed_state({"made": lambda: None})


def test_values_of_either_format_are_read() -> None:
    assert value_of(packed({"a": 1}, "it")) == value_of(({"a": 1},)) == {"a": 1}


def test_paths_are_those_of_the_nested_state() -> None:
    there = Metadata(
        {"model.a.b": BytesStorageMetadata(), "extra.0/a._extra_state": BytesStorageMetadata()},
        planner_data={"model.a.b": ("model", "a.b"), "extra.0/a._extra_state": ("extra", "0/a._extra_state")},
    )
    assert [path for path, _ in entries_of(there)] == [("model", "a.b"), ("extra", "0/a._extra_state")]
    assert names_in(there, "model") == {"a.b"}
    assert names_in(there, "extra") == {"a._extra_state"}
    assert [*flat({"a": {"b": 1}, "c": {}})] == [(("a", "b"), 1)]
    assert absent(("extra", "0/a"), {}) == "it has no entry of a state_dict 0/a, which this model has"
