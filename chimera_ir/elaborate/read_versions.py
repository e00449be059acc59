"""The weight versions that the micro-batches of an asynchronous scheme read."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from chimera_ir.diagnostics.catalogue import endless as say
from chimera_ir.diagnostics.model import Diagnostic, Rejected
from chimera_ir.elaborate.affine import Law
from chimera_ir.elaborate.pipes import Shape
from chimera_ir.ir.ids import Micro, Stage, Version
from chimera_ir.ir.levels import Pipe, Planned
from chimera_ir.ir.ops import singles

Readings = Mapping[tuple[Micro, Stage], Version]
"""The versions that micro-batches read, by micro-batch and stage; empty in a synchronous scheme."""


def check_versions(shape: Shape, laws: Sequence[Law]) -> None:
    """Checks that the micro-batches of a pipe without end read the versions max(0, law of their stage).

    Each micro-batch is checked up to one period after the start of a law. From there on the law holds.

    Parameters
    ----------
    shape
        A pipe without end.
    laws
        The law of the versions of each stage, which grow.

    Raises
    ------
    Rejected
        For the first micro-batch that reads another version.
    """
    if shape.reads is None:
        return
    start, span = shape.micro_range.start, shape.reads.version.span
    for number, law in enumerate(laws):
        micros = range(start, max(start, law.since) + law.period)
        for (micro, stage), version in shape.values(shape.reads.version, _cells(shape, micros, [number])):
            where = span, (), shape.instance(*zip(shape.names, (micro, stage), strict=True)), micro, stage, version
            expected = max(0, law.at(micro))
            if version < 0:
                raise Rejected([say.NegativeVersion(*where)])
            if version != expected:
                raise Rejected([say.VersionUnsettled(*where, expected)])


def readings(shape: Shape, pipe: Pipe) -> Readings:
    """The versions that the micro-batches of a checked pipe read.

    Raises `Rejected` if the version of a micro-batch has no value within 64 bits.
    """
    if shape.reads is None:
        return {}
    numbers = dict(zip(shape.micro_range, pipe.micros, strict=True))
    versions = shape.values(shape.reads.version, _cells(shape, shape.micro_range, shape.stage_range))
    return {(numbers[micro], Stage(stage)): Version(version) for (micro, stage), version in versions}


def _cells(shape: Shape, micros: Iterable[int], stages: Iterable[int]) -> dict[str, Iterable[int]]:
    """The values of the micro-batch and the stage variable, by their names."""
    return dict(zip(shape.names, (micros, stages), strict=True))


def torn(planned: Iterable[Planned], reads: Readings, per_update: int, shape: Shape) -> Iterator[Diagnostic]:
    """Diagnostics of operations on micro-batches that belong to several updates, or that read several versions."""
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
