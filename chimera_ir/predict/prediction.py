"""Prediction of a program's time and memory on a cluster."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from fractions import Fraction
from operator import le, sub
from sys import maxsize
from typing import TYPE_CHECKING, NamedTuple

from chimera_ir.cost.durations import Unit, number, rounded, seconds
from chimera_ir.cost.report import Figures, Report, group_entries
from chimera_ir.cost.simulate import WorkerBytes, mean
from chimera_ir.errors import DoesNotFit, WrongOption
from chimera_ir.ir.levels import Header, Program, Quantity, Schedule
from chimera_ir.ir.ops import AllReduce, WaitAllReduce, WeightGroup
from chimera_ir.ir.streams import ProgramStream, ScheduleStream, view_of
from chimera_ir.lower.lower import lower
from chimera_ir.plural import counted
from chimera_ir.predict.events import LayerSplits, Role, Split, loads_of
from chimera_ir.predict.memory_need import MemoryNeed, bounded, memory, memory_of, worker_bytes
from chimera_ir.predict.replay import Cause, Replay, expected, idle, replay
from chimera_ir.predict.setting import Measured, Setting
from chimera_ir.profile.cluster import torchrun
from chimera_ir.profile.costs import stages_of
from chimera_ir.verify.holdings import holdings

if TYPE_CHECKING:
    from chimera_ir.predict.equation import Equation
    from chimera_ir.profile.choose import Inputs, Wanted


@dataclass(frozen=True, slots=True, repr=False)
class Prediction:
    """Time and memory of an iteration, or of an update of the steady state, in seconds and bytes.

    The time is given by equation 1, and by a replay of the program. ``expected`` is the mean time of many updates whose
    times scatter as in the profile; None if it has no noise. ``memory`` is what each worker needs. ``warnings`` are
    about the profile and the cluster file.
    """

    setting: Setting
    equation: "Equation"
    replay: Replay
    expected: float | None
    memory: tuple[MemoryNeed, ...]
    items: int
    warnings: tuple[str, ...]

    def __repr__(self) -> str:
        return f"<Prediction of {self.replay.header.title}: {seconds(self.replay.seconds)} by replay>"

    @property
    def throughput(self) -> float:
        """Items per second, by equation 1."""
        return self.items / self.equation.seconds

    @property
    def replayed_throughput(self) -> float:
        """Items per second, by the replay."""
        return self.items / self.replay.seconds

    @property
    def available(self) -> int:
        """Bytes that a worker has for the model."""
        return self.setting.cluster.memory - self.setting.cluster.reserved

    def require_fit(self, text: str) -> None:
        """Raises `DoesNotFit`, which calls the program ``text``, if a worker needs more memory than it has."""
        needs = [need.total for need in self.memory]
        if (most := max(needs)) > self.available:
            raise DoesNotFit(text, needs.index(most), most, self.available)

    def bytes_of(self, worker: int) -> WorkerBytes:
        """Bytes of a worker: all that it needs but activations, and those that a micro-batch takes (`worker_bytes`)."""
        return worker_bytes(self.replay.header, self.setting, worker, self.memory[worker])

    def as_json(self) -> dict[str, object]:
        """The prediction in the shape of ``prediction`` in report.json."""
        terms = self.equation
        noisy = {} if self.expected is None else {"T_expected": self.expected}
        hosted = [need.host for need in self.memory]
        return rounded(
            {
                "F_t": terms.forward,
                "B_t": terms.backward,
                "C_f": number(terms.forwards),
                "C_b": number(terms.backwards),
                **{f"{term.kind}_t": term.seconds for term in terms.further},
                **{f"C_{term.kind.lower()}": number(term.count) for term in terms.further},
                "Comm_p2p": terms.p2p,
                "Comm_allreduce": list(terms.all_reduce),
                "free_regions": [
                    [{**group_entries(region.group), "region": region.seconds} for region in regions]
                    for regions in terms.regions
                ],
                "Comm_unoverlapped": list(terms.unoverlapped),
                "T": terms.seconds,
                "T_replay": self.replay.seconds,
                **noisy,
                "throughput": self.throughput,
                "throughput_replay": self.replayed_throughput,
                "memory": [need.total for need in self.memory],
                "memory_available": self.available,
                **({"host_memory": hosted} if any(hosted) else {}),
                "optimizer_state": [need.optimizer for need in self.memory],
                "copies": self.setting.copies,
                "micro_batch_size": self.setting.micro_batch_size,
                "warnings": list(self.warnings),
            }
        )


class BaselinePrediction(NamedTuple):
    """The prediction for a report's baseline: replayed seconds of an update, and bytes of the fullest worker."""

    seconds: float
    memory: int


