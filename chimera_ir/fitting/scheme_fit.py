"""Fits a scheme to the orders of several sizes, and verifies it at larger ones.

Clocks are fitted to three of the smaller sizes; each smaller size whose order these clocks do not give is added to the
three, and the fit is made again. The text with the clocks is then compiled at all sizes, the largest included, and its
lanes are compared with the orders.
"""

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement, product
from typing import NamedTuple

from chimera_ir.compilation import Compilation
from chimera_ir.diagnostics.model import titles
from chimera_ir.elaborate.elaborate import elaborate
from chimera_ir.errors import NotFitted, TextError
from chimera_ir.fitting.frame import Frame, Observed, bracketed, frame_of, tabulated, times, weighted
from chimera_ir.ir.levels import Schedule
from chimera_ir.lower.lower import order as ordered
from chimera_ir.orders.cp_sat import require_solver
from chimera_ir.planner.space import roles
from chimera_ir.plural import counted
from chimera_ir.source import Source
from chimera_ir.syntax import formatter
from chimera_ir.syntax.parser import parse

# The integer program of a fit: few unknowns and many inequalities, solved by CP-SAT of OR-Tools.
#
# minimize    w * |x|             the unknowns x are whole numbers; w > 0
# such that   a * x >= b          for every inequality (a, b)
#
# Few inequalities decide. The solver gets those that its last solution violates, until there are none.

LARGEST = 1_000
"""The largest size of a number of a solution."""

_AT_ONCE = 20
"""Violated inequalities that join the model before it is solved again."""

_WORK = 2.0
"""The most deterministic time of a call of the solver; a program that takes longer counts as one without a solution."""


class Inequality(NamedTuple):
    """``sum(factor * x[n] for n, factor in factors) >= least``; an unknown x[n] that is left out has the factor 0."""

    factors: tuple[tuple[int, int], ...]
    least: int = 1

    def room(self, values: Sequence[int]) -> int:
        """Returns by how much the sum is above ``least``; negative if the inequality is violated."""
        return sum(factor * values[name] for name, factor in self.factors) - self.least


def least_solution(inequalities: Sequence[Inequality], weights: Sequence[int]) -> list[int] | None:
    """Finds whole numbers that satisfy all inequalities, with the least sum of ``weights`` times absolute values.

    The result is None if there are none, or if none are found in the time allowed.

    Examples
    --------
    >>> least_solution([Inequality(((0, 1), (1, -1))), Inequality(((1, 2),))], [1, 1])
    [2, 1]
    """
    from ortools.sat.python import cp_model

    model, solver = cp_model.CpModel(), cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = _WORK
    unknowns = [model.new_int_var(-LARGEST, LARGEST, "") for _ in weights]
    sizes = [model.new_int_var(0, LARGEST, "") for _ in weights]
    for unknown, size in zip(unknowns, sizes, strict=True):
        model.add_abs_equality(size, unknown)
    model.minimize(cp_model.LinearExpr.weighted_sum(sizes, weights))
    values = [0] * len(weights)
    while violated := sorted((room, n) for n, row in enumerate(inequalities) if (room := row.room(values)) < 0):
        for _, number in violated[:_AT_ONCE]:
            names, factors = zip(*inequalities[number].factors, strict=True)
            model.add(
                cp_model.LinearExpr.weighted_sum([unknowns[name] for name in names], factors)
                >= inequalities[number].least
            )
        if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        values = [solver.value(unknown) for unknown in unknowns]
    return values


# Finds clocks that give known orders: sums of terms times whole numbers, which rise along every lane and every value.
#
# The factors x of the terms are free, because a clock is an order, not a time. They only have to give each operation a
# later clock than the operation before it in its lane, and than the operations that make the values it reads:
#
#     F(m, s) @ x0*m + x1*s + x2*D + x3           x0 >= 1          F m0 s0 before F m1 s0
#     B(m, s) @ x4*m + x5*s + x6*D + x7           x1 >= 1          F m0 s0 before F m0 s1
#                                                 ..
#
# Of all such factors those with the least sum of sizes are taken (`whole_numbers`).

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
    """Clocks of a form that rise along all lanes and values, or None; the `Clocks.unknowns` in ``without`` are 0."""
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
    prices = [(6 if term in form.constants else 2) ** (term.count("*") + term.count("/")) for term in terms]
    solution = least_solution([*inequalities], [*prices[:rates], *prices[rates:] * len(kinds)])
    if solution is None:
        return None
    return Clocks(form, {name: (*solution[:rates], *solution[start : start + width]) for name, start in starts.items()})


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
    words = re.findall(r"\w+", f"{workers} {stages} {frame.slices}")
    sizes = [name for name in frame.names if name in words]
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


