"""Costs of a model's stages, timed on this machine or counted from shapes alone."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch.utils.flop_counter import FlopCounterMode

from chimera_ir.measure import equal
from chimera_ir.measure.samples import Samples, ShowProgress, in_rounds, noise, rounded
from chimera_ir.measure.stations import MeasuredTurn, ModelCut, Station, message_bytes, running, stations
from chimera_ir.profile.costs import ENTRIES, NO_OVERHEAD, ModelProfile, StageCosts, Times, Timing
from chimera_ir.profile.work import WorkProfile
from chimera_runtime.errors import Misuse
from chimera_runtime.model.model import ModelFile
from chimera_runtime.tools.watch.memory import bytes_of, state_bytes

WARM_UP = 3
"""Rounds that do not count: memory is allocated, caches and frequencies settle."""

SHORT = 10
"""Factor on the number of rounds for times of microseconds."""


@dataclass(frozen=True, slots=True)
class StageRequest:
    """Depths D and micro-batch sizes B to measure, in at most ``rounds`` rounds; without depths, layers are measured.

    ``split`` is the first layer of each stage of a model of layers; by default stages have equal numbers of layers.
    With ``once``, only one of equal layers is measured.
    """

    depths: tuple[int, ...]
    sizes: tuple[int, ...]
    rounds: int
    seed: int
    split: tuple[int, ...] | None = None
    once: bool = False


@dataclass(frozen=True, slots=True)
class TimedProfile:
    """A profile with its ``noise``: a warning if figures are too noisy to use, then a line for each."""

    profile: ModelProfile
    noise: tuple[str, ...]


class _Passes(NamedTuple):
    """Costs of the passes of a micro-batch through a station; the last two are the halves of a split backward."""

    forward: float
    backward: float
    recomputing: float
    input_gradient: float
    weight_gradient: float


_Figures = TypeVar("_Figures")

_NAMES = tuple(name.replace("_", " ") for name in _Passes._fields)


def timed(model: ModelFile, request: StageRequest, device: torch.device, progress: ShowProgress) -> TimedProfile:
    """Measures a profile in seconds; each figure is the median of rounds, ``noise`` their largest scatter, at most 1.

    A round is a forward with its backward, another with a backward in two halves, and a forward that keeps its input
    with the backward that recomputes; all run the stages of the generated programs. As in these programs, the first
    stage's forward loads its items, and gradients add up over rounds as over the micro-batches of an update. Steps have
    rounds of their own: a forward and a backward of the smallest micro-batch, then everything that a rank does in the
    line ``step``; only this is timed.

    Raises `Misuse` if the model file is not as its interface wants it, or a micro-batch does not fit into memory.
    Raises `ModelError` if the model file's code raises an error.
    """
    times = _StageClock(request.rounds, _cuda_clock if device.type == "cuda" else _clock)
    once = _Once(times)
    note = f"times on {_described(device)}"
    profile = _profile(model, request, device, once if request.once else times, note, progress)
    equal = once.described
    profile = replace(profile, note=f"{profile.note}; {equal}") if equal else profile
    return TimedProfile(profile, noise(times.figures))


class _StageClock:
    """Measures in seconds of ``clock``, in at most ``rounds`` rounds; ``figures`` has the samples of every figure."""

    def __init__(self, rounds: int, clock: "_Clock") -> None:
        self.figures: list[tuple[str, Samples]] = []
        self._rounds = rounds
        self._clock = clock

    def passes(self, cut: ModelCut, number: int, station: Station) -> tuple[_Passes, float | None]:
        """Medians of the times of passes through stage ``number``, and the largest of their scatters."""
        return self._measured(f"{cut.part(number)}, micro-batch size {station.size}", station, self._rounds)

    def _measured(self, where: str, station: Station, most: int) -> tuple[_Passes, float]:
        turns = count()
        samples = in_rounds(lambda: _round(station, next(turns), self._clock), WARM_UP, most)
        self.figures += [(f"{name} of {where}", figure) for name, figure in zip(_NAMES, samples, strict=True)]
        return _Passes(*(rounded(figure.median) for figure in samples)), _noise(*samples)

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
        small = replace(cut, model=nothing, dataset=nothing.items(), stages=3, sizes=(1,))
        (station,) = dict(stations(small, lambda _doing: None))[1]
        return _times(self._measured("an operation", station, SHORT * self._rounds)[0])


class _Identity(torch.nn.Module):
    """Returns its input, through autograd and without a kernel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)


