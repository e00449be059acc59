"""A replay as SVG: operations and steps in real proportions, idle time by its cause, sums, the critical path.

All places are computed here; ``templates/replay.svg.j2`` only writes them down. Equal replays give equal bytes.
"""

from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import chain

from chimera_ir.cost.durations import percent
from chimera_ir.ir.ops import AllReduce, Compute, Operation, Pair, Step, Worker
from chimera_ir.ir.text.printer import group_name, line
from chimera_ir.picture import chart
from chimera_ir.picture.chart import (
    BUBBLE,
    MESSAGE,
    SEND,
    SUM,
    Box,
    Family,
    PlacedOperation,
    Scale,
    families,
    pixels,
    room,
)
from chimera_ir.picture.looks import PAPER, STEP, Looks, label, plain, rows_of
from chimera_ir.picture.svg import FAIR, FONT, MOST_BOXES, WIDEST, WIDTH
from chimera_ir.plural import counted
from chimera_ir.predict.events import Role
from chimera_ir.predict.replay import Cause, Event, Replay, idle, shares

_MOST = 90
"""The largest width in pixels of the shortest operation's box; half of it if messages and sums take no time."""

_PATTERNS = {Cause.BUBBLE: BUBBLE, Cause.MESSAGE: MESSAGE, Cause.SUM: SUM, Cause.MOVE: SEND}


def draw_replay(replay: Replay) -> str:
    """The replay as a self-contained SVG document; names from the scheme and the cluster are escaped."""
    return chart.filled("replay.svg.j2", **drawing(replay))


def drawing(replay: Replay) -> dict[str, object]:
    """The values for ``templates/replay.svg.j2``: the chart, and paths and boxes in pixels.

    ``idle`` has all idle time of a cause as one path, by the name of the pattern that fills it. ``messages``,
    ``critical`` (the critical path) and ``notices`` (that a receive is posted) are paths, too. Sums and moves of memory
    are boxes or, in a long replay, the paths ``sums_path`` and ``moves_path``.
    """
    scale = _scale(replay)
    idle_paths = _idle(replay, scale)
    messages = "".join(_arrow(message, scale) for message in replay.messages if message.end > message.start)
    looks = Looks(replay.header)
    operations = [_operation(event) for event in _computes(replay)]
    # Signs that the picture uses get an entry each, behind the entries of strands.
    signs = {cause.name.lower(): cause.value for cause in idle_paths}
    signs |= {"summing": "sum under way"} if any(_summing(replay)) else {}
    signs |= {"moving": "move under way"} if _timed(replay.moves) else {}
    signs |= {"arrow": "message"} if messages else {}
    signs |= {"critical": "critical path"}
    signs |= {"step": "step"} if any(_steps(replay)) else {}
    one_by_one = sum(map(len, replay.lanes)) <= MOST_BOXES
    made = chart.chart(
        looks,
        operations,
        scale,
        heading=plain(replay.header.title),
        summary=plain(_summary(replay)),
        rows=(scale.lane_row(f"P{worker}", scale.y(worker), 0, replay.span) for worker in range(len(replay.lanes))),
        families=(*_families(replay, looks, scale, one_by_one), *_stepping(replay, scale, one_by_one)),
        ticks=scale.ticks(replay.span, *replay.unit.axis(Fraction(replay.span))),
        signs=signs,
        patterns={
            f"idle-{cause.name.lower()}": pattern
            for cause, pattern in _PATTERNS.items()
            if cause is not Cause.MOVE or replay.header.moves
        },
        span=replay.span,
    )
    return {
        "chart": made,
        "idle": {cause.name.lower(): path for cause, path in idle_paths.items()},
        "messages": messages,
        "summing": SUM.mark,
        "sums": tuple(_box(*both, replay, scale) for both in _summing(replay)) if one_by_one else (),
        "sums_path": "" if one_by_one else "".join(_outline(*both, scale) for both in _summing(replay)),
        "moving": SEND.mark,
        "moves": tuple(_box(move, move.workers[0], replay, scale) for move in replay.moves) if one_by_one else (),
        "moves_path": "" if one_by_one else "".join(_outline(move, move.workers[0], scale) for move in replay.moves),
        "critical": "".join(_marked(event, scale) for event in replay.critical if event.role is not Role.NOTICE),
        "notices": "".join(_arrow(event, scale) for event in replay.critical if event.role is Role.NOTICE),
    }


