"""The loss of an update: summed over ranks, read whenever, by nobody else's leave."""

import math
from functools import partial

import pytest

from chimera_runtime.errors import PeerLost, RanksDiffer
from chimera_runtime.ranks.agreement import TERMS
from chimera_runtime.ranks.world import World
from chimera_runtime.update.updates import Clearings, Outcomes
from chimera_runtime.values.losses import Tally
from tests.unit.runtime.thread_ranks import alone_job, job, together, worlds


def outcomes_of(world: World, counted: bool, names: tuple[str, ...] = ()) -> Outcomes:
    return Outcomes(world.control_group, world.job, world.read, counted=counted, names=names)


def test_the_loss_is_the_mean_over_all_ranks_and_the_same_on_each(alone: World) -> None:
    with worlds(alone, job()) as ranks:
        outcomes = together(
            [
                partial(outcomes_of(world, False).launch, 7, Tally(loss, 2))
                for world, loss in zip(ranks, (0.0, 10.0), strict=True)
            ]
        )
        assert [outcome.update for outcome in outcomes] == [7, 7]
        assert [outcome.loss for outcome in outcomes] == [2.5, 2.5]
        assert [outcome.loss for outcome in outcomes] == [2.5, 2.5], "again"


def test_it_is_read_long_after_in_any_order(alone: World) -> None:
    with worlds(alone, job()) as ranks:

        def updates(world: World) -> list[float]:
            outcomes = outcomes_of(world, False)
            launched = [outcomes.launch(update, Tally(float(update), 0.5)) for update in range(20)]
            return [outcome.loss for outcome in reversed(launched)]

        assert together([partial(updates, world) for world in ranks]) == [[2.0 * u for u in reversed(range(20))]] * 2


def test_what_nobody_reads_is_let_go_once_it_is_over(alone: World) -> None:
    with worlds(alone, job()) as ranks:

        def updates(world: World) -> int:
            outcomes = outcomes_of(world, False)
            for update in range(200):
                outcomes.launch(update, Tally())
                world.control_group.barrier("for the other one")
            return len(outcomes._under_way)

        assert max(together([partial(updates, world) for world in ranks])) < 10


def test_sums_under_way_are_waited_for_at_the_end(alone: World) -> None:
    with worlds(alone, job()) as ranks:

        def ended(world: World) -> list[bool]:
            outcomes = outcomes_of(world, False)
            launched = [outcomes.launch(update, Tally(1.0, 1)) for update in range(3)]
            outcomes.settle()
            return [outcome.is_there for outcome in launched]

        assert together([partial(ended, world) for world in ranks]) == [[True] * 3] * 2


def test_a_rank_that_never_ends_its_step_is_given_up(alone: World) -> None:
    with worlds(alone, job(), timeout=0.05) as (first, _):
        outcome = outcomes_of(first, False).launch(0, Tally(1.0, 1))
        assert not outcome.is_there
        with pytest.raises(PeerLost, match="for the loss of a step: rank 1: no answer within"):
            _ = outcome.loss


@pytest.mark.parametrize(("counted", "weights"), [(True, [5.0, 5.0]), (False, [1.0, 1.0])])
def test_a_mini_batch_weighs_its_count_and_one_if_the_loss_is_a_mean(
    alone: World, counted: bool, weights: list[float]
) -> None:
    with worlds(alone, job()) as ranks:
        outcomes = together(
            [
                partial(outcomes_of(world, counted).launch, 0, Tally(6.0, n))
                for world, n in zip(ranks, (0, 5), strict=True)
            ]
        )
        assert [outcome.weight for outcome in outcomes] == weights
        assert [outcome.loss for outcome in outcomes] == [12 / 5, 12 / 5]


def test_the_loss_of_nothing_that_counts_is_not_a_number(alone: World) -> None:
    with worlds(alone, alone_job()) as (world,):
        assert math.isnan(outcomes_of(world, True).launch(0, Tally(0.0, 0.0)).loss)


def test_auxiliary_losses_are_the_same_on_all_ranks_whoever_has_them(alone: World) -> None:
    with worlds(alone, job()) as ranks:
        tallies = Tally(6.0, 4.0), Tally(auxiliary={"b": 2.0})
        outcomes = together(
            [
                partial(outcomes_of(world, False, ("a", "b")).launch, 0, tally)
                for world, tally in zip(ranks, tallies, strict=True)
            ]
        )
        assert [outcome.auxiliary for outcome in outcomes] == [{"a": 0.0, "b": 0.5}] * 2
        assert [outcome.loss for outcome in outcomes] == [1.5] * 2


