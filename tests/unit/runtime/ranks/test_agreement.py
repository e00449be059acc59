"""What ranks compare: a difference is found on all of them, by its kind, and told with the values of each."""

from functools import partial

import pytest

from chimera_runtime.errors import RanksDiffer
from chimera_runtime.program.job import Job
from chimera_runtime.ranks import agreement
from chimera_runtime.ranks.agreement import POSITION, STEPS, TERMS, Fact, FactComparison, Facts, settings_of, weights_of
from chimera_runtime.ranks.world import World
from tests.unit.runtime.thread_ranks import alone_job, job, together, worlds

BOTH = job(placement=((0, 1), (1, 0)))


def fact(number: int, **text: str) -> Fact:
    return number, lambda: text


def summed(of: list[FactComparison], facts: list[Facts]) -> list[float]:
    added = [one.numbers(known) for one, known in zip(of, facts, strict=True)]
    return [sum(numbers) for numbers in zip(*added, strict=True)]


def test_weight_groups_that_several_ranks_hold_are_shared(alone: World) -> None:
    with worlds(alone, job()) as (world, _), worlds(alone, BOTH) as (other, _), worlds(alone, alone_job()) as (single,):
        assert FactComparison(world.control_group, world.job).shared == ()
        assert FactComparison(other.control_group, other.job).shared == ((0,), (1,))
        assert (
            FactComparison(single.control_group, single.job).shared,
            FactComparison(single.control_group, single.job).numbers({TERMS: fact(1)}),
        ) == ((), [])


@pytest.mark.parametrize("key", [TERMS, STEPS, POSITION, ("data", 0, 1), settings_of((1,)), weights_of((0,))])
def test_a_difference_shows_by_its_kind_and_what_is_the_same_does_not(alone: World, key: agreement.Key) -> None:
    with worlds(alone, BOTH) as ranks:
        both = [FactComparison(world.control_group, world.job) for world in ranks]
        assert both[0].differing(summed(both, [{key: fact(77)}, {key: fact(77)}])) == []
        assert both[0].differing(summed(both, [{key: fact(77)}, {}])) == [], "the other one knows nothing of it"
        assert both[0].differing(summed(both, [{key: fact(77)}, {key: fact(78)}])) == [key]
        assert both[0].differing(summed(both, [{key: fact(0)}, {key: fact(1)}])) == [key]


def test_variants_of_what_one_rank_alone_uses_are_harmless(alone: World) -> None:
    """Each rank may draw its own augmentation of inputs that the first stage alone reads, unless targets go with it."""
    inputs, targets, keywords = (("data", 0, part) for part in range(3))

    def differing(job_: Job, *keys: agreement.Key) -> list[agreement.Key]:
        with worlds(alone, job_) as ranks:
            both = [FactComparison(world.control_group, world.job) for world in ranks]
            return both[0].differing(summed(both, [{key: fact(77 + n) for key in keys} for n in range(2)]))

    assert differing(job(), inputs) == differing(job(), targets) == []
    assert differing(job(), inputs, targets) == [inputs, targets]
    assert differing(job(), keywords) == [keywords], "any stage may take them"
    assert differing(BOTH, inputs) == [inputs]
    assert differing(job(), inputs, STEPS) == [STEPS]


def test_sums_over_thousands_of_ranks_are_exact(alone: World) -> None:
    with worlds(alone, BOTH) as (world, _):
        one = FactComparison(world.control_group, world.job)
        for digest in (1, 2**19 + 1, 2**20 - 1):
            numbers = one.numbers({TERMS: fact(digest)})
            other = one.numbers({TERMS: fact(12345)})
            assert one.differing([4096 * number for number in numbers]) == []
            assert one.differing([4095 * n + m for n, m in zip(numbers, other, strict=True)]) == [TERMS]


def test_all_ranks_say_the_same_with_the_values_of_each(alone: World) -> None:
    with worlds(alone, BOTH, copies=2) as ranks:
        key = settings_of((1,))

        def said(world: World) -> str:
            rate = "0.2" if world.place.rank == 2 else "0.1"
            return str(
                FactComparison(world.control_group, world.job).error(
                    1, "update 7", [key], {key: fact(0, lr=rate, momentum="0.9")}
                )
            )

        messages = together([partial(said, world) for world in ranks])
        assert {*messages} == {
            "update 7: optimizers of different ranks step stage 1 in different ways (lr is 0.1 on ranks 0, 1 and 3 and "
            "0.2 on rank 2): give what several ranks hold the same optimizer with the same settings on all of them, "
            "and step schedulers on every rank"
        }


def test_data_are_compared_within_a_copy(alone: World) -> None:
    with worlds(alone, BOTH, copies=2) as ranks:
        key = ("data", 1, 0)

        def said(world: World) -> str:
            facts = {key: fact(0, sample=f"{world.place.rank}")} if world.place.copy else {}
            return str(FactComparison(world.control_group, world.job).error(1, "update 7", [key], facts))

        (message,) = {*together([partial(said, world) for world in ranks])}
        assert "ranks of copy 1 are given different inputs (sample is 2 on rank 2 and 3 on rank 3)" in message


def test_a_rank_that_does_not_answer_is_named(alone: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_PATIENCE", 0.05)
    with worlds(alone, BOTH) as (world, _):
        error = FactComparison(world.control_group, world.job).error(
            1, "update 7", [TERMS], {TERMS: fact(0, **{agreement.SCALE: "8.0"})}
        )
        assert isinstance(error, RanksDiffer)
        assert str(error) == (
            "update 7: ranks differ in what they give step (scale of the GradScaler is 8.0 on rank 0, no answer from "
            "rank 1): call pipe.unscale_(scaler, optimizer) on every rank before scaler.step(optimizer)"
        )
