"""A program, replayed event by event: when everything happens in one copy of the workers, on links that cost something.

`events` says what waits for what. Copies are all alike, so one is replayed: the others only make sums larger.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from chimera_ir.flow.run import ends, ordered
from chimera_ir.ir.ids import Worker
from chimera_ir.ir.levels import Header, Program
from chimera_ir.ir.ops import Instruction
from chimera_ir.plural import counted
from chimera_ir.predict.charges import Charges
from chimera_ir.predict.events import Events, Role, events
from chimera_ir.predict.setting import Setting
from chimera_ir.predict.shares import contended
from chimera_ir.predict.spread import longer_by
from chimera_ir.predict.steady import period, turn_of
from chimera_ir.undisturbed import undisturbed


class Event(NamedTuple):
    """What takes time, in seconds: an operation, a step or a wait, a message (named by its send), a sum, a notice.

    ``posted`` is when both ends had posted a message, or all members a sum; of anything else it is the start.
    """

    role: Role
    what: Instruction
    workers: tuple[Worker, ...]
    posted: float
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Replay:
    """When everything happened, in seconds from the start.

    ``seconds`` is the time of an update: of a synchronous program the time until everything is over, of an asynchronous
    one that of its steady state. ``lanes[w]`` are the computes, steps, posts and waits of worker w, without a gap
    until the last of them.
    ``messages`` last from the first byte sent to the last received; ``sums`` are those of more than one rank; both are
    in the order of their starts.
    ``critical`` are events that follow one another without a gap from 0 to the end, each one needing the one before; of
    a message or a notice the part that the next one waits for.
    """

    header: Header
    setting: Setting
    seconds: float
    span: float
    lanes: tuple[tuple[Event, ...], ...]
    messages: tuple[Event, ...]
    sums: tuple[Event, ...]
    critical: tuple[Event, ...]


def replay(program: Program, setting: Setting) -> Replay:
    """Replays one copy of a verified program, in time linear in its instructions.

    Raises
    ------
    ValueError
        If the setting has other stages than the program, or the program does not finish: it was not verified.
    """
    with undisturbed():
        return _replay(program, setting)


def pace(program: Program, setting: Setting) -> float:
    """Seconds from an update to the next, in the long run, where updates follow one another without a barrier.

    A worker goes on as soon as it is through, and so hides a part of what others still do. Never more than the seconds
    of a replay, and as much where one lane begins first and ends last; arguments and errors as in `replay`.
    """
    with undisturbed():
        found = _events(program, setting)
        return period(turn_of(program.header, found, _times(found).order))


def expected(program: Program, setting: Setting) -> float:
    """Mean seconds of an update in the long run, where operations and steps scatter as they did in the profile.

    `pace`, and what is lost because whoever waits for several waits for the slowest of them (`spread`). Exactly `pace`
    where the profile has no noise. Messages and sums take what they take in a replay. Arguments and errors as there.
    """
    with undisturbed():
        found, charges = _events(program, setting), Charges(program.header, setting)
        turn = turn_of(program.header, found, _times(found).order)
        nodes = [found.nodes[number] for number in turn.events]
        noise = [charges.noise(each.what) if each.seconds else 0.0 for each in nodes]
        joint = [each.role is Role.SUM for each in nodes]
        return period(turn) + (longer_by(turn, noise, joint, setting.copies) if any(noise) else 0.0)


def _events(program: Program, setting: Setting) -> Events:
    if len(setting.stages) != program.header.stages:
        given = f"costs are given of {counted(len(setting.stages), 'stage')}"
        raise ValueError(f"{given}, and the program has {program.header.stages}")
    return contended(events(program, Charges(program.header, setting)))


def _replay(program: Program, setting: Setting) -> Replay:
    found = _events(program, setting)
    times = _times(found)
    span = max(times.ends, default=0.0)
    told = {number: _event(found, times, number) for number in range(len(found.nodes))}
    return Replay(
        header=program.header,
        setting=setting,
        seconds=period(turn_of(program.header, found, times.order)) if program.header.asynchronous else span,
        span=span,
        lanes=tuple(tuple(told[number] for number in lane[1:]) for lane in found.lanes),
        messages=_by_start(_whole(told[n], told[n + 1]) for n in told if found.nodes[n].role is Role.WIRE),
        sums=_by_start(told[n] for n in told if found.nodes[n].role is Role.SUM),
        critical=tuple(_critical(told, times)),
    )


class _Times(NamedTuple):
    """When the events begin and end; ``decided[n]`` is the one that event n began right after, itself if it is none.

    ``order`` has every event after all that it waits for.
    """

    starts: Sequence[float]
    ends: Sequence[float]
    decided: Sequence[int]
    order: Sequence[int]


def _times(found: Events) -> _Times:
    before, order = found.before, ordered(found.before)
    if len(order) < len(before):
        raise ValueError("the program does not finish; only a verified one can be replayed")
    ended = ends(order, before, [node.seconds for node in found.nodes])
    decided = [max(needs, key=ended.__getitem__) if needs else number for number, needs in enumerate(before)]
    starts = [ended[last] if needs else 0.0 for last, needs in zip(decided, before, strict=True)]
    return _Times(starts, ended, decided, order)


def _event(found: Events, times: _Times, number: int) -> Event:
    """An event with its times; a wait lasts from when its lane is there, which it waits for first."""
    role, what, workers, _ = found.nodes[number]
    start, end = times.starts[number], times.ends[number]
    posted = max((times.ends[other] for other in found.posted.get(number, ())), default=0.0)
    if role is Role.WAIT:
        start = times.ends[found.before[number][0]]
    return Event(role, what, workers, posted if role in _POSTED else start, start, end)


_POSTED = (Role.WIRE, Role.SUM)


def _by_start(several: Iterable[Event]) -> tuple[Event, ...]:
    return tuple(sorted(several, key=lambda each: (each.start, each.workers)))


def _whole(wire: Event, flight: Event) -> Event:
    return wire._replace(end=flight.end)


def _critical(told: dict[int, Event], times: _Times) -> Iterator[Event]:
    """From the start to the event that ends last; waits take part by what they wait for."""
    if not told:
        return
    number = max(told, key=lambda each: times.ends[each])
    path = [number]
    while times.decided[number] != number:
        number = times.decided[number]
        path.append(number)
    timed = (told[each]._replace(start=times.starts[each]) for each in reversed(path))
    yield from _joined(each for each in timed if each.end > each.start)


def _joined(path: Iterable[Event]) -> Iterator[Event]:
    """A message's flight together with its wire, where a path has both."""
    last: Event | None = None
    for each in path:
        if last and last.role is Role.WIRE and each.role is Role.FLIGHT and last.what == each.what:
            last = _whole(last, each)
            continue
        if last:
            yield last
        last = each
    if last:
        yield last
