"""Costs of a model's stages, timed on this machine or counted from shapes alone."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from math import sqrt
from pathlib import Path
from statistics import median, quantiles
from typing import Any, TypeVar, cast

import torch
from torch.utils.flop_counter import FlopCounterMode

from chimera_ir import plural
from chimera_ir.ir.levels import Header
from chimera_ir.measure.stations import (
    MeasuredTurn,
    ModelCut,
    Station,
    graph,
    message_bytes,
    passes_key,
    running,
    stations,
    step_key,
)
from chimera_ir.profile.costs import (
    ENTRIES,
    NO_OVERHEAD,
    RECOMPUTING,
    ModelProfile,
    StageCosts,
    Times,
    Timing,
    WorkProfile,
    lasting_stage,
)
from chimera_runtime import blame
from chimera_runtime.blame import ModelError
from chimera_runtime.errors import BadModel, Misuse
from chimera_runtime.model.model import ModelFile, load
from chimera_runtime.program.job import Feed, Job
from chimera_runtime.ranks.devices import keep_memory
from chimera_runtime.tools.watch.memory import bytes_of, state_bytes

# Rounds of measurement: every pass of a micro-batch through a stage, slice by slice, each timed or counted.

Stopwatch = Callable[[Callable[[], None]], float]
"""Calls a function and returns what it costs: the seconds or, where work is counted, the floating-point operations."""


def cpu_clock(run: Callable[[], None]) -> float:
    """Calls ``run`` and returns the seconds that it takes, by the clock of this machine."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def cuda_clock(run: Callable[[], None]) -> float:
    """Calls ``run`` and returns its seconds by the GPU's own clock, from an idle GPU to the end of the last kernel."""
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


_PASSES = "F", "B", RECOMPUTING, "I", "W"
"""The passes of a slice, by the keys of `Times`."""


def costs_of_round(station: Station, number: int, clock: Stopwatch) -> list[tuple[float, ...]]:
    """Runs all passes of round ``number`` through a stage, measured by ``clock``; returns their costs, by slice.

    ``station`` is the stage, ready to run. A round has a micro-batch with an ordinary backward, one that recomputes,
    and one with a backward in halves. Backwards take the slices in reverse.
    """
    turn = MeasuredTurn.of(number)
    station.refill()
    forward = by_slice(station, clock, station.forward, turn.ordinary)
    backward = by_slice(station, clock, station.backward, turn.ordinary, reverse=True)
    station.refill()
    by_slice(station, clock, station.forward, turn.recomputed)
    recomputing = by_slice(station, clock, station.backward, turn.recomputed, reverse=True)
    station.refill()
    by_slice(station, clock, station.forward, turn.halved)
    halves = halves_by_slice(station, clock, turn.halved)
    station.forget_losses(turn)
    return [*zip(forward, backward, recomputing, *halves, strict=True)]


def by_slice(
    station: Station, clock: Stopwatch, run: Callable[[int], None], micro_batch: int, reverse: bool = False
) -> list[float]:
    """The cost of each call of ``run`` by slice; with ``reverse`` the last comes first, as in a backward."""
    slices = station.slices_of(micro_batch)
    costs = {number: clock(partial(run, number)) for number in (slices[::-1] if reverse else slices)}
    return [costs[number] for number in slices]


def halves_by_slice(station: Station, clock: Stopwatch, micro_batch: int) -> tuple[list[float], list[float]]:
    """Runs the first halves of the backwards of all slices, then the second halves; returns the costs of each half."""
    first = by_slice(station, clock, station.backward_input, micro_batch, reverse=True)
    return first, by_slice(station, clock, station.stage.backward_weights, micro_batch, reverse=True)


# Repeated measurements of one thing: their median, their spread, and whether that is good enough.
#
# A round measures each of several things once.

NOISY = 0.05
"""The largest uncertainty of a usable median, as a share of the median."""

GOOD = 0.01
"""The uncertainty, as a share of the median, at which no further rounds are needed."""

BRIEF = 0.1
"""Share of the longest time measured in the same rounds; a time below it gets a weight less than 1."""

FEWEST = 5


