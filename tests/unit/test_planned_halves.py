"""Schemes with split backwards in a plan: ranked where the profile has their times, and held against memory."""

import pytest

from tests.unit.test_plan import FULL, Plan, cluster, found, plan, profile

__all__ = ["plan"]


HALVES = 'input_gradient = "10 ms"\nweight_gradient = "10 ms"'


def test_split_backwards_are_ranked_where_the_profile_has_their_times(plan: Plan) -> None:
    """D = 4, N = 8 without messages: 1F1B takes 3 (N + D - 1) times 10 ms, ZB-H1 3 N + D - 1 of them."""
    asked = "--mini-batch", 8, "--json", "--scheme", "dapple", "--scheme", "zb_h1"
    without = found(plan(profile((4,), (1,)), cluster(4), *asked))
    assert [choice["scheme"] for choice in without["choices"]] == ["dapple"]
    assert {left["scheme"] for left in without["left_out"]} >= {"zb_h1"}
    ranked = found(plan(profile((4,), (1,), more=HALVES), cluster(4), *asked))["choices"]
    assert [(choice["scheme"], choice["T"]) for choice in ranked] == [
        ("zb_h1", pytest.approx(0.27)),
        ("dapple", pytest.approx(0.33)),
    ]


@pytest.mark.parametrize(
    ("entries", "kept"), [("", 0), ('released = "1 MB"', -3 * (FULL - 8)), ('operands = "3 MB"', 12 * FULL)]
)
def test_what_is_kept_between_the_halves_decides_whether_a_choice_fits(plan: Plan, entries: str, kept: int) -> None:
    """Of zb_h1 with D = 4 each worker keeps 4 micro-batches of 1 MB, 8 bytes of which are in a receive buffer.

    On the last worker all 4 may be between I and W, or 3 of them beside one that waits for I.
    """
    asked = "--mini-batch", 8, "--json", "--scheme", "zb_h1", "--no-recompute"
    whole = found(plan(profile((4,), (1,), more=HALVES), cluster(4), *asked))["choices"]
    ours = found(plan(profile((4,), (1,), more=f"{HALVES}\n{entries}"), cluster(4), *asked))["choices"]
    assert ours[0]["memory"][3] - whole[0]["memory"][3] == kept


def test_a_first_stage_that_has_all_in_its_second_half_is_no_slower_in_equation_1(plan: Plan) -> None:
    """All backwards take 20 ms, and on the other stages both halves of them 10: so does the slowest stage."""
    asked = "--mini-batch", 8, "--json", "--scheme", "zb_h1"
    even = profile((4,), (1,), more=HALVES)
    first, rest = even.split(HALVES, 1)
    uneven = (
        first + HALVES.replace('input_gradient = "10 ms"', 'input_gradient = "0 s"').replace("10 ms", "20 ms") + rest
    )
    (of_even,), (of_uneven,) = (found(plan(text, cluster(4), *asked))["choices"] for text in (even, uneven))
    assert (of_uneven["T"], of_even["T"]) == (pytest.approx(0.27), pytest.approx(0.27))
