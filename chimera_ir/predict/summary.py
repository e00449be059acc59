"""Answers to a user's first three questions: how fast is it, does it fit, and what limits it."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction

from chimera_ir.cost.number_text import Unit, number, rounded
from chimera_ir.cost.report import Figures, Report
from chimera_ir.cost.simulate import mean
from chimera_ir.ir.ids import WeightGroup
from chimera_ir.ir.ops import AllReduce, WaitAllReduce
from chimera_ir.predict.events import Role
from chimera_ir.predict.idle import Cause, idle
from chimera_ir.predict.prediction import BaselinePrediction, Prediction
from chimera_ir.predict.replay import Replay

_Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class Speed:
    """The time of an update and that of the baseline, in the same unit.

    ``is_baseline`` is whether the schedule is the baseline itself. The times are those of replays on a cluster if
    ``messages_counted``; otherwise messages, sums and steps take no time. ``throughput`` is in items per second, None
    without a prediction; ``baseline_fits`` is None where the memory that the baseline needs is not known.
    """

    baseline: str
    is_baseline: bool
    time: Fraction
    baseline_time: Fraction
    unit: Unit
    messages_counted: bool
    throughput: float | None
    baseline_fits: bool | None

    @property
    def times_as_fast(self) -> Fraction:
        """The time of the baseline divided by that of the schedule; 1 if nothing takes time."""
        return self.baseline_time / self.time if self.time else Fraction(1)

    def as_json(self) -> _Json:
        """The answer in the shape of report.json."""
        return {
            "baseline": self.baseline,
            "time": _number(self.time),
            "baseline_time": _number(self.baseline_time),
            "times_as_fast": _number(self.times_as_fast),
            "messages": "counted" if self.messages_counted else "free",
            **({} if self.throughput is None else {"throughput": self.throughput}),
            **({} if self.baseline_fits is None else {"baseline_fits": self.baseline_fits}),
        }


@dataclass(frozen=True, slots=True)
class Copies:
    """Memory in the paper's units, each number the largest of all workers, which need not be the same worker's.

    Weights are in M_theta, activations and ``host`` (what is in the memory of a host) in M_a, ``stashed_inputs`` in
    micro-batches. ``stages`` is the number of stages of the worker that keeps most weights.
    """

    weights: Fraction
    activations: Fraction
    stashed_inputs: Fraction
    host: Fraction
    stages: int

    @staticmethod
    def of(figures: Figures) -> "Copies":
        """The largest numbers of all workers."""
        counts = figures.weights, figures.activations, figures.stashed_inputs, figures.host
        fullest = max(range(len(figures.weights)), key=figures.weights.__getitem__)
        stages = len(figures.header.stages_of[fullest])
        weights, activations, inputs, host = (max(values, default=Fraction(0)) for values in counts)
        return Copies(weights, activations, inputs, host, stages)

    def as_json(self) -> _Json:
        """The answer in the shape of report.json."""
        return {
            "weights": _number(self.weights),
            "activations": _number(self.activations),
            "stashed_inputs": _number(self.stashed_inputs),
            **({"host": _number(self.host)} if self.host else {}),
        }


@dataclass(frozen=True, slots=True)
class Bytes:
    """Memory in bytes of ``worker``, the fullest one: what it needs, what it has, and the name of the largest part.

    ``too_full`` is the number of workers that need more than they have. ``host`` is the most bytes that any worker
    needs in its host's memory, ``host_available`` the bytes that it has there; None if they are not limited.
    """

    worker: int
    needed: int
    available: int
    largest_part: str
    too_full: int
    host: int = 0
    host_available: int | None = None

    @staticmethod
    def of(prediction: Prediction) -> "Bytes":
        """The memory of the worker that needs most."""
        needs = [memory.total for memory in prediction.memory]
        worker = needs.index(max(needs))
        parts = prediction.memory[worker].parts
        available = prediction.available
        too_full = sum(need > available for need in needs)
        host, limit = max(memory.host for memory in prediction.memory), prediction.setting.host.memory
        return Bytes(worker, needs[worker], available, max(parts, key=parts.__getitem__), too_full, host, limit)

    @property
    def fits(self) -> bool:
        """Whether every worker has as much memory as it needs, on its host as well."""
        return self.too_full == 0 and self.fits_host

    @property
    def fits_host(self) -> bool:
        """Whether every worker has as much memory on its host as it needs."""
        return self.host_available is None or self.host <= self.host_available

    def as_json(self) -> _Json:
        """The answer in the shape of report.json."""
        return {
            "fits": self.fits,
            "worker": self.worker,
            "needed": self.needed,
            "available": self.available,
            "largest_part": self.largest_part,
            **({"host": self.host} if self.host else {}),
        }


class TimePart(Enum):
    """A part of the time of an update on the busiest worker; the values are words for a reader.

    ``COMPUTE`` is the mean work of all workers, and ``UNEVEN`` the additional work of the busiest one. ``WAITING``
    stands for bubbles, messages, sums and steps together, in an update without a flush on a cluster.
    """

    COMPUTE = "computing"
    UNEVEN = "uneven work"
    BUBBLES = "bubbles"
    MESSAGES = "messages"
    SUMS = "gradient sums"
    MOVES = "moves to the host"
    STEPS = "optimizer steps"
    WAITING = "waiting"


@dataclass(frozen=True, slots=True)
class Limit:
    """The parts of the time of an update on ``worker``, the busiest one, as shares of the whole time.

    ``evenly`` says whether all workers have the same work.
    """

    worker: int
    evenly: bool
    shares: Mapping[TimePart, Fraction]

    @property
    def largest(self) -> TimePart:
        """The largest part apart from computing; computing if there is no other."""
        lost = {part: share for part, share in self.shares.items() if share > 0 and part is not TimePart.COMPUTE}
        return max(lost, key=lost.__getitem__, default=TimePart.COMPUTE)

    def as_json(self) -> _Json:
        """The answer in the shape of report.json."""
        shares = {part.value.replace(" ", "_"): rounded(float(share)) for part, share in self.shares.items()}
        return {"worker": self.worker, "largest": self.largest.value.replace(" ", "_"), "shares": shares}


@dataclass(frozen=True, slots=True, repr=False)
class Summary:
    """The answers to a user's first questions: how fast is it, does it fit, what limits it.

    ``baseline_memory`` is in bytes if it is an integer, and None if it is not known.
    """

    speed: Speed
    memory: Copies | Bytes
    baseline_memory: Copies | int | None
    limit: Limit

    def __repr__(self) -> str:
        return f"<Summary: {float(self.speed.times_as_fast):.3g} times as fast as {self.speed.baseline}>"

    @property
    def fits(self) -> bool:
        """Whether the workers have the memory, as far as that is known."""
        return not isinstance(self.memory, Bytes) or self.memory.fits

    def as_json(self) -> _Json:
        """The answers in the shape of ``summary`` in report.json."""
        return {"speed": self.speed.as_json(), "memory": self.memory.as_json(), "limit": self.limit.as_json()}


def summary(report: Report, prediction: Prediction | None, baseline: BaselinePrediction | None) -> Summary:
    """Answers the questions from a report and, on a cluster, from the predictions for its schedule and its baseline.

    If both predictions are there, the two are compared with the time of messages, else as if messages took no time.
    """
    if prediction is None:
        copies = Copies.of(report.baseline)
        return Summary(_speed(report, None, None), Copies.of(report), copies, _limit(report, report.makespan, None))
    speed = _speed(report, prediction, baseline)
    needed = None if baseline is None else baseline.memory
    limit = _limit(report, Fraction(prediction.replay.seconds), prediction.replay)
    return Summary(speed, Bytes.of(prediction), needed, limit)


def _speed(report: Report, prediction: Prediction | None, baseline: BaselinePrediction | None) -> Speed:
    base = report.baseline
    counted = prediction is not None and baseline is not None
    return Speed(
        baseline=base.header.scheme,
        is_baseline=report.is_baseline,
        time=Fraction(prediction.replay.seconds) if prediction and counted else report.makespan,
        baseline_time=Fraction(baseline.seconds) if baseline else base.makespan,
        unit=report.durations.unit,
        messages_counted=counted,
        throughput=prediction.replayed_throughput if prediction else None,
        baseline_fits=baseline.memory <= prediction.available if prediction and baseline else None,
    )


def _limit(figures: Figures, time: Fraction, replay: Replay | None) -> Limit:
    """Divides the ``time`` of an update into parts, as shares.

    With a ``replay`` of a schedule with a flush, waits are divided by their causes.
    """
    work = figures.work
    busiest = max(range(len(work)), key=work.__getitem__, default=0)
    most, even = max(work, default=Fraction(0)), mean(work)
    times = {TimePart.COMPUTE: even, TimePart.UNEVEN: most - even}
    if replay is None:
        times[TimePart.BUBBLES] = time - most
    elif figures.header.asynchronous:
        times[TimePart.WAITING] = max(time - most, Fraction(0))
    else:
        times |= _waits(replay, busiest)
    shares = {part: value / time if time else Fraction(0) for part, value in times.items()}
    return Limit(busiest, len(set(work)) <= 1, shares)


def _waits(replay: Replay, worker: int) -> dict[TimePart, Fraction]:
    """The seconds of a replay in which ``worker`` does not compute: idle time by its cause, posts, and steps."""
    times: defaultdict[TimePart, float] = defaultdict(float)
    for stretch in idle(replay)[worker]:
        times[_PARTS[stretch.cause]] += stretch.end - stretch.start
    posts = [event for event in replay.lanes[worker] if event.role is Role.POST]
    for post in posts:
        times[TimePart.SUMS if isinstance(post.instruction, AllReduce) else TimePart.MESSAGES] += post.end - post.start
    times[TimePart.STEPS] = sum(event.end - event.start for event in replay.lanes[worker] if event.role is Role.STEP)
    return {part: Fraction(seconds) for part, seconds in times.items()}


_PARTS = {
    Cause.BUBBLE: TimePart.BUBBLES,
    Cause.MESSAGE: TimePart.MESSAGES,
    Cause.SUM: TimePart.SUMS,
    Cause.MOVE: TimePart.MOVES,
}


def exposed(replay: Replay) -> dict[WeightGroup, float]:
    """Seconds of each group's sum that no computing hides.

    With a flush, they are the seconds for which the sum goes on after the last operation of all workers. Without one,
    they are the waits for the sum on the worker that waits longest, as a mean over the updates.
    """
    ends = sorted(
        (event.instruction.group, event.end) for event in replay.sums if isinstance(event.instruction, AllReduce)
    )
    last_ends = dict(ends)
    if replay.header.asynchronous:
        waits = {group: [0.0] * len(replay.lanes) for group in last_ends}
        for worker, lane in enumerate(replay.lanes):
            for event in lane:
                if isinstance(event.instruction, WaitAllReduce) and event.instruction.group in waits:
                    waits[event.instruction.group][worker] += event.end - event.start
        return {group: max(seconds) / replay.header.updates for group, seconds in waits.items()}
    computed = max((event.end for lane in replay.lanes for event in lane if event.role is Role.COMPUTE), default=0.0)
    return {group: max(0.0, end - computed) for group, end in last_ends.items()}


def hiding_time(report: Report) -> dict[WeightGroup, Fraction]:
    """The idle time that can hide each sum, on the worker with the least of it; only sums over several workers."""
    members: defaultdict[WeightGroup, list[Fraction]] = defaultdict(list)
    for launched in report.synchronisation:
        members[launched.group].append(launched.free + launched.flush)
    return {group: min(members[group]) for group in sorted(members) if len(report.header.members(group)) > 1}


def _number(value: Fraction) -> int | float:
    return rounded(number(value))
