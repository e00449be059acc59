"""The sizes at which the orders of a scheme are fitted and verified."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from chimera_ir.compilation import Compilation
from chimera_ir.diagnostics.model import titles
from chimera_ir.errors import NotFitted, TextError
from chimera_ir.fitting.scheme_fit import FittedScheme, fit_scheme
from chimera_ir.ir.levels import Schedule
from chimera_ir.planner.roles import roles
from chimera_ir.request import Request

STAGES, MICRO_BATCHES = (2, 3, 4, 5, 6, 8), (2, 3, 5, 8, 11, 14)
"""Values of parameters that give the number of stages, and of that of the number of micro-batches."""


def fitted(request: Request, values: Mapping[str, Sequence[int]]) -> FittedScheme:
    """The scheme with clocks fitted to the orders of a request at all combinations of values that it accepts.

    Without values its parameters get those of `STAGES` and `MICRO_BATCHES`. Raises `NotFitted` as `fit_scheme` does.
    """
    if not request.source.is_scheme:
        raise NotFitted(f"{request.source.name} has one size; chimera_ir.fit_scheme takes the schedules of several")
    several = values if any(len(numbers) > 1 for numbers in values.values()) else _chosen(request, values)
    schedules, refused = [], ""
    for settings in _combinations(several):
        level = _schedule(replace(request, settings=settings))
        if isinstance(level, Schedule):
            schedules.append(level)
        refused = level if isinstance(level, str) else refused
    if not schedules:
        raise NotFitted(f"{request.source.name}: it has no size with orders{refused and f': {refused}'}")
    return fit_scheme(schedules, [name for name, numbers in several.items() if len(numbers) > 1])


def _chosen(request: Request, values: Mapping[str, Sequence[int]]) -> Mapping[str, Sequence[int]]:
    """The given values, and several for the other parameters that give a scheme its size."""
    role = roles(request.source, Compilation(request).scheme, request.max_operations)
    counts = {role.micro_batches: MICRO_BATCHES} if role.micro_batches else {}
    return {**dict.fromkeys(role.sizes, STAGES), **counts, **values}


def _combinations(values: Mapping[str, Sequence[int]]) -> Iterator[dict[str, int]]:
    yield from (dict(zip(values, numbers, strict=True)) for numbers in product(*values.values()))


def _schedule(request: Request) -> Schedule | str:
    """The schedule of a request, or why the scheme refuses its parameters."""
    try:
        level = Compilation(request).schedule
    except TextError as error:
        return titles(error.diagnostics)
    if not isinstance(level, Schedule):
        raise NotFitted(f"{level.header.title}: it has no flush")
    return level
