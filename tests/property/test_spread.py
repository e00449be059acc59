"""What is expected of noisy updates against a simulation of processes and queues that draws times of its own."""

from dataclasses import replace
from itertools import pairwise
from math import asinh
from random import Random
from statistics import mean, stdev

import pytest

from chimera_ir.ir.levels import Program
from chimera_ir.ir.ops import Compute
from chimera_ir.ir.streams import ProgramStream, longer, view_of
from chimera_ir.predict.replay import expected, pace
from chimera_ir.predict.setting import Setting
from tests.lowered import level
from tests.property.test_replay import STREAMS, random_program, random_setting
from tests.repeatable import searching, tries
from tests.simulator import Simulator

UPDATES, FIRST = 400, 40


class Drawn(Simulator):
    """Every operation and step takes a factor of its own longer, or shorter."""

    def __init__(self, program: Program, setting: Setting, seed: int) -> None:
        self.random = Random(seed)
        super().__init__(program, setting)

    def compute(self, each: Compute) -> float:
        noise = self.setting.stages[each.stage].at[self.setting.micro_batch_size].noise
        return super().compute(each) * self.factor(noise or 0.0)

    def step(self, stage: int) -> float:
        return super().step(stage) * self.factor(self.setting.stages[stage].step_noise or 0.0)

    def factor(self, noise: float) -> float:
        return self.random.lognormvariate(0.0, asinh(noise / 2) / 0.6744897501960817)


def noisy(setting: Setting, random: Random) -> Setting:
    """One copy, some stages with noise and some without."""
    stages = tuple(
        replace(
            one,
            step_noise=random.choice([0.0, 0.5]),
            at={size: replace(each, noise=random.choice([0.0, 0.3, 0.8])) for size, each in one.at.items()},
        )
        for one in setting.stages
    )
    return replace(setting, stages=stages, copies=1)


def agrees(level: Program | ProgramStream, setting: Setting, seed: int) -> None:
    """The mean of many simulated updates, as far as their scatter lets it be known."""
    program, simulated = view_of(level), Drawn(longer(level, UPDATES), setting, seed + 1)
    ends: dict[int, float] = {}
    for _, step, _, end in simulated.steps:
        version = step.version or 0  # type: ignore[union-attr]
        ends[version] = max(end, ends.get(version, 0.0))
    taken = [later - earlier for earlier, later in pairwise(ends[version] for version in sorted(ends)[FIRST:-FIRST])]
    known = 4 * stdev(taken) / len(taken) ** 0.5 + 0.002 * mean(taken)
    assert expected(program, setting) == pytest.approx(mean(taken), abs=known)


@pytest.mark.parametrize("seed", range(tries(6)))
def test_many_updates_take_it_on_average(seed: int) -> None:
    program = random_program(seed)
    agrees(program, noisy(random_setting(program.header, Random(seed)), Random(seed)), seed)


@pytest.mark.parametrize("number", range(0, len(STREAMS), 1 if searching() else 3))
def test_so_it_is_without_a_flush(number: int) -> None:
    stream = [*STREAMS.values()][number]
    program = level(stream.schedule(2 * stream.turns + 3))
    agrees(program, noisy(random_setting(program.header, Random(number)), Random(number)), number)


def test_noise_costs_something_on_some_of_these() -> None:
    """What would agree, too, if noise did nothing, would be no proof."""
    lost = []
    for seed in (1, 5, 11):
        program = random_program(seed)
        setting = noisy(random_setting(program.header, Random(seed)), Random(seed))
        lost.append(expected(program, setting) / pace(program, setting) - 1)
    assert max(lost) > 0.05
