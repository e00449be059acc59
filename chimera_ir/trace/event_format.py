"""A trace as a JSON object in the Trace Event Format, which chrome://tracing and Perfetto read.

Every rank is a process with two threads: the measured run, and the prediction at the time of the typical update.
Times are in microseconds from the first operation of the run.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from chimera_ir.ir.ids import WeightGroup
from chimera_ir.ir.ops import AllReduce, Recv, Send, WaitAllReduce, WaitRecv
from chimera_ir.ir.text.printer import group_text
from chimera_ir.trace.compare import TraceComparison
from chimera_ir.trace.spans import LaneSpan, activity, words
from chimera_ir.trace.trace_files import Trace

Event = dict[str, Any]

MEASURED, PREDICTED = 0, 1
"""The numbers of a rank's two threads."""


def events(trace: Trace, comparison: TraceComparison) -> str:
    """The text of a file with the trace, and with the prediction of the comparison."""
    about = trace.about
    content = {
        "traceEvents": [*_names(trace), *_recorded(trace, comparison), *_predicted(trace, comparison)],
        "displayTimeUnit": "ms",
        "otherData": {
            "scheme": about.scheme,
            "program": about.program,
            "backend": about.backend,
            "layout": about.layout,
            "clock_offset_ns": {str(rank.rank): [[*offset] for offset in rank.clock] for rank in trace.ranks},
        },
    }
    return json.dumps(content, separators=(",", ":")) + "\n"


def _names(trace: Trace) -> Iterator[Event]:
    for rank in trace.ranks:
        copy = f" of copy {rank.copy}" if trace.about.copies > 1 else ""
        yield _meta("process_name", rank.rank, 0, name=f"rank {rank.rank} (worker {rank.worker}{copy})")
        yield _meta("process_sort_index", rank.rank, 0, sort_index=rank.rank)
        yield _meta("thread_name", rank.rank, MEASURED, name="measured")
        yield _meta("thread_name", rank.rank, PREDICTED, name="predicted")


def _meta(what: str, rank: int, thread: int, **arguments: object) -> Event:
    return {"name": what, "ph": "M", "pid": rank, "tid": thread, "args": arguments}


def _recorded(trace: Trace, comparison: TraceComparison) -> Iterator[Event]:
    """Yields all ranks' operations, an arrow from each send to the end of the wait for it, and each sum's duration."""
    arrived = {
        (rank.copy, span.update, span.operation.message)
        for rank, lane in zip(trace.ranks, comparison.recorded, strict=True)
        for span in lane
        if isinstance(span.operation, WaitRecv)
    }
    for rank, lane in zip(trace.ranks, comparison.recorded, strict=True):
        summed = {(s.update, s.operation.group) for s in lane if isinstance(s.operation, WaitAllReduce)}
        for span in lane:
            yield _complete(span, rank.rank, MEASURED, {"update": span.update})
            match span.operation:
                case Send(message=message) if (rank.copy, span.update, message) in arrived:
                    yield _event("s", "message", rank.rank, span.start, cat="message", id=_id(rank.copy, span))
                case WaitRecv():
                    last = max(span.start, span.end - 1)
                    yield _event("f", "message", rank.rank, last, cat="message", id=_id(rank.copy, span), bp="e")
                case AllReduce(group=group) if (span.update, group) in summed:
                    yield _sum("b", rank.rank, span.update, group, span.start)
                case WaitAllReduce(group=group):
                    yield _sum("e", rank.rank, span.update, group, span.end)
                case _:
                    pass


def _sum(phase: str, rank: int, update: int, group: WeightGroup, time: int) -> Event:
    stages = "+".join(map(str, group))
    return _event(phase, f"sum {group_text(group)}", rank, time, cat="sum", id=f"{rank}/{update}/{stages}")


def _event(phase: str, name: str, rank: int, time: int, **more: object) -> Event:
    return {"name": name, "ph": phase, "pid": rank, "tid": MEASURED, "ts": time / 1000} | more


def _id(copy: int, span: LaneSpan) -> str:
    """The id of the message that ``span`` sends or waits for in a copy: its send and its wait share it, no others."""
    operation = span.operation
    assert isinstance(operation, Send | Recv | WaitRecv)
    return f"{copy}/{span.update}/{words(WaitRecv(operation.message)).removeprefix('wait recv ')}"


def _complete(span: LaneSpan, rank: int, thread: int, arguments: Mapping[str, object]) -> Event:
    event = {"name": words(span.operation), "ph": "X", "pid": rank, "tid": thread, "ts": span.start / 1000}
    return event | {"cat": activity(span.operation), "dur": (span.end - span.start) / 1000, "args": arguments}


def _predicted(trace: Trace, comparison: TraceComparison) -> Iterator[Event]:
    """Yields the operations of the predicted update, moved to the beginning of the typical one."""
    for rank in trace.ranks:
        for span in comparison.predicted.lanes[rank.worker]:
            if span.start < span.end:
                shown = span._replace(start=span.start + comparison.origin, end=span.end + comparison.origin)
                yield _complete(shown, rank.rank, PREDICTED, {})
