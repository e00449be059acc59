"""Everything of a scheme but its clocks, fitted to the headers of orders: workers, stages, places, micro-batches.

headers                                               the frame
chimera(D=2, N=4): workers 2, stages 2,               workers D
  pipe up on 1 0 micros 1 3                           pipe up {
chimera(D=4, N=4): workers 4, stages 4,                 stages s in 0..D on D - 1 - s
  pipe up on 3 2 1 0 micros 2 3                         micros m in 0..share(N, 2, 1) as ..
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, groupby

from chimera_ir.errors import NotFitted
from chimera_ir.fitting.exact import exact_fit
from chimera_ir.fitting.observed import Observed
from chimera_ir.fitting.terms import Point, tabulated, times, weighted
from chimera_ir.ir.levels import Header, Pipe


@dataclass(frozen=True, slots=True)
class PipeFrame:
    """A pipe: its name, and the lines with its stages, micro-batches and slices."""

    name: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Frame:
    """The fitted header: its pipes, and formulas for the numbers of workers, stages and slices.

    ``names`` are the parameters. ``constants`` are terms in parameters alone, to be used in formulas. ``units`` are
    formulas for the number of micro-batches after which clocks may begin anew.
    """

    names: tuple[str, ...]
    constants: tuple[str, ...]
    workers: str
    stages: str
    slices: str
    pipes: tuple[PipeFrame, ...]
    units: tuple[str, ...]

    @property
    def variables(self) -> tuple[str, ...]:
        """The names of the variables in formulas of an operation: m, s and, with slices, q."""
        return ("m", "s") if self.slices == "1" else ("m", "s", "q")


def frame_of(orders: Sequence[Observed]) -> Frame:
    """Returns the frame that fits all orders; raises `NotFitted` with the part for which no formula fits."""
    names = tuple(orders[0].settings)
    for order in orders:
        if _pipe_names(order.header) != _pipe_names(orders[0].header):
            titles = f"{orders[0].header.title} and {order.header.title}"
            raise NotFitted(f"{titles}: their pipes have other names")
    products = tuple("*".join(pair) for pair in combinations_with_replacement(names, 2))
    constants = (*names, "1", *products)

    def number(what: str, of: Callable[[Header], int]) -> str:
        values = [(order, (0, 0, 0), of(order.header)) for order in orders]
        return _formula(what, [constants], values)

    workers = number("workers", lambda header: header.workers)
    stages = number("stages", lambda header: header.stages)
    slices = number("slices of a micro-batch", lambda header: header.slices)
    whole = number("micro-batches", lambda header: header.whole_micro_batches)
    count = len(orders[0].header.pipes)
    base = bracketed(workers)
    units = dict.fromkeys((f"{base} / {count}" if count > 1 else base, base, bracketed(stages)))
    frame = Frame(names, constants, workers, stages, slices, (), tuple(units))
    pipes = tuple(_pipe(frame, orders, place, count, whole) for place in range(count))
    return Frame(names, constants, workers, stages, slices, pipes, tuple(units))


def bracketed(term: str) -> str:
    """The term, in brackets if it needs them as a part of another one."""
    return term if term.isidentifier() or term.isdigit() else f"({term})"


def _pipe_names(header: Header) -> list[str]:
    return [pipe.name for pipe in header.pipes]


def _pipe(frame: Frame, orders: Sequence[Observed], place: int, count: int, whole: str) -> PipeFrame:
    pipes = [(order, order.header.pipes[place]) for order in orders]
    name = pipes[0][1].name.replace("[", "_").replace("]", "").replace(",", "_")
    if any(pipe.recompute for _, pipe in pipes) and not all(_all_recompute(order, pipe) for order, pipe in pipes):
        raise NotFitted(f"pipe {name}: only some stages recompute")
    workers = [(order, (0, s, 0), worker) for order, pipe in pipes for s, worker in enumerate(pipe.workers)]
    on = _formula(f"the worker of a stage of pipe {name}", _places(frame), workers)
    sizes = [(order, (0, 0, 0), len(pipe.micros) // order.header.slices) for order, pipe in pipes]
    shares = [[f"share({whole}, {count}, {place})"]] if count > 1 else []
    size = _formula(f"the number of micro-batches of pipe {name}", [*shares, frame.constants], sizes)
    numbers = [
        (order, (m, 0, 0), micro // order.header.slices)
        for order, pipe in pipes
        for m, micro in enumerate(pipe.micros[:: order.header.slices])
    ]
    numbered = _formula(f"the numbers of the micro-batches of pipe {name}", _numberings(frame), numbers)
    lines = (
        f"stages s in 0..{frame.stages} on {on}",
        f"micros m in 0..{size}" + ("" if numbered == "m" else f" as {numbered}"),
        *([] if frame.slices == "1" else [f"slices q in 0..{frame.slices}"]),
    )
    return PipeFrame(name, lines)


def _all_recompute(order: Observed, pipe: Pipe) -> bool:
    return len(pipe.recompute) == order.header.stages and not pipe.recomputed


def _places(frame: Frame) -> list[Sequence[str]]:
    """Sets of terms to try, one after another, for the worker of a stage.

    Stages lie in a line over the workers, go round them, or go there and back, once or often.
    """
    workers, stages, constants = bracketed(frame.workers), bracketed(frame.stages), frame.constants
    back, zigzag = f"min(s, {stages} - 1 - s)", f"s % (2*{workers})"
    turn = f"min({zigzag}, 2*{workers} - 1 - {zigzag})"
    around = [f"(s + {term}) % {workers}" for term in frame.names]
    return [("s", *constants), (f"s % {workers}", *constants), (back, *constants), (turn, *constants), (*around, "1")]


def _numberings(frame: Frame) -> list[Sequence[str]]:
    """Sets of terms to try, one after another, for the number that the m-th micro-batch of a pipe has in the schedule.

    Numbers follow one another in a line, or unit by unit.
    """
    lines: list[Sequence[str]] = [("m", *frame.constants)]
    for unit in frame.units:
        units = [times(term, f"(m / ({unit}))") for term in ("1", *frame.names)]
        lines.append((f"m % ({unit})", *units, *frame.constants))
    return lines


def _formula(what: str, candidates: Iterable[Sequence[str]], values: Sequence[tuple[Observed, Point, int]]) -> str:
    """Returns the first formula, a sum of terms times whole numbers, that equals all ``values``.

    Each of ``candidates`` is a list of terms to try. A value is (order, point, number): the formula has to give this
    number for the order's parameters and the point's m, s and q. Raises `NotFitted`, which calls the formula ``what``,
    if none does.
    """
    for terms in candidates:
        rows = [
            row
            for order, several in groupby(values, lambda value: value[0])
            for row in tabulated(terms, order.settings, [point for _, point, _ in several])
        ]
        factors = exact_fit(rows, [value for _, _, value in values])
        if factors is not None:
            return weighted(factors, terms)
    first = values[0][0].header.scheme
    raise NotFitted(f"{first}: no formula of the parameters fits {what}")
