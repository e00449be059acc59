"""Finds clocks that give known orders: sums of terms times whole numbers, which rise along every lane and every value.

The factors x of the terms are free, because a clock is an order, not a time. They only have to give each operation a
later clock than the operation before it in its lane, and than the operations that make the values it reads:

    F(m, s) @ x0*m + x1*s + x2*D + x3           x0 >= 1          F m0 s0 before F m1 s0
    B(m, s) @ x4*m + x5*s + x6*D + x7           x1 >= 1          F m0 s0 before F m0 s1
                                                ..

Of all such factors those with the least sum of sizes are taken (`whole_numbers`).
"""

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement

from chimera_ir.fitting.frame import Frame, bracketed
from chimera_ir.fitting.observed import Observed
from chimera_ir.fitting.terms import tabulated, times, weighted
from chimera_ir.fitting.whole_numbers import Inequality, least_solution

Statement = tuple[str, str, int]
"""The key of operations whose clocks have one formula: their pipe, the letter of their kind, and their arm.

The pipe is empty if all pipes have the same clocks. `ClockForm` says what an arm is.
"""


@dataclass(frozen=True, slots=True)
class ClockForm:
    """The form of clocks: the terms of their formulas, and which operations have a formula of their own.

    ``rates`` are terms in the micro-batch, whose factors are the same in all formulas. ``slopes`` are terms in the
    stage and the slice, ``constants`` are terms in parameters alone. ``shared`` is whether all pipes have the same
    clocks. ``arms`` are conditions on the stage: stages that meet equally many of them are an arm, and each arm has
    formulas of its own.
    """

    rates: tuple[str, ...]
    slopes: tuple[str, ...]
    constants: tuple[str, ...]
    shared: bool
    arms: tuple[str, ...] = ()

    @property
    def terms(self) -> tuple[str, ...]:
        """All terms of a formula."""
        return (*self.rates, *self.slopes, *self.constants)

    def statements(self, order: Observed) -> list[Statement]:
        """Returns for each operation of an order, lane by lane, the key (`Statement`) of the formula of its clock."""
        arms = tabulated(self.arms, order.settings, order.points) if self.arms else [[]] * order.size
        return [
            ("" if self.shared else pipe, letter, sum(map(bool, met)))
            for (pipe, letter), met in zip(order.kinds, arms, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Clocks:
    """Fitted clocks of a ``form``: for each formula, by its `Statement`, the factors of the form's terms in order."""

    form: ClockForm
    factors: Mapping[Statement, Sequence[int]]

    @property
    def unknowns(self) -> list[int]:
        """The factors of all formulas, one after another; those of the rates, which formulas share, come first."""
        rates = len(self.form.rates)
        several = list(self.factors.values())
        return [*several[0][:rates], *(factor for factors in several for factor in factors[rates:])]

    def keep(self, order: Observed) -> bool:
        """Whether the clocks give an order: they rise along every lane, and from what makes a value to its readers."""
        statements = self.form.statements(order)
        if not {*statements} <= self.factors.keys():
            return False
        table = tabulated(self.form.terms, order.settings, order.points)
        clocks = [
            sum(factor * value for factor, value in zip(self.factors[statement], values, strict=True))
            for statement, values in zip(statements, table, strict=True)
        ]
        return all(clocks[before] < clocks[after] for before, after in order.pairs())

    def lines(self, pipe: str, variables: Sequence[str]) -> Iterator[str]:
        """Yields the lines of a scheme with the clocks of a pipe's operations, such as ``F(m, s) @ 2*m + s``."""
        arms = self.form.arms
        for (name, letter, arm), factors in self.factors.items():
            if name in ("", pipe):
                conditions = [*arms[arm - 1 : arm], *(f"not {condition}" for condition in arms[arm : arm + 1])]
                guard = f" when {' and '.join(conditions)}" if conditions else ""
                yield f"{letter}({', '.join(variables)}) @ {weighted(factors, self.form.terms)}{guard}"


def fitted_clocks(form: ClockForm, orders: Sequence[Observed], without: Container[int] = ()) -> Clocks | None:
    """Finds clocks of a form that rise along all lanes and values of the orders; None if there are none.

    ``without`` are unknowns whose factor is to be 0: their places in the list `Clocks.unknowns`.
    """
    statements = [form.statements(order) for order in orders]
    kinds = list(dict.fromkeys(statement for several in statements for statement in several))
    terms, rates = form.terms, len(form.rates)
    width = len(terms) - rates
    starts = {statement: rates + place * width for place, statement in enumerate(kinds)}
    # All clocks may be moved together, so that the first one needs no constants.
    fixed = range(rates + len(form.slopes), rates + width)
    inequalities: dict[Inequality, None] = {}
    for order, several in zip(orders, statements, strict=True):
        table = tabulated(terms, order.settings, order.points)
        for before, after in order.pairs():
            row: dict[int, int] = {}
            for number, sign in ((after, 1), (before, -1)):
                start = starts[several[number]] - rates
                for place, value in enumerate(table[number]):
                    unknown = place if place < rates else start + place
                    row[unknown] = row.get(unknown, 0) + sign * value
            factors = (
                (name, factor) for name, factor in row.items() if factor and name not in fixed and name not in without
            )
            inequalities[Inequality(tuple(factors))] = None
    if Inequality(()) in inequalities:
        return None
    # A product of parameters alone tells little from a number at few sizes, so it is dear.
    prices = [_price(term, 6 if term in form.constants else 2) for term in terms]
    solution = least_solution([*inequalities], [*prices[:rates], *prices[rates:] * len(kinds)])
    if solution is None:
        return None
    return Clocks(form, {name: (*solution[:rates], *solution[start : start + width]) for name, start in starts.items()})


def _price(term: str, base: int) -> int:
    """Returns how dear a factor of 1 on ``term`` is: ``base`` to the power of the term's number of ``*`` and ``/``.

    A fit takes the factors whose sizes cost least in all.
    """
    return int(base ** (term.count("*") + term.count("/")))


def forms(frame: Frame, pipes: int) -> Iterator[ClockForm]:
    """Yields forms of clocks to try, the simplest first, for a scheme with this many pipes.

    The terms are m and s at first, then further ones are tried: products with parameters; units, that is m divided by a
    period and the remainder; the place of a stage on its way through the workers and the number of the way, or
    conditions that give each way clocks of its own.
    """
    q = frame.variables[2:]
    workers, stages = bracketed(frame.workers), bracketed(frame.stages)
    ways: list[tuple[tuple[str, ...], tuple[str, ...]]] = [(("s",), ())]
    if stages != workers:
        ways += [((f"s % {workers}", f"s / {workers}"), ()), (("s",), (f"s >= {workers}",))]
    # Numbers of stages, workers and slices multiply variables; that of micro-batches only where nothing else does.
    sizes = [name for name in frame.names if name in _words(f"{workers} {stages} {frame.slices}")]
    pairs = ["*".join(pair) for pair in combinations_with_replacement(sizes, 2)]
    long = [times(frame.slices, name) for name in frame.names if frame.slices != "1" and name not in sizes]
    short, plain = (*sizes, "1"), (*frame.names, "1")
    degrees = [(constants, ["1"], ["1"]) for constants in dict.fromkeys((short, plain))]
    degrees += [(constants, ["1", *sizes], ["1", *sizes]) for constants in dict.fromkeys((short, plain))]
    degrees += [((*plain, *pairs, *long), ["1", *sizes], ["1", *sizes, *pairs])]
    whole = (*plain, *("*".join(pair) for pair in combinations_with_replacement(frame.names, 2)))
    degrees += [(whole, ["1", *frame.names], ["1", *frame.names])]
    for shared in (True, False)[: min(pipes, 2)]:
        for constants, factors, of_units in degrees:
            for unit in ("", *frame.units):
                for stage, arms in ways:
                    rates = [(factor, f"m % ({unit})" if unit else "m") for factor in factors]
                    rates += [(factor, f"m / ({unit})") for factor in of_units if unit]
                    slopes = [(factor, slope) for slope in (*stage, *q) for factor in factors]
                    yield ClockForm(_products(rates), _products(slopes), tuple(constants), shared, arms)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def _products(pairs: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Returns the texts of products, of a factor and a term each; a term that is more than a name gets brackets."""
    return tuple(times(factor, term if term.isidentifier() else f"({term})") for factor, term in pairs)
