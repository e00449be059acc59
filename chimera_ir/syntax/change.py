"""What a user asks of a scheme beside its parameters: clauses that every pipe gets instead of its own."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from chimera_ir.syntax.ast import Clause, Pipe, Recompute, Scheme, Sync, SyncMode


@dataclass(frozen=True, slots=True)
class Change:
    """``recompute`` has every stage recompute; ``sync`` is the strategy of every stage. By default nothing changes."""

    recompute: bool = False
    sync: SyncMode | None = None

    def of(self, scheme: Scheme) -> Scheme:
        """The scheme as if its text said so; what is wrong with an added clause is told at the name of the pipe."""
        if self == Change():
            return scheme
        items = (
            replace(item, clauses=tuple(self._clauses(item))) if isinstance(item, Pipe) else item
            for item in scheme.items
        )
        return replace(scheme, items=tuple(items))

    def _clauses(self, pipe: Pipe) -> Iterator[Clause]:
        for clause in pipe.clauses:
            replaced = (self.recompute and isinstance(clause, Recompute)) or (self.sync and isinstance(clause, Sync))
            if not replaced:
                yield clause
        if self.recompute:
            yield Recompute(None, pipe.name.span)
        if self.sync:
            yield Sync(self.sync, None, pipe.name.span)
