"""Costs of stages that are made of layers, and the check of a split."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from chimera_ir.ir.kinds import RECOMPUTATION
from chimera_ir.profile.balance import balanced
from chimera_ir.profile.costs import ENTRIES, LEAST, RECOMPUTING, StageCosts, Times, Timing, time_of


def stages_of(layers: Sequence[StageCosts], split: Sequence[int]) -> tuple[StageCosts, ...]:
    """The costs of the stages that a split, the first layer of each stage, makes of layers.

    An operation takes `LEAST` at least, also on a stage of layers without work, such as a table of words.
    """
    return tuple(
        _lasting(merged(layers[first:end], opens=first == 0)) for first, end in pairwise((*split, len(layers)))
    )


def _lasting(stage: StageCosts) -> StageCosts:
    def lasting(timing: Timing) -> Timing:
        longer = timing.with_times(lambda key, seconds: max(seconds, LEAST) if key in whole else seconds)
        return replace(longer, slices=tuple(map(lasting, timing.slices)))

    whole = ("F", "B", RECOMPUTING)
    return replace(stage, at={size: lasting(timing) for size, timing in stage.at.items()})


def durations(layers: Sequence[StageCosts], size: int, *, recomputing: bool) -> list[float]:
    """The time of a forward and a backward of ``size`` items on each layer, without the overhead of operations.

    With ``recomputing``, the backward runs the forward again.
    """
    kinds = ("F", "B", RECOMPUTATION.letter) if recomputing else ("F", "B")
    times = ([layer.at[size].seconds(kind) - time_of(layer.overhead, kind) for kind in kinds] for layer in layers)
    return [max(0.0, sum(of_kinds)) for of_kinds in times]


def fastest(layers: Sequence[StageCosts], stages: int, size: int, *, recomputing: bool) -> tuple[int, ...]:
    """The split of the layers into ``stages`` stages whose slowest stage takes the least time for ``size`` items.

    There are at least as many layers as stages. With ``recomputing``, every backward runs its forward again.
    """
    split = balanced(durations(layers, size, recomputing=recomputing), [()] * stages)
    assert split is not None, "without a limit on memory there is one"
    return split


def merged(layers: Sequence[StageCosts], *, opens: bool = False) -> StageCosts:
    """The costs of one stage made of these layers: their sums, except for messages and the overhead of an operation.

    A stage that ``opens`` the model has no input gradient: all of its backward is in the second half. An output that a
    layer saves and that the next layer keeps as its input counts twice in ``activations``.
    """
    if len(layers) == 1:
        return layers[0]
    sizes = set.intersection(*(set(layer.at) for layer in layers))
    step = sum(layer.step for layer in layers)
    return StageCosts(
        weights=sum(layer.weights for layer in layers),
        gradients=sum(layer.gradients for layer in layers),
        optimizer=sum(layer.optimizer for layer in layers),
        at={size: _merged([layer.at[size] for layer in layers], layers[0].overhead, opens) for size in sorted(sizes)},
        step=step,
        step_noise=_mean([(layer.step_noise, layer.step) for layer in layers]),
        overhead=layers[0].overhead,
    )


def _merged(timings: Sequence[Timing], overhead: Times, opens: bool) -> Timing:
    first, last = timings[0], timings[-1]
    operands = sum(timing.operands for timing in timings)
    inner_inputs = sum(max(0, after.input - before.output) for before, after in pairwise(timings))
    times = {
        key: _as_one([timing.times[key] for timing in timings], time_of(overhead, key))
        for key in ENTRIES
        if all(key in timing.times for timing in timings)
    }
    if opens and "I" in times:
        times |= _opening([timing.times for timing in timings], overhead, times["W"])
    return Timing(
        times,
        activations=sum(timing.activations for timing in timings),
        input=first.input + inner_inputs,
        output=last.output,
        gradient=last.gradient,
        noise=_mean([(timing.noise, timing.times["F"] + timing.times["B"]) for timing in timings]),
        released=0 if opens else _released(timings),
        operands=min(operands, last.gradient) if opens else operands,
        resident=_ends(first.input, first.resident, last.input, last.resident),
        resident_operands=_ends(first.input, first.resident_operands, last.input, last.resident_operands),
        carry=sum(timing.carry for timing in timings),
        carry_gradient=sum(timing.carry_gradient for timing in timings),
        slices=tuple(_merged(of_slice, overhead, opens) for of_slice in zip(*(t.slices for t in timings), strict=True)),
    )


def _opening(layers: Sequence[Times], overhead: Times, weights: float) -> dict[str, float]:
    """Times of the two halves of a backward on the first stage, which needs no gradient of its input.

    The first half is the one of the first layer alone. The first halves of all other layers count to the second half,
    with ``weights``: the time that the second half would take on any other stage.
    """
    behind = sum(max(0.0, times["I"] - time_of(overhead, "I")) for times in layers[1:])
    return {"I": layers[0]["I"], "W": behind + weights}


def _ends(first_input: int, of_first: int, last_input: int, of_last: int) -> int:
    """Bytes of a stage of layers that stay when the rest is off-loaded: the first layer's input, the last one's output.

    ``of_first`` are such bytes of the first layer alone, its input and its output, and ``of_last`` those of the last
    layer. Between the halves of a backward, the gradient of the output takes the output's place.
    """
    return min(of_first, first_input) + max(0, of_last - last_input)


def _released(timings: Sequence[Timing]) -> int:
    """Bytes that the first half of a backward frees on a stage of these layers.

    Layers free activations from the last one back, up to and including the first that keeps some for its weights: these
    hold the graph of all layers before it.
    """
    released = 0
    for timing in reversed(timings):
        released += timing.released
        if timing.released < timing.activations:
            break
    return released


def _as_one(times: Sequence[float], overhead: float) -> float:
    """The time of several operations run as one: their sum with one overhead in all, at least the longest."""
    return max(*times, sum(times) - (len(times) - 1) * overhead)


def _mean(noise: Sequence[tuple[float | None, float]]) -> float | None:
    """The noise of a sum of times that are slow at the same moments: the mean of their noises, weighted by seconds.

    Each part of the sum is a pair: its noise and its seconds. The result is None if a noise is not known.
    """
    if any(share is None for share, _ in noise):
        return None
    total = sum(seconds for _, seconds in noise)
    return sum((share or 0.0) * seconds for share, seconds in noise) / total if total else 0.0


def problem(split: Sequence[int], stages: int, layers: int) -> str | None:
    """The reason why a split does not cut ``layers`` layers into ``stages`` stages; None if it does."""
    if not split or split[0] != 0:
        return "it lists the first layer of each stage, so it begins with 0"
    if any(second <= first for first, second in pairwise(split)):
        return "every stage has one layer at least, so the numbers ascend"
    if split[-1] >= layers:
        return f"there is no layer {split[-1]}; there are the layers 0 to {layers - 1}"
    if len(split) != stages:
        return f"it begins the stages 0 to {len(split) - 1}, and the schedule has the stages 0 to {stages - 1}"
    return None