def _scale(replay: Replay) -> Scale:
    """Returns a scale at which labels fit or, if that is too wide, the shortest operation can be seen."""
    # The smallest scale that is fair to the shortest operation, or that gives every label room if that is possible.
    lengths = [Fraction(event.end) - Fraction(event.start) for event in _computes(replay)]
    shortest = min((length for length in lengths if length > 0), default=Fraction(1))
    span = Fraction(replay.span) or Fraction(1)
    row, strip, gap, font = (14, 4, 3, 10) if len(replay.lanes) > 16 else (26, 7, 5, FONT)
    looks = Looks(replay.header)
    labels = (looks.label(part) for event in _computes(replay) for part in _operation(event).parts)
    labelled = max((room(text, font) for text in labels), default=Fraction(0)) / shortest
    least = labelled if labelled * span <= WIDEST else FAIR[0] / shortest
    most = _MOST if _timed(chain(replay.messages, replay.sums)) else _MOST // 2
    return Scale(min(max(WIDTH / span, least), most / shortest, WIDEST / span), row, gap, font, strip)


def _computes(replay: Replay) -> Iterator[Event]:
    return (event for event in chain.from_iterable(replay.lanes) if event.role is Role.COMPUTE)


def _operation(event: Event) -> Operation:
    assert isinstance(event.instruction, Compute | Pair)
    return event.instruction


def _steps(replay: Replay) -> Iterator[Event]:
    return (event for event in chain.from_iterable(replay.lanes) if event.role is Role.STEP)


def _summary(replay: Replay) -> str:
    """The conditions, the time of an update, and the shares of computing and of each cause of idle time."""
    idle_shares = shares(replay) if replay.span else dict.fromkeys(Cause, 0.0)
    busy = 1 - sum(idle_shares.values())
    stepping = sum(event.end - event.start for event in _steps(replay)) / (replay.span * len(replay.lanes) or 1.0)
    parts = [
        ("computing", busy - stepping),
        *([("stepping", stepping)] if stepping else []),
        ("bubbles", idle_shares[Cause.BUBBLE]),
        *([("waiting for messages", idle_shares[Cause.MESSAGE])] if _timed(replay.messages) else []),
        *([("waiting for sums", idle_shares[Cause.SUM])] if _timed(replay.sums) else []),
        *([("waiting for the host", idle_shares[Cause.MOVE])] if replay.header.moves else []),
    ]
    shares_text = ", ".join(f"{name} {percent(Fraction(share))}" for name, share in parts)
    if replay.header.asynchronous:
        shown = f"the first {counted(replay.header.updates, 'update')}, in {_time(replay, replay.span)}"
        update = f"one update in the steady state: {_time(replay, replay.seconds)}; {shown}"
        return f"{replay.conditions}; {update}: {shares_text}"
    return f"{replay.conditions}; one update: {_time(replay, replay.seconds)}; {shares_text}"


def _timed(events: Iterable[Event]) -> bool:
    return any(event.end > event.start for event in events)


def _time(replay: Replay, time: float) -> str:
    return replay.unit.show(Fraction(time))


def _period(replay: Replay, event: Event) -> str:
    return f"{_time(replay, event.start)} to {_time(replay, event.end)}"


def _idle(replay: Replay, scale: Scale) -> dict[Cause, str]:
    """All stretches of idle time of each cause as one SVG path; a cause without idle time is left out."""
    paths: dict[Cause, list[str]] = {cause: [] for cause in Cause}
    for worker, lane in enumerate(idle(replay)):
        for cause, start, end in lane:
            paths[cause].append(scale.outline(start, end, scale.y(worker), scale.row))
    return {cause: "".join(parts) for cause, parts in paths.items() if parts}


