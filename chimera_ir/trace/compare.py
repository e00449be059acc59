"""Comparison of prediction and measurement: what each worker's time goes to, in updates of typical length."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import fmean, median
from typing import NamedTuple

from chimera_ir.ir.kinds import Kind, Pairing
from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import Compute, Drop, Instruction, Pair, Stash, Step, WeightGroup
from chimera_ir.ir.streams import view_of
from chimera_ir.plural import counted
from chimera_ir.predict.memory_need import carry_bytes, memory
from chimera_ir.trace.forecast import (
    Account,
    PredictedLanes,
    ProfileSource,
    account,
    inside,
    length,
    like_typical,
    play,
    played_updates,
    predict_from_profile,
    windows,
)
from chimera_ir.trace.match import whole_updates
from chimera_ir.trace.trace_files import BUSY, Activity, BadTrace, Lane, LaneSpan, Load, RunInfo, Trace, UpdateWindow


@dataclass(frozen=True, slots=True)
class Residual:
    """Seconds of a worker's update in one activity (``kind``), predicted and measured; a wait has a ``cause``."""

    kind: str
    cause: str
    predicted: float
    measured: float


@dataclass(frozen=True, slots=True)
class Side:
    """One update, predicted or measured: the lane of each worker, in nanoseconds from the beginning of the update.

    ``windows[w]`` is the part of lane w to show: the update on worker w or, if updates overlap, on all workers.
    """

    lanes: tuple[Lane, ...]
    windows: tuple[UpdateWindow, ...]


class Paired(NamedTuple):
    """An operation of a worker, predicted and measured."""

    worker: int
    predicted: LaneSpan
    measured: LaneSpan


class MemoryRow(NamedTuple):
    """The most bytes of carries or on the host of a worker, in the copy that used most; as predicted by a profile."""

    worker: int
    purpose: str
    predicted: int | None
    measured: int


@dataclass(frozen=True, slots=True)
class TraceComparison:
    """Prediction and measurement of a run, side by side.

    ``source`` is that of the prediction, None if it was made from the run itself. Of the ``updates`` that were recorded
    completely, measured figures are means of the ``chosen`` ones. ``typical`` is the chosen update of median length,
    which begins at ``origin`` nanoseconds; the predicted one begins at ``begins``. ``rows`` has the residuals of each
    worker, which add up to its `step`.

    ``predicted`` and ``measured`` are the update that is compared, of copy 0. ``operations`` has its operations on both
    sides; none if updates overlap. ``recorded`` has the lanes of all ranks, ``windows[u]`` their windows of update u;
    ``first_copy`` are the ranks of copy 0. ``ended`` says how the run ended early, None if it did not. ``memory`` has
    the bytes of carries and on the host.
    """

    about: RunInfo
    source: ProfileSource | None
    header: Header
    updates: int
    chosen: tuple[int, ...]
    typical: int
    origin: int
    begins: int
    rows: tuple[tuple[Residual, ...], ...]
    predicted: Side
    measured: Side
    operations: tuple[Paired, ...]
    recorded: tuple[Lane, ...]
    ended: str | None
    windows: Sequence[Sequence[UpdateWindow]]
    first_copy: tuple[int, ...]
    memory: tuple[MemoryRow, ...]

    def measured_update(self, update: int) -> Side:
        """A recorded update of copy 0."""
        lanes = [self.recorded[rank] for rank in self.first_copy]
        return _side(self.header, lanes, [self.windows[update][rank] for rank in self.first_copy])

    def step(self, worker: int) -> tuple[float, float]:
        """Seconds of an update on a worker: predicted, measured."""
        return sum(row.predicted for row in self.rows[worker]), sum(row.measured for row in self.rows[worker])

    @property
    def steps(self) -> tuple[float, float]:
        """Seconds of an update, on average over the workers: predicted, measured."""
        both = [self.step(worker) for worker in range(len(self.rows))]
        return fmean(predicted for predicted, _ in both), fmean(measured for _, measured in both)

    @property
    def bubbles(self) -> tuple[float, float]:
        """The shares of all workers' time in which they compute nothing: predicted, measured."""
        busy = [row for rows in self.rows for row in rows if row.kind in BUSY]
        predicted, measured = (total * len(self.rows) for total in self.steps)
        return (
            1 - sum(row.predicted for row in busy) / predicted if predicted else 0.0,
            1 - sum(row.measured for row in busy) / measured if measured else 0.0,
        )


