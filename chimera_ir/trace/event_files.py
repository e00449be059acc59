"""Writes replays and recorded runs in the Trace Event Format, which Perfetto and chrome://tracing read."""

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import chain
from typing import Any

from chimera_ir.cost.durations import Unit
from chimera_ir.flow.live import MoveStep, timed_changes
from chimera_ir.ir.kinds import Counted
from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import AllReduce, Compute, Pair, Recv, Send, WaitAllReduce, WaitMove, WaitRecv, WeightGroup
from chimera_ir.ir.text.printer import absolute, group_text, line, message_text
from chimera_ir.predict.events import Role
from chimera_ir.predict.replay import Event, Replay
from chimera_ir.trace.compare import TraceComparison
from chimera_ir.trace.trace_files import LaneSpan, Trace, activity, words

# Events as JSON objects. A thread is given as the numbers of its process and of itself. Times are given in nanoseconds,
# and written in microseconds.

TraceEvent = dict[str, Any]

Thread = tuple[int, int]
"""The number of a process, and the number of a thread in it."""


def _file_text(events: Iterable[TraceEvent], about: Mapping[str, object]) -> str:
    content = {"traceEvents": list(events), "displayTimeUnit": "ms", "otherData": about}
    return json.dumps(content, separators=(",", ":")) + "\n"


def _process(number: int, name: str, place: int, *threads: str) -> Iterator[TraceEvent]:
    """Yields the events that give a process a name and a place among others, and names to its threads."""
    for what, thread, value in (
        ("process_name", 0, {"name": name}),
        ("process_sort_index", 0, {"sort_index": place}),
        *(("thread_name", thread, {"name": title}) for thread, title in enumerate(threads)),
    ):
        yield {"name": what, "ph": "M", "pid": number, "tid": thread, "args": value}


def _box(name: str, category: str, thread: Thread, start: int, end: int, about: Mapping[str, object]) -> TraceEvent:
    return _event("X", name, thread, start) | {"cat": category, "dur": (end - start) / 1000, "args": about}


def _arrow(phase: str, message: str, thread: Thread, time: int) -> TraceEvent:
    """The event of an end of a message's arrow: its start (phase ``s``) or end (``f``), within a box of a thread."""
    within = {"bp": "e"} if phase == "f" else {}
    return _event(phase, "message", thread, time) | {"cat": "message", "id": message} | within


def _end_of_stretch(phase: str, name: str, category: str, thread: Thread, time: int, number: str) -> TraceEvent:
    """The event of the beginning (phase ``b``) or end (``e``) of a stretch: a time beside boxes, as of a sum."""
    return _event(phase, name, thread, time) | {"cat": category, "id": number}


def _stretch(name: str, category: str, process: int, start: int, end: int) -> Iterator[TraceEvent]:
    for phase, time in (("b", start), ("e", end)):
        yield _end_of_stretch(phase, name, category, (process, 0), time, f"{process}/{name}")