ShowProgress = Callable[[str, int, int], None]
"""Shows progress: called with what has just been done, the number of steps done, and the number of all steps."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Measurements of a positive quantity, two or more.

    ``weight`` scales the uncertainty before it is compared with the limit for noise: 1, or less for a time that is much
    shorter than others of the same rounds, because a noisy short time does less harm.
    """

    values: tuple[float, ...]
    weight: float = 1.0

    @property
    def median(self) -> float:
        """Median of the measurements, which is the figure to use."""
        return median(self.values)

    @property
    def spread(self) -> float:
        """Distance between the quartiles (IQR), as a share of the median."""
        first, _, third = quantiles(self.values, n=4, method="inclusive")
        return (third - first) / self.median

    @property
    def scatter(self) -> float:
        """Spread without disturbances: twice the distance from lower quartile to median, as a share of the median.

        Equal to the spread where the values are symmetric. Another process that slows the machine down for a while
        makes many rounds in a row longer, and raises the upper quartile: that is not a scatter from round to round.
        """
        first, middle, _ = quantiles(self.values, n=4, method="inclusive")
        return 2 * (middle - first) / middle

    @property
    def uncertainty(self) -> float:
        """Uncertainty of the median, as a share of it: 1.57 IQR / sqrt(n).

        Half the notch of McGill, Tukey and Larsen, "Variations of Box Plots" (1978): for measurements that scatter by
        chance, an interval that holds the true median in about 95 of 100 cases. A disturbance that slows down all
        measurements does not show in it.
        """
        return 1.57 * self.spread / sqrt(len(self.values))

    @property
    def is_noisy(self) -> bool:
        """Whether the median is too uncertain to use."""
        return self.weight * self.uncertainty > NOISY


def together(figures: Sequence[Sequence[float]]) -> tuple[Samples, ...]:
    """Makes the samples of several quantities; ``figures`` has a list of times for each, measured in the same rounds.

    A quantity whose median is below a tenth (`BRIEF`) of the largest median gets a weight below 1, so its uncertainty
    counts for less.

    Examples
    --------
    >>> [samples.weight for samples in together([[10.0, 10.0], [0.5, 0.5]])]
    [1.0, 0.5]
    """
    medians = [median(values) for values in figures]
    least = BRIEF * max(medians)
    return tuple(Samples(tuple(v), min(1.0, m / least)) for v, m in zip(figures, medians, strict=True))


def enough(figures: list[list[float]], most: int) -> bool:
    """Whether every quantity is known well enough, or has been measured ``most`` times, once in each round."""
    rounds = min(map(len, figures))
    if rounds < FEWEST:
        return False
    return rounds >= most or all(samples.weight * samples.uncertainty <= GOOD for samples in together(figures))


def in_rounds(measure: Callable[[], tuple[float, ...]], warm_up: int, most: int) -> tuple[Samples, ...]:
    """Samples of several quantities; each round measures all, so that a disturbance affects them all.

    The first ``warm_up`` rounds do not count; then come FEWEST rounds or more, until `enough`, but at most ``most``.
    """
    for _ in range(warm_up):
        measure()
    figures = [[value] for value in measure()]
    while not enough(figures, most):
        for values, value in zip(figures, measure(), strict=True):
            values.append(value)
    return together(figures)


def noise(figures: Sequence[tuple[str, Samples]]) -> tuple[str, ...]:
    """One warning about the figures that are too noisy to use, then a line for each, the worst first."""
    noisy = sorted((named for named in figures if named[1].is_noisy), key=lambda named: -named[1].uncertainty)
    if not noisy:
        return ()
    rounds = max(len(samples.values) for _, samples in noisy)
    (worst, samples), lines = noisy[0], [f"{name}: {percent(samples.uncertainty)}" for name, samples in noisy]
    return (
        f"too noisy to use: {len(noisy)} of {plural.counted(len(figures), 'figure')}, whose medians may be off by more "
        f"than {percent(NOISY)} after {plural.counted(rounds, 'round')}, the {worst} by "
        f"{percent(samples.uncertainty)}; "
        "measure on an idle machine, or with more --rounds",
        *lines,
    )