def _empty_model() -> ModelFile:
    """A model of three stages whose middle stage computes nothing: its times are those of overhead alone.

    The first stage has a weight, so that gradients have to pass back through the middle stage.
    """
    modules = partial(torch.nn.Linear, 1, 1), _Identity, _Identity
    return ModelFile(
        Path("an empty stage"),
        lambda stage, _stages: modules[stage](),
        lambda output, _target: output.mean(),
        lambda: [(torch.zeros(1), 0)],
        lambda parameters: torch.optim.SGD(parameters, lr=0.0),
    )


class _Once:
    """Measures only the first of equal stations; the others get its figures."""

    def __init__(self, measure: _StageClock) -> None:
        self._measure = measure
        self._known: list[tuple[object, int, Any]] = []
        self._equal: dict[int, set[int]] = {}

    def passes(self, cut: ModelCut, number: int, station: Station) -> tuple[_Passes, float | None]:
        return self._once(equal.passes(station), number, lambda: self._measure.passes(cut, number, station))

    def step(self, cut: ModelCut, number: int, station: Station) -> tuple[float, float | None]:
        return self._once(equal.step(station), number, lambda: self._measure.step(cut, number, station))

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
        """A sentence on the layers that were equal; empty if there are none."""
        groups = "; ".join(_numbered(layers) for layers in sorted(map(sorted, self._equal.values())))
        return f"of equal layers one was measured: {groups}" if groups else ""


def _numbered(layers: Sequence[int]) -> str:
    """Text with ascending numbers, as a range if there is no gap."""
    together = layers[-1] - layers[0] == len(layers) - 1
    return f"{layers[0]} to {layers[-1]}" if together else ", ".join(map(str, layers))


def _noise(*figures: Samples) -> float:
    return min(1.0, rounded(max(samples.weight * samples.scatter for samples in figures), 2))


def counted(model: ModelFile, request: StageRequest, progress: ShowProgress) -> WorkProfile:
    """The profile in floating-point operations instead of seconds, from shapes alone, without memory for the model.

    Operations are those that torch.utils.flop_counter counts: matrix products, convolutions and attention, with a
    multiplication and an addition for each pair of numbers. A recomputing backward is a forward and a backward. Bytes
    are those that the same operators would save.

    Raises `Misuse` if the model file is not as its interface wants it. Raises `ModelError` if the model file's code
    raises an error, as where it asks for values and there are shapes alone.
    """

    note = f"work counted on shapes, torch {torch.__version__}"
    return WorkProfile(_profile(model, request, torch.device("meta"), _Work(), note, progress))


class _Work:
    """Counts FLOP with torch's flop counter. An optimizer's step counts as 0, as that counter sees no FLOP there."""

    def passes(self, cut: ModelCut, _number: int, station: Station) -> tuple[_Passes, float | None]:
        turn, totals = MeasuredTurn.of(0), [0]
        with cut.here(), FlopCounterMode(display=False) as flops:
            for run, micro in (
                (station.forward, turn.ordinary),
                (station.backward, turn.ordinary),
                (station.forward, turn.halved),
                (station.backward_input, turn.halved),
                (station.stage.backward_weights, turn.halved),
            ):
                run(micro)
                totals.append(flops.get_total_flops())
        forward, backward, _, *halves = (float(end - start) for start, end in pairwise(totals))
        return _Passes(forward, backward, forward + backward, *halves), None

    def step(self, _cut: ModelCut, _number: int, _station: Station) -> tuple[float, float | None]:
        return 0.0, None

    def overhead(self, _cut: ModelCut) -> Times:
        """Returns no overhead, because only a device has one."""
        return NO_OVERHEAD


_Measure = _StageClock | _Once | _Work
"""Source of the costs of passes, steps and operations without work; the noise of a counted cost is None."""