def _event(phase: str, name: str, thread: Thread, time: int) -> TraceEvent:
    process, number = thread
    return {"name": name, "ph": phase, "pid": process, "tid": number, "ts": time / 1000}


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
    return _file_text(
        chain(
            *(drawn.names(), drawn.operations(), drawn.messages()),
            *(drawn.stretches(replay.sums, "sum"), drawn.stretches(replay.moves, "move"), drawn.memory()),
        ),
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
            yield from _process(FIRST_PROCESS + worker, f"worker {worker}, predicted", worker, "lane")

    def operations(self) -> Iterator[TraceEvent]:
        for worker, lane in enumerate(self._timed):
            for event in lane:
                start, end = self._at(event.start), self._at(event.end)
                about = _about(self._replay.header, event)
                name, category = line(event.instruction, self._replay.header), activity(event.instruction)
                yield _box(name, category, (FIRST_PROCESS + worker, 0), start, end, about)

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
                yield from _stretch(name, "message", FIRST_PROCESS + sender, start, end)
            before = bisect_left(starts[sender], sent.start) - 1
            taker = takers[receiver].get(message)
            if before >= 0 and taker is not None:
                last = self._at(self._timed[sender][before].end) - 1
                yield _arrow("s", name, (FIRST_PROCESS + sender, 0), min(start, last))
                is_wait = isinstance(taker.instruction, WaitRecv)
                at = self._at(taker.end) - 1 if is_wait else self._at(taker.start)
                yield _arrow("f", name, (FIRST_PROCESS + receiver, 0), at)

    def _takers(self, lane: Sequence[Event]) -> Iterator[tuple[object, Event]]:
        """Yields each message that a lane waits for with an event that takes time: the wait, or the first after it."""
        taker: Event | None = None
        for event in reversed(lane):
            if self._at(event.start) < self._at(event.end):
                taker = event
            if isinstance(event.instruction, WaitRecv) and taker is not None:
                yield event.instruction.message, taker

    def stretches(self, events: Iterable[Event], category: str) -> Iterator[TraceEvent]:
        """Yields a stretch for each sum or move that takes time, in the process of every member."""
        for event in events:
            start, end = self._at(event.start), self._at(event.end)
            if start < end:
                for worker in event.workers:
                    name = line(event.instruction, self._replay.header)
                    yield from _stretch(name, category, FIRST_PROCESS + worker, start, end)

    def memory(self) -> Iterator[TraceEvent]:
        """Yields counters of what every worker keeps.

        A value counts from the start of the operation that makes it to the end of the operation that frees it; where
        it moves, from the launch of the move, or to the wait for it.
        """
        header = self._replay.header
        for worker, lane in enumerate(self._replay.lanes):
            change_at: dict[Counted, Counter[int]] = {unit: Counter() for unit in _KEPT}
            for time, step, unit, amount in timed_changes(header, self._steps(worker, lane), list(_KEPT)):
                change_at[unit][self._at(time)] += amount * header.size(unit, step.stage)
            for unit, of_unit in change_at.items():
                amount = 0
                for at, change in sorted(of_unit.items()):
                    amount += change
                    if change:
                        value = {_KEPT[unit]: float(Fraction(amount, header.units_of_m_a))}
                        yield _event("C", _KEPT[unit], (FIRST_PROCESS + worker, 0), at) | {"args": value}

    def _steps(self, worker: int, lane: Iterable[Event]) -> Iterator[tuple[MoveStep, float, float]]:
        for event in lane:
            if event.role is Role.COMPUTE and isinstance(event.instruction, Compute | Pair):
                yield from ((part, event.start, event.end) for part in event.instruction.parts)
            elif isinstance(event.instruction, WaitMove):
                yield event.instruction, event.end, event.end
        for event in self._replay.moves:
            if worker in event.workers and isinstance(event.instruction, Compute):
                yield event.instruction, event.posted, event.posted

    def _at(self, time: float) -> int:
        return round(time * self._scale)


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


# A recorded run. Every rank is a process with two threads: the measured run, and the prediction. The prediction is of
# one update, and is shown at the time of the typical update, the one of median length. Times count from the first
# operation of the run.

MEASURED, PREDICTED = 0, 1
"""The numbers of a rank's two threads."""


def recorded_trace(trace: Trace, comparison: TraceComparison) -> str:
    """The text of a file with the operations of a recorded run and the predicted update of ``comparison``."""
    about = trace.about
    return _file_text(
        chain(_names(trace), _recorded(trace, comparison), _predicted(trace, comparison)),
        {
            "scheme": about.scheme,
            "program": about.program,
            "backend": about.backend,
            "layout": about.layout,
            "clock_offset_ns": {str(rank.rank): [[*offset] for offset in rank.clock] for rank in trace.ranks},
        },
    )


def _names(trace: Trace) -> Iterator[TraceEvent]:
    for rank in trace.ranks:
        copy = f" of copy {rank.copy}" if trace.about.copies > 1 else ""
        name = f"rank {rank.rank} (worker {rank.worker}{copy})"
        yield from _process(rank.rank, name, rank.rank, "measured", "predicted")


def _recorded(trace: Trace, comparison: TraceComparison) -> Iterator[TraceEvent]:
    """Yields the operations of all ranks, with an arrow for each message and a stretch for each sum, to their waits."""
    arrived = {
        (rank.copy, span.update, span.operation.message)
        for rank, lane in zip(trace.ranks, comparison.recorded, strict=True)
        for span in lane
        if isinstance(span.operation, WaitRecv)
    }
    for rank, lane in zip(trace.ranks, comparison.recorded, strict=True):
        summed = {(s.update, s.operation.group) for s in lane if isinstance(s.operation, WaitAllReduce)}
        for span in lane:
            yield _slice(trace.header, span, (rank.rank, MEASURED), {"update": span.update})
            match span.operation:
                case Send(message=message) if (rank.copy, span.update, message) in arrived:
                    yield _arrow("s", _id(trace.header, rank.copy, span), (rank.rank, MEASURED), span.start)
                case WaitRecv():
                    last = max(span.start, span.end - 1)
                    yield _arrow("f", _id(trace.header, rank.copy, span), (rank.rank, MEASURED), last)
                case AllReduce(group=group) if (span.update, group) in summed:
                    yield _sum("b", rank.rank, span.update, group, span.start)
                case WaitAllReduce(group=group):
                    yield _sum("e", rank.rank, span.update, group, span.end)
                case _:
                    pass


def _sum(phase: str, rank: int, update: int, group: WeightGroup, time: int) -> TraceEvent:
    stages = "+".join(map(str, group))
    name, number = f"sum {group_text(group)}", f"{rank}/{update}/{stages}"
    return _end_of_stretch(phase, name, "sum", (rank, MEASURED), time, number)


def _id(header: Header, copy: int, span: LaneSpan) -> str:
    """The id of the message that ``span`` sends or waits for, which only these two have."""
    operation = span.operation
    assert isinstance(operation, Send | Recv | WaitRecv)
    return f"{copy}/{span.update}/{words(WaitRecv(operation.message), header).removeprefix('wait recv ')}"


def _slice(header: Header, span: LaneSpan, thread: tuple[int, int], about: dict[str, object]) -> TraceEvent:
    return _box(words(span.operation, header), activity(span.operation), thread, span.start, span.end, about)


def _predicted(trace: Trace, comparison: TraceComparison) -> Iterator[TraceEvent]:
    """Yields the operations of the predicted update, moved to the time at which the typical measured update begins."""
    for rank in trace.ranks:
        for span in comparison.predicted.lanes[rank.worker]:
            if span.start < span.end:
                shown = span._replace(start=span.start + comparison.origin, end=span.end + comparison.origin)
                yield _slice(trace.header, shown, (rank.rank, PREDICTED), {})
