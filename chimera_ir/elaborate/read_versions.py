"""Finds and checks the weight versions that the micro-batches of pipes without end read."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product

from chimera_ir.diagnostics.catalogue import endless
from chimera_ir.diagnostics.catalogue.values import Instance
from chimera_ir.diagnostics.model import Diagnostic, Rejected
from chimera_ir.elaborate.affine import Law
from chimera_ir.elaborate.pipes import Shape
from chimera_ir.elaborate.rhythm import Rhythm
from chimera_ir.ir.ids import Micro, Stage, Version
from chimera_ir.ir.levels import Header, Pipe
from chimera_ir.ir.ops import singles
from chimera_ir.ir.planned import Planned, Unclocked

Readings = Mapping[tuple[Micro, Stage], Version]
"""The versions that micro-batches read, by micro-batch and stage; empty with a flush."""


def check_versions(shape: Shape, laws: Sequence[Law]) -> None:
    """Checks that every micro-batch m of a pipe without end reads version max(0, f(m)) on each stage.

    f is the law of the stage in ``laws``: the version that micro-batches read in the long run. The first micro-batches
    are checked one by one, until the law has held for a period. All laws grow.

    Raises `Rejected` for the first micro-batch that reads another version.
    """
    if shape.reads is None:
        return
    start, span = shape.micro_range.start, shape.reads.version.span
    for number, law in enumerate(laws):
        micros = range(start, max(start, law.since) + law.period)
        cells: dict[str, Iterable[int]] = dict(zip(shape.names, (micros, [number]), strict=True))
        for (micro, stage), version in shape.values(shape.reads.version, cells):
            where = span, (), shape.instance(*zip(shape.names, (micro, stage), strict=True)), micro, stage, version
            expected = max(0, law.at(micro))
            if version < 0:
                raise Rejected([endless.NegativeVersion(*where)])
            if version != expected:
                raise Rejected([endless.VersionUnsettled(*where, expected)])


def readings(shapes: Sequence[Shape], pipes: Sequence[Pipe], rhythms: Sequence[Rhythm]) -> Readings:
    """Returns the versions that the micro-batches of turn 0 read, as the laws of their pipes give them.

    Versions may be below 0, where the first micro-batches of a run read version 0: turn 0 stands for all turns.
    """
    return {
        (number, Stage(stage)): Version(law.at(shape.micro_range[place // shape.slices]))
        for shape, pipe, rhythm in zip(shapes, pipes, rhythms, strict=True)
        for stage, law in enumerate(rhythm.versions)
        for place, number in enumerate(pipe.micros)
    }


def torn(planned: Iterable[Planned | Unclocked], reads: Readings, header: Header, turns: int) -> Iterator[Diagnostic]:
    """Yields mistakes in operations whose micro-batches belong to different updates, or read different versions.

    ``planned`` and ``reads`` are the operations and the versions of turn 0. The operations of turns 0 .. ``turns`` - 1
    are checked, as micro-batches that read different versions later may all read version 0 at first.
    """
    groups = [part for part in singles(entry.operation for entry in planned) if len(part.micros) > 1]
    per_turn = header.per_turn
    for turn, operation in product(range(turns if groups else 0), groups):
        first, more = operation.micros[0], turn * per_turn
        for micro in operation.micros[1:]:
            updates = [number // header.per_update + more for number in (first, micro)]
            versions = [max(0, reads[number, operation.stage] + more) for number in (first, micro)]
            numbers = first + turn * header.period, micro + turn * header.period
            where = operation.origin, (), Instance(header.pipe_of[first].name), *numbers
            if updates[0] != updates[1]:
                yield endless.GroupTorn(*where, "update", *updates)
            elif versions[0] != versions[1]:
                yield endless.GroupTorn(*where, "version", *versions)
