"""A replay in the Trace Event Format, for Perfetto and chrome://tracing: the file of ``chimera compile --emit trace``.

Every worker is a process with one thread, whose operations have the names that ``train.py --torch-profile`` gives them:
so a prediction can lie beside a profile of torch. Its process numbers are above those that an operating system gives.
Times are in microseconds; where no profile is given, a cost of 1 is a millisecond.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, chain

from chimera_ir.cost.number_text import Unit
from chimera_ir.flow.host_moves import to_its_end
from chimera_ir.flow.live import changes, is_at_end
from chimera_ir.ir.kinds import Counted
from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import Compute, Pair, Send, WaitRecv
from chimera_ir.ir.text.printer import absolute, line, message_text
from chimera_ir.predict.replay import Event, Replay
from chimera_ir.trace import event_format
from chimera_ir.trace.event_format import TraceEvent, metadata
from chimera_ir.trace.spans import activity

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
    return event_format.file_text(
        chain(drawn.names(), drawn.operations(), drawn.messages(), drawn.sums(), drawn.moves(), drawn.memory()),
        {"schedule": replay.header.title, "conditions": replay.conditions},
    )


class _Drawn:
    """Makes the events of a trace file from a ``replay``; ``_timed`` has, for each lane, its events that take time."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        self._scale = _NANOSECONDS[replay.unit]
        self._timed = [
            [event for event in lane if self._at(event.start) < self._at(event.end)] for lane in replay.lanes
        ]

    def names(self) -> Iterator[TraceEvent]:
        """Yields the names of processes and threads."""
        for worker in range(len(self._timed)):
            process = FIRST_PROCESS + worker
            yield metadata("process_name", process, 0, name=f"worker {worker}, predicted")
            yield metadata("process_sort_index", process, 0, sort_index=worker)
            yield metadata("thread_name", process, 0, name="lane")

    def operations(self) -> Iterator[TraceEvent]:
        """Yields the operations and waits of all lanes."""
        for worker, lane in enumerate(self._timed):
            for event in lane:
                start, end = self._at(event.start), self._at(event.end)
                about = _about(self._replay.header, event)
                name, category = line(event.instruction, self._replay.header), activity(event.instruction)
                yield event_format.slice_of(name, category, (FIRST_PROCESS + worker, 0), start, end, about)

    def messages(self) -> Iterator[TraceEvent]:
        """Yields an arrow for each message, and its way from the sender's process if that takes time.

        The arrow begins in the event during which, or at whose end, it is sent. It ends in the wait for it or, if that
        takes no time, in the event behind the wait.
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
                yield from event_format.stretch(name, "message", FIRST_PROCESS + sender, start, end)
            before = bisect_left(starts[sender], sent.start) - 1
            taker = takers[receiver].get(message)
            if before >= 0 and taker is not None:
                last = self._at(self._timed[sender][before].end) - 1
                yield event_format.arrow("s", name, (FIRST_PROCESS + sender, 0), min(start, last))
                is_wait = isinstance(taker.instruction, WaitRecv)
                at = self._at(taker.end) - 1 if is_wait else self._at(taker.start)
                yield event_format.arrow("f", name, (FIRST_PROCESS + receiver, 0), at)

    def _takers(self, lane: Sequence[Event]) -> Iterator[tuple[object, Event]]:
        """Yields each message that a lane waits for with an event that takes time: the wait, or the first after it."""
        taker: Event | None = None
        for event in reversed(lane):
            if self._at(event.start) < self._at(event.end):
                taker = event
            if isinstance(event.instruction, WaitRecv) and taker is not None:
                yield event.instruction.message, taker

    def sums(self) -> Iterator[TraceEvent]:
        """Yields a stretch for each sum that takes time, in the process of every member."""
        for event in self._replay.sums:
            if self._at(event.start) < self._at(event.end):
                for worker in event.workers:
                    name, process = line(event.instruction, self._replay.header), FIRST_PROCESS + worker
                    yield from event_format.stretch(name, "sum", process, self._at(event.start), self._at(event.end))

    def moves(self) -> Iterator[TraceEvent]:
        """Yields a stretch for each move of memory that takes time, in the process of its worker."""
        for event in self._replay.moves:
            if self._at(event.start) < self._at(event.end):
                name, process = line(event.instruction, self._replay.header), FIRST_PROCESS + event.workers[0]
                yield from event_format.stretch(name, "move", process, self._at(event.start), self._at(event.end))

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
                    yield event_format.counter(_KEPT[unit], FIRST_PROCESS + worker, time, value)

    def _at(self, time: float) -> int:
        return round(time * self._scale)


def _amounts(changes_made: Sequence[tuple[int, int]]) -> Mapping[int, int]:
    """Maps each time at which an amount changes to the amount from then on.

    Each of ``changes_made`` is a time and the number that is added to the amount then.
    """
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
