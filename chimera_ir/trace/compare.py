"""Predicted against measured: one account for each worker, from updates that are like most."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple

from chimera_ir.ir.kinds import Kind
from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import Compute, Drop, Instruction, Stash, Step
from chimera_ir.plural import counted
from chimera_ir.trace.account import Account, account, inside, length, windows
from chimera_ir.trace.forecast import Promised, alike, play, played_updates
from chimera_ir.trace.foretold import Foretold, foretell
from chimera_ir.trace.match import lanes
from chimera_ir.trace.read import About, BadTrace, Trace
from chimera_ir.trace.spans import BUSY, Activity, Lane, Load, Span, Window


@dataclass(frozen=True, slots=True)
class Row:
    """How long a worker took for something in an update, in seconds; ``cause`` is what a wait waited for."""

    kind: Activity
    cause: str
    predicted: float
    measured: float


@dataclass(frozen=True, slots=True)
class Side:
    """One update as it was predicted, or measured: ``lanes[w]`` with times in nanoseconds from its beginning.

    ``windows[w]`` is what of a lane is shown: what belongs to the update or, where updates overlap, what is meanwhile.
    """

    lanes: tuple[Lane, ...]
    windows: tuple[Window, ...]


class Paired(NamedTuple):
    """An operation of a worker, as it was predicted and measured."""

    worker: int
    predicted: Span
    measured: Span


@dataclass(frozen=True, slots=True)
class Comparison:
    """``rows[w]`` of worker w add up to its ``step``, predicted and measured; means over the ``chosen`` updates.

    ``predicted`` and ``measured`` show one update: the promised one, and of copy 0 the chosen one of median length.
    ``operations`` are those of both, if an update has its lanes to itself.
    ``updates`` were recorded whole, the one shown from ``origin`` on, in nanoseconds; ``ended`` says how the run ended
    early. ``foretold`` is what the prediction was made from, if not from the run itself.
    """

    about: About
    foretold: Foretold | None
    header: Header
    updates: int
    chosen: tuple[int, ...]
    typical: int
    origin: int
    rows: tuple[tuple[Row, ...], ...]
    predicted: Side
    measured: Side
    operations: tuple[Paired, ...]
    recorded: tuple[Lane, ...]
    ended: str | None

    def step(self, worker: int) -> tuple[float, float]:
        """How long an update takes on a worker, in seconds: predicted, measured."""
        return sum(row.predicted for row in self.rows[worker]), sum(row.measured for row in self.rows[worker])

    @property
    def steps(self) -> tuple[float, float]:
        """The same on average over the workers."""
        both = [self.step(worker) for worker in range(len(self.rows))]
        return fmean(predicted for predicted, _ in both), fmean(measured for _, measured in both)

    @property
    def bubbles(self) -> tuple[float, float]:
        """The share of all workers' time in which they compute nothing: predicted, measured."""
        busy = [row for rows in self.rows for row in rows if row.kind in BUSY]
        predicted, measured = (total * len(self.rows) for total in self.steps)
        return (
            1 - sum(row.predicted for row in busy) / predicted if predicted else 0.0,
            1 - sum(row.measured for row in busy) / measured if measured else 0.0,
        )


