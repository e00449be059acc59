"""Bounds on the bytes that each worker needs, from its compute operations alone.

For most configurations the bounds show whether they fit, without messages and buffers. Both count what a worker
keeps all the time, the versions of its weights, and what waits for a backward; they differ in the messages under way:
`least` counts none, `most` as many as there can be.
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
    """Bytes that each worker keeps all the time: a copy of the weights, gradients and optimizer state of its stages."""
    header = variant.header
    sizes = [
        costs.weights + costs.gradients + setting.optimizer(header, Stage(stage))
        for stage, costs in enumerate(setting.stages)
    ]
    return [sum(sizes[stage] for stage in stages) for stages in header.stages_of]


def least(variant: Variant, setting: Setting) -> list[int]:
    """Lower bound on the bytes that each worker needs: received messages count only while they wait for a backward."""
    header, splits = variant.header, variant.compiled.splits
    kept = [_least_kept(header, setting.as_cut(stage, header), stage, splits) for stage in range(header.stages)]
    return _peaks(variant, setting, kept)


def _peaks(variant: Variant, setting: Setting, kept: Sequence[int]) -> list[int]:
    """Most bytes that each worker needs at once, if every micro-batch that waits on stage s takes ``kept[s]`` bytes."""
    weights, compiled = [costs.weights for costs in setting.stages], variant.compiled
    workers = zip(standing(variant, setting), compiled.copies, compiled.waiting, strict=True)
    return [
        always
        + sum(weights[stage] * (count - 1) for stage, count in copies.items())
        + -(-max(accumulate(map(mul, counts, map(kept.__getitem__, stages)), initial=0)) // variant.header.units)
        for always, copies, (stages, counts) in workers
    ]


def most(variant: Variant, setting: Setting) -> list[int] | None:
    """Upper bound on the bytes that each worker needs, with as many messages under way as there can be.

    A stage that recomputes holds the activations of what was recomputed last, one stage at a time. There is no bound
    for slices of unequal lengths. Without a flush there is none if micro-batches do not pass in order, because a
    receive may be posted any time before its use, or if backwards are split, because received gradients may stay in
    their buffers. Nor is there one where memory moves: what is kept depends on when lanes wait for the moves.
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
    """Counts, for each worker, how many micro-batches, or parts of them, pass each of its stages in all."""
    counts: list[Counter[int]] = [Counter() for _ in range(header.workers)]
    for pipe in header.pipes:
        for stage, worker in enumerate(pipe.workers):
            counts[worker][stage] += len(pipe.micros)
    return counts


def _under_way(compiled: CompiledScheme, header: Header, timings: Sequence[Timing], stage: int, passing: int) -> int:
    """Upper bound on the bytes of a stage's messages at any time, if ``passing`` parts of micro-batches pass it.

    With a flush: the messages of all those parts. In a stream in order, activations have arrived when their
    gradients come back, and stay in their buffer until the backward; gradients have arrived when the first activations
    come that were sent after the use of these gradients, and leave their buffer at once. `_EARLY` covers receives
    posted early.
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
    """The fewest bytes that a stage keeps of a micro-batch between forward and backward, receive buffer included.

    ``splits`` says whether any backward is split.
    """
    waiting = [timing.input if stage in pipe.recompute else timing.activations for pipe in header.pipes]
    return min([*waiting, *([timing.kept.halfway] if splits else [])], default=0)


def _most_kept(header: Header, timings: Sequence[Timing], stage: int, splits: bool) -> int:
    """The most bytes that a stage keeps of a micro-batch between forward and backward, without its receive buffer.

    If backwards are split, a stage that recomputes keeps activations from the first half of a backward to the second.
    The bytes are rounded up to a multiple of the parts of a micro-batch, as each stage rounds up those of a part.
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
