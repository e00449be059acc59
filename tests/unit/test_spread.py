"""What is expected of an update whose operations scatter, where there is a formula for it."""

from dataclasses import replace
from math import asinh, exp, log, pi
from statistics import NormalDist

import pytest

from chimera_ir.ir.kinds import BACKWARD, FORWARD
from chimera_ir.ir.levels import Header, Pipe, Program, Schedule
from chimera_ir.ir.ops import Compute, Micro, Stage, Worker
from chimera_ir.predict.replay import expected, pace
from chimera_ir.predict.setting import Setting
from chimera_ir.profile.cluster import Link
from tests.lowered import lowered
from tests.timings import stage_times
from tests.unit.clocked import one_direction, two_directions, two_versions
from tests.unit.test_replay import setting

QUARTILE = 0.6744897501960817
"""Of a standard normal variable, 75 % are below (any table)."""

NORMAL = NormalDist()
SUM = Link(alpha=0.5, beta=0.0)


def noisy(how: Setting, noise: float) -> Setting:
    stages = tuple(
        replace(one, step_noise=noise, at={size: replace(each, noise=noise) for size, each in one.at.items()})
        for one in how.stages
    )
    return replace(how, stages=stages)


def deviation(noise: float) -> float:
    """Of the logarithm: quartiles at exp(-q s) and exp(q s) of the median are 2 sinh(q s) apart."""
    return asinh(noise / 2) / QUARTILE


def of_the_slowest(s: float, many: int) -> float:
    """The mean of the largest of so many lognormal factors, by integration of 1 - P(all are below x)."""
    steps, top = 20_000, exp(7 * s)
    middles = (top * (i + 0.5) / steps for i in range(steps))
    return sum(1 - NORMAL.cdf(log(x) / s) ** many for x in middles) * top / steps


def in_step(workers: int) -> Program:
    """Workers with a stage and a micro-batch each, that sum their gradients: no one begins before all are done."""
    lanes = tuple(
        (Compute(FORWARD, (Micro(w),), Stage(0)), Compute(BACKWARD, (Micro(w),), Stage(0))) for w in range(workers)
    )
    pipes = tuple(Pipe(f"p{w}", (Worker(w),), (Micro(w),)) for w in range(workers))
    return lowered(Schedule(Header("in_step", (), workers, 1, workers, pipes), lanes))


@pytest.mark.parametrize("noise", [0.05, 0.3])
def test_a_worker_alone_takes_the_mean_of_each(noise: float) -> None:
    """The mean of a lognormal variable is exp(s s / 2) times its median."""
    how = noisy(setting(1, steps=[4.0]), noise)
    mean = (3 * (3 + 5) + 4) * exp(deviation(noise) ** 2 / 2)
    assert expected(lowered(one_direction(1, 3)), how) == pytest.approx(mean, rel=0.005)


@pytest.mark.parametrize("noise", [0.05, 0.3, 1.0])
def test_two_in_step_take_what_the_slower_takes(noise: float) -> None:
    """The larger of two such variables is 2 exp(s s / 2) Phi(s / sqrt 2) on average; nearly mu + sigma / sqrt pi."""
    s = deviation(noise)
    longer = 2 * exp(s * s / 2) * NORMAL.cdf(s / 2**0.5)
    how = noisy(setting(1, costs=(0.0, 10.0, 10.0), sums=SUM), noise)
    assert pace(in_step(2), how) == 10 + 1
    assert expected(in_step(2), how) == pytest.approx(10 * longer + 1, rel=0.01)
    if noise < 0.1:
        assert longer == pytest.approx(1 + s / pi**0.5, rel=0.001)


@pytest.mark.parametrize(("workers", "copies"), [(1, 2), (1, 8), (2, 1), (2, 4), (3, 3)])
def test_a_sum_waits_for_all_workers_of_all_copies(workers: int, copies: int) -> None:
    how = noisy(setting(1, costs=(0.0, 10.0, 10.0), sums=Link(0.0, 0.0), copies=copies), 0.2)
    slowest = of_the_slowest(deviation(0.2), workers * copies)
    assert expected(in_step(workers), how) == pytest.approx(10 * slowest, rel=0.01)


@pytest.mark.parametrize(
    "program", [lowered(two_directions(4)), lowered(two_versions(3, 4)), lowered(one_direction(2, 5))]
)
def test_without_noise_it_is_the_pace_to_the_last_bit(program: Program) -> None:
    how = setting(program.header.stages, link=Link(0.3, 0.1, 0.07), sums=SUM, costs=(0.1, 0.2, 0.3))
    assert expected(program, how) == expected(program, noisy(how, 0.0)) == pace(program, how)
    assert expected(program, noisy(how, 0.1)) == expected(program, noisy(how, 0.1)) > pace(program, how)


def test_with_next_to_no_noise_it_is_next_to_the_pace() -> None:
    """Also where turns overlap: what is played takes what the critical cycle says."""
    for program in (lowered(two_directions(4)), lowered(two_versions(3, 4)), lowered(one_direction(4, 5))):
        how = setting(program.header.stages, link=Link(0.3, 0.1, 0.07), sums=SUM)
        assert expected(program, noisy(how, 1e-9)) == pytest.approx(pace(program, how), rel=1e-7)


def test_slack_hides_what_is_late_now_and_then() -> None:
    """A stage that takes a tenth of the other may well be late: of a stream the other one alone decides."""
    how = setting(2)
    quick = replace(how.stages[0], at={1: replace(how.stages[0].at[1], times=stage_times(0.3, 0.5))})
    slow = how.stages[1]
    program = lowered(two_versions(2, 4))
    assert expected(program, noisy(replace(how, stages=(quick, slow)), 0.0)) == 4 * (3 + 5)
    (late,) = noisy(replace(how, stages=(quick,)), 0.2).stages
    assert expected(program, replace(how, stages=(late, slow))) == pytest.approx(4 * (3 + 5), rel=0.001)