def memory_rows(trace: Trace, source: ProfileSource | None) -> Iterator[MemoryRow]:
    """Yields a row for each worker and each purpose of memory that was measured, in the order of workers."""
    used: dict[tuple[int, str], int] = {}
    for rank in trace.ranks:
        for purpose, measured in rank.memory.items():
            used[rank.worker, purpose] = max(used.get((rank.worker, purpose), 0), measured)
    predicted: dict[tuple[int, str], int] = {}
    if source and used:
        program, setting = view_of(trace.program), source.setting
        if trace.header.moves:
            predicted |= {(worker, "host"): need.host for worker, need in enumerate(memory(program, setting))}
        if trace.header.slices > 1 and setting.slices_known:
            predicted |= {(worker, f"carries s{stage}"): size for worker, stage, size in carry_bytes(program, setting)}
    for (worker, purpose), measured in sorted(used.items()):
        yield MemoryRow(worker, purpose, predicted.get((worker, purpose)), measured)


def is_barriered(about: RunInfo, header: Header) -> bool:
    """Whether a barrier precedes each update of a run."""
    return about.rehearse is not None and not header.asynchronous


def has_whole_updates(trace: Trace, recorded: Sequence[Lane]) -> bool:
    """Whether every rank of a run that ended early recorded an update to its end."""
    return all(rank.is_recorded for rank in trace.ranks) and whole_updates(trace, recorded) > 0


