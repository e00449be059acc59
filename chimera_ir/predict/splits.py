"""The fastest split of a profile's layers into stages that fit the memory of the workers."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, chain
from operator import sub
from typing import NamedTuple

from chimera_ir.ir.levels import Header
from chimera_ir.ir.recomputation import recomputes_all
from chimera_ir.profile.balance import balanced
from chimera_ir.profile.costs import StageCosts
from chimera_ir.profile.layers import durations
from chimera_ir.verify.holdings import Holdings

_TRIES = 5
"""The most splits that are tried; of each the exact bytes are computed."""

Split = tuple[int, ...]
"""The first layer of each stage."""


class StageLoad(NamedTuple):
    """The most that a worker keeps of a stage: copies of its weights, and what waits for a backward.

    In ``waiting`` a whole micro-batch counts as `Header.units`.
    """

    copies: int
    waiting: int


@dataclass(frozen=True)
class LayerSplits:
    """Searches for a fast split of ``layers`` into the stages of a header, for micro-batches of ``size`` items.

    ``replicas`` is W, the number of copies of the pipelines. With a ``sharded_optimizer`` and a flush, the ranks that
    hold a stage share the optimizer's state.
    """

    layers: Sequence[StageCosts]
    header: Header
    size: int
    replicas: int
    sharded_optimizer: bool

    def candidates(
        self,
        room: Sequence[int],
        loads: Callable[[], Sequence[StageLoad]],
        needed: Callable[[Split], Sequence[int]],
    ) -> Iterator[Split]:
        """Yields a few splits to try, the fastest first; the caller takes the first that fits.

        The first split is the fastest without a limit on memory, the second the fastest within ``room``, the bytes of
        each worker. Bytes are counted as in `_within`, with the ``loads`` of the stages, and so not exactly. Before
        each further split the limits are lowered by as much as the last split exceeds ``room``; ``needed`` gives the
        exact bytes of each worker with a split.
        """
        limits: tuple[int, ...] | None = None
        for _ in range(_TRIES):
            split = (
                _fastest(tuple(self._seconds), self.header.stages) if limits is None else self._within(limits, loads())
            )
            if split is None:
                return
            yield split
            if limits is None:
                limits = tuple(room)
            else:
                excess = max(1, max(map(sub, needed(split), room)))
                limits = tuple(limit - excess for limit in limits)

    @property
    def _seconds(self) -> list[float]:
        stages = range(self.header.stages)
        everywhere = all(recomputes_all(pipe, stage) for pipe in self.header.pipes for stage in stages)
        return durations(self.layers, self.size, recomputing=everywhere)

    def _within(self, limits: Sequence[int], loads: Sequence[StageLoad]) -> Split | None:
        """The split whose slowest stage takes the least time within ``limits``, bytes by worker; None if there is none.

        The bytes of a stage are its weights in all their copies, gradients, optimizer state, and the activations of the
        largest number of micro-batches that wait for a backward at once. Messages do not count. The gradients that a
        first backward makes count for the largest stage of a worker.
        """
        header, layers, size = self.header, self.layers, self.size
        shards = self.sharded_optimizer and not header.steps_inside
        weights = _until([layer.weights for layer in layers])
        standing = _until([layer.weights + layer.gradients for layer in layers])
        optimizer = _until([layer.optimizer for layer in layers])
        first_gradients = _until([layer.first_gradients for layer in layers])
        shares = [self.replicas * len(workers) if shards else 1 for workers in header.holders]
        activations = _until([layer.at[size].activations for layer in layers])
        again = [all(recomputes_all(pipe, stage) for pipe in header.pipes) for stage in range(header.stages)]

        def needed(stage: int, first: int, end: int) -> int:
            whole = activations[end] - activations[first]
            waiting = layers[first].at[size].input if again[stage] else whole
            return (
                standing[end]
                - standing[first]
                + -(-(optimizer[end] - optimizer[first]) // shares[stage])
                + (loads[stage].copies - 1) * (weights[end] - weights[first])
                + -(-loads[stage].waiting * waiting // header.units)
                + whole * again[stage]
            )

        def once(_stage: int, first: int, end: int) -> int:
            return first_gradients[end] - first_gradients[first]

        return balanced(self._seconds, header.holders, needed, limits, once)


def loads_of(header: Header, held: Iterable[Holdings]) -> list[StageLoad]:
    """The most that each stage keeps on any worker, from the holdings of each worker: what it holds at its fullest."""
    loads = [StageLoad(1, 0)] * header.stages
    for holdings in held:
        for stage, copies in holdings.copies:
            loads[stage] = loads[stage]._replace(copies=max(loads[stage].copies, copies))
        for stage, activations, inputs, begun, *_ in chain.from_iterable(holdings.fullest):
            waiting = begun + (inputs or activations)
            loads[stage] = loads[stage]._replace(waiting=max(loads[stage].waiting, waiting))
    return loads


@cache
def _fastest(seconds: tuple[float, ...], stages: int) -> Split | None:
    return balanced(seconds, [()] * stages)


def _until(sizes: Sequence[int]) -> list[int]:
    """Running totals: for each layer the bytes of all layers before it, and at the end the bytes of all layers."""
    return [0, *accumulate(sizes)]