def too_noisy(where: str, figures: Sequence[tuple[str, Samples]]) -> list[str]:
    """A line for ``where``, naming the figures that are too noisy to use; an empty list if all can be used."""
    noisy = [f"{name} {percent(samples.uncertainty)}" for name, samples in figures if samples.is_noisy]
    if not noisy:
        return []
    rounds = max(len(samples.values) for _, samples in figures)
    return [
        f"{where}: too noisy to use: after {rounds} rounds the median may be off by more than {percent(NOISY)}: "
        + ", ".join(noisy)
    ]


def rounded(value: float, digits: int = 4) -> float:
    """The value with ``digits`` significant digits, for people who read a profile."""
    return float(f"{value:.{digits}g}")


def percent(share: float) -> str:
    """A share in percent, as text.

    Examples
    --------
    >>> percent(0.0712), percent(0.996), percent(-12.3)
    ('7.1 %', '100 %', '-1230 %')
    """
    return f"{100 * share:.2g} %" if abs(share) < 0.995 else f"{100 * share:.0f} %"


WARM_UP = 3
"""Rounds that do not count: memory is allocated, caches and frequencies settle."""

SHORT = 10
"""Factor on the number of rounds for times of microseconds."""


@dataclass(frozen=True, slots=True)
class StageRequest:
    """Depths D and micro-batch sizes B to measure, in at most ``rounds`` rounds; without depths, layers are measured.

    ``split`` is the first layer of each stage of a model of layers; by default stages have equal numbers of layers.
    With ``once``, only one of equal layers is measured. Each micro-batch is also measured in ``slices``, if several.
    ``graphs`` have the groups and edges of the stages of each depth, or of the layers, of a model that is no chain.
    """

    depths: tuple[int, ...]
    sizes: tuple[int, ...]
    rounds: int
    seed: int
    split: tuple[int, ...] | None = None
    once: bool = False
    slices: int = 1
    graphs: tuple[Header, ...] = ()


@dataclass(frozen=True, slots=True)
class TimedProfile:
    """A profile with its ``noise``: a warning if figures are too noisy to use, then a line for each."""

    profile: ModelProfile
    noise: tuple[str, ...]


_Measured = tuple[Times, float | None]
"""Costs of the passes of a slice, and the largest scatter of their times as a share, None if nothing was timed."""


_Figures = TypeVar("_Figures")

_NAMES = tuple(ENTRIES[key].replace("_", " ") for key in _PASSES)


_OFFERED: dict[str, list[str]] = {"args": []}
"""The values that functions of a model file can take by name here: ``args``, without any command-line arguments."""


class BadFile(Exception):
    """The model cannot be measured; the message says why and what to do."""


Load = Callable[[tuple[int, ...] | None], ModelFile]
"""Loads a model; the argument has the first layer of each stage, and None stands for stages of equal size."""


def of_file(file: Path) -> Load:
    """Returns a function that loads a model file."""
    return lambda split: load(file, _OFFERED, split)


def of_transformer(source: str, length: int | None) -> Load:
    """Returns a function that loads a model of transformers, with items of ``length`` tokens."""
    from chimera_runtime.huggingface.layers import without_text

    return lambda split: without_text(source, length, split)


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except (Misuse, BadModel) as error:
        raise BadFile(str(error)) from error
    except ModelError as error:
        raise BadFile(blame.describe(error)) from error


