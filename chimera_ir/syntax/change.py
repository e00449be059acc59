"""Replaces clauses of every pipe of a scheme by those of the command line."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from chimera_ir.syntax.ast import Clause, Operation, PipeBlock, Recompute, Scheme, Sync, SyncMode


@dataclass(frozen=True, slots=True)
class Change:
    """Clauses for every pipe: all stages recompute, or all use one strategy of sums; by default nothing changes.

    A pipe that has lines for recomputations, or for moves of memory, recomputes only as its lines say.
    """

    recompute: bool = False
    sync: SyncMode | None = None

    def of(self, scheme: Scheme) -> Scheme:
        """Returns a scheme with the clauses in every pipe; the span of a new clause is the pipe's name."""
        if self == Change():
            return scheme
        items = (
            replace(item, clauses=tuple(self._clauses(item))) if isinstance(item, PipeBlock) else item
            for item in scheme.items
        )
        return replace(scheme, items=tuple(items))

    def unmet_by(self, scheme: Scheme) -> bool:
        """Whether a pipe cannot recompute as asked, because it moves memory and has no lines for recomputations."""
        pipes = ([c.subjects[0].kind for c in item.clauses if isinstance(c, Operation)] for item in _pipes(scheme))
        return self.recompute and any(
            any(kind.moves for kind in kinds) and not any(kind.recomputes for kind in kinds) for kinds in pipes
        )

    def _clauses(self, pipe: PipeBlock) -> Iterator[Clause]:
        clocked = any(_keeps_its_own_way(clause) for clause in pipe.clauses)
        for clause in pipe.clauses:
            replaced = (self.recompute and isinstance(clause, Recompute)) or (self.sync and isinstance(clause, Sync))
            if not replaced:
                yield clause
        if self.recompute and not clocked:
            yield Recompute(None, span=pipe.name.span)
        if self.sync:
            yield Sync(self.sync, None, span=pipe.name.span)


def _pipes(scheme: Scheme) -> Iterator[PipeBlock]:
    return (item for item in scheme.items if isinstance(item, PipeBlock))


def _keeps_its_own_way(clause: Clause) -> bool:
    """Whether a clause recomputes, or moves memory: then its pipe recomputes only as its lines say."""
    if not isinstance(clause, Operation):
        return False
    kind = clause.subjects[0].kind
    return kind.recomputes or kind.moves
