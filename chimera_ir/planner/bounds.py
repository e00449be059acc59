"""Bounds on the bytes that each worker needs, computed from compute operations alone.

The bounds show of most configurations whether they fit, before messages and buffers are known. Both bounds count what a
worker keeps all the time, the versions of its weights, and what waits for a backward. They differ in the messages under
way: `least` counts none, `most` as many as there can be.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from chimera_ir.ir.ids import Stage
from chimera_ir.ir.levels import Header
from chimera_ir.lower.comm import AHEAD
from chimera_ir.planner.compiled import CompiledScheme, Variant
from chimera_ir.predict.setting import Setting
from chimera_ir.profile.costs import Timing

_EARLY = 2 * (AHEAD + 1)
"""Safety margin of the upper bound, in messages per stage: receives that lowering posts before they are needed.

`lower.comm` posts AHEAD receives early, and slots that are used round and round hold one more; twice as many are safe.
"""


def standing(variant: Variant, setting: Setting) -> list[int]:
    """Bytes that each worker keeps in any order: a copy of weights and optimizer state, and gradients of its stages."""
    header, first = variant.header, [costs.first_gradients for costs in setting.stages]
    sizes = [
        costs.weights + costs.gradients + setting.optimizer(header, Stage(stage))
        for stage, costs in enumerate(setting.stages)
    ]
    return [sum(sizes[s] for s in stages) + max((first[s] for s in stages), default=0) for stages in header.stages_of]


def least(variant: Variant, setting: Setting) -> list[int]:
    """Returns a lower bound on the bytes that each worker needs.

    A message counts only where it has been received and waits for a backward.
    """
    header, splits = variant.header, variant.compiled.splits
    kept = [_least_kept(header, setting.as_cut(stage, header), stage, splits) for stage in range(header.stages)]
    return _peaks(variant, setting, kept)


def _peaks(variant: Variant, setting: Setting, kept: Sequence[int]) -> list[int]:
    """Returns the most bytes that each worker needs at once, apart from messages under way.

    Every micro-batch that waits for a backward on stage s takes ``kept[s]`` bytes.
    """
    weights, compiled = [costs.weights for costs in setting.stages], variant.compiled
    workers = zip(standing(variant, setting), compiled.copies, compiled.waiting, strict=True)
    return [
        always
        + sum(weights[stage] * (count - 1) for stage, count in copies.items())
        + -(-max(accumulate(map(mul, counts, map(kept.__getitem__, stages)), initial=0)) // variant.header.units)
        for always, copies, (stages, counts) in workers
    ]


def most(variant: Variant, setting: Setting) -> list[int] | None:
    """Returns an upper bound on the bytes that each worker needs, with as many messages under way as there can be.

    Of its stages that recompute, a worker holds the recomputed activations of one at a time. The result is None where
    no bound is known: for slices of unequal lengths, and for moves to the host, where the bytes depend on when lanes
    wait for the moves. Without a flush it is also None for micro-batches that do not pass in order, because a receive
    may be posted any time before its use, and for split backwards, because received gradients may stay in their
    buffers.
    """
    compiled, header = variant.compiled, variant.header
    if header.moves or header.lengths:
        return None
    if header.asynchronous and (compiled.splits or not compiled.streams_in_order):
        return None
    timings = [setting.as_cut(stage, header) for stage in range(header.stages)]
    kept = [_most_kept(header, timings, stage, compiled.splits) for stage in range(header.stages)]
    return [
        peak
        + max(timings[stage].activations * compiled.recomputed for stage in passing)
        + max(timings[stage].kept.halving * compiled.splits for stage in passing)
        + sum(_under_way(compiled, header, timings, stage, count) for stage, count in passing.items())
        for peak, passing in zip(_peaks(variant, setting, kept), _passing(header), strict=True)
    ]


def _passing(header: Header) -> list[Counter[int]]:
    """Counts, for each worker and stage, the micro-batches (or parts of them) that the stage works on there."""
    counts: list[Counter[int]] = [Counter() for _ in range(header.workers)]
    for pipe in header.pipes:
        for stage, worker in enumerate(pipe.workers):
            counts[worker][stage] += len(pipe.micros)
    return counts


def _under_way(compiled: CompiledScheme, header: Header, timings: Sequence[Timing], stage: int, passing: int) -> int:
    """Returns an upper bound on the bytes of a stage's messages that are under way or in buffers at any one time.

    ``passing`` is how many micro-batches, or parts of them, the stage works on. With a flush all of their messages
    count.

    In a stream whose micro-batches pass in order, the activations of a micro-batch have arrived when its gradients come
    back, and stay in their buffer until the backward. Gradients leave their buffer at once: they have arrived when the
    first activations come that were sent after the use of these gradients. `_EARLY` more messages allow for receives
    that are posted early.
    """
    this, before = (
        _messages(header, timings[stage]),
        [(s, _messages(header, timings[s])) for s in header.feeding[stage]],
    )
    if header.asynchronous:
        begun = compiled.begun
        onward = begun[stage] * this[0] + _EARLY * this[1]
        back = [
            (begun[stage] + _EARLY) * output + (begun[maker] + _EARLY) * gradient
            for maker, (output, gradient) in before
        ]
    else:
        onward, *back = (passing * sum(messages) for messages in (this, *dict(before).values()))
    return onward * len(header.fed[stage]) + sum(back)


def _messages(header: Header, timing: Timing) -> tuple[int, int]:
    """Returns the bytes of a message with an output of a stage, and of one with the gradient that comes back for it.

    A message has a part of a micro-batch: all of it, a half or a slice.
    """
    return -(-timing.output // header.parts), -(-timing.gradient // header.parts)


def _least_kept(header: Header, timing: Timing, stage: int, splits: bool) -> int:
    """The fewest bytes that a stage may keep of a micro-batch between forward and backward, receive buffer included.

    If ``splits`` (any backward is split), the bytes kept between the two halves are considered, too.
    """
    waiting = [timing.input if stage in pipe.recompute else timing.activations for pipe in header.pipes]
    return min([*waiting, *([timing.kept.halfway] if splits else [])], default=0)


def _most_kept(header: Header, timings: Sequence[Timing], stage: int, splits: bool) -> int:
    """The most bytes that a stage may keep of a micro-batch between forward and backward, without its receive buffer.

    If ``splits`` (any backward is split), a stage that recomputes keeps activations from the first half of a backward
    to the second. The bytes are rounded up to a multiple of the parts of a micro-batch: stages round up the bytes of
    each part.
    """
    again = all(stage in pipe.recompute for pipe in header.pipes) and not splits
    in_buffer = sum(
        timings[maker].output
        for maker in header.feeding[stage]
        if all(pipe.workers[stage] != pipe.workers[maker] for pipe in header.pipes)
    )
    sizes = timings[stage].kept.without_received(in_buffer, 0)
    size = sizes.input if again else max(sizes.input, sizes.activations, sizes.halfway * splits)
    size += sizes.carry + sizes.carry_gradients
    return -(-size // header.units) * header.units
