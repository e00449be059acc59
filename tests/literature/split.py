"""Library schemes with split backwards, compiled without a warning, and their makespans confirmed by the simulator."""

from fractions import Fraction

import pytest

from chimera_ir import library
from chimera_ir.compilation import Compilation
from chimera_ir.cost.durations import Costs
from chimera_ir.cost.report import Figures
from chimera_ir.predict.setting import Setting
from chimera_ir.profile.cluster import FREE, Cluster
from chimera_ir.profile.costs import StageCosts
from chimera_ir.request import Request
from tests.simulator import Simulator
from tests.timings import stage_timing

Times = tuple[int, int, int]
"""Of a forward, an input gradient and a weight gradient, over a micro-batch."""

EQUAL = (1, 1, 1)


def compilation(name: str, times: Times, **settings: int) -> Compilation:
    costs = Costs()
    for kind, time in zip("FIW", times, strict=True):
        costs = costs.using(kind, str(time))
    request = Request(library.source(name), settings, costs)
    return Compilation(request, warn=lambda warning: pytest.fail(warning.code))


def figures(name: str, times: Times, **settings: int) -> Figures:
    """The figures of a schedule without a warning, whose makespan the simulator of programs confirms."""
    f, b, w = times
    compiled = compilation(name, times, **settings)
    stage = StageCosts(1, 1, 0, {1: stage_timing(f, b + w, f + b + w, 1, 1, 1, 1, halves=(b, w))})
    stages = compiled.schedule.header.stages
    setting = Setting((stage,) * stages, Cluster("free", 4096, 1, 1, 0, FREE, FREE, FREE), 1, 1)
    simulated = Simulator(compiled.program, setting).computes
    assert max(end for *_, end in simulated) == compiled.report.makespan
    return compiled.report


def spans(name: str, times: Times, **settings: int) -> list[Fraction]:
    """For each worker the time from the beginning of its first operation to the end of its last."""
    timeline = compilation(name, times, **settings).timeline
    return [(lane[-1].end - lane[0].start) * timeline.tick for lane in timeline.lanes]
