"""The Trace Event Format, which chrome://tracing and Perfetto read: events as JSON objects.

A thread is given as the numbers of its process and of itself. Times are given in nanoseconds, and written in
microseconds.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

TraceEvent = dict[str, Any]

Thread = tuple[int, int]
"""The number of a process, and the number of a thread in it."""


def file_text(events: Iterable[TraceEvent], about: Mapping[str, object]) -> str:
    """The text of a file with ``events``; ``about`` has further entries on the file as a whole."""
    content = {"traceEvents": list(events), "displayTimeUnit": "ms", "otherData": about}
    return json.dumps(content, separators=(",", ":")) + "\n"


def metadata(what: str, process: int, thread: int, **arguments: object) -> TraceEvent:
    """The event that gives a process or a thread its name or its place among others; ``what`` says which."""
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": arguments}


def slice_of(name: str, category: str, thread: Thread, start: int, end: int, about: Mapping[str, object]) -> TraceEvent:
    """The event of a box on a thread, from ``start`` to ``end``; a viewer shows ``about`` beside it."""
    event = _event("X", name, thread, start)
    return event | {"cat": category, "dur": (end - start) / 1000, "args": about}


def arrow(phase: str, message: str, thread: Thread, time: int) -> TraceEvent:
    """The event of an end of a message's arrow: its start (phase ``s``) or end (``f``), within a box of a thread."""
    within = {"bp": "e"} if phase == "f" else {}
    return _event(phase, "message", thread, time) | {"cat": "message", "id": message} | within


def end_of_stretch(phase: str, name: str, category: str, thread: Thread, time: int, number: str) -> TraceEvent:
    """The event of the beginning (phase ``b``) or end (``e``) of a stretch: a time beside boxes, as of a sum."""
    return _event(phase, name, thread, time) | {"cat": category, "id": number}


def stretch(name: str, category: str, process: int, start: int, end: int) -> Iterator[TraceEvent]:
    """Yields the beginning and the end of a stretch: a time beside the boxes of a process, with a name of its own."""
    for phase, time in (("b", start), ("e", end)):
        yield end_of_stretch(phase, name, category, (process, 0), time, f"{process}/{name}")


def counter(name: str, process: int, time: int, value: float) -> TraceEvent:
    """The event that gives a counter of a process its value from a time on."""
    return _event("C", name, (process, 0), time) | {"args": {name: value}}


def _event(phase: str, name: str, thread: Thread, time: int) -> TraceEvent:
    process, number = thread
    return {"name": name, "ph": phase, "pid": process, "tid": number, "ts": time / 1000}
