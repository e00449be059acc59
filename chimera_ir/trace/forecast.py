"""Prediction from the costs of operations; messages and sums take no time."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

from chimera_ir.cost.durations import Unit
from chimera_ir.flow import engine
from chimera_ir.flow.live import changes, is_at_end, to_its_end
from chimera_ir.ir.kinds import Counted
from chimera_ir.ir.levels import Header, Program
from chimera_ir.ir.ops import AllReduce, Compute, Instruction, Pair, Send, WaitAllReduce, WaitRecv
from chimera_ir.ir.streams import ProgramStream, longer, view_of
from chimera_ir.ir.text.printer import absolute, line, message_text
from chimera_ir.predict.replay import Event, Replay, pace, replay
from chimera_ir.predict.setting import Setting
from chimera_ir.profile.choose import Inputs, Wanted
from chimera_ir.trace import trace_files
from chimera_ir.trace.account import windows
from chimera_ir.trace.match import instructions
from chimera_ir.trace.trace_files import Lane, LaneSpan, Trace, TraceEvent, UpdateWindow, activity, metadata

# A replay in the Trace Event Format, for Perfetto and chrome://tracing: the file of ``chimera compile --emit trace``.
#
# Every worker is a process with one thread, whose operations have the names that ``train.py --torch-profile`` gives
# them: so a prediction can lie beside a profile of torch. Its process numbers are above those that an operating system
# gives. Times are in microseconds; where no profile is given, a cost of 1 is a millisecond.

FIRST_PROCESS = 10_000_000
"""The number of worker 0's process; Linux has at most 4,194,304 processes."""

_KEPT = {
    Counted.ACTIVATIONS: "activations in M_a",
    Counted.INPUT: "inputs kept",
    Counted.OPERANDS: "operands of split backwards",
    Counted.HOST: "activations on the host in M_a",
    Counted.HOST_OPERANDS: "operands on the host",
    Counted.CARRIES: "carries of whole micro-batches",
    Counted.CARRY_GRADIENTS: "gradients of carries of whole micro-batches",
}
"""Names of the counters of memory; values on their way to other stages are not counted."""

_NANOSECONDS = {Unit.SECOND: 10**9, Unit.COST: 10**6}
"""Nanoseconds of a unit of a replay's times."""


def predicted_trace(replay: Replay) -> str:
    """The text of a file with the operations, messages, sums and kept activations of a replay."""
    drawn = _Drawn(replay)
    return trace_files.file_text(
        chain(drawn.names(), drawn.operations(), drawn.messages(), drawn.sums(), drawn.moves(), drawn.memory()),
        {"schedule": replay.header.title, "conditions": replay.conditions},
    )