def _profile(
    model: ModelFile, request: StageRequest, device: torch.device, measure: _Measure, note: str, progress: ShowProgress
) -> ModelProfile:
    depths_cut = request.depths or (len(_layers(model)),)
    done, steps = count(1), sum(depths_cut) * (2 + len(request.sizes))

    def tell(doing: str) -> None:
        progress(doing, next(done), steps)

    # Stage by stage from the last to the first, so that no two stages are in memory at once.
    dataset = model.items()
    depths: dict[int, tuple[StageCosts, ...]] = {}
    kinds: set[str] = set()
    for depth in depths_cut:
        cut = ModelCut(
            model, dataset, depth, request.sizes, device, request.seed, "stage" if request.depths else "layer"
        )
        stage_costs: list[StageCosts] = []
        for number, stage_stations in stations(cut, tell):
            at: dict[int, Timing] = {}
            for station in stage_stations:
                with running(cut, number, station.size):
                    at[station.size] = _timing(station, *measure.passes(cut, number, station))
                tell(f"{cut.part(number)}, micro-batch size {station.size}")
            # The step does not depend on the micro-batch size: the smallest one needs least memory.
            smallest = min(stage_stations, key=lambda station: station.size)
            with running(cut, number, smallest.size):
                stage_costs.append(_costs(model, smallest, at, measure.step(cut, number, smallest)))
            tell(f"{cut.part(number)}, optimizer")
            kinds |= {str(p.dtype).removeprefix("torch.") for p in smallest.module.parameters()}
        depths[depth] = tuple(stage_costs[::-1])
    overhead = measure.overhead(cut)
    described = ", ".join([note, *sorted(kinds)])
    if request.depths:
        splits = {} if model.layers is None else {depth: tuple(model.layers.first(depth)) for depth in depths}
        return ModelProfile(model.file.stem, depths, described, splits=splits).with_overhead(overhead)
    return ModelProfile(model.file.stem, {}, described, layers=depths[depths_cut[0]]).with_overhead(overhead)


def _layers(model: ModelFile) -> Sequence[object]:
    if model.layers is None:
        raise Misuse(
            f"{model.file} has build_stage, which makes whole stages: layers are those of a file with layers()"
        )
    return model.layers.layers


def _costs(model: ModelFile, station: Station, at: dict[int, Timing], step: tuple[float, float | None]) -> StageCosts:
    """Costs of a stage; ``step`` has seconds and noise. The flat gradients have a further number for each parameter."""
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


def _timing(station: Station, costs: _Passes, noise: float | None) -> Timing:
    sizes = station.kept
    return Timing(
        _times(costs),
        activations=sizes.activations,
        input=sizes.input,
        output=message_bytes(station.after),
        gradient=station.gradient_bytes,
        noise=noise,
        released=sizes.released,
        operands=sizes.operands,
        resident=sizes.resident,
    )


def _times(costs: _Passes) -> Times:
    passes = costs._asdict()
    return {key: passes[entry] for key, entry in ENTRIES.items() if entry in passes}


def _round(station: Station, number: int, clock: "_Clock") -> _Passes:
    turn = MeasuredTurn.of(number)
    station.refill()
    forward = clock(lambda: station.forward(turn.ordinary))
    backward = clock(lambda: station.backward(turn.ordinary))
    station.refill()
    station.forward(turn.recomputed)
    recomputing = clock(lambda: station.backward(turn.recomputed))
    station.refill()
    station.forward(turn.halved)
    input_gradient = clock(lambda: station.backward_input(turn.halved))
    weight_gradient = clock(lambda: station.stage.backward_weights(turn.halved))
    station.forget_losses(turn)
    return _Passes(forward, backward, recomputing, input_gradient, weight_gradient)


_Clock = Callable[[Callable[[], None]], float]
"""Calls a function and returns the seconds that it takes."""


def _clock(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _cuda_clock(run: Callable[[], None]) -> float:
    """Seconds of a call on the device's own clock, from an idle device to the end of the last kernel."""
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def _described(device: torch.device) -> str:
    if device.type == "cuda":
        return f"one {torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    threads = torch.get_num_threads()
    return f"a CPU, {threads} thread{'s' if threads > 1 else ''}, torch {torch.__version__}"