def compare(trace: Trace, foretold: Foretold | None = None) -> Comparison:
    """The comparison of a trace with what its program promises: by what was said before, or by what operations took.

    Raises
    ------
    BadTrace
        If no update was recorded whole, or a rank did something else than the program says.
    """
    header, about = trace.program.header, trace.about
    barriered = about.rehearse is not None and not header.asynchronous
    found = lanes(trace)
    ended = next((rank.ended for rank in trace.ranks if rank.ended is not None), None)
    whole = windows(header, found, barriered)[: None if ended is None else -1]
    if not whole:
        raise BadTrace("no update was recorded whole; trace a run of more updates (--steps)")
    chosen = choose([length(window) for window in whole], header.workers if header.asynchronous else 1)
    typical = chosen[len(chosen) // 2]
    if foretold is None:
        cost = costs(header, about.rehearse, found, [whole[update] for update in chosen])
        promised = forecast(trace, cost, barriered, typical)
    else:
        promised = foretell(trace.program, foretold.setting, barriered, typical)
    accounts: list[list[Account]] = [[] for _ in range(header.workers)]
    for rank, lane in zip(trace.ranks, found, strict=True):
        accounts[rank.worker] += [account(header, lane, whole[update][rank.rank], barriered) for update in chosen]
    first = [rank for rank in trace.ranks if rank.copy == 0]
    shown = [found[rank.rank] for rank in first], [whole[typical][rank.rank] for rank in first]
    frame = promised.windows[promised.shown]
    origins = _origin(frame), _origin(shown[1])
    expected = [
        [account(header, lane, promised.windows[update][worker], barriered) for update in promised.counted]
        for worker, lane in enumerate(promised.lanes)
    ]
    return Comparison(
        about=about,
        foretold=foretold,
        header=header,
        updates=len(whole),
        chosen=tuple(sorted(chosen)),
        typical=typical,
        origin=origins[1],
        rows=tuple(map(_rows, expected, accounts)),
        predicted=_side(header, promised.lanes, frame),
        measured=_side(header, *shown),
        operations=() if header.asynchronous else tuple(_paired(promised, shown[0], typical, origins)),
        recorded=found,
        ended=ended,
    )


def choose(lengths: Sequence[float], apart: int) -> list[int]:
    """The updates that are like most, by length: the middle half of those in the steady state.

    The first ``apart`` are left out, which warm up; and the last, where more than one is left out: they drain.
    """
    last = len(lengths) - (apart if apart > 1 else 0)
    steady = range(apart, last) if last - apart >= 1 else range(len(lengths))
    ordered = sorted(steady, key=lengths.__getitem__)
    quarter = len(ordered) // 4
    return ordered[quarter : len(ordered) - quarter]


def costs(
    header: Header, rehearse: tuple[float, float] | None, lanes: Sequence[Lane], chosen: Iterable[Sequence[Window]]
) -> Callable[[Instruction], int]:
    """What operations cost, in nanoseconds: the sleeps of a rehearsal, or else the median over all ranks and updates.

    Posting costs nothing: that it does is a part of the difference.
    """
    if rehearse is not None:
        lengths = {letter: round(seconds * 1e9) for letter, seconds in zip("FB", rehearse, strict=True)}

        def slept(operation: Instruction) -> int:
            if isinstance(operation, Compute):
                return lengths[operation.kind.letter] * len(operation.micros) // header.parts
            return 0

        return slept
    seen: dict[tuple[Kind | type, int, int], list[int]] = defaultdict(list)
    for update in chosen:
        for lane, window in zip(lanes, update, strict=True):
            for span in inside(lane, window):
                if isinstance(span.operation, Compute | Step | Stash | Drop):
                    seen[_like(span.operation)].append(span.end - span.start)
    known = {like: round(median(lengths)) for like, lengths in seen.items()}

    def measured(operation: Instruction) -> int:
        if isinstance(operation, Compute | Step | Stash | Drop):
            return known.get(_like(operation), 0)
        return 0

    return measured


def _like(operation: Compute | Step | Stash | Drop) -> tuple[Kind | type, int, int]:
    micros = len(operation.micros) if isinstance(operation, Compute) else 0
    what = operation.kind if isinstance(operation, Compute) else type(operation)
    return what, int(operation.stage), micros


def forecast(trace: Trace, cost: Callable[[Instruction], int], barriered: bool, typical: int) -> Promised:
    """What the program promises, with these costs and messages that take no time."""
    header = trace.program.header
    updates = played_updates(header, barriered)
    promised = play(trace.program, updates, cost)
    shown = alike(header, updates, typical)
    return Promised(promised, windows(header, promised, barriered), shown, range(shown, shown + 1))


def _rows(expected: Sequence[Account], accounts: Sequence[Account]) -> tuple[Row, ...]:
    promised, total = _sum(expected), _sum(accounts)
    order = list(Activity)
    keys = sorted(promised.keys() | total.keys(), key=lambda key: (order.index(key[0]), key[1]))
    return tuple(
        Row(*key, predicted=promised[key] / len(expected) / 1e9, measured=total[key] / len(accounts) / 1e9)
        for key in keys
        if promised[key] or total[key]
    )


def _sum(accounts: Iterable[Account]) -> Account:
    total: Account = Counter()
    for each in accounts:
        total.update(each)
    return total


def _side(header: Header, lanes: Sequence[Lane], frame: Sequence[Window]) -> Side:
    """The part of lanes that belongs to one update, from its first moment; where updates overlap, all meanwhile."""
    origin = _origin(frame)
    if header.asynchronous:
        frame = [Window(origin, max(window.end for window in frame))] * len(frame)
    return Side(
        tuple(tuple(_later(span, -origin) for span in inside(lane, w)) for lane, w in zip(lanes, frame, strict=True)),
        tuple(Window(start - origin, end - origin) for start, end in frame),
    )


def _origin(frame: Iterable[Window]) -> int:
    return min(window.start for window in frame)


def _later(span: Span, by: int) -> Span:
    return span._replace(start=span.start + by, end=span.end + by)


def _paired(promised: Promised, recorded: Sequence[Lane], typical: int, origins: tuple[int, int]) -> Iterator[Paired]:
    """The operations of an update that has its lanes to itself, predicted and measured, from its beginning."""
    for worker, (theirs, ours) in enumerate(zip(promised.lanes, recorded, strict=True)):
        expected = [span for span in theirs if span.update == promised.shown]
        done = [span for span in ours if span.update == typical and not isinstance(span.operation, Load)]
        if len(done) != len(expected):
            raise BadTrace(
                f"worker {worker}, update {typical}: {counted(len(done), 'operation')} recorded, where the program has "
                f"{len(expected)}; trace the run again"
            )
        for p, m in zip(expected, done, strict=True):
            yield Paired(worker, _later(p, -origins[0]), _later(m, -origins[1]))
