"""AMDP runs the orders of its authors' code, and costs what these cost.

Chen, Wu and Yu, ICML 2026; Vinsmoke86/AMDP, async_schedules.py: what each worker does in a round of D micro-batches,
for the two sizes that are there. F = 1, B = 2 unless a test says otherwise, communication free.
"""

from collections.abc import Iterator
from fractions import Fraction
from itertools import cycle

import pytest

from chimera_ir.cost.durations import Costs
from tests.literature.test_asynchronous import streamed
from tests.literature.test_facts import EQUAL, PAPER, schedule
from tests.repeatable import also

ROUNDS = {
    4: ["F0 F2 B2' F1 B1 F3 B3 B0", "B2' F0 F1 F2 F3 B1 B0 B3", "B3' F1 F0 F3 F2 B0 B1 B2", "F1 F3 B3' F0 B0 F2 B2 B1"],
    8: [
        "F0 F4 B4' F1 F2 F5 F6 F3 B3 F7 B7 B2 B1 B6 B5 B0",
        "B4' F0 F1 F4 F5 F2 F3 F6 F7 B3 B2 B7 B6 B1 B0 B5",
        "B5' F1 F0 F5 F4 F3 F2 F7 F6 B2 B3 B6 B7 B0 B1 B4",
        "F1 F5 B5' F0 F3 F4 F7 F2 B2 F6 B6 B3 B0 B7 B4 B1",
        "F2 F6 B6' F3 F0 F7 F4 F1 B1 F5 B5 B0 B3 B4 B7 B2",
        "B6' F2 F3 F6 F7 F0 F1 F4 F5 B1 B0 B5 B4 B3 B2 B7",
        "B7' F3 F2 F7 F6 F1 F0 F5 F4 B0 B1 B4 B5 B2 B3 B6",
        "F3 F7 B7' F2 F1 F6 F5 F0 B0 F4 B4 B1 B2 B5 B6 B3",
    ],
}
"""The lanes of the workers in a round; a micro-batch with ' is of the round before."""
SIZES = also([(4, 4), (4, 8), (4, 16), (8, 8), (8, 24), (12, 12)], [(12, 24), (16, 16)])
Lane = list[tuple[str, int]]


def lanes(workers: int, rounds: int) -> Iterator[Lane]:
    """What each worker does in so many rounds, the last of which is brought to its end."""
    for text in ROUNDS[workers]:
        words = [(word[0], int(word[1]) - workers * word.endswith("'")) for word in text.split()]
        lane = [(letter, micro + workers * number) for number in range(rounds + 1) for letter, micro in words]
        yield [(letter, micro) for letter, micro in lane if 0 <= micro < workers * rounds]


def stage_of(worker: int, micro: int, workers: int) -> int:
    """The stage of a micro-batch's direction on a worker: 0 is down, 1 up, 2 down from the fifth worker, .."""
    direction = micro % (workers // 2)
    down, up = worker - 2 * direction, 2 * direction + 1 - worker
    return (up if direction % 2 else down) % workers


@pytest.mark.parametrize(("D", "N"), [(D, N) for D, N in SIZES if D in ROUNDS])
def test_workers_do_what_the_authors_code_does(D: int, N: int) -> None:
    own = schedule("amdp", D=D, N=N)
    for worker, (lane, expected) in enumerate(zip(own.lanes, lanes(D, own.header.micro_batches // D), strict=True)):
        assert [(each.kind.letter, *each.micros) for each in lane] == expected
        assert [each.stage for each in lane] == [stage_of(worker, micro, D) for _, micro in expected]


@pytest.mark.parametrize("D", ROUNDS)
def test_a_round_of_the_authors_orders_takes_what_a_round_compiles_to(D: int) -> None:
    """Simulated from these lanes alone: each operation as soon as its worker and what it needs are there."""
    rounds, ends, free = 8, dict[tuple[str, int, int], int](), [0] * D
    left = list(lanes(D, rounds))
    for worker in cycle(range(D)):
        while left[worker]:
            letter, micro = left[worker][0]
            stage = stage_of(worker, micro, D)
            before = stage - 1 if letter == "F" else stage + 1
            if 0 <= before < D and (letter, micro, before) not in ends:
                break
            start = max(free[worker], ends.get((letter, micro, before), 0))
            free[worker] = ends[letter, micro, stage] = start + " FB".index(letter)
            del left[worker][0]
        if not any(left):
            break
    period = 3 * D + 1
    steady = range(3 * D, (rounds - 2) * D)
    assert {ends["B", micro + D, 0] - ends["B", micro, 0] for micro in steady} == {period}
    assert streamed("amdp", D=D, N=D).makespan == period


@pytest.mark.parametrize(("D", "N"), SIZES)
def test_a_worker_idles_for_a_slot_in_each_round(D: int, N: int) -> None:
    figures = streamed("amdp", D=D, N=N)
    assert figures.makespan == 3 * N + N // D
    assert figures.bubble_ratio == Fraction(1, 3 * D + 1)
    assert streamed("amdp", EQUAL, D=D, N=N).bubble_ratio == 0


@pytest.mark.parametrize(("D", "N"), SIZES)
def test_two_versions_of_half_of_the_stages_and_about_d_activations_are_kept(D: int, N: int) -> None:
    figures = streamed("amdp", D=D, N=N)
    assert figures.weights == (D,) * D
    assert figures.activations == (D - 1, D, D, D - 1) * (D // 4)


@pytest.mark.parametrize(("D", "N"), [(2, 2), (2, 6), *SIZES])
def test_only_the_first_d_micro_batches_after_an_update_are_late_and_by_one(D: int, N: int) -> None:
    """The abstract: a bounded number of micro-batches, and within one step."""
    for lane in schedule("amdp", D=D, N=N).lanes:
        for each in lane:
            update, place = divmod(each.micros[0], N)
            assert each.version == max(0, update - (place < D))
    assert streamed("amdp", D=D, N=N).staleness == (1,) * D


@pytest.mark.parametrize("costs", [PAPER, EQUAL, Costs(F=Fraction(2, 3), B=Fraction(7, 5))])
def test_on_two_workers_it_is_the_order_of_2bw(costs: Costs) -> None:
    own, other = schedule("amdp", D=2, N=4), schedule("pipedream_2bw", D=2, N=4)
    assert own.header.micro_batches == other.header.micro_batches
    for mine, theirs in zip(own.lanes, other.lanes, strict=True):
        words, known = ([(each.kind, each.micros, each.stage) for each in lane] for lane in (mine, theirs))
        assert words == known
    assert streamed("amdp", costs, D=2, N=4).makespan == 4 * (costs["F"] + costs["B"])