class _Drawn:
    """Makes the events of a trace file from a ``replay``; ``_timed`` has the events of each lane that take time."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        self._scale = _NANOSECONDS[replay.unit]
        self._timed = [
            [event for event in lane if self._at(event.start) < self._at(event.end)] for lane in replay.lanes
        ]

    def names(self) -> Iterator[TraceEvent]:
        for worker in range(len(self._timed)):
            process = FIRST_PROCESS + worker
            yield metadata("process_name", process, 0, name=f"worker {worker}, predicted")
            yield metadata("process_sort_index", process, 0, sort_index=worker)
            yield metadata("thread_name", process, 0, name="lane")

    def operations(self) -> Iterator[TraceEvent]:
        for worker, lane in enumerate(self._timed):
            for event in lane:
                start, end = self._at(event.start), self._at(event.end)
                about = _about(self._replay.header, event)
                name, category = line(event.instruction, self._replay.header), activity(event.instruction)
                yield trace_files.slice_of(name, category, (FIRST_PROCESS + worker, 0), start, end, about)

    def messages(self) -> Iterator[TraceEvent]:
        """Yields an arrow for each message, and its way from the sender's process if that takes time.

        The arrow leads from the event during which, or at whose end, it is sent, to the wait for it or, if that takes
        no time, to the event behind the wait.
        """
        takers = [dict(self._takers(lane)) for lane in self._replay.lanes]
        starts = [[event.start for event in lane] for lane in self._timed]
        for sent in self._replay.messages:
            assert isinstance(sent.instruction, Send)
            message = sent.instruction.message
            sender, receiver = sent.workers
            name, start, end = (
                message_text(message, absolute(self._replay.header.slices)),
                self._at(sent.start),
                self._at(sent.end),
            )
            if start < end:
                yield from trace_files.stretch(name, "message", FIRST_PROCESS + sender, start, end)
            before = bisect_left(starts[sender], sent.start) - 1
            taker = takers[receiver].get(message)
            if before >= 0 and taker is not None:
                last = self._at(self._timed[sender][before].end) - 1
                yield trace_files.arrow("s", name, (FIRST_PROCESS + sender, 0), min(start, last))
                is_wait = isinstance(taker.instruction, WaitRecv)
                at = self._at(taker.end) - 1 if is_wait else self._at(taker.start)
                yield trace_files.arrow("f", name, (FIRST_PROCESS + receiver, 0), at)

    def _takers(self, lane: Sequence[Event]) -> Iterator[tuple[object, Event]]:
        """Yields each message that a lane waits for with an event that takes time: the wait, or the first after it."""
        taker: Event | None = None
        for event in reversed(lane):
            if self._at(event.start) < self._at(event.end):
                taker = event
            if isinstance(event.instruction, WaitRecv) and taker is not None:
                yield event.instruction.message, taker

    def sums(self) -> Iterator[TraceEvent]:
        for event in self._replay.sums:
            if self._at(event.start) < self._at(event.end):
                for worker in event.workers:
                    name, process = line(event.instruction, self._replay.header), FIRST_PROCESS + worker
                    yield from trace_files.stretch(name, "sum", process, self._at(event.start), self._at(event.end))

    def moves(self) -> Iterator[TraceEvent]:
        for event in self._replay.moves:
            if self._at(event.start) < self._at(event.end):
                name, process = line(event.instruction, self._replay.header), FIRST_PROCESS + event.workers[0]
                yield from trace_files.stretch(name, "move", process, self._at(event.start), self._at(event.end))

    def memory(self) -> Iterator[TraceEvent]:
        """Yields counters of what every worker keeps.

        A value counts from the start of the operation that makes it to the end of the operation that frees it.
        """
        header = self._replay.header
        for worker, lane in enumerate(self._timed):
            changes_of: dict[Counted, list[tuple[int, int]]] = {unit: [] for unit in _KEPT}
            for event in lane:
                if isinstance(event.instruction, Compute | Pair):
                    for step, unit, amount in changes(header, to_its_end(event.instruction), list(_KEPT)):
                        time = event.end if is_at_end(step, unit, amount) else event.start
                        changes_of[unit].append((self._at(time), amount))
            for unit, unit_changes in changes_of.items():
                for time, amount in _amounts(unit_changes).items():
                    value = float(Fraction(amount, header.units))
                    yield trace_files.counter(_KEPT[unit], FIRST_PROCESS + worker, time, value)

    def _at(self, time: float) -> int:
        return round(time * self._scale)


def _amounts(changes_made: Sequence[tuple[int, int]]) -> Mapping[int, int]:
    """The amount from each time on at which it changes, by the times and amounts of changes."""
    change_at: dict[int, int] = {}
    for time, change in sorted(changes_made):
        change_at[time] = change_at.get(time, 0) + change
    times = [time for time, change in change_at.items() if change]
    return dict(zip(times, accumulate(change_at[time] for time in times), strict=True))


def _about(header: Header, event: Event) -> Mapping[str, object]:
    """Micro-batches, stages and pipes of an operation, which a viewer shows beside its name."""
    if not isinstance(event.instruction, Compute | Pair):
        return {}
    parts = event.instruction.parts
    return {
        "micro-batches": [int(micro) for part in parts for micro in part.micros],
        "stages": [int(part.stage) for part in parts],
        "pipes": [header.pipe_of[part.micros[0]].name for part in parts],
    }


Cost = Callable[[Instruction], int]
"""Nanoseconds of an operation; never called for a wait."""


class PredictedLanes(NamedTuple):
    """A prediction: ``windows[u][w]`` is the window of update u on worker w, whose lane is ``lanes[w]``.

    ``shown`` is the update to show next to a measured one; a predicted time is the mean of the ``counted`` updates.
    """

    lanes: tuple[Lane, ...]
    windows: Sequence[tuple[UpdateWindow, ...]]
    shown: int
    counted: range


def played_updates(program: Program | ProgramStream, barriered: bool) -> int:
    """Number of updates to predict so that one of them is like the measured ones.

    One if a barrier precedes each update (``barriered``), four if updates follow one another; of a stream as many as
    its view has, which shows all that ever happens.
    """
    return view_of(program).header.updates if isinstance(program, ProgramStream) else 1 if barriered else 4


def like_typical(header: Header, updates: int, typical: int) -> int:
    """Index, among ``updates`` predicted updates, of the one that is most like ``typical``, an update of a run.

    The middle update is taken or, as even and odd updates of a stream differ, the one before.
    """
    shown = updates // 2
    return shown - (shown - typical) % 2 if header.asynchronous and shown > 1 else shown


def play(program: Program | ProgramStream, updates: int, cost: Cost) -> tuple[Lane, ...]:
    """Lanes of ``updates`` updates of a verified program in which everything runs as early as possible, from time 0.

    The wait for a message ends when the message is sent, the wait for a sum when the last holder launches it.
    """
    served = [list(instructions(program, worker, updates)) for worker in range(program.header.workers)]
    bounds = pairwise(accumulate(map(len, served), initial=0))
    lanes = [range(start, end) for start, end in bounds]
    before = _waits(served, lanes)
    durations = [
        0 if isinstance(instruction, WaitRecv | WaitAllReduce) else cost(instruction)
        for lane in served
        for _, instruction in lane
    ]
    played = engine.play(lanes, before)
    assert len(played.order) == len(before), "a verified program ends"
    ends = engine.ends(played.order, before, durations)
    pairs = zip(served, lanes, strict=True)
    return tuple(tuple(_spans(lane, ends[numbers.start : numbers.stop])) for lane, numbers in pairs)


_Served = Sequence[tuple[int, Instruction]]
"""The instructions of a lane, each with the update that it serves."""


def _waits(served: Iterable[_Served], lanes: Iterable[range]) -> list[list[int]]:
    """Lists, for each instruction, those that it waits for: the one before it, and posts of its message or sum.

    An instruction is given by its index, counted lane by lane: ``lanes`` has the indices of each lane in ``served``.
    """
    posted: dict[Hashable, list[int]] = defaultdict(list)
    awaited: dict[int, Hashable] = {}
    before: list[list[int]] = []
    for lane, numbers in zip(served, lanes, strict=True):
        for number, (update, instruction) in zip(numbers, lane, strict=True):
            needs = [number - 1] if number > numbers.start else []
            match instruction:
                case Send(content) | AllReduce(content):
                    posted[update, content].append(number)
                case WaitRecv(content) | WaitAllReduce(content):
                    awaited[number] = update, content
                case _:
                    pass
            before.append(needs)
    for number, key in awaited.items():
        before[number] += posted[key]
    return before


def _spans(lane: _Served, ends: Sequence[int]) -> Iterator[LaneSpan]:
    """Yields the instructions of a lane with their times: from the end of the one before to its own in ``ends``."""
    for (update, instruction), start, end in zip(lane, [0, *ends], ends, strict=False):
        yield LaneSpan(instruction, update, start, end)


# Prediction from a profile and a cluster file, by a replay of the program, as it could be made before the run.

LONGER = (1, 2, 4, 8, 16)
"""Factors on the number of replayed updates, tried in order until the replay shows steady updates."""

MOST = 300_000
"""The most instructions of a replay with more updates than the first one."""


@dataclass(frozen=True, slots=True)
class ProfileSource:
    """Source of a prediction; ``profile`` and ``cluster`` are the names that the two files give themselves."""

    profile: str
    cluster: str
    setting: Setting


def profile_source(trace: Trace, inputs: Inputs) -> ProfileSource:
    """Source of a prediction for a trace: profile and cluster of ``inputs``, with copies and sizes of the run.

    For a rehearsal only the sizes of the profile count: an operation takes the rehearsed time of its kind, whether it
    recomputes or not, and a step takes none. Raises `Unfit` if the profile or the cluster does not fit the run.
    """
    header, about = trace.header, trace.about
    wanted = Wanted(header.stages, header.workers, about.copies, about.micro_batch_size)
    if about.rehearse is None:
        stages = inputs.choose(wanted)
    else:
        stages = tuple(sizes.slept(wanted.micro_batch_size, about.rehearse) for sizes in inputs.choose_sizes(wanted))
    where = inputs.cluster, about.copies, about.micro_batch_size, about.layout == "replica"
    setting = Setting(stages, *where, about.sharded_optimizer and about.rehearse is None)
    return ProfileSource(inputs.counts.name, inputs.cluster.name, setting)


def predict_from_profile(
    program: Program | ProgramStream, setting: Setting, barriered: bool, typical: int
) -> PredictedLanes:
    """The lanes of a program replayed in a setting, and which updates in them to compare with ``typical``.

    If a barrier precedes each update (``barriered``), one update is replayed. Otherwise the counted updates are whole
    turns that take exactly as long as updates in the long run. If there are none, which is possible on shared links,
    the turn that ends with the shown update counts.
    """
    header = view_of(program).header
    updates = played_updates(program, barriered)
    if barriered:
        predicted, _ = _replayed(program, setting, updates)
        return PredictedLanes(predicted, windows(header, predicted, barriered), 0, range(1))
    # Replay more and more updates, until some whole turns before the shown update are in the steady state.
    turn = header.per_turn
    lines = sum(map(len, view_of(program).lanes))
    counts = [times * updates for times in LONGER if times == 1 or times * lines <= MOST]
    for count in counts:
        predicted, seconds = _replayed(program, setting, count)
        update_windows, shown = windows(header, predicted, barriered), like_typical(header, count, typical)
        for start in range(shown + 1 - turn, 0, -turn):
            counted = range(start, shown + 1)
            if _steady(predicted, update_windows, counted, 1e9 * seconds):
                return PredictedLanes(predicted, update_windows, shown, counted)
    return PredictedLanes(predicted, update_windows, shown, range(max(shown + 1 - turn, 0), shown + 1))


def _steady(
    lanes: Sequence[Lane], update_windows: Sequence[Sequence[UpdateWindow]], counted: range, nanoseconds: float
) -> bool:
    whole = len(counted) * nanoseconds
    return all(
        abs(update_windows[counted[-1]][worker].end - update_windows[counted[0]][worker].start - whole) <= 2
        for worker, lane in enumerate(lanes)
        if lane
    )


def _replayed(program: Program | ProgramStream, setting: Setting, updates: int) -> tuple[tuple[Lane, ...], float]:
    whole = longer(program, updates)
    replayed = replay(whole, setting)
    lanes = tuple(
        tuple(_profiled_spans(instructions(program, worker, updates), lane, replayed.lanes[worker]))
        for worker, lane in enumerate(whole.lanes)
    )
    return lanes, pace(program, setting) if isinstance(program, Program) and updates > 1 else replayed.seconds


def _profiled_spans(
    serving: Iterator[tuple[int, Instruction]], lane: Sequence[Instruction], timed: Sequence[Event]
) -> Iterator[LaneSpan]:
    """Yields the instructions of a lane with their times in a replay; one without an event takes no time.

    ``serving`` has each instruction as in the run, ``lane`` as in the replayed program, of which ``timed`` has the
    events. All are in one order, and no instruction occurs twice in ``lane``.
    """
    now, events = 0, iter(timed)
    ahead = next(events, None)
    for (update, operation), instruction in zip(serving, lane, strict=True):
        end = now
        if ahead is not None and ahead.instruction == instruction:
            end, ahead = round(ahead.end * 1e9), next(events, None)
        yield LaneSpan(operation, update, now, end)
        now = end
