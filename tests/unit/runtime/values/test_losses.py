"""Sums and counts of losses, and what an update may count before that is known."""

import math

import pytest
import torch

from chimera_runtime.values.losses import Tally, added, as_pair, expected_count


def test_tallies_add_up_and_have_a_mean() -> None:
    tally = added([Tally(1.0, 2.0), Tally(), Tally(5.0, 1.0)])
    assert tally == Tally(6.0, 3.0) == Tally.of(tally.numbers())
    assert tally.mean == 2.0
    assert math.isnan(added([]).mean)


def test_auxiliary_losses_add_up_by_name_and_are_divided_by_the_same_count() -> None:
    tally = added([Tally(0.0, 2.0), Tally(auxiliary={"a": 1.0}), Tally(1.0, 2.0, {"a": 5.0, "b": 2.0})])
    assert tally.auxiliary_means == {"a": 1.5, "b": 0.5}
    assert Tally.of(tally.numbers(["a", "b"]), ["a", "b"]) == tally
    assert tally.numbers(["b", "c"]) == [1.0, 4.0, 2.0, 0.0]


@pytest.mark.parametrize("count", [5, 5.0, torch.tensor(5), torch.tensor([[5.0]], requires_grad=True)])
def test_a_count_is_a_number_in_float64_whatever_it_was(count: object) -> None:
    total, number = as_pair((torch.tensor(2.0), count))
    assert total == 2.0
    assert number is not None
    assert (number.tolist(), number.dtype, number.requires_grad) == ([5.0], torch.float64, False)
    mean = torch.tensor(2.0)
    assert as_pair(mean) == (mean, None)


@pytest.mark.parametrize(("count", "expected"), [(10.0, 64.0), (0.0, 8.0), (12.0, 128.0), (0.5, 8.0)])
def test_an_update_is_expected_to_count_a_power_of_two(count: float, expected: float) -> None:
    """To divide by it rounds nothing."""
    assert expected_count(count, 8) == expected
    assert expected_count(None, 8) is None
