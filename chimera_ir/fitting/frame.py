"""Everything of a scheme but its clocks, fitted to the headers of orders: workers, stages, places, micro-batches.

headers                                               the frame
chimera(D=2, N=4): workers 2, stages 2,               workers D
  pipe up on 1 0 micros 1 3                           pipe up {
chimera(D=4, N=4): workers 4, stages 4,                 stages s in 0..D on D - 1 - s
  pipe up on 3 2 1 0 micros 2 3                         micros m in 0..share(N, 2, 1) as ..
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import chain, combinations_with_replacement, groupby, pairwise

from chimera_ir.elaborate.evaluate import Scope, compiled
from chimera_ir.errors import NotFitted
from chimera_ir.flow.net import numbered, reads_of
from chimera_ir.ir.levels import Header, Schedule
from chimera_ir.ir.ops import Compute
from chimera_ir.source import Source
from chimera_ir.syntax import ast
from chimera_ir.syntax.parser import parse

# Finds the whole numbers by which terms have to be multiplied to add up to given values, at every point.


def exact_fit(rows: Sequence[Sequence[int]], values: Sequence[int]) -> list[int] | None:
    """Returns whole numbers x with ``row * x == value`` for each of the rows and its value; None if none are found.

    Where the rows leave a choice, a later number is 0 rather than an earlier one.

    Examples
    --------
    >>> exact_fit([[1, 0, 0], [1, 1, 1], [1, 2, 2]], [3, 5, 7])
    [3, 2, 0]
    >>> exact_fit([[1], [1]], [3, 4])
    """
    # Gaussian elimination; a column without a pivot keeps the factor 0.
    pivots: list[tuple[int, list[Fraction]]] = []
    for row, value in zip(rows, values, strict=True):
        line = [Fraction(number) for number in (*row, value)]
        for column, pivot in pivots:
            if factor := line[column]:
                line = [number - factor * other for number, other in zip(line, pivot, strict=True)]
        first = next((place for place, number in enumerate(line[:-1]) if number), None)
        if first is None:
            if line[-1]:
                return None
            continue
        line = [number / line[first] for number in line]
        pivots = [
            (place, [number - pivot[first] * other for number, other in zip(pivot, line, strict=True)])
            for place, pivot in pivots
        ]
        pivots.append((first, line))
    factors = [Fraction(0)] * len(rows[0])
    for column, pivot in pivots:
        factors[column] = pivot[-1]
    return [int(factor) for factor in factors] if all(factor.denominator == 1 for factor in factors) else None


# Terms: formulas of the scheme language as texts, with their values at many points.

VARIABLES = ("m", "s", "q")
"""The variables of a clock: a micro-batch of the pipe, a stage, a slice."""

Point = tuple[int, int, int]


def tabulated(terms: Sequence[str], settings: Mapping[str, int], points: Iterable[Point]) -> list[list[int]]:
    """The values of every term at each point; ``settings`` are the values of all other names."""
    scope = Scope(settings, {}, {}).with_variables(*VARIABLES)
    formulas = [compiled(expression, scope) for expression in expressions(terms)]
    return [[formula(point) for formula in formulas] for point in points]


def expressions(terms: Sequence[str]) -> list[ast.Expression]:
    """The syntax trees of terms."""
    lines = "\n".join(f"fn term{number}({', '.join(VARIABLES)}) = {term}" for number, term in enumerate(terms))
    scheme = parse(Source("", f"scheme terms\n{lines}\npipe none {{}}"))
    return [item.body for item in scheme.items if isinstance(item, ast.Function)]


def times(factor: str, term: str) -> str:
    """The product of two terms."""
    if "1" in (factor, term):
        return term if factor == "1" else factor
    return f"{factor}*{term}"


def weighted(factors: Sequence[int], terms: Sequence[str]) -> str:
    """The sum of terms times whole numbers, positive ones first.

    Examples
    --------
    >>> weighted([-1, 2, 0, 3], ["s", "m", "N", "1"])
    '2*m + 3 - s'
    """
    parts = [(factor, times(str(abs(factor)), term)) for factor, term in zip(factors, terms, strict=True) if factor]
    text = " + ".join(part for factor, part in parts if factor > 0)
    rest = "".join(f" - {part}" for factor, part in parts if factor < 0)
    return f"{text}{rest}" if text else f"0{rest}"


# An order in the form that formulas are fitted to: the operations, and which of them come before which.
#
# An operation comes before another one because it stands before it in the lane of its worker, or because it makes a
# value that the other one takes. Operations are written here with the pair (micro-batch counted in its pipe, stage):
#
# worker 0: F m0 s0, F m1 s0, B m0 s0           F (0, 0)  before  F (1, 0)  before  B (0, 0)        by the lane
# worker 1: F m0 s1, B m0 s1, ..                F (0, 0)  before  F (0, 1)                          by a value


@dataclass(frozen=True)
class Observed:
    """A verified schedule at one size, with the parts that a fit needs.

    It has no pairs, operations over several micro-batches, halves or strategies for sums, and it has a flush. ``names``
    are the parameters whose values differ among the orders that are fitted.
    """

    schedule: Schedule
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        header = self.schedule.header
        whole = all(isinstance(part, Compute) and part.size == 1 for part in chain.from_iterable(self.schedule.lanes))
        reasons = {
            "it has no flush": header.asynchronous,
            "its micro-batches count halves": header.halves,
            "it has pairs, or operations over several micro-batches": not whole,
            "it gives stages strategies of sums": bool(header.strategies),
        }
        for reason, holds in reasons.items():
            if holds:
                raise NotFitted(f"{header.title}: {reason}")

    @property
    def header(self) -> Header:
        """The header of the schedule."""
        return self.schedule.header

    @property
    def settings(self) -> Mapping[str, int]:
        """The values that this order has of the parameters ``names``."""
        return {name: value for name, value in self.header.parameters if name in self.names}

    @property
    def size(self) -> int:
        """The number of operations."""
        return sum(map(len, self.schedule.lanes))

    @cached_property
    def kinds(self) -> tuple[tuple[str, str], ...]:
        """The pipe and the letter of each operation, lane by lane."""
        pipe_of = self.header.pipe_of
        return tuple((pipe_of[part.micros[0]].name, part.kind.letter) for part in self._operations)

    @cached_property
    def points(self) -> tuple[Point, ...]:
        """The values of m, s and q for each operation, lane by lane: micro-batch counted in its pipe, stage, slice."""
        slices = self.header.slices
        places = {micro: place for pipe in self.header.pipes for place, micro in enumerate(pipe.micros)}
        return tuple(
            (places[part.micros[0]] // slices, part.stage, part.micros[0] % slices) for part in self._operations
        )

    @cached_property
    def _operations(self) -> tuple[Compute, ...]:
        return tuple(part for lane in self.schedule.lanes for operation in lane for part in operation.parts)

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Yields pairs of numbers: the second operation is next in the lane of the first, or reads what that makes."""
        for lane in numbered(self.schedule):
            yield from pairwise(lane)
        for number, others in enumerate(reads_of(self.schedule)):
            yield from ((other, number) for other in others)


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
    return replace(frame, pipes=tuple(_pipe(frame, orders, place, count, whole) for place in range(count)))


