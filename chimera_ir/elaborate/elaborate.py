"""Elaborates a tree to a plan: the operations of a scheme for given parameters, each with its worker and clock."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.elaborate.checker import check
from chimera_ir.elaborate.operations import operations
from chimera_ir.elaborate.pipes import Shape, reject, shapes
from chimera_ir.elaborate.places import place, strategies
from chimera_ir.elaborate.read_versions import readings, torn
from chimera_ir.elaborate.settings import Globals, evaluate_globals, parameter_names, require_settable
from chimera_ir.elaborate.unrolling import FinitePipes, unrolled
from chimera_ir.ir.levels import Header, Pipe, Plan, Planned
from chimera_ir.syntax import ast

__all__ = ["Outline", "elaborate", "outline", "parameter_names"]


def elaborate(
    scheme: ast.Scheme, settings: Mapping[str, int], max_operations: int
) -> tuple[Plan, tuple[Diagnostic, ...]]:
    """The plan of a scheme, and warnings.

    Parameters
    ----------
    scheme
        The tree of its text.
    settings
        Values of parameters that replace their defaults.
    max_operations
        The most operations; a scheme that has more is rejected before they are enumerated.

    Raises
    ------
    SettingError
        If a setting is not of a parameter of the scheme.
    Rejected
        If the scheme has errors: with all errors that are not consequences of others.

    Examples
    --------
    >>> from chimera_ir.source import Source
    >>> from chimera_ir.syntax.parser import parse
    >>> text = "scheme a(N = 2) pipe p { stages s in 0..3 on s  micros m in 0..N  F(m, s) @ m + s }"
    >>> plan, warnings = elaborate(parse(Source("", text)), {"N": 4}, 1000)
    >>> plan.header.workers, plan.header.micro_batches, len(plan.operations)
    (3, 4, 12)
    """
    outlined = outline(scheme, settings, max_operations)
    return outlined.plan(), outlined.warnings


@dataclass(frozen=True, slots=True)
class Outline:
    """The header of a plan, and all that is needed to make its operations.

    ``shapes`` are the pipes, each cut to the length that is elaborated; ``values`` has the values of global names.
    """

    header: Header
    shapes: tuple[Shape, ...]
    values: Globals
    warnings: tuple[Diagnostic, ...]

    def plan(self) -> Plan:
        """The plan; raises ``Rejected`` for errors in operations, as `elaborate` does."""
        return Plan(self.header, tuple(_planned(self.shapes, self.header.pipes, self.values)))


def outline(scheme: ast.Scheme, settings: Mapping[str, int], max_operations: int) -> Outline:
    """Returns the outline of a scheme's plan; raises what `elaborate` raises, except for errors in operations."""
    require_settable(scheme, settings)
    warnings = _warnings(_Tree(scheme))
    values = evaluate_globals(scheme, settings)
    # The pipes as ranges, and cut to a finite length: counted in time that does not grow with the parameters.
    ranges = shapes(scheme, values, max_operations)
    per_update = values.per_update
    finite = FinitePipes(ranges) if per_update is None else unrolled(ranges, per_update, max_operations)
    stages = len(ranges[0].stage_range)
    workers = stages if values.workers is None else values.workers
    pipes = place(finite.shapes, workers, values.workers_span)
    header = Header(
        scheme=scheme.name.text,
        parameters=values.parameters,
        workers=workers,
        stages=stages,
        micro_batches=sum(len(pipe.micros) for pipe in pipes),
        pipes=pipes,
        bounds=values.bounds(workers),
        halves=ranges[0].micros.halves is not None,
        strategies=strategies(ranges),
        updates=finite.updates,
        period=finite.period,
    )
    return Outline(header, finite.shapes, values, warnings)


@dataclass(frozen=True, slots=True, eq=False)
class _Tree:
    """A scheme as a key by identity, because equal schemes may have different spans, and so different diagnostics."""

    scheme: ast.Scheme

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Tree) and self.scheme is other.scheme

    def __hash__(self) -> int:
        return id(self.scheme)


@lru_cache(maxsize=64)
def _warnings(tree: _Tree) -> tuple[Diagnostic, ...]:
    """The warnings about a scheme that do not depend on its parameters, found once; raises ``Rejected`` for errors."""
    return check(tree.scheme)


def _planned(shapes: Sequence[Shape], pipes: Sequence[Pipe], values: Globals) -> list[Planned]:
    """The operations of all pipes; raises ``Rejected`` with the first failure of every line that fails."""
    outcomes: list[Planned | Diagnostic] = []
    by_name = {shape.name: (shape, pipe) for shape, pipe in zip(shapes, pipes, strict=True)}
    for shape, pipe in by_name.values():
        reads = readings(shape, pipe)
        pipe_outcomes = list(operations(shape, pipe, reads, by_name))
        outcomes += pipe_outcomes
        if values.per_update is not None:
            planned = (outcome for outcome in pipe_outcomes if isinstance(outcome, Planned))
            outcomes += torn(planned, reads, values.per_update, shape)
    reject([outcome for outcome in outcomes if isinstance(outcome, Diagnostic)])
    return cast("list[Planned]", outcomes)
