"""Costs of slices from a profile: as measured, of slices of other lengths, and their carries in bytes."""

from dataclasses import replace
from fractions import Fraction

import pytest

import chimera_ir
from chimera_ir.cost.simulate import simulate
from chimera_ir.ir.kinds import KINDS
from chimera_ir.ir.ops import Compute, Micro, Stage
from chimera_ir.predict.equation import equation
from chimera_ir.predict.memory_need import memory
from chimera_ir.predict.setting import Measured, Setting
from chimera_ir.profile.costs import NO_OVERHEAD, Device, ModelProfile, StageCosts, Times, Timing, WorkProfile, sliced
from chimera_ir.profile.read import read_profile
from chimera_ir.profile.write import write_profile
from chimera_ir.source import Source
from chimera_runtime.program.kept_bytes import MicroBatchBytes
from tests.timings import stage_times
from tests.unit.bounded import ALONE

TIMES = (2.0, 3.0, 4.0, 5.0)
"""Forwards of the four slices that are measured; a backward takes twice as long."""

OVERHEAD = stage_times(0.5, 1.0, 1.5)


def setting(overhead: Times = NO_OVERHEAD, stages: int = 4) -> Setting:
    carries = (40, 40), (40, 80), (40, 120), (0, 0)
    slices = tuple(
        Timing(
            stage_times(time, 2 * time, 3 * time),
            MicroBatchBytes(100, 10, carry=carry, carry_gradients=gradient),
            10,
            10,
        )
        for time, (carry, gradient) in zip(TIMES, carries, strict=True)
    )
    whole = Timing(stage_times(14.0, 28.0, 42.0), MicroBatchBytes(400, 40), 40, 40, slices=slices)
    return Setting((StageCosts(0, 0, 0, {1: whole}, overhead=overhead),) * stages, ALONE, 1, 1)


def test_unequal_slices_of_a_profile_take_as_long_as_the_solver_found() -> None:
    """(P, N, k) = (4, 8, 4) with F = 2, 3, 4, 5 and B = 2 F takes 507; equation 1 has the whole micro-batch's times."""
    compiled = chimera_ir.compile("seq1f1b", D=4, N=8, k=4)
    assert simulate(compiled.schedule, Measured.of(setting())).makespan == 507
    terms = equation(compiled.verified.program, setting())
    assert (terms.forward, terms.backward) == (14, 28)


@pytest.mark.parametrize(
    ("slices", "overhead", "times"),
    [
        (4, OVERHEAD, TIMES),
        (2, NO_OVERHEAD, (5.0, 9.0)),
        (2, OVERHEAD, (4.5, 8.5)),
        (8, OVERHEAD, (1.25, 1.25, 1.75, 1.75, 2.25, 2.25, 2.75, 2.75)),
        (3, NO_OVERHEAD, (3.0, 14 / 3, 19 / 3)),
    ],
)
def test_slices_of_other_lengths_have_the_work_in_between_and_one_overhead(
    slices: int, overhead: Times, times: tuple[float, ...]
) -> None:
    """By hand: two slices as one have one overhead less; a third is one and a third of the measured quarters."""
    header = chimera_ir.compile("seq1f1b", D=4, N=1, k=slices).schedule.header
    measured = Measured.of(setting(overhead))
    durations = [measured.duration(Compute(KINDS["F"], (Micro(place),), Stage(0)), header) for place in range(slices)]
    assert [float(duration) for duration in durations] == pytest.approx(times)
    assert all((duration / measured.tick(header)).denominator == 1 for duration in durations)


def test_carries_count_in_bytes_and_what_a_profile_lacks_is_said() -> None:
    """The first of two stages keeps five slices and carries, the last four; a backward reads and makes gradients."""
    compiled = chimera_ir.compile("seq1f1b", D=2, N=2, k=4)
    report, program = compiled.report, compiled.verified.program
    assert [[Fraction(4) * each for each in report.activations], report.carries] == [[5, 4], (5, 4)]
    with_carries, without = (
        [need.activations for need in memory(program, replace(setting(stages=2), stages=stages))]
        for stages in (setting(stages=2).stages, tuple(map(without_slices, setting(stages=2).stages)))
    )
    assert without == [500, 400 - 40]
    assert [more - less for more, less in zip(with_carries, without, strict=True)] == [
        5 * 40 + 2 * 120,
        4 * 40 + 2 * 120,
    ]
    (remark,) = Measured.of(replace(setting(), stages=(without_slices(setting().stages[0]),))).remarks(
        compiled.schedule
    )
    assert "carries are not counted" in remark
    assert Measured.of(setting(stages=2)).remarks(compiled.schedule) == ()


def without_slices(stage: StageCosts) -> StageCosts:
    return replace(stage, at={1: replace(stage.at[1], slices=())})


def test_a_profile_with_slices_reads_back() -> None:
    first, *_ = setting(OVERHEAD).stages
    timing = replace(first.at[1], output=0, gradient=0)
    last = replace(
        first, at={1: replace(timing, slices=tuple(replace(t, output=0, gradient=0) for t in timing.slices))}
    )
    profile = ModelProfile("m", {2: (first, last)})
    assert read_profile(Source("m.toml", write_profile(profile))) == profile.with_overhead(OVERHEAD)


def test_work_of_slices_takes_longer_on_a_device_that_few_positions_fill_badly() -> None:
    """Half the peak from four positions on: eight in one run at 2/3 of it, in four slices of two at 1/3."""
    counts = ModelProfile("m", {4: setting().stages}, length=8)
    stage, *_ = WorkProfile(counts).on(Device(peak=1.0, efficiency=1.0, half_at=4.0, operation=0.25)).depths[4]
    assert stage.at[1].times["F"] == pytest.approx(14 * 3 / 2 + 0.25)
    assert [part.times["F"] for part in stage.at[1].slices] == pytest.approx([3 * time + 0.25 for time in TIMES])
    assert stage.slept(1, {"F": 1.0, "B": 2.0}).at[1].slices == ()


@pytest.mark.parametrize(
    ("carries", "slices", "mean"), [((40, 40, 40), 8, 20), ((40, 80, 120), 8, 80), ((40, 80, 120), 2, 80)]
)
def test_carries_of_other_slices_grow_with_their_length_and_copies_with_their_start(
    carries: tuple[int, ...], slices: int, mean: int
) -> None:
    """Eight slices leave 20 bytes each or, where a carry is a copy of all before, 20, 40, .. and 140."""
    timing = setting().stages[0].at[1]
    several = zip(timing.slices, (*carries, 0), strict=True)
    parts = tuple(replace(part, kept=part.kept._replace(carry=carry)) for part, carry in several)
    assert sliced(replace(timing, slices=parts), NO_OVERHEAD, (1,) * slices).kept.carry == mean * slices