def bracketed(term: str) -> str:
    """The term, in brackets if it needs them as a part of another one."""
    return term if term.isidentifier() or term.isdigit() else f"({term})"


def _pipe_names(header: Header) -> list[str]:
    return [pipe.name for pipe in header.pipes]


def _pipe(frame: Frame, orders: Sequence[Observed], place: int, count: int, whole: str) -> PipeFrame:
    pipes = [(order, order.header.pipes[place]) for order in orders]
    name = pipes[0][1].name.replace("[", "_").replace("]", "").replace(",", "_")
    whole_recompute = (len(pipe.recompute) == order.header.stages and not pipe.recomputed for order, pipe in pipes)
    if any(pipe.recompute for _, pipe in pipes) and not all(whole_recompute):
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


def _places(frame: Frame) -> list[Sequence[str]]:
    """Terms for the worker of a stage: stages lie in a line over the workers, go round them, or there and back."""
    workers, stages, constants = bracketed(frame.workers), bracketed(frame.stages), frame.constants
    back, zigzag = f"min(s, {stages} - 1 - s)", f"s % (2*{workers})"
    turn = f"min({zigzag}, 2*{workers} - 1 - {zigzag})"
    around = [f"(s + {term}) % {workers}" for term in frame.names]
    return [("s", *constants), (f"s % {workers}", *constants), (back, *constants), (turn, *constants), (*around, "1")]


def _numberings(frame: Frame) -> list[Sequence[str]]:
    """Terms for the number of the m-th micro-batch of a pipe: in a line, or unit by unit."""
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