def _families(replay: Replay, looks: Looks, scale: Scale, one_by_one: bool) -> Iterator[Family]:
    """Yields the operations, a family for each colour, as boxes if ``one_by_one``, else as outlines.

    The operations of a family have labels if all of its boxes have room for them.
    """

    def with_room(several: Sequence[PlacedOperation], font: int) -> Sequence[PlacedOperation]:
        widths = [scale.x(placed.end) - scale.x(placed.start) for placed in several]
        labels = [looks.label(placed.operation) for placed in several]
        fits = all(room(text, font) <= width for text, width in zip(labels, widths, strict=True))
        return several if fits else ()

    operations = (
        PlacedOperation(y, event.start, event.end, part, row, _title(replay, event, part) if one_by_one else "")
        for event, y in ((event, scale.y(event.workers[0])) for event in _computes(replay))
        for row, part in rows_of(_operation(event))
    )
    return families(operations, looks, scale, with_room)


def _title(replay: Replay, event: Event, part: Compute) -> str:
    return f"{part.kind.noun} of {label(part, replay.header.slices)} on stage {part.stage}, {_period(replay, event)}"


def _stepping(replay: Replay, scale: Scale, one_by_one: bool) -> Iterator[Family]:
    """Yields the optimizer steps as one `Family`, if they take time: boxes if ``one_by_one``, else an outline."""
    if steps := [(event, event.workers[0]) for event in _steps(replay)]:
        boxes = tuple(_box(*step, replay, scale) for step in steps) if one_by_one else ()
        outline = "" if one_by_one else "".join(_outline(*step, scale) for step in steps)
        yield Family(STEP, PAPER, scale.font, boxes, outline, ())


def _summing(replay: Replay) -> Iterator[tuple[Event, Worker]]:
    """Yields each sum that takes time, once for every worker that takes part in it."""
    return ((event, worker) for event in replay.sums if event.end > event.start for worker in event.workers)


def _box(event: Event, worker: Worker, replay: Replay, scale: Scale) -> Box:
    """The box of a step, or of a sum or a move in the strip below a worker's lane."""
    if isinstance(event.instruction, Compute):
        title = f"{line(event.instruction, replay.header)}, {_period(replay, event)}"
        return scale.box(event.start, event.end, *_height(event, worker, scale), title)
    assert isinstance(event.instruction, Step | AllReduce)
    what, period = group_name(event.instruction.group), _period(replay, event)
    title = f"step of {what}, {period}"
    if event.role is Role.SUM:
        title = f"sum of the gradients of {what}, launched by all at {_time(replay, event.posted)}, {period}"
    return scale.box(event.start, event.end, *_height(event, worker, scale), title)


def _outline(event: Event, worker: Worker, scale: Scale) -> str:
    return scale.outline(event.start, event.end, *_height(event, worker, scale))


def _height(event: Event, worker: Worker, scale: Scale) -> tuple[int, int]:
    """The upper edge and the height of an event's box, in pixels.

    The box of a sum or a move is in the strip below the worker's lane, any other box in the lane itself.
    """
    y = scale.y(worker)
    if event.role in (Role.SUM, Role.MOVE):
        return y + scale.row + 1, scale.strip - 1
    return y, scale.row


def _arrow(event: Event, scale: Scale) -> str:
    """The path of a message, or of a notice that a receive is posted, between the facing edges of two lanes."""
    sender, receiver = (scale.y(worker) for worker in event.workers[:2])
    down = receiver > sender
    start, end = (sender + scale.row, receiver) if down else (sender, receiver + scale.row)
    return f"M{pixels(scale.x(event.start))} {start}L{pixels(scale.x(event.end))} {end}"


def _marked(event: Event, scale: Scale) -> str:
    """The SVG path that marks an event of the critical path: an outline for each worker, or a line along a message."""
    if event.role in (Role.WIRE, Role.FLIGHT):
        return _arrow(event, scale)
    if event.role is Role.SUM:
        return "".join(_outline(event, worker, scale) for worker in event.workers)
    return _outline(event, event.workers[0], scale)
