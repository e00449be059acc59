"""Writes a recorded run in the Trace Event Format, which Perfetto and chrome://tracing read.

Every rank is a process with two threads: the measured run, and the prediction. The prediction is of one update, and is
shown at the time of the typical update, the one of median length. Times count from the first operation of the run.
"""

from collections.abc import Iterator
from itertools import chain

from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import AllReduce, Recv, Send, WaitAllReduce, WaitRecv, WeightGroup
from chimera_ir.ir.text.printer import group_text
from chimera_ir.trace.compare import TraceComparison
from chimera_ir.trace.trace_files import (
    LaneSpan,
    Trace,
    TraceEvent,
    activity,
    arrow,
    end_of_stretch,
    file_text,
    metadata,
    slice_of,
    words,
)

MEASURED, PREDICTED = 0, 1
"""The numbers of a rank's two threads."""


def recorded_trace(trace: Trace, comparison: TraceComparison) -> str:
    """The text of a file with the operations of a recorded run and the predicted update of ``comparison``."""
    about = trace.about
    return file_text(
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
        yield metadata("process_name", rank.rank, 0, name=f"rank {rank.rank} (worker {rank.worker}{copy})")
        yield metadata("process_sort_index", rank.rank, 0, sort_index=rank.rank)
        yield metadata("thread_name", rank.rank, MEASURED, name="measured")
        yield metadata("thread_name", rank.rank, PREDICTED, name="predicted")


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
                    yield arrow("s", _id(trace.header, rank.copy, span), (rank.rank, MEASURED), span.start)
                case WaitRecv():
                    last = max(span.start, span.end - 1)
                    yield arrow("f", _id(trace.header, rank.copy, span), (rank.rank, MEASURED), last)
                case AllReduce(group=group) if (span.update, group) in summed:
                    yield _sum("b", rank.rank, span.update, group, span.start)
                case WaitAllReduce(group=group):
                    yield _sum("e", rank.rank, span.update, group, span.end)
                case _:
                    pass


def _sum(phase: str, rank: int, update: int, group: WeightGroup, time: int) -> TraceEvent:
    stages = "+".join(map(str, group))
    name, number = f"sum {group_text(group)}", f"{rank}/{update}/{stages}"
    return end_of_stretch(phase, name, "sum", (rank, MEASURED), time, number)


def _id(header: Header, copy: int, span: LaneSpan) -> str:
    """The id of the message that ``span`` sends or waits for, which only these two have."""
    operation = span.operation
    assert isinstance(operation, Send | Recv | WaitRecv)
    return f"{copy}/{span.update}/{words(WaitRecv(operation.message), header).removeprefix('wait recv ')}"


def _slice(header: Header, span: LaneSpan, thread: tuple[int, int], about: dict[str, object]) -> TraceEvent:
    return slice_of(words(span.operation, header), activity(span.operation), thread, span.start, span.end, about)


def _predicted(trace: Trace, comparison: TraceComparison) -> Iterator[TraceEvent]:
    """Yields the operations of the predicted update, moved to the time at which the typical measured update begins."""
    for rank in trace.ranks:
        for span in comparison.predicted.lanes[rank.worker]:
            if span.start < span.end:
                shown = span._replace(start=span.start + comparison.origin, end=span.end + comparison.origin)
                yield _slice(trace.header, shown, (rank.rank, PREDICTED), {})