def test_a_rank_that_waits_for_nothing_else_waits_for_the_sums(alone: World) -> None:
    """One that holds no stage launches sums alone: no more than one is under way."""
    with worlds(alone, job(), timeout=0.2) as (first, _):
        outcomes = outcomes_of(first, False)
        outcomes.launch(0, Tally())
        with pytest.raises(PeerLost, match="for the loss of a step"):
            outcomes.launch(1, Tally())


def test_ranks_hear_what_loops_did_to_gradients_and_refuse_together_what_is_unknown(alone: World) -> None:
    cleared, kept, unknown = (Clearings(*(i == place for i in range(3))) for place in range(3))
    with worlds(alone, job(workers=3, stages=3, placement=((0, 1, 2),), links=())) as ranks:

        def updates(world: World, last: Clearings) -> tuple[Clearings, str]:
            outcomes = outcomes_of(world, False)
            first = outcomes.launch(0, Tally(), kept if last is cleared else last)
            second = outcomes.launch(1, Tally(), last)
            with pytest.raises(RanksDiffer) as refused:
                second.settle()
            return first.clearings, str(refused.value)[:32]

        heard = together([partial(updates, *of) for of in zip(ranks, (cleared, kept, unknown), strict=True)])
        assert heard == [(Clearings(False, True, True), "update 2: the loop had cleared t")] * 3


def test_all_ranks_hear_with_the_same_update_that_one_has_asked_to_stop(alone: World) -> None:
    """That of the next update: the losses are as they would have been."""
    with worlds(alone, job()) as ranks:

        def updates(world: World) -> list[tuple[float, bool]]:
            outcomes = outcomes_of(world, False, ("a",))
            launched = []
            for update in range(4):
                if (world.place.rank, update) == (1, 2):
                    outcomes.asked_to_stop = True
                launched.append(outcomes.launch(update, Tally(1.0, 0.5, {"a": 1.0})))
            return [(outcome.loss, outcome.is_last) for outcome in reversed(launched)]

        expected = [(2.0, True), (2.0, True), (2.0, False), (2.0, False)]
        assert together([partial(updates, world) for world in ranks]) == [expected] * 2


def test_all_ranks_see_a_difference_at_the_next_launch_where_nobody_reads_the_loss(alone: World) -> None:
    with worlds(alone, job()) as ranks:

        def updates(world: World) -> tuple[int, str]:
            outcomes = outcomes_of(world, False)
            rank = world.place.rank
            outcomes.facts_of = lambda update: {TERMS: (rank if update == 2 else 7, lambda: {"scale": f"{rank}"})}
            for update in range(9):
                try:
                    outcomes.require_agreement()
                    outcomes.launch(update, Tally(1.0, 1))
                except RanksDiffer as error:
                    with pytest.raises(RanksDiffer):
                        outcomes.require_agreement()
                    return update, str(error)
            return -1, ""

        (first, words), other = together([partial(updates, world) for world in ranks])
        assert (first, words) == other
        assert first == 3
        assert words.startswith(
            "update 3: ranks differ in what they give step (scale is 0 on rank 0 and 1 on rank 1): "
        )


def test_who_reads_the_loss_sees_it_at_once_and_again(alone: World) -> None:
    with worlds(alone, job()) as ranks:

        def read(world: World) -> None:
            outcomes = outcomes_of(world, False)
            outcomes.facts_of = lambda _update: {TERMS: (world.place.rank, dict)}
            outcome = outcomes.launch(0, Tally(1.0, 1))
            for _ in range(2):
                with pytest.raises(RanksDiffer):
                    _ = outcome.loss
            with pytest.raises(RanksDiffer):
                outcomes.explain()

        together([partial(read, world) for world in ranks])


def test_facts_that_are_the_same_change_no_loss(alone: World) -> None:
    with worlds(alone, job()) as ranks:

        def read(world: World) -> tuple[float, dict[str, float], bool]:
            outcomes = outcomes_of(world, False, ("a",))
            outcomes.facts_of = lambda update: {TERMS: (update, dict)}
            outcome = outcomes.launch(3, Tally(1.0, 0.5, {"a": 3.0}))
            outcomes.compare({TERMS: (5, dict)}, "after update 4")
            return outcome.loss, outcome.auxiliary, outcome.is_last

        assert together([partial(read, world) for world in ranks]) == [(2.0, {"a": 6.0}, False)] * 2
