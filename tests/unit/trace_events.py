"""What the Trace Event Format asks of a file, written from its public description and not from our code.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from collections import defaultdict
from typing import Any

REQUIRED = {
    "X": {"name", "cat", "ph", "ts", "dur", "pid", "tid"},
    "M": {"name", "ph", "pid", "args"},
    "s": {"name", "cat", "ph", "ts", "pid", "tid", "id"},
    "f": {"name", "cat", "ph", "ts", "pid", "tid", "id"},
    "b": {"name", "cat", "ph", "ts", "pid", "tid", "id"},
    "e": {"name", "cat", "ph", "ts", "pid", "tid", "id"},
    "C": {"name", "ph", "ts", "pid", "args"},
}
METADATA = {"process_name": ("name", str), "thread_name": ("name", str), "process_sort_index": ("sort_index", int)}


def nanoseconds(event: dict[str, Any], field: str) -> int:
    """A time of an event; the format counts in microseconds, with fractions."""
    assert isinstance(event[field], int | float)
    assert event[field] >= 0
    return round(event[field] * 1000)


def assert_valid(content: Any) -> None:
    """The JSON object format: known phases with their fields, slices nested, flows and async events paired."""
    assert isinstance(content, dict)
    assert content.get("displayTimeUnit", "ms") in ("ms", "ns")
    events = content["traceEvents"]
    assert isinstance(events, list)
    for event in events:
        assert REQUIRED[event["ph"]] <= event.keys(), event
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event.get("tid", 0), int)
        assert isinstance(event.get("cat", ""), str)
        assert isinstance(event.get("args", {}), dict)
        if event["ph"] == "M":
            field, kind = METADATA[event["name"]]
            assert type(event["args"][field]) is kind
        if event["ph"] == "C":
            assert nanoseconds(event, "ts") >= 0
            assert all(type(value) in (int, float) for value in event["args"].values())
    slices = _slices(events)
    _flows(events, slices)
    _asynchronous(events)


Slices = dict[tuple[int, int], list[tuple[int, int]]]


def _slices(events: list[dict[str, Any]]) -> Slices:
    """The complete events of each thread: one within another, or apart."""
    found: Slices = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            start = nanoseconds(event, "ts")
            found[event["pid"], event["tid"]].append((start, start + nanoseconds(event, "dur")))
    for slices in found.values():
        open_until: list[int] = []
        for start, end in sorted(slices, key=lambda each: (each[0], -each[1])):
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or end <= open_until[-1], "slices of a thread overlap"
            open_until.append(end)
    return found


def _flows(events: list[dict[str, Any]], slices: Slices) -> None:
    """Every flow starts once and ends once, not before, each time in a slice of its thread."""
    found: dict[object, dict[str, int]] = defaultdict(dict)
    for event in events:
        if event["ph"] in "sf":
            ends = found[event["cat"], event["name"], event["id"]]
            assert event["ph"] not in ends, f"{event['id']} twice"
            time = ends[event["ph"]] = nanoseconds(event, "ts")
            assert any(a <= time <= b for a, b in slices[event["pid"], event["tid"]])
            if event["ph"] == "f":
                assert event["bp"] == "e", "else it would bind to the slice after"
    for name, ends in found.items():
        assert ends.keys() == {"s", "f"}, name
        assert ends["s"] <= ends["f"], name


def _asynchronous(events: list[dict[str, Any]]) -> None:
    """Begin and end of the same category, id and name, in one process."""
    found: dict[object, list[tuple[int, str]]] = defaultdict(list)
    for event in events:
        if event["ph"] in "be":
            key = event["cat"], event["id"], event["name"], event["pid"]
            found[key].append((nanoseconds(event, "ts"), event["ph"]))
    for key, pairs in found.items():
        assert "".join(phase for _, phase in sorted(pairs)) == "be", key
