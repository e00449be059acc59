"""Fits a scheme to the orders of several sizes, and verifies it at larger ones.

Clocks are fitted to three of the smaller sizes; each smaller size whose order these clocks do not give is added to the
three, and the fit is made again. The text with the clocks is then compiled at all sizes, the largest included, and its
lanes are compared with the orders.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from chimera_ir.elaborate.elaborate import elaborate
from chimera_ir.errors import NotFitted
from chimera_ir.fitting.clock_form import ClockForm, Clocks, fitted_clocks, forms
from chimera_ir.fitting.frame import Frame, frame_of
from chimera_ir.fitting.observed import Observed
from chimera_ir.ir.levels import Schedule
from chimera_ir.lower.order import order as ordered
from chimera_ir.orders.cp_sat import require_solver
from chimera_ir.plural import counted
from chimera_ir.source import Source
from chimera_ir.syntax import formatter
from chimera_ir.syntax.parser import parse

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
    orders = sorted((Observed(schedule, names) for schedule in schedules), key=_by_size)
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
    """Divides orders, sorted by size, into those to fit and those that only verify, or raises `NotFitted`.

    What only verifies has a larger value of a parameter than all that is fitted.
    """
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


def _by_size(order: Observed) -> tuple[int, tuple[int, ...]]:
    return order.size, tuple(order.settings.values())


def _fitted(form: ClockForm, pool: Sequence[Observed]) -> tuple[Clocks | None, list[Observed]]:
    """Returns clocks of a form that give all orders of ``pool``, and the orders to which they were fitted.

    The clocks are None if there are none.
    """
    training = [*pool[-FITTED:]]
    while (clocks := fitted_clocks(form, training)) is not None:
        failing = next((order for order in pool if not clocks.keep(order)), None)
        if failing is None:
            break
        training.append(failing)
    return clocks, training


def _shortened(clocks: Clocks, training: Sequence[Observed], orders: Sequence[Observed]) -> Clocks:
    """Returns clocks of the same form that keep all ``orders`` with fewer terms; else ``clocks`` themselves.

    ``training`` are the orders to fit.
    """
    without = {number for number, factor in enumerate(clocks.unknowns) if not factor}
    for number in range(len(clocks.unknowns) - 1, -1, -1):
        if number not in without:
            shorter = fitted_clocks(clocks.form, training, without | {number})
            if shorter is not None and all(map(shorter.keep, orders)):
                clocks, without = shorter, {n for n, factor in enumerate(shorter.unknowns) if not factor}
    return clocks


def _text(frame: Frame, clocks: Clocks, smallest: Observed) -> str:
    """The text of the scheme; the defaults of its parameters are those of the smallest size."""
    header = smallest.header
    parameters = ", ".join(f"{name} = {value}" for name, value in smallest.settings.items())
    pipes = (
        f"pipe {pipe.name} {{\n" + "\n".join((*pipe.lines, *clocks.lines(name, frame.variables))) + "\n}"
        for pipe, name in zip(frame.pipes, (pipe.name for pipe in header.pipes), strict=True)
    )
    text = f"scheme {header.scheme}({parameters})\nworkers {frame.workers}\n" + "\n".join(pipes)
    return formatter.show(parse(Source("fitted.chim", text)))


def _compiles_to(text: str, orders: Sequence[Observed]) -> bool:
    """Whether a scheme compiles to the orders, at the size of each."""
    scheme = parse(Source("fitted.chim", text))
    for order in orders:
        plan, _ = elaborate(scheme, order.settings, order.size)
        schedule = ordered(plan)
        if schedule.lanes != order.schedule.lanes or schedule.header.workers != order.header.workers:
            return False
    return True