def compare(trace: Trace, recorded: tuple[Lane, ...], source: ProfileSource | None = None) -> TraceComparison:
    """Comparison of a trace with a prediction from ``source`` or, if that is None, from the run's operations.

    ``recorded`` are the lanes of all ranks. Raises `BadTrace` if no update was recorded completely.
    """
    # The measured updates: all that were recorded completely, and the typical ones among them.
    header, about = trace.header, trace.about
    streams = header.asynchronous
    barriered = is_barriered(about, header)
    ended = next((rank.ended for rank in trace.ranks if rank.ended is not None), None)
    whole = windows(header, recorded, barriered)[: None if ended is None else whole_updates(trace, recorded)]
    if not whole:
        raise BadTrace("no update was recorded whole; trace a run of more updates (--steps)")
    chosen = choose([length(window) for window in whole], header.workers if streams else 1)
    typical = chosen[len(chosen) // 2]
    # The prediction, for an update like the typical one.
    if source is None:
        cost = costs(header, about.rehearse, recorded, [whole[update] for update in chosen])
        prediction = forecast(trace, cost, barriered, typical)
    else:
        prediction = predict_from_profile(trace.program, source.setting, barriered, typical)
    # Residuals: a worker's accounts of all copies and chosen updates, against those of the predicted updates.
    accounts: list[list[Account]] = [[] for _ in range(header.workers)]
    for rank, lane in zip(trace.ranks, recorded, strict=True):
        accounts[rank.worker] += [account(header, lane, whole[update][rank.rank], barriered) for update in chosen]
    # One update to show on each side, both from their beginning: the ranks of copy 0 stand for all.
    first = [rank for rank in trace.ranks if rank.copy == 0]
    shown = [recorded[rank.rank] for rank in first], [whole[typical][rank.rank] for rank in first]
    frame = prediction.windows[prediction.shown]
    origins = _origin(frame), _origin(shown[1])
    expected = [
        [account(header, lane, prediction.windows[update][worker], barriered) for update in prediction.counted]
        for worker, lane in enumerate(prediction.lanes)
    ]
    return TraceComparison(
        about=about,
        source=source,
        header=header,
        updates=len(whole),
        chosen=tuple(sorted(chosen)),
        typical=typical,
        origin=origins[1],
        begins=origins[0],
        rows=tuple(map(_rows, expected, accounts)),
        predicted=_side(header, prediction.lanes, frame),
        measured=_side(header, *shown),
        operations=() if streams else tuple(_paired(prediction, shown[0], typical, origins)),
        recorded=recorded,
        ended=ended,
        windows=whole,
        first_copy=tuple(rank.rank for rank in first),
        memory=tuple(memory_rows(trace, source)),
    )


def choose(lengths: Sequence[float], apart: int) -> list[int]:
    """Indices of the updates of typical length: the middle half, by length, of the updates in the steady state.

    The first ``apart`` updates warm up and are left out; if updates overlap, ``apart`` is greater than 1, and the last
    ones drain and are left out, too.
    """
    last = len(lengths) - (apart if apart > 1 else 0)
    steady = range(apart, last) if last - apart >= 1 else range(len(lengths))
    ordered = sorted(steady, key=lengths.__getitem__)
    quarter = len(ordered) // 4
    return ordered[quarter : len(ordered) - quarter]


def costs(
    header: Header,
    rehearse: Mapping[str, float] | None,
    lanes: Sequence[Lane],
    chosen: Iterable[Sequence[UpdateWindow]],
) -> Callable[[Instruction], int]:
    """A function from an operation to nanoseconds: a rehearsal's sleep, or a median over ranks and updates.

    ``rehearse`` has the seconds of sleep by kind. If it is None, the median is over equal operations of all ranks in
    the ``chosen`` windows. Posting costs nothing, so that its measured time shows as a difference.
    """
    if rehearse is not None:
        lengths = {letter: round(seconds * 1e9) for letter, seconds in rehearse.items()}

        def slept(operation: Instruction) -> int:
            if isinstance(operation, Compute | Pair):
                return int(lengths.get(operation.kind.letter, 0) * header.weight(operation) // header.parts)
            return 0

        return slept
    # A median over equal operations of all ranks: one slow run of an operation is no cost.
    lengths_of: dict[_Likeness, list[int]] = defaultdict(list)
    for update in chosen:
        for lane, window in zip(lanes, update, strict=True):
            for span in inside(lane, window):
                if isinstance(span.operation, _Timeable):
                    lengths_of[_like(span.operation, header)].append(span.end - span.start)
    medians = {like: round(median(several)) for like, several in lengths_of.items()}

    def measured(operation: Instruction) -> int:
        if isinstance(operation, _Timeable):
            return medians.get(_like(operation, header), 0)
        return 0

    return measured


_Timeable = Compute | Pair | Step | Stash | Drop
"""The instructions that take time by themselves."""

_Likeness = tuple[Kind | Pairing | type, WeightGroup, int, int | Fraction]
"""A key that is equal for operations that should take equally long: kind, stages, and how much is computed."""


def _like(operation: _Timeable, header: Header) -> _Likeness:
    if isinstance(operation, Compute | Pair):
        stages = tuple(single.stage for single in operation.parts)
        return operation.kind, stages, operation.size, header.weight(operation)
    return type(operation), operation.group, 0, 0


def forecast(trace: Trace, cost: Callable[[Instruction], int], barriered: bool, typical: int) -> PredictedLanes:
    """Prediction from the nanoseconds of operations (``cost``), to compare with the update ``typical`` of a run."""
    header = trace.header
    updates = played_updates(trace.program, barriered)
    played = play(trace.program, updates, cost)
    shown = like_typical(header, updates, typical)
    return PredictedLanes(played, windows(header, played, barriered), shown, range(shown, shown + 1))


def _rows(expected: Sequence[Account], accounts: Sequence[Account]) -> tuple[Residual, ...]:
    predicted, measured = sum(expected, Counter()), sum(accounts, Counter())
    order = [*BUSY, *Activity]
    keys = sorted(predicted.keys() | measured.keys(), key=lambda key: (order.index(key[0]), key[1]))
    return tuple(
        Residual(*key, predicted=predicted[key] / len(expected) / 1e9, measured=measured[key] / len(accounts) / 1e9)
        for key in keys
        if predicted[key] or measured[key]
    )


def _side(header: Header, lanes: Sequence[Lane], frame: Sequence[UpdateWindow]) -> Side:
    """The parts of the lanes in one update, in nanoseconds from its start; ``frame`` has its window on each worker."""
    origin = _origin(frame)
    if header.asynchronous:
        frame = [UpdateWindow(origin, max(window.end for window in frame))] * len(frame)
    return Side(
        tuple(tuple(later(span, -origin) for span in inside(lane, w)) for lane, w in zip(lanes, frame, strict=True)),
        tuple(UpdateWindow(start - origin, end - origin) for start, end in frame),
    )


def _origin(frame: Iterable[UpdateWindow]) -> int:
    return min(window.start for window in frame)


def later(span: LaneSpan, by: int) -> LaneSpan:
    """The span, ``by`` nanoseconds later."""
    return span._replace(start=span.start + by, end=span.end + by)


def _paired(
    prediction: PredictedLanes, recorded: Sequence[Lane], typical: int, origins: tuple[int, int]
) -> Iterator[Paired]:
    """Yields the operations of an update that overlaps with no other, each as predicted and as recorded.

    ``origins`` are the starts of the update in the prediction and in the record, from which times are then counted.
    """
    for worker, (predicted_lane, lane) in enumerate(zip(prediction.lanes, recorded, strict=True)):
        expected = [span for span in predicted_lane if span.update == prediction.shown]
        done = [span for span in lane if span.update == typical and not isinstance(span.operation, Load)]
        if len(done) != len(expected):
            raise BadTrace(
                f"worker {worker}, update {typical + 1}: {counted(len(done), 'operation')} recorded, where the "
                f"program has {len(expected)}; trace the run again"
            )
        for predicted, measured in zip(expected, done, strict=True):
            yield Paired(worker, later(predicted, -origins[0]), later(measured, -origins[1]))
