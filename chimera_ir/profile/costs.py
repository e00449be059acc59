"""A model's profile: the costs of each of its stages at each micro-batch size."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from itertools import accumulate, chain, pairwise
from math import ceil
from typing import NamedTuple

from chimera_ir.ir.graph import NamedStages
from chimera_ir.ir.kinds import COSTED, KINDS, RECOMPUTATION, Kind
from chimera_ir.ir.levels import Extent, extents
from chimera_ir.profile.balance import balanced
from chimera_runtime.program.kept_bytes import MicroBatchBytes, largest_mean

LEAST = 1e-9
"""The least time of an operation, a nanosecond; where work is counted, the least work in FLOP."""

RECOMPUTING = "recomputing"
"""The key of the time of a backward that runs the forward again."""

Times = Mapping[str, float]
"""Seconds of operations, keyed by the letter of their kind; pairs by ``pair``, a backward that recomputes as below.

There are at least F, B and `RECOMPUTING`, which are F_t and B_t of section 3.4. `time_of` gives the time of a kind that
is left out.
"""

ENTRIES = {"F": "forward", "B": "backward", RECOMPUTING: RECOMPUTING} | {
    letter: kind.noun.replace(" ", "_") for letter, kind in KINDS.items()
}
"""The names of times in a file, by the keys of `Times`."""


def time_of(times: Times, key: str) -> float:
    """The time under a key: the letter of a kind, or `RECOMPUTING` for a backward that runs the forward again.

    If ``times`` lacks the key, the time follows from others. A pair takes as long as its two operations one after the
    other, and a recomputation as long as `RECOMPUTING` less B. Any other kind takes a part of F if it opens the
    micro-batch, as forwards do, else a part of B: in proportion to the costs in the table of kinds.
    """
    return times[key] if key in times else sum(_derived(times, kind) for kind in COSTED[key].kinds)


def _derived(times: Times, kind: Kind) -> float:
    if kind.letter in times:
        return times[kind.letter]
    if kind is RECOMPUTATION:
        return max(0.0, round(times[RECOMPUTING] - times["B"], 12))
    reference = KINDS["F" if kind.opens else "B"]
    return times[reference.letter] * kind.cost / reference.cost


@dataclass(frozen=True, slots=True)
class Timing:
    """The costs of a micro-batch on a stage, at one micro-batch size.

    ``kept`` has the bytes that the stage keeps, received inputs and gradients included; its ``activations`` are M_a.
    ``output`` is the message to the next stage and ``gradient`` the one that comes back, in bytes; the last stage sends
    nothing on. ``noise`` is the spread of the measured times as a share of the median, None where nothing was measured.

    ``slices`` has the costs of each slice, if the micro-batch was also measured in slices of equal length. The carry
    that a slice leaves for the next ones is in bytes beyond those of earlier slices, ``carry_gradients`` are those of
    all that it leaves.
    """

    times: Times
    kept: MicroBatchBytes
    output: int
    gradient: int
    noise: float | None = None
    slices: tuple["Timing", ...] = ()

    def plus(self, overhead: Times, times: float) -> "Timing":
        """Returns the costs with longer times: each by ``times`` times the overhead of its operation."""
        return self.with_times(lambda key, seconds: seconds + times * time_of(overhead, key))

    def with_times(self, change: Callable[[str, float], float]) -> "Timing":
        """The costs with each time replaced by what ``change`` makes of its key and the time."""
        return replace(self, times={key: change(key, seconds) for key, seconds in self.times.items()})

    def seconds(self, kind: str) -> float:
        """The time of an operation (`time_of`); at least `LEAST` for half a backward without work."""
        seconds = time_of(self.times, kind)
        return seconds if kind in ("F", "B", RECOMPUTATION.letter) else seconds or LEAST


NO_OVERHEAD: Times = {"F": 0.0, "B": 0.0, RECOMPUTING: 0.0}

FREE_TIMING = Timing(NO_OVERHEAD, MicroBatchBytes(0, 0), 0, 0)
"""The costs of a stage that takes no time and keeps nothing."""


@dataclass(frozen=True, slots=True)
class StageCosts:
    """The costs of a stage: bytes of parameters (M_theta), of the gradients that are summed, of optimizer state.

    ``at[b]`` has the costs of a micro-batch of b items. ``step`` is how long the optimizer's step takes, in seconds; 0
    where a profile does not say. ``step_noise`` is the spread of its measured times as a share of the median.
    ``overhead`` has the seconds that an operation takes on any stage, even an empty one; the times of a `Timing`
    include them. It is the work of a rank around the stage's own: seeds, hooks, autograd's start, the launch of the
    first kernel.
    """

    weights: int
    gradients: int
    optimizer: int
    at: Mapping[int, Timing]
    step: float = 0.0
    step_noise: float | None = None
    overhead: Times = field(default_factory=lambda: NO_OVERHEAD)

    @property
    def first_gradients(self) -> int:
        """Bytes of the gradients that the first backward of an update makes, beside the flat tensors that are summed.

        They have the dtypes of the weights, and are freed when they have been copied into the flat tensors.
        """
        return min(self.gradients, self.weights)

    def slept(self, size: int, seconds: Mapping[str, float]) -> "StageCosts":
        """The costs in a rehearsal, in which a stage sleeps instead of computing or recomputing, and has no steps.

        ``seconds`` are given by the letters of the kinds that the schedule has. An operation over k micro-batches
        sleeps k times as long, and a slice its share, whatever the profile has for these.
        """
        backward = seconds["B"] if "B" in seconds else seconds["I"] + seconds["W"]
        recomputing = backward + seconds.get(RECOMPUTATION.letter, 0.0)
        times = {**seconds, "B": backward, RECOMPUTING: recomputing}
        timing = replace(self.at[size], times=times, noise=None, slices=())
        return replace(self, at={size: timing}, step=0.0, step_noise=None, overhead=NO_OVERHEAD)


UNKNOWN_LENGTH = 1_000
"""The length of an item in positions, which its slices divide among them, if a profile does not say it."""


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """Costs of a model: ``depths[D]`` has its D stages in order; an item has ``length`` positions (words, pixels).

    A profile of layers has ``layers`` in order, all at the same micro-batch sizes, in place of depths; a split makes
    stages of any number of layers. If stages made of layers were measured, ``splits[D]`` has the first layer of each
    stage. ``file`` is the model file that was measured, as its user named it.

    A model of several parts has in ``groups`` a profile of each part, a group of stages, with the depths of this group
    alone, or with its layers; the model itself then has none. `joined` puts groups in a row. Of its layers, ``begins``
    says which one is the first of a stage, for each stage with which a group begins, as (stage, layer). ``sources`` are
    the stages that no other feeds.
    """

    name: str
    depths: Mapping[int, tuple[StageCosts, ...]]
    note: str = ""
    length: int = 1
    layers: tuple[StageCosts, ...] = ()
    splits: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    file: str = ""
    groups: Mapping[str, "ModelProfile"] = field(default_factory=dict)
    begins: tuple[tuple[int, int], ...] = ()
    sources: tuple[int, ...] = (0,)

    def with_overhead(self, overhead: Times) -> "ModelProfile":
        """The profile with this overhead of an operation; its times, which include it, do not change."""
        return self.mapped(lambda part: replace(part, overhead=overhead))

    def mapped(self, change: Callable[[StageCosts], StageCosts]) -> "ModelProfile":
        """The profile with ``change`` applied to every stage and every layer."""
        depths = {depth: tuple(map(change, stages)) for depth, stages in self.depths.items()}
        groups = {name: group.mapped(change) for name, group in self.groups.items()}
        return replace(self, depths=depths, layers=tuple(map(change, self.layers)), groups=groups)

    def joined(self, named: Sequence[NamedStages], sources: tuple[int, ...]) -> "ModelProfile":
        """The profile of stages in these groups, in a row; itself if it has no groups.

        If it has no costs of these groups with as many stages, the result has no layers, and no such depth.
        """
        if not self.groups:
            return replace(self, sources=sources)
        whole = replace(self, groups={}, sources=sources)
        sizes = {name: stop - start for name, start, stop in named}
        if {*sizes} != {*self.groups}:
            return whole
        ordered = [self.groups[name] for name in sizes]
        if all(group.layers for group in ordered):
            ends = [*accumulate((len(group.layers) for group in ordered), initial=0)]
            begins = tuple((int(start), layer) for (_, start, _), layer in zip(named, ends, strict=False))
            return replace(whole, layers=tuple(chain(*(group.layers for group in ordered))), begins=begins[1:])
        if any(size not in group.depths for group, size in zip(ordered, sizes.values(), strict=True)):
            return whole
        stages = chain(*(group.depths[size] for group, size in zip(ordered, sizes.values(), strict=True)))
        return replace(whole, depths={sum(sizes.values()): tuple(stages)})

    def stages_in(self, count: int, split: Sequence[int] | None) -> tuple[StageCosts, ...]:
        """The costs of ``count`` stages: of a ``split`` of the layers, or else those of a depth."""
        return stages_of(self.layers, split, self.sources) if self.layers and split else self.depths[count]

    def ends(self, stages: int) -> list[tuple[int, int]]:
        """The ends of the groups, each as (stages, layers) up to there; of a chain there is one."""
        return [*self.begins, (stages, len(self.layers))]

    def even(self, stages: int) -> tuple[int, ...]:
        """The split of the layers in which the stages of a group have equally many, or one more or less."""
        split, (stage, layer) = list[int](), (0, 0)
        for end, last in self.ends(stages):
            split += [layer + place * (last - layer) // (end - stage) for place in range(end - stage)]
            stage, layer = end, last
        return tuple(split)

    @property
    def parts(self) -> Iterator[StageCosts]:
        """Yields all stages or layers, those of groups too."""
        yield from chain(self.layers, *self.depths.values(), *(group.parts for group in self.groups.values()))

    @property
    def overhead(self) -> Times:
        """The overhead of an operation, which is the same on every stage."""
        return next((part.overhead for part in self.parts), NO_OVERHEAD)

    @property
    def positions(self) -> int:
        """The length of an item, which its slices divide among them; a round number if the profile lacks it."""
        return self.length if self.length > 1 else UNKNOWN_LENGTH

    @property
    def has_slices(self) -> bool:
        """Whether the slices of any micro-batch were measured."""
        return any(timing.slices for part in self.parts for timing in part.at.values())

    @property
    def sizes(self) -> frozenset[int]:
        """The micro-batch sizes at which the layers were measured; none if the profile is not one of layers."""
        return frozenset(self.layers[0].at) if self.layers else frozenset()


# Costs of stages that are made of layers, and the check of a split.


def stages_of(
    layers: Sequence[StageCosts], split: Sequence[int], sources: Sequence[int] = (0,)
) -> tuple[StageCosts, ...]:
    """The costs of the stages that a split, the first layer of each stage, makes of layers; no stage feeds ``sources``.

    An operation takes `LEAST` at least, also on a stage of layers without work, such as a table of words.
    """
    return tuple(
        lasting_stage(merged(layers[first:end], opens=stage in sources))
        for stage, (first, end) in enumerate(pairwise((*split, len(layers))))
    )


def lasting_stage(stage: StageCosts) -> StageCosts:
    """The costs of a stage whose operations take `LEAST` at least."""

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


def fastest(model: ModelProfile, stages: int, size: int) -> tuple[int, ...]:
    """The split of the layers into ``stages`` stages whose slowest stage takes the least time for ``size`` items.

    There are at least as many layers as stages, in each group.
    """
    split = balanced(durations(model.layers, size, recomputing=False), [()] * stages, begins=model.begins)
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
    kept = [timing.kept for timing in timings]
    first, last, gradient = kept[0], kept[-1], timings[-1].gradient
    operands = sum(of_layer.operands for of_layer in kept)
    inner_inputs = sum(max(0, after.kept.input - before.output) for before, after in pairwise(timings))
    times = {
        key: _as_one([timing.times[key] for timing in timings], time_of(overhead, key))
        for key in ENTRIES
        if all(key in timing.times for timing in timings)
    }
    if opens and "I" in times:
        times |= _opening([timing.times for timing in timings], overhead, times["W"])
    return Timing(
        times,
        MicroBatchBytes(
            activations=sum(of_layer.activations for of_layer in kept),
            input=first.input + inner_inputs,
            released=0 if opens else _released(kept),
            operands=min(operands, gradient) if opens else operands,
            carry=sum(of_layer.carry for of_layer in kept),
            carry_gradients=sum(of_layer.carry_gradients for of_layer in kept),
            resident=_ends(first.input, first.resident, last.input, last.resident),
            resident_operands=_ends(first.input, first.resident_operands, last.input, last.resident_operands),
        ),
        timings[-1].output,
        gradient,
        _mean([(timing.noise, timing.times["F"] + timing.times["B"]) for timing in timings]),
        tuple(_merged(of_slice, overhead, opens) for of_slice in zip(*(t.slices for t in timings), strict=True)),
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


def _released(layers: Sequence[MicroBatchBytes]) -> int:
    """Bytes that the first half of a backward frees on a stage of these layers.

    Layers free activations from the last one back, up to and including the first that keeps some for its weights: these
    hold the graph of all layers before it.
    """
    released = 0
    for kept in reversed(layers):
        released += kept.released
        if kept.released < kept.activations:
            break
    return released


def _as_one(times: Sequence[float], overhead: float) -> float:
    """The time of several operations run as one: their sum with one overhead in all, at least the longest."""
    return max(*times, sum(times) - (len(times) - 1) * overhead)


def _mean(noise: Sequence[tuple[float | None, float]]) -> float | None:
    """The mean of noises, weighted by seconds: times that are slow at the same moments. None if one is not known."""
    if any(share is None for share, _ in noise):
        return None
    total = sum(seconds for _, seconds in noise)
    return sum((share or 0.0) * seconds for share, seconds in noise) / total if total else 0.0


def problem(split: Sequence[int], stages: int, layers: int, begins: Sequence[tuple[int, int]] = ()) -> str | None:
    """The reason why a split does not cut ``layers`` layers into ``stages`` stages; None if it does.

    ``begins`` are as in `ModelProfile`.
    """
    if not split or split[0] != 0:
        return "it lists the first layer of each stage, so it begins with 0"
    if any(second <= first for first, second in pairwise(split)):
        return "every stage has one layer at least, so the numbers ascend"
    if split[-1] >= layers:
        return f"there is no layer {split[-1]}; there are the layers 0 to {layers - 1}"
    if len(split) != stages:
        return f"it begins the stages 0 to {len(split) - 1}, and the schedule has the stages 0 to {stages - 1}"
    if wrong := next(((stage, layer) for stage, layer in begins if split[stage] != layer), None):
        stage, layer = wrong
        return f"a group of stages begins with stage {stage}, and in the profile with layer {layer}, not {split[stage]}"
    return None


# Costs of slices of any length, computed from the equal slices that a profile has.
#
# The work along the sequence is a curve, which rises over each measured slice by the work of that slice. Any other
# slice takes the time by which the curve rises from its start to its end, and the overhead of an operation once.


def slice_terms(timing: Timing, overhead: Times, kind: str, extent: Extent) -> tuple[tuple[float, Fraction], ...]:
    """Time of an operation on a slice, as terms to be added: each is the seconds of a measured slice and a factor.

    ``extent`` is where the slice begins and ends, as shares of the sequence. A last term adds or removes overhead, so
    that the slice has that of one operation.
    """
    terms = [(part.seconds(kind), share) for part, share in _overlaps(timing.slices, extent)]
    operations = sum((share for _, share in terms), Fraction(0))
    # Each part that was measured has the overhead once, also where a slice is longer or shorter.
    seconds = min(time_of(overhead, kind), *(part.seconds(kind) for part in timing.slices))
    return (*terms, (seconds, 1 - operations)) if seconds and operations != 1 else tuple(terms)


def _overlaps(parts: Sequence[Timing], extent: Extent) -> Iterator[tuple[Timing, Fraction]]:
    """Yields the measured slices that overlap with an extent, each with the share of that slice which lies in it."""
    start, end = (place * len(parts) for place in extent)
    for number, part in enumerate(parts):
        share = min(end, Fraction(number + 1)) - max(start, Fraction(number))
        if share > 0:
            yield part, share


def sliced(timing: Timing, overhead: Times, lengths: tuple[int, ...]) -> Timing:
    """Costs of a micro-batch in slices of these relative lengths: times of all together, bytes as if it were whole.

    The bytes of a slice are then its share of the length. If a worker keeps only some slices of a micro-batch, these
    are always the first ones, which may be larger than the mean. So activations and carries count as if every slice
    were as large as the largest mean of the first n slices, for any n.
    """
    parts, of_slices = timing.slices, extents(lengths)

    def times_of(kind: str) -> float:
        terms = (term for extent in of_slices for term in slice_terms(timing, overhead, kind, extent))
        return sum(seconds * float(share) for seconds, share in terms)

    # The gradient of a carry is as long as all slices before: it grows from the first boundary to the last.
    kept = [part.kept for part in parts]
    boundaries = [start / Fraction(max(1, len(parts) - 1), len(parts)) for start, _ in of_slices[1:]] or [Fraction(0)]
    gradient = max(of_slice.carry_gradients for of_slice in kept)
    shares = [end - start for start, end in of_slices[1:]]
    gradients = [ceil(ceil(gradient * b) / share) for b, share in zip(boundaries, shares, strict=False)]
    return replace(
        timing,
        times={key: times_of(key) for key in timing.times if all(key in part.times for part in parts)},
        kept=MicroBatchBytes(
            activations=largest_mean([of_slice.activations for of_slice in kept], (1,) * len(parts)),
            input=timing.kept.input,
            released=len(parts) * min(of_slice.released for of_slice in kept),
            operands=len(parts) * max(of_slice.operands for of_slice in kept),
            carry=largest_mean([*_carries(kept, of_slices), 0], lengths),
            carry_gradients=max(gradients, default=0),
            resident=len(parts) * max(of_slice.resident for of_slice in kept),
            resident_operands=len(parts) * max(of_slice.resident_operands for of_slice in kept),
        ),
        slices=(),
    )


def _carries(parts: Sequence[MicroBatchBytes], of_slices: Sequence[Extent]) -> Iterator[int]:
    """Yields the bytes of the carry that each slice leaves, except the last, which leaves none.

    The carry of the first measured slice is in proportion to its length, as the keys of its positions are. The carry of
    a later slice may be larger, the later the slice starts: it may hold a copy of the keys of all positions before.
    """
    sizes = [part.carry for part in parts[:-1]] or [0]
    for start_of_slice, end in of_slices[:-1]:
        start = start_of_slice * len(parts)
        below = min(int(start), max(0, len(sizes) - 2))
        growth = sizes[below + 1] - sizes[below] if len(sizes) > 1 else 0
        copied = sizes[below] - sizes[0] + (start - below) * growth
        yield ceil(max(Fraction(0), sizes[0] * (end - start_of_slice) * len(parts) + copied))


def equal_times(slices: int, length: int, time: Callable[[int, int], float]) -> tuple[int, ...]:
    """Lengths of slices, ``length`` in all, with which the slowest slice is fastest: all take about equally long.

    ``time`` gives the time of a slice from its start and end; a slice within another one is not slower. From the last
    slice back, each is as long as the time of the slowest allows, and leaves at least 1 for each slice before it.
    """
    most, least = time(0, length), 0.0
    best = _cut(slices, length, time, most)
    # The interval of limits is halved until no number is between its ends.
    while least < (limit := (least + most) / 2) < most:
        if (starts := _cut(slices, length, time, limit)) is None:
            least = limit
        else:
            best, most = starts, limit
    assert best is not None, "the whole sequence takes longest"
    return tuple(end - start for end, start in reversed([*pairwise([length, *best])]))


def _cut(slices: int, length: int, time: Callable[[int, int], float], limit: float) -> list[int] | None:
    """The starts of ``slices`` slices, the last first, none longer than ``limit``; None if there are none such."""

    def fits(end: int, start: int) -> bool:
        return time(start, end) <= limit

    starts = [length]
    for others in range(slices - 1, -1, -1):
        end = starts[-1]
        first = bisect_left(range(end), True, lo=others, key=partial(fits, end))
        if first == end or (first and not others):
            return None
        starts.append(first)
    return starts[1:]


_BOTH = ("F", "B")
"""The keys of times that every profile has; together they are all work on a slice, if nothing is computed twice."""


def slowest_stage(stages: Sequence[tuple[Timing, Times]], length: int) -> Callable[[int, int], float]:
    """Returns a function from the start and the end of a slice to its time on the stage where it takes longest.

    Starts and ends are positions in a sequence of this ``length``. ``stages`` have a timing and the overhead each; the
    time is that of the forward and the backward.
    """
    curves = []
    for timing, overhead in stages:
        once = [min(time_of(overhead, kind), *(part.seconds(kind) for part in timing.slices)) for kind in _BOTH]
        work = (sum(part.seconds(kind) for kind in _BOTH) - sum(once) for part in timing.slices)
        curves.append(([*accumulate(work, initial=0.0)], sum(once)))

    def work_until(place: int, curve: Sequence[float]) -> float:
        whole, rest = divmod(place * (len(curve) - 1), length)
        return curve[whole] + (rest / length * (curve[whole + 1] - curve[whole]) if rest else 0.0)

    return lambda start, end: max(work_until(end, curve) - work_until(start, curve) + once for curve, once in curves)


# A profile that counts work instead of time, and the device that turns work into time.


class Device(NamedTuple):
    """The processor of a worker: ``peak`` in FLOP/s, of which large micro-batches reach the share ``efficiency``.

    A micro-batch of ``half_at`` positions reaches half that rate (Hockney's half-performance length). The length in a
    profile is the number of positions of an item, 1 by default. ``operation`` is the overhead in seconds of each
    forward, each backward, and each half of a split backward; a backward that runs the forward again has it twice.
    """

    peak: float
    efficiency: float
    half_at: float
    operation: float = 0.0

    def rate(self, positions: float) -> float:
        """FLOP/s for a micro-batch of n positions: peak * efficiency * n / (n + half_at)."""
        return self.peak * self.efficiency * positions / (positions + self.half_at)


class WorkProfile(NamedTuple):
    """A profile that counts work: the times in ``counts`` are in FLOP instead of seconds."""

    counts: ModelProfile

    def on(self, device: Device) -> ModelProfile:
        """The profile in seconds, on a device."""
        overhead = {**dict.fromkeys(KINDS, device.operation), RECOMPUTING: 2 * device.operation}

        def timed(size: int, counted: Timing) -> Timing:
            slices = tuple(at(size * self.counts.length / len(counted.slices), part) for part in counted.slices)
            return replace(at(size * self.counts.length, counted), slices=slices)

        def at(positions: float, counted: Timing) -> Timing:
            rate = device.rate(positions)
            return counted.with_times(lambda _, flop: flop / rate).plus(overhead, 1)

        def on(stage: StageCosts) -> StageCosts:
            return replace(stage, at={size: timed(size, at) for size, at in stage.at.items()}, overhead=overhead)

        return self.counts.mapped(on)
