"""Differences that count, tolerances, and verdicts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from chimera_runtime.check.compare import (
    LARGEST_TOLERANCE,
    TOLERANCES,
    Deviation,
    RankResult,
    ResultsOfRanks,
    Verdict,
    compare,
    tolerance,
)
from chimera_runtime.check.reference import Training, distance
from chimera_runtime.errors import CheckFailed
from chimera_runtime.program.rank_facts import Group
from chimera_runtime.ranks.agreement import Enquiry
from chimera_runtime.ranks.world import World
from chimera_runtime.values.losses import Tally
from tests.unit.runtime.models import reference
from tests.unit.runtime.thread_ranks import alone_job, together, worlds


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_tolerance_grows_with_the_sums_and_never_lets_a_missing_half_or_a_wrong_sign_pass(dtype: torch.dtype) -> None:
    bounds = [tolerance(dtype, summands) for summands in (1, 16, 256, 2**30)]
    assert bounds == sorted(bounds)
    assert bounds[0] == TOLERANCES[dtype]
    assert bounds[-1] <= LARGEST_TOLERANCE <= 0.5
    if dtype == torch.float64:
        assert bounds[:3] == [1e-12] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("summands", [2, 8, 64])
def test_sums_in_another_order_stay_within_the_tolerance(dtype: torch.dtype, summands: int) -> None:
    """Sums in halves that are added at last, as by two replicas, against one after another."""
    torch.manual_seed(summands)
    parts = torch.randn(summands, 10_000).to(dtype)

    def total(some: torch.Tensor) -> torch.Tensor:
        added = torch.zeros_like(some[0])
        for one in some:
            added += one
        return added

    first, second = parts[::2], parts[1::2]
    halves, whole = total(first) + total(second), total(parts)
    assert distance([halves], [whole]) / float(whole.abs().max()) <= tolerance(dtype, summands)


def verdict(**changed: Any) -> Verdict:
    values: dict[str, Any] = {
        "updates": 3,
        "dtype": "float64",
        "gradients": [Deviation((0,), "gradients of update 1", 0.0, "weight")],
        "gradient_tolerance": 1e-12,
        "weights": [Deviation((0,), "weights after 3 updates", 0.0, "weight")],
        "weight_tolerance": 1e-9,
        "losses": [1.0] * 3,
        "reference_losses": [1.0] * 3,
        "loss_error": 0.0,
        "unequal": [],
    }
    return Verdict(**values | changed)


def test_a_verdict_names_of_every_stage_that_is_off_the_first_update_and_the_parameter() -> None:
    assert verdict().passed
    wrong = verdict(
        gradients=[
            Deviation((0,), "gradients of update 1", 1e-13, "weight"),
            Deviation((1,), "gradients of update 2", 2.0, "bias"),
            Deviation((1,), "gradients of update 3", 3.0, "weight"),
        ],
        weights=[
            Deviation((2,), "weights after 3 updates", 1e-8, "weight"),
            Deviation((1,), "weights after", 1.0, "bias"),
        ],
    )
    assert not wrong.passed
    assert str(wrong).splitlines()[-2:] == [
        "  stage 1: gradients of update 2 differ by 2.00e+00, most in bias",
        "  stage 2: weights after 3 updates differ by 1.00e-08, most in weight",
    ]
    assert "a stage = 3.00e+00, at most 1e-12 in float64" in str(wrong)


@pytest.mark.parametrize(
    "fault",
    [
        {"loss_error": 1e-11},
        {"loss_error": float("inf"), "reference_losses": [1.0, 1.0, float("nan")]},
        {"unequal": ["replicas of stage 1: NOT bitwise equal; ranks that agree: 0 | 3"]},
        {"weights": [Deviation((0,), "weights after 3 updates", float("inf"), "weight")]},
    ],
)
def test_each_part_of_a_verdict_can_fail_it(fault: dict[str, Any]) -> None:
    failed = verdict(**fault)
    assert not failed.passed
    assert str(failed).startswith("check: FAILED\n")
    assert all(line in str(failed) for line in failed.unequal)
    assert ("one process comes to no finite loss either" in str(failed)) == ("reference_losses" in fault)


# What the ranks hand to rank 0.

UPDATES = 2


def begin() -> Training:
    return Training(reference(2), 2, (((0, 2),), ((0, 2),)))


def compared(world: World, result: RankResult, begin: Callable[[], Training] = begin) -> Verdict | None:
    """The verdict on the results of all ranks, on rank 0."""
    results = ResultsOfRanks.gather(world.control_group, world.job, result, (), "check")
    answers: dict[str, Callable[..., Any]] = {"part": result.part, "outputs": lambda: result.outputs}
    enquiry = Enquiry(world.control_group, "check", answers, "for one process")
    if world.place.rank:
        assert enquiry.serve() == ["end of the comparison"]
        return None
    try:
        return compare(enquiry, world.job, results, begin, {})
    finally:
        enquiry.end("end of the comparison")


def recorded(**scaled: float) -> RankResult:
    """Result of a rank that holds both stages and computes what the reference does, but for the scaled parts."""
    training = begin()
    gradients: dict[Group, list[Any]] = {(0,): [], (1,): []}
    losses = []
    for _ in range(UPDATES):
        update = training.gradients()
        update[1,] = [g * scaled.get("gradients", 1.0) for g in update[1,]]
        for group, tensors in update.items():
            gradients[group].append(tensors)
        losses.append(Tally(training.losses[-1] * 2 * scaled.get("losses", 1.0), 2))
        training.step(update)
    weights = {
        group: [t.clone() * scaled.get("weights", 1.0) for t in history.newest]
        for group, history in training.histories.items()
    }
    return RankResult(gradients, weights, losses)


def test_what_one_process_computes_too_is_off_by_nothing(alone: World) -> None:
    with worlds(alone, alone_job()) as (world,):
        verdict = compared(world, recorded())
    assert verdict is not None
    assert verdict.passed
    assert verdict.losses == pytest.approx(verdict.reference_losses, rel=1e-15)
    assert {deviation.error for deviation in (*verdict.gradients, *verdict.weights)} == {0.0}


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("gradients", "stage 1: gradients of update 1 differ by 5.00e-01, most in weight"),
        ("weights", "stage 0: weights after 2 updates differ by "),
        ("losses", "losses: max |difference| / mean |loss| = 5.00e-01"),
    ],
)
def test_gradients_weights_and_losses_that_are_off_fail_by_name(alone: World, part: str, words: str) -> None:
    with worlds(alone, alone_job()) as (world,):
        verdict = compared(world, recorded(**{part: 1.5}))
    assert verdict is not None
    assert not verdict.passed
    assert words in str(verdict)


def test_a_step_too_few_is_told_before_anything_is_compared(alone: World) -> None:
    short = recorded()
    for steps in short.gradients.values():
        steps.pop()  # type: ignore[attr-defined]
    with (
        worlds(alone, alone_job()) as (world,),
        pytest.raises(CheckFailed, match="stage 0 on rank 0: the optimizer has made 1 step in 2 updates"),
    ):
        compared(world, short)


def test_a_replica_that_differs_in_a_bit_is_named_with_those_that_agree(alone: World) -> None:
    """The last of three copies has another weight, by one rounding; rank 0 compares its own, and all digests."""
    results = [recorded() for _ in range(3)]
    results[2].weights[1,][0].view(torch.int64).add_(1)
    for result in results:
        result.losses[:] = [Tally(tally.total / 3, tally.count / 3) for tally in result.losses]  # type: ignore[index]
    with worlds(alone, alone_job(), copies=3) as ranks:
        verdict, *others = together(
            [
                lambda world=world, result=result: compared(world, result)  # type: ignore[misc]
                for world, result in zip(ranks, results, strict=True)
            ]
        )
    assert others == [None, None]
    assert verdict is not None
    assert verdict.unequal == ["replicas of stage 1: NOT bitwise equal; ranks that agree: 0, 1 | 2"]
    assert not verdict.wrong


def test_stages_of_other_ranks_are_handed_to_rank_0_with_the_gradients_that_are_none(alone: World) -> None:
    """Stage 1 is on another worker; its first parameter is never used."""

    class Wider(nn.Module):
        def __init__(self, stage: int, _stages: int) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2 - stage, bias=False, dtype=torch.float64)
            self.unused = nn.Parameter(torch.zeros(3, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    def wider() -> Training:
        return Training(reference(2, build=Wider), 2, (((0, 2),), ((0, 2),)))

    training = wider()
    update = training.gradients()
    assert update[1,][0] is None
    losses = [Tally(2 * training.losses[-1], 2)]
    training.step(update)
    parts = [
        RankResult({(s,): [update[s,]]}, {(s,): list(training.histories[s,].newest)}, losses if s else [Tally()])
        for s in range(2)
    ]
    two = alone_job(workers=2, placement=((0, 1),))
    with worlds(alone, two) as ranks:
        verdict, nothing = together(
            [
                lambda world=world, part=part: compared(world, part, wider)  # type: ignore[misc]
                for world, part in zip(ranks, parts, strict=True)
            ]
        )
    assert nothing is None
    assert verdict is not None
    assert verdict.passed, verdict