def timed(load_model: Load, request: StageRequest, device: str, threads: int, progress: ShowProgress) -> TimedProfile:
    """Measures a profile in seconds; each figure is the median of rounds, ``noise`` their largest scatter, at most 1.

    A round is a forward with its backward, another with a backward in two halves, and a forward that keeps its input
    with the backward that recomputes; all run the stages of the generated programs. As in these programs, the first
    stage's forward loads its items, and gradients add up over rounds as over the micro-batches of an update. Steps have
    rounds of their own: a forward and a backward of the smallest micro-batch, then everything that a rank does in the
    line ``step``; only this is timed. ``threads`` is the number of threads that torch uses on a CPU.

    Raises `BadFile` if the model is not as its interface wants it, or the device is not there.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise BadFile("--device cuda: torch finds no GPU here; use --device cpu, or --count")
    torch.set_num_threads(threads)
    if device == "cpu":
        keep_memory()
    times = _StageClock(request.rounds, cuda_clock if device == "cuda" else cpu_clock)
    once = _Once(times)
    note = f"times on {_described(torch.device(device))}"
    with _refusals():
        model = load_model(request.split)
        profile = _profile(model, request, torch.device(device), once if request.once else times, note, progress)
    notes = [profile.note, once.described] if once.described else [profile.note]
    return TimedProfile(replace(profile, note="; ".join(notes), file=str(model.file)), noise(times.figures))


class _StageClock:
    """Measures stages by ``clock``, in at most ``rounds`` rounds; ``figures`` has all samples, each with its name."""

    def __init__(self, rounds: int, clock: Stopwatch) -> None:
        self.figures: list[tuple[str, Samples]] = []
        self._rounds = rounds
        self._clock = clock

    def passes(self, cut: ModelCut, number: int, station: Station) -> list[_Measured]:
        """Medians of the times of passes through stage ``number``, and the largest of their scatters, by slice."""
        return self._measured(f"{cut.part(number)}, micro-batch size {station.shape.size}", station, self._rounds)

    def _measured(self, where: str, station: Station, most: int) -> list[_Measured]:
        turns, slices = count(), station.shape.slices
        samples = in_rounds(lambda: tuple(chain(*costs_of_round(station, next(turns), self._clock))), WARM_UP, most)
        measured: list[_Measured] = []
        for place in range(slices):
            of_slice = samples[place * len(_NAMES) : (place + 1) * len(_NAMES)]
            part = f"slice {place} of {slices} of {where}" if slices > 1 else where
            self.figures += [(f"{name} of {part}", figure) for name, figure in zip(_NAMES, of_slice, strict=True)]
            medians = {key: rounded(figure.median) for key, figure in zip(_PASSES, of_slice, strict=True)}
            measured.append((medians, _noise(*of_slice)))
        return measured

    def step(self, cut: ModelCut, number: int, station: Station) -> tuple[float, float | None]:
        """Median and scatter of the step of stage ``number``; every round starts from the initial weights."""
        turns = count()
        initial = [parameter.detach().clone() for parameter in station.trained]

        def measured() -> tuple[float]:
            for parameter, value in zip(station.trained, initial, strict=True):
                parameter.data.copy_(value)
            # A micro-batch, so that there are gradients, and the caches are as after a backward.
            turn = MeasuredTurn.of(next(turns))
            station.refill()
            station.forward(turn.ordinary)
            station.backward(turn.ordinary)
            station.forget_losses(turn)
            return (self._clock(station.stage.step),)

        (samples,) = in_rounds(measured, WARM_UP, self._rounds)
        self.figures.append((f"step of {cut.part(number)}", samples))
        return rounded(samples.median), _noise(samples)

    def overhead(self, cut: ModelCut) -> Times:
        """Medians of the times of a stage that computes nothing; they are short, so SHORT times as many rounds run."""
        # A stage without work: all its time is overhead.
        nothing = _empty_model()
        small = replace(cut, model=nothing, dataset=nothing.items(), job=graph(3), sizes=(1,), slices=1)
        (station,) = dict(stations(small, lambda _doing: None))[1]
        ((times, _),) = self._measured("an operation", station, SHORT * self._rounds)
        return times


class _Identity(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)


def _empty_model() -> ModelFile:
    """Three stages; the middle one computes nothing. The first has a weight, so that gradients pass back through it."""
    modules = partial(torch.nn.Linear, 1, 1), _Identity, _Identity
    return ModelFile(
        Path("an empty stage"),
        lambda stage, _stages: modules[stage](),
        lambda output, _target: output.mean(),
        lambda: [(torch.zeros(1), 0)],
        lambda parameters: torch.optim.SGD(parameters, lr=0.0),
    )


class _Once:
    """Measures one of several stations (stages, ready to run) that are equal; the others get its figures."""

    def __init__(self, measure: _StageClock) -> None:
        self._measure = measure
        self._known: list[tuple[object, int, Any]] = []
        self._equal: dict[int, set[int]] = {}

    def passes(self, cut: ModelCut, number: int, station: Station) -> list[_Measured]:
        return self._once(passes_key(station), number, lambda: self._measure.passes(cut, number, station))

    def step(self, cut: ModelCut, number: int, station: Station) -> tuple[float, float | None]:
        return self._once(step_key(station), number, lambda: self._measure.step(cut, number, station))

    def overhead(self, cut: ModelCut) -> Times:
        return self._measure.overhead(cut)

    def _once(self, signature: object, number: int, measure: Callable[[], _Figures]) -> _Figures:
        for other, first, figures in self._known:
            if other == signature:
                self._equal.setdefault(first, {first}).add(number)
                return cast("_Figures", figures)
        figures = measure()
        self._known.append((signature, number, figures))
        return figures

    @property
    def described(self) -> str:
        groups = "; ".join(_numbered(layers) for layers in sorted(map(sorted, self._equal.values())))
        return f"of equal layers one was measured: {groups}" if groups else ""


def _numbered(layers: Sequence[int]) -> str:
    together = layers[-1] - layers[0] == len(layers) - 1
    return f"{layers[0]} to {layers[-1]}" if together else ", ".join(map(str, layers))


def _noise(*figures: Samples) -> float:
    return min(1.0, rounded(max(samples.weight * samples.scatter for samples in figures), 2))


def counted(file: Path, request: StageRequest, progress: ShowProgress) -> WorkProfile:
    """The profile in floating-point operations instead of seconds, from shapes alone, without memory for the model.

    Operations are those that torch.utils.flop_counter counts: matrix products, convolutions and attention, with a
    multiplication and an addition for each pair of numbers. A recomputing backward is a forward and a backward. Bytes
    are those that the same operators would save.

    Raises `BadFile` if the model is not as its interface wants it, or needs values where there are shapes alone.
    """
    note = f"work counted on shapes, torch {torch.__version__}"
    with _refusals():
        model = load(file, _OFFERED, request.split)
        counts = _profile(model, request, torch.device("meta"), _Work(), note, progress)
    return WorkProfile(replace(counts, file=str(file)))


class _Work:
    """Counts FLOP with torch's flop counter. An optimizer's step counts as 0, as that counter sees no FLOP there."""

    def passes(self, cut: ModelCut, _number: int, station: Station) -> list[_Measured]:
        turn = MeasuredTurn.of(0)
        with cut.here(), FlopCounterMode(display=False) as flops:

            def clock(run: Callable[[], None]) -> float:
                before = flops.get_total_flops()
                run()
                return float(flops.get_total_flops() - before)

            forward = by_slice(station, clock, station.forward, turn.ordinary)
            backward = by_slice(station, clock, station.backward, turn.ordinary, reverse=True)
            by_slice(station, clock, station.forward, turn.halved)
            halves = halves_by_slice(station, clock, turn.halved)
        recomputing = map(sum, zip(forward, backward, strict=True))
        costs_of_slices = zip(forward, backward, recomputing, *halves, strict=True)
        return [(dict(zip(_PASSES, costs, strict=True)), None) for costs in costs_of_slices]

    def step(self, _cut: ModelCut, _number: int, _station: Station) -> tuple[float, float | None]:
        return 0.0, None

    def overhead(self, _cut: ModelCut) -> Times:
        return NO_OVERHEAD


_Measure = _StageClock | _Once | _Work
"""Source of the measured or counted costs of passes, steps and overheads; the noise of a counted cost is None."""


def _profile(
    model: ModelFile, request: StageRequest, device: torch.device, measure: _Measure, note: str, progress: ShowProgress
) -> ModelProfile:
    jobs = _jobs(model, request)
    several = len(request.sizes) * (2 if request.slices > 1 else 1)
    done, steps = count(1), sum(job.stages for job in jobs) * (2 + several)

    def tell(doing: str) -> None:
        progress(doing, next(done), steps)

    # Stage by stage from the last to the first, so that no two stages are in memory at once.
    dataset, kind = model.items(), "stage" if request.depths else "layer"
    depths: dict[str, dict[int, tuple[StageCosts, ...]]] = {}
    kinds: set[str] = set()
    for job in jobs:
        cut = ModelCut(model, dataset, job, request.sizes, device, request.seed, kind, request.slices)
        stage_costs: list[StageCosts] = []
        for number, stage_stations in stations(cut, tell):
            stage_costs.append(_costs_of_stage(cut, number, stage_stations, measure, tell))
            kinds |= {str(p.dtype).removeprefix("torch.") for p in stage_stations[0].module.parameters()}
            del stage_stations  # before the next stage is made
        stage_costs.reverse()
        if request.depths:  # else stages follow from the layers
            stage_costs = [*map(lasting_stage, stage_costs)]
        for group, start, stop in job.named or [("", 0, job.stages)]:
            depths.setdefault(group, {}).setdefault(stop - start, tuple(stage_costs[start:stop]))
    overhead = measure.overhead(cut)
    described = ", ".join([note, *sorted(kinds)])

    def of_group(name: str, of_depths: Mapping[int, tuple[StageCosts, ...]]) -> ModelProfile:
        layers = () if request.depths else next(iter(of_depths.values()))
        return ModelProfile(name, of_depths if request.depths else {}, layers=layers)

    whole = of_group(model.file.stem, depths.pop("")) if "" in depths else ModelProfile(model.file.stem, {})
    groups = {name: of_group(name, of_depths) for name, of_depths in depths.items()}
    cut_layers = model.layers if request.depths and not groups else None
    splits = {} if cut_layers is None else {depth: tuple(cut_layers.first(depth)) for depth in whole.depths}
    return replace(whole, note=described, splits=splits, groups=groups).with_overhead(overhead)


def _jobs(model: ModelFile, request: StageRequest) -> list[Job]:
    """The stages of each depth, or the layers, with the edges between them; raises `Misuse` if there are none."""
    graphs = [
        graph(h.stages, h.title, frozen=h.frozen, named=h.named, feeds=tuple(Feed(*edge) for edge in h.graph))
        for h in request.graphs
    ]
    if request.depths:
        if graphs and model.layers is not None:
            raise Misuse(
                f"{model.file} has layers(): measure these, as the stages of a scheme of groups follow from them"
            )
        return graphs or [*map(graph, request.depths)]
    if model.layers is None:
        raise Misuse(
            f"{model.file} has build_stage, which makes whole stages: layers are those of a file with layers()"
        )
    layers = len(model.layers.layers)
    for header in request.graphs:
        if header.stages != layers:
            raise Misuse(
                f"{header.title} has {plural.counted(header.stages, 'stage')}, and {model.file} has "
                f"{plural.counted(layers, 'layer')}: choose parameters with which each layer is a stage"
            )
    return graphs or [graph(layers)]


def _costs_of_stage(
    cut: ModelCut, number: int, stations: Sequence[Station], measure: _Measure, tell: Callable[[str], None]
) -> StageCosts:
    at: dict[int, Timing] = {}
    # Whole micro-batches first, then slices of each.
    for station in stations:
        size, slices = station.shape
        with running(cut, number, size):
            timings = tuple(_timings(station, measure.passes(cut, number, station)))
        at[size] = timings[0] if slices == 1 else replace(at[size], slices=timings)
        tell(f"{cut.part(number)}, micro-batch size {size}{f', {slices} slices' if slices > 1 else ''}")
    # The step does not depend on the micro-batch size: the smallest one needs least memory.
    smallest = min(stations, key=lambda station: station.shape)
    with running(cut, number, smallest.shape.size):
        costs = _costs(cut.model, smallest, at, measure.step(cut, number, smallest))
    tell(f"{cut.part(number)}, optimizer")
    return costs


def _costs(model: ModelFile, station: Station, at: dict[int, Timing], step: tuple[float, float | None]) -> StageCosts:
    """The costs of a stage; gradients are summed in flat tensors, with one number more for each parameter."""
    trained = station.trained
    seconds, noise = step
    return StageCosts(
        weights=bytes_of(station.module.parameters()),
        gradients=bytes_of(trained) + sum(p.element_size() for p in trained),
        optimizer=state_bytes(model.steps, trained),
        at=at,
        step=seconds,
        step_noise=noise,
    )


def _timings(station: Station, measured: Sequence[_Measured]) -> Iterator[Timing]:
    for (times, scatter), sizes in zip(measured, station.kept, strict=True):
        yield Timing(times, sizes, message_bytes(station.after), station.gradient_bytes, scatter)


def _described(device: torch.device) -> str:
    if device.type == "cuda":
        return f"one {torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    threads = torch.get_num_threads()
    return f"a CPU, {threads} thread{'s' if threads > 1 else ''}, torch {torch.__version__}"
