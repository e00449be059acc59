"""Elaborates a tree to a plan: the operations of a scheme for given parameters, each with its worker and clock."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain

from chimera_ir.diagnostics.model import Diagnostic, made_of, reject
from chimera_ir.elaborate.checker import check
from chimera_ir.elaborate.graph import feeds, frozen_stages
from chimera_ir.elaborate.operations import Listed, Readings, operations, place, readings, strategies, torn, weights
from chimera_ir.elaborate.pipes import Shape, shapes
from chimera_ir.elaborate.settings import Globals, evaluate_globals, parameter_names, require_settable
from chimera_ir.elaborate.unrolling import EndlessPipes, endless
from chimera_ir.ir.graph import Absence, graph_mistakes
from chimera_ir.ir.levels import Header, Pipe, Plan
from chimera_ir.ir.ops import Micro, Unclocked, singles
from chimera_ir.ir.streams import PlanStream, header_of
from chimera_ir.syntax import ast

__all__ = ["Outline", "elaborate", "outline", "parameter_names"]


def elaborate(
    scheme: ast.Scheme, settings: Mapping[str, int], max_operations: int
) -> tuple[Plan, tuple[Diagnostic, ...]]:
    """The plan of a scheme with some ``settings`` of its parameters, and warnings.

    A scheme with more than ``max_operations`` operations is rejected before they are enumerated.

    Raises `ParameterError` if a setting names no parameter of the scheme. Raises `Rejected` if the scheme has errors:
    with all errors that are not consequences of others.

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
    """The plan of a scheme before its operations are made: its header, and what the operations are made from.

    ``shapes`` are the pipes, evaluated for these parameters; ``values`` has the values of global names. For a scheme
    without a flush each pipe has the micro-batches of one turn, and ``endless`` has the rhythms and the turn; else
    ``endless`` is None.
    """

    header: Header
    shapes: tuple[Shape, ...]
    values: Globals
    warnings: tuple[Diagnostic, ...]
    endless: EndlessPipes | None

    def plan(self) -> Plan:
        """The plan; raises ``Rejected`` for errors in operations, as `elaborate` does."""
        level = self.level()
        return level if isinstance(level, Plan) else level.shown

    def level(self) -> Plan | PlanStream:
        """Returns the plan or, for a scheme without a flush, the plan stream; raises what `plan` raises."""
        if self.endless is None:
            listed = _planned(self.shapes, self.header.pipes, {})
            return Plan(_without_absent(_moving(self.header, listed), listed), listed)
        # The turn that begins with micro-batch 0, whose versions are those of the steady state.
        header = header_of(self.header, self.endless.turn.updates)
        reads = readings(self.shapes, header.pipes, self.endless.rhythms)
        operations = _planned(self.shapes, header.pipes, reads)
        reject(torn(operations, reads, header, self.endless.turns))
        moving = _moving(header, operations)
        prefers = any(isinstance(planned, Unclocked) and planned.preference is not None for planned in operations)
        rises = self._rises(operations, header, reads) if prefers else ()
        return PlanStream(moving, operations, self.endless.turn.clocks, self.endless.turns, rises)

    def _rises(self, operations: Sequence[Listed], header: Header, reads: Readings) -> tuple[int, ...]:
        """How much higher the value after ``prefer`` of each operation is one turn later."""
        following = tuple(shape.following(len(shape.micro_range)) for shape in self.shapes)
        pairs = zip(operations, _planned(following, header.pipes, reads), strict=True)
        return tuple(_preference(later) - _preference(earlier) for earlier, later in pairs)


def outline(scheme: ast.Scheme, settings: Mapping[str, int], max_operations: int) -> Outline:
    """Returns what a scheme's plan is made from, and checks all of it that needs no operations.

    Raises what `elaborate` raises, except for errors in operations.
    """
    require_settable(scheme, settings)
    warnings = _warnings(_Tree(scheme))
    values = evaluate_globals(scheme, settings)
    # The pipes as ranges, those without end cut to a turn: counted in time that does not grow with the parameters.
    ranges = shapes(scheme, values, max_operations)
    per_update = values.per_update
    stream = None if per_update is None else endless(ranges, per_update, max_operations)
    cut = tuple(map(Shape.lengthened, ranges, stream.turn.micros)) if stream else ranges
    stages = len(ranges[0].stage_range)
    workers = stages if values.workers is None else values.workers
    edges, origins = feeds(values, ranges[0].groups)
    pipes = place(cut, workers, values.workers_span, values.left_out)
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
        updates=stream.turn.updates if stream else 1,
        period=stream.turn.period * ranges[0].slices if stream else 0,
        slices=ranges[0].slices,
        weights=weights(cut, pipes),
        frozen=frozen_stages(values, ranges[0].groups),
        named=ranges[0].groups if ranges[0].lines[0].group else (),
        feeds=edges,
    )
    reject(graph_mistakes(header, origins))
    header = header.recomputing_for_backwards()
    shown = header_of(header, stream.turns * stream.turn.updates) if stream else header
    return Outline(shown, cut, values, warnings, stream)


@dataclass(frozen=True, slots=True, eq=False)
class _Tree:
    """A scheme as a key of a cache: equal schemes may stand at different places of a text, so identity counts."""

    scheme: ast.Scheme

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Tree) and self.scheme is other.scheme

    def __hash__(self) -> int:
        return id(self.scheme)


@lru_cache(maxsize=64)
def _warnings(tree: _Tree) -> tuple[Diagnostic, ...]:
    return check(tree.scheme)


def _moving(header: Header, operations: Iterable[Listed]) -> Header:
    moves = any(operation.kind.moves for *_, operation in operations)
    return replace(header, moves=True) if moves else header


def _without_absent(header: Header, operations: Iterable[Listed]) -> Header:
    """The header with the micro-batches of which a group has no operation at all, if others have some."""
    if not header.named:
        return header
    group_of = [group.name for group in header.named for _ in range(group.start, group.stop)]
    parts = singles(planned.operation for planned in operations)
    present = {(group_of[part.stage], micro) for part in parts for micro in part.micros}
    somewhere = {micro for _, micro in present}
    absent = {
        group.name: tuple(
            Micro(m) for m in range(header.micro_batches) if (group.name, m) not in present and m in somewhere
        )
        for group in header.named
    }
    return replace(header, absent=tuple(Absence(name, micros) for name, micros in absent.items() if micros))


def _preference(planned: Listed) -> int:
    return (planned.preference or 0) if isinstance(planned, Unclocked) else 0


def _planned(shapes: Sequence[Shape], pipes: Sequence[Pipe], reads: Readings) -> tuple[Listed, ...]:
    by_name = {shape.name: (shape, pipe) for shape, pipe in zip(shapes, pipes, strict=True)}
    lines = [(line, shape, pipe) for shape, pipe in by_name.values() for line in shape.operations]
    return tuple(chain.from_iterable(made_of(lines, lambda line: operations(*line, reads, by_name))))
