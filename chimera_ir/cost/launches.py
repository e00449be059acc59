"""When each worker launches the sums of its gradients, and how much time is free for them (sections 3.2 and 3.4)."""

from dataclasses import dataclass
from fractions import Fraction

from chimera_ir.cost.simulate import Timed, Timeline
from chimera_ir.ir.ids import Stage, Worker
from chimera_ir.ir.levels import Program, Strategy
from chimera_ir.ir.ops import AllReduce, Compute


@dataclass(frozen=True, slots=True)
class Launched:
    """The sum of a stage's gradients, as one worker launches it; times in the unit of the costs.

    ``free`` is the time in which the worker idles between the launch and its last operation, the regions (a) and (b)
    of Figure 6; ``flush`` from there to the makespan, region (c).
    """

    worker: Worker
    stage: Stage
    strategy: Strategy
    at: Fraction
    free: Fraction
    flush: Fraction


def launches(program: Program, timeline: Timeline) -> tuple[Launched, ...]:
    """All launches, worker by worker, in the order of the lanes."""
    found: list[Launched] = []
    for number, (lane, timed) in enumerate(zip(program.lanes, timeline.lanes, strict=True)):
        done = 0
        for instruction in lane:
            if isinstance(instruction, AllReduce):
                found.append(_launched(Worker(number), instruction.stage, done, timed, timeline))
            done += isinstance(instruction, Compute)
    return tuple(found)


def _launched(worker: Worker, stage: Stage, done: int, timed: tuple[Timed, ...], timeline: Timeline) -> Launched:
    at = timed[done - 1].end if done else 0
    end = timed[-1].end if timed else 0
    busy = sum(each.end - each.start for each in timed[done:])
    return Launched(
        worker=worker,
        stage=stage,
        strategy=timeline.header.strategy(stage),
        at=at * timeline.tick,
        free=(end - at - busy) * timeline.tick,
        flush=(timeline.span - end) * timeline.tick,
    )
