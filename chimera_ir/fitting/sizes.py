"""Makes the orders of a scheme at several sizes, or of several texts, and fits a scheme to them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from chimera_ir.compilation import Compilation
from chimera_ir.diagnostics.model import titles
from chimera_ir.errors import NotFitted, TextError
from chimera_ir.fitting.scheme_fit import FittedScheme, fit_scheme
from chimera_ir.ir.levels import Schedule
from chimera_ir.planner.roles import roles

STAGES, MICRO_BATCHES = (2, 3, 4, 5, 6, 8), (2, 3, 5, 8, 11, 14)
"""Values to try for parameters that give the number of stages, and for one that gives that of micro-batches."""


@dataclass(frozen=True, slots=True)
class SizedOrder:
    """The verified order of a request, as a schedule.

    If a search found the order, ``proven`` says whether the search has proven that no order takes less time; else None.
    """

    schedule: Schedule
    proven: bool | None

    @staticmethod
    def of(compilation: Compilation) -> "SizedOrder":
        """The order of a compilation; raises `NotFitted` if it has no flush."""
        schedule = compilation.schedule
        if not isinstance(schedule, Schedule):
            raise NotFitted(f"{schedule.header.title}: it has no flush, and clocks are fitted to orders of one update")
        improvement = compilation.improvement
        return SizedOrder(schedule, improvement.result.proven if improvement else None)


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
    for settings in _combinations(several):
        try:
            orders.append(SizedOrder.of(replace(compilation, request=replace(request, settings=settings))))
        except TextError as error:
            refused = titles(error.diagnostics)
    if not orders:
        raise NotFitted(f"{request.source.name}: it has no size with orders{refused and f': {refused}'}")
    return _fitted_orders(orders, [name for name, numbers in several.items() if len(numbers) > 1])


def fitted_texts(compilations: Sequence[Compilation]) -> FittedScheme:
    """The scheme with clocks fitted to the orders of several IR texts or schedules of torch, each of its own size.

    Raises `NotFitted` if a text is a scheme, if two are of one size, and as `fit_scheme` does.
    """
    texts: dict[tuple[tuple[str, int], ...], str] = {}
    orders = []
    for compilation in compilations:
        source = compilation.request.source
        if source.is_scheme:
            raise NotFitted(f"{source.name} is a scheme, which has every size: fit it alone")
        order = SizedOrder.of(compilation)
        size = order.schedule.header.parameters
        if size in texts:
            shown = " ".join(f"{name}={value}" for name, value in size) or "no parameters"
            raise NotFitted(f"{texts[size]} and {source.name} are both of the size {shown}: leave one of them out")
        texts[size] = source.name
        orders.append(order)
    return _fitted_orders(orders, ())


def _fitted_orders(orders: Sequence[SizedOrder], names: Sequence[str]) -> FittedScheme:
    proofs = [order.proven for order in orders if order.proven is not None]
    try:
        scheme = fit_scheme([order.schedule for order in orders], names)
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


def _combinations(values: Mapping[str, Sequence[int]]) -> Iterator[dict[str, int]]:
    yield from (dict(zip(values, numbers, strict=True)) for numbers in product(*values.values()))