def _products(pairs: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Returns the texts of products, of a factor and a term each; a term that is more than a name gets brackets."""
    return tuple(times(factor, term if term.isidentifier() else f"({term})") for factor, term in pairs)


FITTED, HELD_OUT = 3, 5
"""The fewest orders that are fitted, and the larger ones that only verify."""

_HELD_OUT_OF_ONE = 3
"""The fewest larger orders that only verify where a single parameter differs, so that formulas have fewer terms."""

_CHANCES = 40
"""The number of forms that may fit the smaller sizes and not the larger ones before the fit gives up."""


@dataclass(frozen=True, slots=True)
class FittedScheme:
    """The text of a fitted scheme, and its sizes, each as values of parameters.

    The clocks were ``fitted`` to the orders of some sizes, and ``verified`` at others. ``origin`` are the first lines
    of the `remark`, which say where the orders come from, if that is known.
    """

    text: str
    fitted: tuple[Mapping[str, int], ...]
    verified: tuple[Mapping[str, int], ...]
    origin: str = ""

    @property
    def remark(self) -> str:
        """Comment lines to put before the text: where the clocks come from, and at which sizes they hold."""
        sizes = ", ".join(" ".join(f"{name}={value}" for name, value in size.items()) for size in self.fitted)
        largest = ", ".join(f"{name}={max(size[name] for size in self.verified)}" for name in self.verified[0])
        held = counted(len(self.verified), "other size")
        clocks = f"# Clocks fitted to the orders at {sizes};\n# they give the orders of {held}, up to {largest}.\n"
        return f"{self.origin}{clocks}"


def fit_scheme(schedules: Sequence[Schedule], names: Sequence[str] = ()) -> FittedScheme:
    """Fits a scheme that compiles to the given schedules, which are verified and those of one scheme at several sizes.

    Its parameters are those whose values differ among the schedules; with ``names``, those that are among ``names``.

    Sizes with the largest value of a parameter are never fitted: they only verify. Where a single parameter differs,
    such as N of schedules that all have D=4, its three to five largest values only verify.

    Raises `OptionError` if OR-Tools is not installed. Raises `NotFitted` if there are fewer than three sizes to fit or
    five that verify (three of a single parameter); if a schedule has what no scheme of this fit can say, such as pairs;
    or if no clocks of a known form give the orders.

    Examples
    --------
    >>> import chimera_ir
    >>> from chimera_ir.source import Source
    >>> text = "scheme a(D = 2, N = 2) pipe p { stages s in 0..D on s  micros m in 0..N "
    >>> text += "F(m, s) @ 3*m + s  B(m, s) @ 5*N + 5*D + m - s }"
    >>> sizes = [(D, N) for D in (2, 3, 4, 6) for N in (2, 3, 5, 8)]
    >>> scheme = fit_scheme([chimera_ir.compile(Source("", text), D=D, N=N).schedule for D, N in sizes])
    >>> print(scheme.text[scheme.text.index("F(") :], end="")
    F(m, s) @ m + s
      B(m, s) @ m + 2*D + N - s
    }
    """
    require_solver("a fit of clocks")
    values = _values(schedules)
    names = tuple(name for name, several in values.items() if len(several) > 1 and name in (names or values))
    orders = [Observed(schedule, names) for schedule in schedules]
    orders.sort(key=lambda order: (order.size, tuple(order.settings.values())))
    pool, held_out = _divided(orders, names)
    frame = frame_of(orders)
    chances = _CHANCES
    for form in forms(frame, len(frame.pipes)):
        clocks, training = _fitted(form, pool)
        if clocks is None:
            continue
        failing = next((order for order in held_out if not clocks.keep(order)), None)
        if failing is None:
            text = _text(frame, _shortened(clocks, training, orders), orders[0])
            if _compiles_to(text, orders):
                others = [order for order in orders if order not in training]
                trained, verified = (tuple(order.settings for order in several) for several in (training, others))
                return FittedScheme(text, trained, verified)
        elif (chances := chances - 1) == 0:
            raise NotFitted(
                f"{failing.header.title}: clocks that give the orders of smaller sizes do not give this one; more "
                "sizes help if it follows the same formulas"
            )
    raise NotFitted(
        f"{orders[0].header.scheme}: no clocks that are linear in micro-batch and stage, in units of micro-batches or "
        "on ways through the workers, give its orders"
    )


def _values(schedules: Sequence[Schedule]) -> Mapping[str, set[int]]:
    """The values of every parameter; raises `NotFitted` unless all schedules have the same parameters."""
    values: dict[str, set[int]] = {}
    for schedule in schedules:
        for name, value in schedule.header.parameters:
            values.setdefault(name, set()).add(value)
    for schedule in schedules:
        if (*dict(schedule.header.parameters),) != (*values,):
            raise NotFitted(f"{schedules[0].header.title}, {schedule.header.title}: their parameters have other names")
    return values


def _divided(orders: Sequence[Observed], names: Sequence[str]) -> tuple[Sequence[Observed], Sequence[Observed]]:
    """Sorted orders to fit, and larger ones that only verify; raises `NotFitted`."""
    if not names:
        raise NotFitted(
            f"{counted(len(orders), 'order')} of one size: a fit takes orders of several, such as several N"
        )
    if len(names) == 1:
        (name,), least = names, FITTED + _HELD_OUT_OF_ONE
        if len(orders) < least:
            raise NotFitted(
                f"only {name} differs, and a fit then takes {least} values of it or more, the largest to verify; here "
                f"are {len(orders)}"
            )
        ascending = sorted(orders, key=lambda order: order.settings[name])
        first = max(FITTED, len(orders) - HELD_OUT)
        return ascending[:first], ascending[first:]
    largest = {name: max(order.settings[name] for order in orders) for name in names}
    pool = [order for order in orders if all(value < largest[name] for name, value in order.settings.items())]
    held_out = [order for order in orders if order not in pool]
    if len(pool) < FITTED or len(held_out) < HELD_OUT:
        raise NotFitted(
            f"a fit takes {FITTED} sizes or more, and {HELD_OUT} that verify it, each with the largest value of a "
            f"parameter; here are {len(pool)} and {len(held_out)}"
        )
    return pool, held_out


def _fitted(form: ClockForm, pool: Sequence[Observed]) -> tuple[Clocks | None, list[Observed]]:
    """Clocks of a form that give all orders of ``pool``, or None, and the orders to which they were fitted."""
    training = [*pool[-FITTED:]]
    while (clocks := fitted_clocks(form, training)) is not None:
        failing = next((order for order in pool if not clocks.keep(order)), None)
        if failing is None:
            break
        training.append(failing)
    return clocks, training


def _shortened(clocks: Clocks, training: Sequence[Observed], orders: Sequence[Observed]) -> Clocks:
    """Clocks of the same form that keep all ``orders`` with fewer terms, if any; ``training`` are the orders to fit."""
    without = {number for number, factor in enumerate(clocks.unknowns) if not factor}
    for number in range(len(clocks.unknowns) - 1, -1, -1):
        if number not in without:
            shorter = fitted_clocks(clocks.form, training, without | {number})
            if shorter is not None and all(map(shorter.keep, orders)):
                clocks, without = shorter, {n for n, factor in enumerate(shorter.unknowns) if not factor}
    return clocks


def _text(frame: Frame, clocks: Clocks, smallest: Observed) -> str:
    header = smallest.header
    parameters = ", ".join(f"{name} = {value}" for name, value in smallest.settings.items())
    pipes = (
        f"pipe {pipe.name} {{\n" + "\n".join((*pipe.lines, *clocks.lines(name, frame.variables))) + "\n}"
        for pipe, name in zip(frame.pipes, (pipe.name for pipe in header.pipes), strict=True)
    )
    text = f"scheme {header.scheme}({parameters})\nworkers {frame.workers}\n" + "\n".join(pipes)
    return formatter.show(parse(Source("fitted.chim", text)))


def _compiles_to(text: str, orders: Sequence[Observed]) -> bool:
    scheme = parse(Source("fitted.chim", text))
    for order in orders:
        plan, _ = elaborate(scheme, order.settings, order.size)
        schedule = ordered(plan)
        if schedule.lanes != order.schedule.lanes or schedule.header.workers != order.header.workers:
            return False
    return True


# Makes the orders of a scheme at several sizes, or of several texts, and fits a scheme to them.

STAGES, MICRO_BATCHES = (2, 3, 4, 5, 6, 8), (2, 3, 5, 8, 11, 14)
"""Values to try for parameters that give the number of stages, and for one that gives that of micro-batches."""


Order = tuple[Schedule, bool | None]
"""The verified order of a compilation, and if a search found it, whether it is proven to be the shortest."""


def _order(compilation: Compilation) -> Order:
    schedule = compilation.schedule
    if not isinstance(schedule, Schedule):
        raise NotFitted(f"{schedule.header.title}: it has no flush, and clocks are fitted to orders of one update")
    improvement = compilation.improvement
    return schedule, improvement.result.proven if improvement else None


def fitted(compilation: Compilation, values: Mapping[str, Sequence[int]]) -> FittedScheme:
    """Returns the scheme with clocks fitted to its own orders, at all combinations of ``values`` that it accepts.

    If no parameter has several values, those that give its size get the values `STAGES` and `MICRO_BATCHES`. Raises
    `NotFitted` as `fit_scheme` does.
    """
    request = compilation.request
    if not request.source.is_scheme:
        raise NotFitted(f"{request.source.name} has one size; name the texts of several sizes, one after another")
    several = values if any(len(numbers) > 1 for numbers in values.values()) else _chosen(compilation, values)
    orders, refused = [], ""
    for numbers in product(*several.values()):
        settings = dict(zip(several, numbers, strict=True))
        try:
            orders.append(_order(replace(compilation, request=replace(request, settings=settings))))
        except TextError as error:
            refused = titles(error.diagnostics)
    if not orders:
        raise NotFitted(f"{request.source.name}: it has no size with orders{refused and f': {refused}'}")
    return _fitted_orders(orders, [name for name, numbers in several.items() if len(numbers) > 1])


def fitted_texts(compilations: Sequence[Compilation]) -> FittedScheme:
    """The scheme fitted to texts, each of its own size; raises `NotFitted` for a scheme, and as `fit_scheme` does."""
    texts: dict[tuple[tuple[str, int], ...], str] = {}
    orders = []
    for compilation in compilations:
        source = compilation.request.source
        if source.is_scheme:
            raise NotFitted(f"{source.name} is a scheme, which has every size: fit it alone")
        order = _order(compilation)
        size = order[0].header.parameters
        if size in texts:
            shown = " ".join(f"{name}={value}" for name, value in size) or "no parameters"
            raise NotFitted(f"{texts[size]} and {source.name} are both of the size {shown}: leave one of them out")
        texts[size] = source.name
        orders.append(order)
    return _fitted_orders(orders, ())


def _fitted_orders(orders: Sequence[Order], names: Sequence[str]) -> FittedScheme:
    proofs = [proven for _, proven in orders if proven is not None]
    try:
        scheme = fit_scheme([schedule for schedule, _ in orders], names)
    except NotFitted as error:
        if not proofs:
            raise
        remedy = "of orders that take the same time a search finds any: `prefer` or a bound on memory leaves fewer"
        raise NotFitted(f"{error}; {remedy}") from error
    origin = f"# Orders of a search, {sum(proofs)} of {len(orders)} proven to be the shortest.\n" if proofs else ""
    return replace(scheme, origin=origin)


def _chosen(compilation: Compilation, values: Mapping[str, Sequence[int]]) -> Mapping[str, Sequence[int]]:
    """Returns the given values, and several to try for each other parameter that sets stages or micro-batches."""
    request = compilation.request
    role = roles(request.source, compilation.scheme, request.max_operations)
    counts = {role.micro_batches: MICRO_BATCHES} if role.micro_batches else {}
    return {**dict.fromkeys(role.sizes, STAGES), **counts, **values}
