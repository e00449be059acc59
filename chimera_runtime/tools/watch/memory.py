"""``--memory-limit``: the bytes that each rank needs, computed before training and held against what it may have.

The schedule says how much of each stage a rank keeps at once (`RankFacts`). What one forward of each stage keeps is
measured on the first micro-batch. What operators allocate as they run is not counted.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import compress
from typing import Any

import torch

from chimera_runtime.blame import UserCode
from chimera_runtime.errors import FAILED, Misuse
from chimera_runtime.model.ties import by_group
from chimera_runtime.optimizer.sharding import Sharding
from chimera_runtime.program.rank_facts import KeptMicros
from chimera_runtime.program.weight_groups import Group
from chimera_runtime.start.rank_context import RankContext
from chimera_runtime.values.byte_text import byte_text
from chimera_runtime.values.tensors import generators_kept


@dataclass(frozen=True)
class MemoryNeed:
    """What a rank needs, in bytes.

    ``weights`` are all copies, frozen parameters and buffers; ``gradients`` the flat buffers and, once more, those that
    the first backward of the largest stage makes; ``optimizer`` its state; ``messages`` the receive buffers, and what
    is on its way to others and not saved as well; ``activations`` the rest of what waits for a backward.
    """

    weights: int
    gradients: int
    optimizer: int
    messages: int
    activations: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(asdict(self).values())


def refuse_beyond(
    limit: int,
    context: RankContext,
    optimizer: Callable[[list[torch.nn.Parameter]], Any],
    built: dict[int, torch.nn.Module],
    is_sharded: bool = False,
) -> str:
    """What the fullest rank needs, in words, if no rank needs more than ``limit`` bytes; every rank calls it.

    ``is_sharded`` says that the replicas of a stage share the optimizer's state.

    Raises
    ------
    Misuse
        On every rank, if some rank needs more.
    """
    world = context.world
    mine = RankNeed(context, optimizer, built, is_sharded)
    need = mine.need()
    world.control_group.store.set(f"memory/{world.place.rank}", json.dumps([need.total, mine.words(need)]))
    ranks = world.place.ranks
    heard = [
        json.loads(world.control_group.wait_for_key(f"memory/{rank}", rank, f"for the memory that rank {rank} needs"))
        for rank in ranks
    ]
    needs = [total for total, _ in heard]
    fullest = max(ranks, key=needs.__getitem__)
    if needs[fullest] <= limit:
        return f"memory: of {byte_text(limit)}, {heard[fullest][1]}"
    excess = sum(total > limit for total in needs) - 1
    others = f"; {excess} other rank{'s need' if excess > 1 else ' needs'} too much as well" if excess else ""
    job = world.job
    replicated = any(len(world.ranks_of(stage)) > 1 for stage in range(job.stages))
    further = ", or --shard-optimizer" if replicated and not job.period and not is_sharded else ""
    raise Misuse(
        f"--memory-limit {byte_text(limit)}: {heard[fullest][1]}{others}; "
        f"choose a smaller --micro-batch-size, a scheme that recomputes, or more stages{further}"
    )


class RankNeed:
    """Adds up what this rank needs, by the schedule and by what was measured on the first micro-batch."""

    def __init__(
        self,
        context: RankContext,
        optimizer: Callable[[list[torch.nn.Parameter]], Any],
        built: dict[int, torch.nn.Module],
        is_sharded: bool = False,
    ) -> None:
        self._context = context
        self._is_sharded = is_sharded
        self._optimizer = optimizer
        self._facts = context.facts
        self._built = built
        groups = by_group(built, context.ties)
        self._trained = {group: [p for p in all_ if p.requires_grad] for group, all_ in groups.items()}

    def need(self) -> MemoryNeed:
        """The need, by what it is for."""
        return MemoryNeed(
            weights=self._weights(),
            gradients=self._gradients(),
            optimizer=sum(state_bytes(self._optimizer, stepped) for stepped in self._stepped()),
            messages=sum(self._slots(stage) + self._sending(stage) for stage in self._built),
            activations=max((self._moment(kept) for kept in self._facts.kept), default=0),
        )

    def _stepped(self) -> Iterator[list[torch.nn.Parameter]]:
        """What the optimizer of each weight group is given."""
        for group, trained in self._trained.items():
            yield Sharding(self._context.world, group, trained).shards if self._is_sharded else trained

    def words(self, need: MemoryNeed) -> str:
        """A need with the figures of the stages behind it."""
        place = self._context.world.place
        parts = ", ".join(f"{name} {byte_text(count)}" for name, count in asdict(need).items())
        fullest = max(self._facts.kept, key=self._moment, default=())
        stages = "; ".join(self._stage_in_words(*kept) for kept in fullest)
        return f"rank {place.rank} (worker {place.worker}) needs {byte_text(need.total)}: {parts} ({stages})"

    def _stage_in_words(self, stage: int, activations: int, inputs: int, begun: int) -> str:
        footprint, weights = self._context.probed.footprints[stage], self._weights_of(stage)
        kept = [f"{activations} x M_a = {byte_text(footprint.activations)}"] if activations else []
        kept += [f"{inputs} inputs of {byte_text(footprint.inputs)}"] if inputs else []
        halfway = footprint.activations - footprint.released + footprint.operands
        kept += [f"{begun} between I and W of {byte_text(halfway)}"] if begun else []
        copies = self._facts.stages[stage].copies
        return f"stage {stage}: {copies} x M_theta = {byte_text(weights)}{''.join(f', {part}' for part in kept)}"

    def _weights(self) -> int:
        """Buffers and frozen parameters have no versions; of the buffers of a stage that recomputes there is a copy."""
        parameters = {parameter for module in self._built.values() for parameter in module.parameters()}
        copies = {stage: 2 if stage in self._context.world.job.recomputing else 1 for stage in self._built}
        total = bytes_of(parameters)
        total += sum(copies[stage] * bytes_of(module.buffers()) for stage, module in self._built.items())
        stashed: dict[Group, int] = {(stage,): facts.copies - 1 for stage, facts in self._facts.stages.items()}
        stashed |= {tie.stages: tie.copies - 1 for tie in self._facts.ties}
        return total + sum(stashed[group] * bytes_of(trained) for group, trained in self._trained.items())

    def _weights_of(self, stage: int) -> int:
        """What a stage trains, that which it shares included."""
        return sum(bytes_of(trained) for group, trained in self._trained.items() if stage in group)

    def _gradients(self) -> int:
        largest = max(map(self._weights_of, self._built), default=0)
        counts = sum(p.element_size() for trained in self._trained.values() for p in trained)
        return sum(map(bytes_of, self._trained.values())) + counts + largest

    def _slots(self, stage: int) -> int:
        facts = self._facts.stages[stage]
        return sum(facts.inputs) * self._message(stage - 1) + sum(facts.gradients) * self._answer(stage)

    def _sending(self, stage: int) -> int:
        """What a stage saves of its results is counted with its activations; one that runs again saves nothing."""
        footprint = self._context.probed.footprints[stage]
        activations, gradients = self._facts.stages[stage].sending
        saved = 0 if stage in self._context.world.job.recomputing else footprint.saved_results
        return activations * (footprint.results - saved) + gradients * self._answer(stage - 1)

    def _message(self, stage: int) -> int:
        """What a stage hands on of one micro-batch; none does before the first."""
        if stage < 0:
            return 0
        boundary = self._context.probed.boundaries[stage]
        return sum(map(_tensor, boundary.shapes, boundary.dtypes))

    def _answer(self, stage: int) -> int:
        """The gradients that come back for that, and the count that comes with them; none do to the last."""
        if not 0 <= stage < len(self._context.probed.boundaries):
            return 0
        boundary = self._context.probed.boundaries[stage]
        count = torch.float64.itemsize if boundary.counted else 0
        return count + sum(compress(map(_tensor, boundary.shapes, boundary.dtypes), boundary.differentiable))

    def _moment(self, kept: Iterable[KeptMicros]) -> int:
        """While the first half of a backward runs, what it makes is there beside what it lets go of."""
        halving = [self._halving(stage) for stage, _, _, begun in kept if begun]
        return max(halving, default=0) + sum(
            activations * self._pass(stage) + inputs * self._input(stage) + begun * self._halfway(stage)
            for stage, activations, inputs, begun in kept
        )

    def _pass(self, stage: int) -> int:
        """What a forward keeps; of an input that was received, that is in the receive buffer."""
        footprint = self._context.probed.footprints[stage]
        if self._is_received(stage):
            return footprint.activations - footprint.saved_inputs
        return footprint.activations + (footprint.inputs - footprint.saved_inputs if stage else 0)

    def _halfway(self, stage: int) -> int:
        """What is kept between the halves of a backward; gradients that were received are in their receive buffer."""
        return self._pass(stage) - self._context.probed.footprints[stage].released + self._operands(stage)

    def _operands(self, stage: int) -> int:
        probed, job = self._context.probed, self._context.world.job
        footprint = probed.footprints[stage]
        received = footprint.received_operands if self._is_answered(stage) else 0
        apart = self._weights_of(stage) if probed.traits[stage].whole and job.period else 0
        return footprint.operands - received + apart

    def _halving(self, stage: int) -> int:
        return min(self._context.probed.footprints[stage].released, self._operands(stage))

    def _input(self, stage: int) -> int:
        """What a forward keeps that is to be run again."""
        footprint = self._context.probed.footprints[stage]
        module, changed = self._built[stage], self._context.probed.traits[stage].buffers
        buffers = bytes_of(module.get_buffer(name) for name in changed)
        return footprint.targets + buffers + (0 if self._is_received(stage) else footprint.inputs)

    def _is_received(self, stage: int) -> bool:
        """Whether all inputs of a stage come from other workers."""
        return stage > 0 and not self._has_both(stage - 1)

    def _is_answered(self, stage: int) -> bool:
        """Whether all gradients of what a stage hands on come from other workers."""
        return stage < self._context.world.job.stages - 1 and not self._has_both(stage)

    def _has_both(self, stage: int) -> bool:
        """Whether this worker holds a stage and the next one in the same pipe."""
        worker = self._context.world.place.worker
        return any(pipe[stage] == pipe[stage + 1] == worker for pipe in self._context.world.job.placement)


def _tensor(shape: Sequence[int], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of tensors, each counted."""
    return sum(t.numel() * t.element_size() for t in tensors)


def state_bytes(make: Callable[[list[torch.nn.Parameter]], Any], parameters: list[torch.nn.Parameter]) -> int:
    """The bytes of an optimizer's state, from a step on parameters without memory; two per weight if that fails."""
    try:
        with generators_kept():
            steps = make([_stand_in(parameter) for parameter in parameters])
            with UserCode("a step to measure the state of the optimizer", FAILED):
                steps.step()
        states = getattr(steps, "state", {}).values()
        return bytes_of(t for state in states for t in state.values() if isinstance(t, torch.Tensor))
    except Exception:
        return 2 * bytes_of(parameters)


def _stand_in(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """A parameter of the same shape, with the same attributes and a gradient, but without memory."""
    made = torch.nn.Parameter(torch.empty_like(parameter, device="meta"))
    made.__dict__.update(parameter.__dict__)
    made.grad = torch.empty_like(made)
    return made
