"""The fastest split of a profile's layers for a configuration within the memory of a worker."""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate

from chimera_ir.ir.ids import Stage
from chimera_ir.planner.compiled import Variant
from chimera_ir.planner.space import Configuration
from chimera_ir.profile.balance import balanced
from chimera_ir.profile.costs import StageCosts
from chimera_ir.profile.layers import durations


def best_split(
    layers: Sequence[StageCosts],
    variant: Variant,
    choice: Configuration,
    limits: Sequence[int] | None,
    sharded_optimizer: bool = False,
) -> tuple[int, ...] | None:
    """The split (first layers of stages) whose slowest stage takes the least time within ``limits``, bytes by worker.

    The bytes of a stage are its weights in all their copies, gradients, optimizer state, and the activations of the
    largest number of micro-batches that wait for a backward at once. Messages do not count. The result is None if no
    split is within the limits; None is no limit.
    """
    compiled, header, size = variant.compiled, variant.header, choice.micro_batch_size
    everywhere = all(stage in pipe.recompute for pipe in header.pipes for stage in range(header.stages))
    seconds = durations(layers, size, recomputing=everywhere)
    if limits is None:
        return _without_limit(tuple(seconds), header.stages)
    shards = sharded_optimizer and not header.asynchronous
    holders = [[w for w, held in enumerate(header.stages_of) if stage in held] for stage in range(header.stages)]
    weights = _until([layer.weights for layer in layers])
    standing = _until([layer.weights + layer.gradients for layer in layers])
    optimizer = _until([layer.optimizer for layer in layers])
    shares = [choice.copies * len(workers) if shards else 1 for workers in holders]
    activations = _until([layer.at[size].activations for layer in layers])
    again = [all(stage in pipe.recompute for pipe in header.pipes) for stage in range(header.stages)]
    copies = [max(compiled.copies[worker][Stage(s)] for worker in workers) for s, workers in enumerate(holders)]
    waiting = compiled.begun

    def needed(stage: int, first: int, end: int) -> int:
        whole = activations[end] - activations[first]
        kept = layers[first].at[size].input if again[stage] else whole
        return (
            standing[end]
            - standing[first]
            + -(-(optimizer[end] - optimizer[first]) // shares[stage])
            + (copies[stage] - 1) * (weights[end] - weights[first])
            + -(-waiting[stage] * kept // header.parts)
            + whole * again[stage]
        )

    return balanced(seconds, holders, needed, limits)


@cache
def _without_limit(seconds: tuple[float, ...], stages: int) -> tuple[int, ...] | None:
    return balanced(seconds, [()] * stages)


def _until(sizes: Sequence[int]) -> list[int]:
    """Running totals: for each layer the bytes of all layers before it, and at the end the bytes of all layers."""
    return [0, *accumulate(sizes)]
