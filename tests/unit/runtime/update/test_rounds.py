"""Rounds of an update: which programs make a number of micro-batches, and what ranks say of their own number."""

from itertools import combinations_with_replacement
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from chimera_runtime.data.feed import UNKNOWN
from chimera_runtime.errors import Misuse, RanksDiffer
from chimera_runtime.program.job import Place
from chimera_runtime.program.numbering import rounds_of
from chimera_runtime.update.rounds import SumsAlone, agree_on_numbers, remarks_on


@pytest.mark.parametrize("programs", [(1,), (1, 4), (1, 2, 4, 8), (3, 5), (4, 6, 9), (2, 3, 7)])
def test_a_number_is_made_of_as_few_programs_as_can_be(programs: tuple[int, ...]) -> None:
    for number in range(1, 25):
        made = (
            chosen
            for count in range(1, number + 1)
            for chosen in combinations_with_replacement(programs, count)
            if sum(chosen) == number
        )
        fewest = next(made, None)
        if fewest is None:
            with pytest.raises(Misuse, match=f"^{number} micro-batches cannot be made of programs for "):
                rounds_of(number, programs)
            continue
        rounds = rounds_of(number, programs)
        numbers = [each.number for each in rounds]
        assert (len(numbers), sum(numbers)) == (len(fewest), number)
        assert numbers == sorted(numbers, reverse=True)
        assert [each.start for each in rounds] == [sum(numbers[:place]) for place in range(len(numbers))]
        assert [each.is_last for each in rounds] == [*[False] * (len(numbers) - 1), True]


def test_a_copy_without_micro_batches_has_one_round_of_none() -> None:
    assert rounds_of(0, (2, 4)) == ((0, 0, True),)


def test_only_a_number_without_a_program_gets_a_remark() -> None:
    assert remarks_on([rounds_of(4, (1, 4)), rounds_of(0, (1, 4))]) == []
    (remark,) = remarks_on([rounds_of(4, (1, 4)), rounds_of(6, (1, 4)), rounds_of(5, (1, 4))])
    assert remark.startswith("an update of 6 micro-batches runs the programs for 4, 1, 1, one after the other")


def agreed(copies: int, told: list[int], layout: str = "pipeline") -> tuple[int, ...]:
    """What ranks of two workers agree on if each of them tells a number."""
    place = Place(0, 2, copies, layout)

    def reduce(numbers: torch.Tensor, _operation: str) -> None:
        numbers += torch.tensor([0, *(number - UNKNOWN for number in told[1:])])

    control: Any = SimpleNamespace(place=place, reduce=reduce)
    return agree_on_numbers(control, told[0])


def test_ranks_agree_on_the_number_of_each_copy() -> None:
    assert agreed(1, [3, 3]) == (3,)
    assert agreed(2, [3, 3, 0, 0]) == (3, 0)
    assert agreed(2, [3, 0, 3, 0], "replica") == (3, 0)
    assert agreed(2, [UNKNOWN, 5, 7, UNKNOWN]) == (5, 7)


def test_ranks_that_do_not_agree_are_named() -> None:
    with pytest.raises(RanksDiffer, match=r"^ranks 2 and 3 of copy 1 are given 5 and 6 micro-batches in one step: "):
        agreed(2, [4, 4, 5, 6])
    with pytest.raises(Misuse, match=r"^what the ranks of copy 1 are given does not show how many"):
        agreed(2, [4, 4, UNKNOWN, UNKNOWN])
    with pytest.raises(Misuse, match=r"^no copy has a micro-batch in this step"):
        agreed(2, [0, 0, 0, 0])


def test_a_round_without_micro_batches_makes_the_sums_of_a_script_in_its_order() -> None:
    notes: list[str] = []

    class Group:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getattr__(self, method: str) -> Any:
            return lambda *_arguments: notes.append(f"{method} {self.name}")

    def update(lane: Any) -> None:
        first, shared, received = lane.stage(3), lane.tie(0, 3), lane.incoming(2, 3, worker=1)
        for micro in range(4):
            received.irecv(micro, into=0)
            first.forward(micro, received.take(micro), lane.target(micro))
            first.backward(micro, (*received.take(micro), *first.input_gradients(micro)))  # as of a graph
        shared.all_reduce()
        first.all_reduce()
        for group in (first, shared):
            group.wait_all_reduce()
            group.step()

    lane = SimpleNamespace(stage=lambda number: Group(f"s{number}"), tie=lambda *stages: Group(f"{stages}"))
    update(SumsAlone(lane))
    sums = ["all_reduce (0, 3)", "all_reduce s3"]
    assert notes == [*sums, "wait_all_reduce s3", "step s3", "wait_all_reduce (0, 3)", "step (0, 3)"]
