"""Bytes that go to the host: what the probe measures of stages that have moves."""

from typing import Any

import pytest
from torch import nn

from chimera_runtime.program.kept_bytes import MovedBytes
from chimera_runtime.ranks.world import World
from chimera_runtime.stage import saved_tensors
from tests.unit.runtime.start.test_probe import WIDTH, found, linear, then


def test_the_bytes_that_go_to_the_host_are_measured_of_the_stages_that_have_moves(
    alone: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Profiles tell the same from sizes alone: what is saved, without inputs and outputs."""
    monkeypatch.setattr(saved_tensors, "SMALLEST", 1)
    turning, tensor = then(lambda y: y.sin().cos().tanh()), 3 * WIDTH * 8
    result = found(alone, turning, turning, linear, moving=(0, 1), measures=True)
    assert result.moved_bytes == {0: MovedBytes(2 * tensor), 1: MovedBytes(2 * tensor)}
    for stage, footprint in enumerate(result.footprints[:2]):
        is_fed = stage > 0
        assert (
            footprint.activations_with_inputs(is_fed) - footprint.resident(is_fed)
            == result.moved_bytes[stage].activations
        )
    assert found(alone, turning, turning).moved_bytes == {}


def test_of_what_is_kept_between_halves_gradients_and_the_graph_below_them_move(
    alone: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stage 1 keeps its input and what it received; above its first layer, one tensor and one gradient are left.

    Profiles tell the same from sizes alone.
    """
    monkeypatch.setattr(saved_tensors, "SMALLEST", 1)
    tensor = 3 * WIDTH * 8

    class Deep(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    options: dict[str, Any] = {"moving_operands": (1,), "split_backward": (1,), "measures": True}
    result = found(alone, linear, Deep, linear, **options)
    assert result.moved_bytes == {1: MovedBytes(0, 2 * tensor)}
    footprint = result.footprints[1]
    halfway = footprint.activations_with_inputs(True) - footprint.released + footprint.operands
    assert halfway - footprint.resident_operands(True, footprint.received_operands) == 2 * tensor
