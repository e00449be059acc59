"""The weight versions that the micro-batches of an asynchronous scheme read."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from chimera_ir.diagnostics.catalogue import endless as say
from chimera_ir.diagnostics.model import Diagnostic, Rejected
from chimera_ir.elaborate.affine import Law
from chimera_ir.elaborate.evaluate import Fault, compiled
from chimera_ir.elaborate.pipes import Shape
from chimera_ir.ir.ids import Micro, Stage, Version
from chimera_ir.ir.levels import Pipe, Planned
from chimera_ir.ir.ops import singles

Readings = Mapping[tuple[Micro, Stage], Version]
"""The versions that micro-batches read, by micro-batch and stage; empty in a synchronous scheme."""


def check_versions(shape: Shape, laws: Sequence[Law]) -> Iterator[Diagnostic]:
    """The diagnostic of the first micro-batch, if any, that reads another version than max(0, law of its stage).

    Micro-batches up to one period after the start of a law are compared. From there on the law holds.

    Parameters
    ----------
    shape
        A pipe without end.
    laws
        The law of the versions of each stage. The versions grow.
    """
    if shape.reads is None:
        return
    names, span = (shape.micros.variable.text, shape.stages.variable.text), shape.reads.version.span
    formula = compiled(shape.reads.version, shape.scope.with_variables(*names))
    start = shape.micro_range.start
    # A law holds from ``since`` on, and repeats: before it and in its first period each version is computed.
    for stage, law in enumerate(laws):
        for micro in range(start, max(start, law.since) + law.period):
            instance = shape.instance(*zip(names, (micro, stage), strict=True))
            try:
                version = formula((micro, stage))
            except Fault as fault:
                yield fault.diagnostic(instance)
                return
            expected = max(0, law.at(micro))
            if version < 0:
                yield say.NegativeVersion(span, (), instance, micro, stage, version)
                return
            if version != expected:
                yield say.VersionUnsettled(span, (), instance, micro, stage, version, expected)
                return


def readings(shape: Shape, pipe: Pipe) -> Readings:
    """The versions that the micro-batches of a checked pipe read.

    Raises `Rejected` if the version of a micro-batch has no value within 64 bits.
    """
    if shape.reads is None:
        return {}
    names = (shape.micros.variable.text, shape.stages.variable.text)
    formula = compiled(shape.reads.version, shape.scope.with_variables(*names))
    versions: dict[tuple[Micro, Stage], Version] = {}
    for micro, number in zip(shape.micro_range, pipe.micros, strict=True):
        for stage in shape.stage_range:
            try:
                versions[number, Stage(stage)] = Version(formula((micro, stage)))
            except Fault as fault:
                instance = shape.instance(*zip(names, (micro, stage), strict=True))
                raise Rejected([fault.diagnostic(instance)]) from None
    return versions


def torn(planned: Iterable[Planned], reads: Readings, per_update: int, shape: Shape) -> Iterator[Diagnostic]:
    """Diagnostics of operations on micro-batches of several updates, or of several versions."""
    for operation in singles(entry.operation for entry in planned):
        first = operation.micros[0]
        for micro in operation.micros[1:]:
            updates = first // per_update, micro // per_update
            versions = reads[first, operation.stage], reads[micro, operation.stage]
            where = operation.origin, (), shape.instance(), first, micro
            if updates[0] != updates[1]:
                yield say.GroupTorn(*where, "update", *updates)
            elif versions[0] != versions[1]:
                yield say.GroupTorn(*where, "version", *versions)
