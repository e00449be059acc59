"""Bounds on the bytes that each worker needs, from its compute operations alone: most that fits or does not is seen so.

Both count what stands on a worker all the time, the versions of its weights, and what waits for a backward; they differ
in what is on its way.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from chimera_ir.ir.levels import Header
from chimera_ir.planner.compiled import Compiled
from chimera_ir.predict.setting import Setting
from chimera_ir.profile.costs import Timing
from chimera_ir.syntax.change import Change

_EARLY = 4
"""More than are expected early or go round a ring, beside those that `_under_way` counts; there are one or two."""


def standing(header: Header, setting: Setting) -> list[int]:
    """What each worker keeps all the time: a copy of the weights, gradients and optimizer state of its stages."""
    sizes = [costs.weights + costs.gradients + costs.optimizer for costs in setting.stages]
    return [sum(sizes[stage] for stage in stages) for stages in header.stages_of]


def least(compiled: Compiled, change: Change, setting: Setting) -> list[int]:
    """What each worker needs if messages that are not kept take no room."""
    header = compiled.header(change)
    kept = [_kept(header, setting.timing(stage), stage) for stage in range(header.stages)]
    return _peaks(compiled, header, setting, kept)


def _peaks(compiled: Compiled, header: Header, setting: Setting, kept: Sequence[int]) -> list[int]:
    """What each worker needs if so much is kept of a micro-batch on a stage, and beside it only weights."""
    weights = [costs.weights for costs in setting.stages]
    workers = zip(standing(header, setting), compiled.copies, compiled.growth, strict=True)
    return [
        always
        + sum(weights[stage] * (count - 1) for stage, count in copies.items())
        + -(-max(accumulate(map(mul, counts, map(kept.__getitem__, stages)), initial=0)) // header.parts)
        for always, copies, (stages, counts) in workers
    ]


def most(compiled: Compiled, change: Change, setting: Setting) -> list[int] | None:
    """No less than each worker needs: as much is on its way as can be.

    A stage that recomputes has the activations of one micro-batch more, one stage at a time. None where a stream is not
    in order: then a receive may be posted any time before its use.
    """
    header = compiled.header(change)
    if header.asynchronous and not compiled.streams_in_order:
        return None
    timings = [setting.timing(stage) for stage in range(header.stages)]
    kept = [_beside(header, timings, stage) for stage in range(header.stages)]
    return [
        peak
        + max(timings[stage].activations * header.recomputing for stage in passing)
        + sum(_under_way(compiled, header, timings, stage, count) for stage, count in passing.items())
        for peak, passing in zip(_peaks(compiled, header, setting, kept), _passing(header), strict=True)
    ]


def _passing(header: Header) -> list[Counter[int]]:
    """By worker and stage, the micro-batches that pass."""
    counts: list[Counter[int]] = [Counter() for _ in range(header.workers)]
    for pipe in header.pipes:
        for stage, worker in enumerate(pipe.workers):
            counts[worker][stage] += len(pipe.micros)
    return counts


def _under_way(compiled: Compiled, header: Header, timings: Sequence[Timing], stage: int, passing: int) -> int:
    """No less than the messages of a stage take at once, of as many micro-batches as pass on a worker.

    Not more than there are. In a stream in order, activations have been taken over when their gradients come back, and
    stay in their buffer until the backward; gradients have been taken over when the first activations come that were
    sent after their use, and leave their buffer at once. A few more are expected early, or go round a ring.
    """
    this, previous = timings[stage], timings[stage - 1]
    if header.asynchronous:
        begun = compiled.begun
        to_next = begun[stage] * this.output + _EARLY * this.gradient
        to_previous = (begun[stage] + _EARLY) * previous.output + (begun[stage - 1] + _EARLY) * previous.gradient
    else:
        to_next, to_previous = (passing * (timing.output + timing.gradient) for timing in (this, previous))
    return (to_next if stage < header.stages - 1 else 0) + (to_previous if stage > 0 else 0)


def _kept(header: Header, timing: Timing, stage: int) -> int:
    """What a stage keeps of a micro-batch at least, in its receive buffer or beside it."""
    return min((timing.input if stage in pipe.recompute else timing.activations for pipe in header.pipes), default=0)


def _beside(header: Header, timings: Sequence[Timing], stage: int) -> int:
    """What a stage keeps of a micro-batch at most, beside its receive buffer."""
    again = all(stage in pipe.recompute for pipe in header.pipes)
    received = stage > 0 and all(pipe.workers[stage] != pipe.workers[stage - 1] for pipe in header.pipes)
    size = timings[stage].input if again else max(timings[stage].input, timings[stage].activations)
    return max(0, size - timings[stage - 1].output * received)
