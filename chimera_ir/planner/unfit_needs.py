"""Memory of configurations that do not fit: plain data parallelism, and the one that is nearest to fitting."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice

from chimera_ir import library
from chimera_ir.planner.judge import MODES, Judge
from chimera_ir.planner.rank import Ranking, affordable
from chimera_ir.planner.space import Configuration, configurations
from chimera_ir.profile.costs import ModelProfile, merged

WEIGHED_OPERATIONS = 30_000
"""The most compute operations, in total, of configurations whose exact bytes are computed for this."""

_WEIGHED = 20
"""The most configurations whose exact bytes are computed to find the one that is nearest to fitting."""


@dataclass(frozen=True, slots=True)
class Need:
    """A configuration, and the bytes that its fullest worker needs."""

    choice: Configuration
    size: int


def plain_need(ranking: Ranking) -> Need | None:
    """The least memory of plain data parallelism, with the model as one stage; None if it cannot be configured.

    The scheme is the baseline, whatever the user asked for. A worker keeps one micro-batch at a time, so one is
    compiled. If the profile has no depth of 1, the stages of its smallest depth are merged.
    """
    profile, (baseline, _) = _with_one_stage(ranking.judge.profile), library.baseline(1, 1)
    judge = replace(ranking.judge, ties=(), profile=profile)
    of_baseline = ranking.roles[baseline]
    single = dict.fromkeys(of_baseline.sizes, 1)
    question = replace(ranking.question, settings=single)
    candidates = configurations(baseline, judge.schemes[baseline], of_baseline, profile, question)
    settings = tuple({**single, of_baseline.micro_batches: 1}.items()) if of_baseline.micro_batches else ()
    choices = (
        replace(choice, settings=settings, micro_batches=1, split=(0,) if profile.layers else None)
        for choice in candidates
        if isinstance(choice, Configuration)
    )
    return _least(judge, (choice.recomputing(again) for choice in choices for again in MODES[judge.recomputation]))


def _with_one_stage(profile: ModelProfile) -> ModelProfile:
    if not profile.depths or 1 in profile.depths:
        return profile
    whole = merged(profile.depths[min(profile.depths)], opens=True)
    return replace(profile, depths={**profile.depths, 1: (whole,)})


def nearest(ranking: Ranking) -> Need | None:
    """The configuration that is nearest to fitting, of those with the least lower bounds on their memory."""
    unfit = [(left_out.needed, left_out.choice) for left_out in ranking.left_out if left_out.needed and left_out.choice]
    unfit.sort(key=lambda pair: (pair[0], pair[1].micro_batch_size, pair[1].operations))
    candidates = affordable((choice for _, choice in unfit), lambda choice: choice.operations, WEIGHED_OPERATIONS)
    return _least(ranking.judge, islice(candidates, _WEIGHED))


def _least(judge: Judge, choices: Iterable[Configuration]) -> Need | None:
    needs = (Need(choice, judge.needed(choice)) for choice in choices)
    return min(needs, key=lambda need: need.size, default=None)
