"""Divides the time of an update into parts.

The same program is predicted as it is, then without the time of sums, then of messages, and then of steps: the
differences are their parts.
"""

from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

from chimera_ir.ir.kinds import RECOMPUTATION
from chimera_ir.planner.compiled import Variant
from chimera_ir.predict.equation import seconds_of
from chimera_ir.predict.measured import Measured
from chimera_ir.predict.replay import replay
from chimera_ir.predict.setting import Setting
from chimera_ir.profile.cluster import FREE


class TimeParts(NamedTuple):
    """The parts of an update's time, in seconds; their sum is the whole time.

    ``work`` and ``recomputation`` are the times that a worker computes and recomputes, ``bubbles`` is the time that it
    idles where links, sums and steps are free: means over all workers. ``steps``, ``messages`` and ``sums`` are how
    much longer the update takes as each of these, in this order, begins to take time.
    """

    work: float
    recomputation: float
    bubbles: float
    steps: float
    messages: float
    sums: float


def time_parts(variant: Variant, setting: Setting, replays: bool) -> TimeParts:
    """Divides the predicted time of an update into its parts.

    Predictions are replays of the program if ``replays``, else those of equation 1, which counts no steps.
    """
    cluster, stages = setting.cluster, setting.stages
    no_sums = replace(setting, cluster=replace(cluster, sums=FREE))
    no_messages = replace(no_sums, cluster=replace(no_sums.cluster, within=FREE, between=FREE))
    no_steps = replace(no_messages, stages=tuple(replace(stage, step=0.0) for stage in stages))

    def seconds(of: Setting) -> float:
        if replays:
            return replay(variant.lowered(of), of).seconds
        return seconds_of(variant.schedule, variant.compiled.structure, variant.launched(of), of)

    work, recomputation = _computing(variant, setting)
    bare, stepping, talking, whole = map(seconds, (no_steps, no_messages, no_sums, setting))
    return TimeParts(
        work,
        recomputation,
        bubbles=bare - work - recomputation,
        steps=stepping - bare,
        messages=talking - stepping,
        sums=whole - talking,
    )


def _computing(variant: Variant, setting: Setting) -> tuple[float, float]:
    """Returns the seconds of an update in which a worker computes, without recomputation, and in which it recomputes.

    Both are means over all workers.
    """
    header, measured = variant.header, Measured.of(setting)
    computing, repeating = Fraction(), Fraction()
    for operation in (operation for lane in variant.compiled.lanes for operation in lane):
        seconds = measured.duration(operation, header)
        if operation.kind is RECOMPUTATION:
            repeating += seconds
        else:
            computing += seconds
    shares = header.workers * header.updates
    return float(computing) / shares, float(repeating) / shares