@dataclass(frozen=True, slots=True)
class Forecast:
    """The conditions of a prediction, from which a `Setting` follows once the program's stages are known.

    ``inputs`` are the profile and the cluster, ``copies`` is W. ``split`` has the first layer of each stage; None takes
    the fastest split. ``replica_layout`` and ``sharded_optimizer`` are as in `Setting`.
    """

    inputs: "Inputs"
    copies: int
    micro_batch_size: int
    replica_layout: bool
    split: tuple[int, ...] | None = None
    sharded_optimizer: bool = False

    def torchrun(self, workers: int, script: str, split: tuple[int, ...] | None) -> str:
        """The command line that starts ``script`` for the predicted run; a copy of it has ``workers`` workers."""
        per_node = self.inputs.cluster.per_node
        ranks, more = self.copies * workers, (self.sharded_optimizer, self.inputs.counts.file)
        return torchrun(ranks, per_node, script, self.micro_batch_size, self.replica_layout, split, *more)

    def split_of(self, header: Header) -> tuple[int, ...] | None:
        """The first layer of each stage, as the user asked or else as is fastest; None if the profile has no layers."""
        return self.inputs.split(self._wanted(header))

    def within_bounds(self, level: Schedule | ScheduleStream | Program | ProgramStream) -> "Forecast":
        """The forecast with the fastest split of the profile's layers that keeps declared bounds in bytes.

        It is this one if it has a split, if the profile has no layers, or if no split keeps the bounds. ``level`` is a
        program, or a verified schedule.
        """
        header = level.header
        model = self.inputs.of_stages(self._wanted(header))
        if self.split or not model.layers or not any(bound.quantity is Quantity.BYTES for bound in header.bounds):
            return self
        # What is kept does not depend on the durations with which a schedule is lowered.
        program = level if isinstance(level, Program | ProgramStream) else lower(level)
        held, room = tuple(holdings(view_of(program))), header.limits(Quantity.BYTES, maxsize)

        def needed(split: Split | None) -> list[int]:
            setting = replace(self, split=split)._setting(header)
            return [need.total for need in memory_of(header, setting, held)]

        if all(map(le, needed(None), room)):
            return self
        splits = LayerSplits(model, header, self.micro_batch_size, self.copies, self.sharded_optimizer)
        candidates = splits.candidates(room, lambda: loads_of(header, held), needed)
        fitting = (split for split in candidates if all(map(le, needed(split), room)))
        return replace(self, split=next(fitting, None))

    def _wanted(self, header: Header) -> "Wanted":
        from chimera_ir.profile.choose import Wanted

        return Wanted.of(header, self.copies, self.micro_batch_size, self.split)

    def durations(self, header: Header) -> Measured:
        """Durations, from the profile, of the operations of a program or schedule with this header.

        Raises `Unfit` if the profile has no costs for them, or the cluster too few workers; `OptionError` if
        ``sharded_optimizer`` is set where stages step inside the schedule.
        """
        return Measured.of(self._setting(header))

    def equal_times(self, header: Header) -> tuple[int, ...]:
        """The lengths of slices that take equally long, as `Setting.equal_times` finds them.

        They add up to the length of an item, if the profile has it. Raises `WrongOption` if the profile has no costs of
        slices, and the errors of `durations`.
        """
        setting, length = self._setting(header), self.inputs.counts.positions
        if not setting.slices_known:
            measures = f"chimera profile stages --slices {header.slices} measures them"
            raise WrongOption("slice_lengths", f" equal-times: the profile has no costs of slices; {measures}")
        if length < header.slices:
            items, cut = counted(length, "position"), counted(header.slices, "slice")
            raise WrongOption("slice_lengths", f" equal-times: an item of the profile has {items}, too few for {cut}")
        return setting.equal_times(header.slices, length)

    def shares(self, header: Header) -> tuple[Fraction, ...]:
        """The shares of M_a that stages keep, if M_a is what the largest one keeps, rounded up to thousandths.

        Empty if all are 1. Raises the errors of `durations`.
        """
        setting = self._setting(header)
        sizes = [max(1, setting.as_cut(stage, header).kept.activations) for stage in range(header.stages)]
        shares = tuple(Fraction(-(-1000 * size // max(sizes)), 1000) for size in sizes)
        return shares if {*shares} != {1} else ()

    def _setting(self, header: Header) -> Setting:
        if self.sharded_optimizer and header.steps_inside:
            lacks = "no flush, and its stages step inside the schedule, which leaves no place to gather their weights"
            raise WrongOption("shard_optimizer", f": {header.scheme} has {lacks}")
        stages, cluster = self.inputs.choose(self._wanted(header)), self.inputs.cluster
        return Setting(stages, cluster, self.copies, self.micro_batch_size, self.replica_layout, self.sharded_optimizer)

    def baseline(self, program: Program, like: Header) -> BaselinePrediction | None:
        """The prediction for a verified program that trains the same model as ``like``; None if it has no setting."""
        setting = self.setting_of_baseline(program.header, like)
        if setting is None:
            return None
        fullest = max(need.total for need in memory(program, setting))
        return BaselinePrediction(replay(program, setting).seconds, fullest)

    def setting_of_baseline(self, header: Header, like: Header) -> Setting | None:
        """The setting of a program with ``header`` that trains the same model as one with the header ``like``.

        If it has fewer stages, each consists of an equal number of those of ``like`` in a row; None if that cannot be.
        """
        larger, rest = divmod(like.stages, header.stages)
        if rest:
            return None
        setting = self._setting(like)
        return replace(setting, stages=stages_of(setting.stages, range(0, like.stages, larger)))

    def needs(self, program: Program) -> Mapping[Quantity, Sequence[int]]:
        """The bytes that each worker of a verified program needs, and those on its host; errors as in `durations`."""
        needs = memory(program, self._setting(program.header))
        return {
            Quantity.BYTES: [need.total for need in needs],
            Quantity.HOST_BYTES: [need.host for need in needs],
        }

    def with_room(self, schedule: Schedule) -> Schedule:
        """The verified schedule with a bound on each worker's activations: no more than its memory holds.

        What the schedule itself keeps is always allowed. A schedule with moves to the host is returned as it is. Raises
        the errors of `durations`.
        """
        header, setting = schedule.header, self._setting(schedule.header)
        if header.moves:
            return schedule
        available = setting.cluster.memory - setting.cluster.reserved
        room = header.limits(Quantity.BYTES, available)
        needs = memory(view_of(lower(schedule)), setting)
        return bounded(schedule, setting, map(sub, room, (need.total for need in needs)))

    def of(self, program: Program) -> Prediction:
        """The prediction for a verified program; raises the errors of `durations`."""
        from chimera_ir.predict.equation import equation

        header, setting = program.header, self._setting(program.header)
        items = header.whole_micro_batches * self.micro_batch_size * self.copies
        return Prediction(
            setting=setting,
            equation=equation(program, setting),
            replay=replay(program, setting),
            expected=expected(program, setting) if setting.noisy else None,
            memory=memory(program, setting),
            items=items,
            warnings=self.inputs.warnings,
        )


# Answers to a user's first three questions: how fast is it, does it fit, and what limits it.

_Json = dict[str, object]


class Speed(NamedTuple):
    """The time of an update and that of the baseline, in the same unit.

    The times are those of replays on a cluster if ``messages_counted``; otherwise messages, sums and steps are free.
    ``throughput`` is in items per second, None without a prediction; ``baseline_fits`` is None where that is not known.
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


class Copies(NamedTuple):
    """Memory in the paper's units, each number the largest of all workers, which need not be the same worker's.

    Weights are in M_theta, activations and ``host`` (memory of a host) in M_a, ``stashed_inputs`` in micro-batches.
    ``stages`` is the number of stages of the worker that keeps most weights.
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


class Bytes(NamedTuple):
    """Memory in bytes of ``worker``, the fullest one: what it needs, what it has, and the name of the largest part.

    ``too_full`` is the number of workers that need more than they have. ``host`` is the most that any worker needs of
    its host, ``host_available`` what it has there; None if that is not limited.
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

    ``COMPUTE`` is the mean work of all workers, ``UNEVEN`` the additional work of the busiest one. ``WAITING`` stands
    for all other parts together, in an update without a flush on a cluster.
    """

    COMPUTE = "computing"
    UNEVEN = "uneven work"
    BUBBLES = "bubbles"
    MESSAGES = "messages"
    SUMS = "gradient sums"
    MOVES = "moves to the host"
    STEPS = "optimizer steps"
    WAITING = "waiting"


class Limit(NamedTuple):
    """The parts of the time of an update on ``worker``, the busiest one, as shares; ``evenly``: all work the same."""

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
    """The answers to a user's first questions; ``baseline_memory`` is in bytes if it is an integer."""

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
    """Divides the ``time`` of an update; with a ``replay`` of a schedule with a flush, waits by their causes."""
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

    With a flush, the sum goes on for so long after the last operation of all workers. Without one, they are the waits
    for the sum on the worker that waits longest, as a mean over the updates.
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
