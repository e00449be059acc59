"""Finds the sets of kinds that can make up all operations of a micro-batch on a stage: F and B, or F, I and W.

The sets follow from the table of kinds alone.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain, combinations

from chimera_ir.ir.kinds import Kind, Value


def unmade(kinds: Iterable[Kind]) -> Iterator[tuple[Kind, Value]]:
    """Yields each of ``kinds`` that reads a value of its own stage which none of ``kinds`` makes, with the value."""
    kinds = tuple(kinds)
    made = {value for row in kinds for value in row.keeps}
    yield from ((row, value) for row in kinds for value in row.reads if not value.crosses and value not in made)


@cache
def alternatives(kinds: tuple[Kind, ...]) -> tuple[tuple[Kind, ...], ...]:
    """Returns the sets of kinds that the operations of one micro-batch on a stage can have, the smallest set first.

    In each set exactly one kind opens the micro-batch, that is, comes first. A kind of the set can make each value that
    another one reads, before it is read. Each value that any of ``kinds`` frees is freed as often as it is made.
    Exactly one kind of the set sums gradients, if any of ``kinds`` does.

    Examples
    --------
    >>> from chimera_ir.ir.kinds import BACKWARD, FORWARD, OFFLOAD, RELOAD, all_kinds
    >>> alternatives((*all_kinds()[:-4],))
    ((F, B), (F, B, recompute), (F, I, W), (F, I, W, recompute))
    >>> alternatives((FORWARD, BACKWARD, OFFLOAD, RELOAD))
    ((F, B), (F, B, offload, reload))
    """
    freed = {value for row in kinds for value in row.frees}
    sums = int(any(row.sums for row in kinds))

    def complete(several: tuple[Kind, ...]) -> bool:
        kept = Counter(value for row in several for value in row.keeps if value in freed)
        gone = Counter(value for row in several for value in row.frees)
        once = sum(row.opens for row in several) == 1 and sum(row.sums for row in several) == sums
        return once and kept == gone and not any(unmade(several)) and _can_run(several)

    subsets = chain.from_iterable(combinations(kinds, size) for size in range(1, len(kinds) + 1))
    return tuple(filter(complete, subsets))


def _can_run(kinds: Iterable[Kind]) -> bool:
    """Whether some order of the kinds lets each run after those that make the values it reads.

    Only values of its own stage and slice count.
    """
    waiting, made = set(kinds), set[Value]()
    while waiting:
        ready = {kind for kind in waiting if all(v.crosses or v.slices_on or v in made for v in kind.reads)}
        if not ready:
            return False
        waiting -= ready
        made.update(value for kind in ready for value in kind.keeps)
    return True
