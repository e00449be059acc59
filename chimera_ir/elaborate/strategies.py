"""The `sync` clauses: when the gradients of each stage are summed over its replicas."""

from collections.abc import Sequence

from chimera_ir.diagnostics.catalogue.groups import SyncDiffers
from chimera_ir.diagnostics.model import Diagnostic, Rejected
from chimera_ir.elaborate.pipes import Shape
from chimera_ir.elaborate.places import stages_of
from chimera_ir.ir.ids import Stage
from chimera_ir.ir.levels import Strategy
from chimera_ir.syntax import ast


def strategies(shapes: Sequence[Shape]) -> tuple[tuple[Stage, Strategy], ...]:
    """The stages with another strategy than the default, ascending.

    The last clause of a pipe whose guard holds for a stage counts; a pipe without such a clause takes no part.

    Raises
    ------
    Rejected
        If two pipes ask for different strategies for the same stage.
    """
    failed: list[Diagnostic] = []
    chosen: dict[Stage, tuple[ast.Sync, Shape]] = {}
    for shape in shapes:
        for stage, clause in _wishes(shape, failed).items():
            first, other = chosen.setdefault(stage, (clause, shape))
            if first.mode is not clause.mode:
                instance = shape.instance((shape.stages.variable.text, stage))
                modes = clause.mode.value, first.mode.value
                failed.append(SyncDiffers(clause.span, (), instance, stage, *modes, other.name, first.span))
    if failed:
        raise Rejected({(type(diagnostic), diagnostic.span): diagnostic for diagnostic in reversed(failed)}.values())
    listed = [(stage, Strategy(clause.mode.value)) for stage, (clause, _) in sorted(chosen.items(), key=lambda c: c[0])]
    return tuple(entry for entry in listed if entry[1] is not Strategy.EAGER_OPT)


def _wishes(shape: Shape, failed: list[Diagnostic]) -> dict[Stage, ast.Sync]:
    return {stage: clause for clause in shape.syncs for stage in stages_of(shape, clause, failed)}
