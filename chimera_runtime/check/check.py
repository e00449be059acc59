"""``--check``: runs the generated scripts and compares them with one process, update by update, stage by stage."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from chimera_runtime.check import full_model, whole_sequences
from chimera_runtime.check.compare import RankResult, compare
from chimera_runtime.check.reference import Reference, Training
from chimera_runtime.errors.check import ranks_differ_from_one_process
from chimera_runtime.model.arguments import label
from chimera_runtime.model.model import ModelFile
from chimera_runtime.model.naming import parameters_by_name
from chimera_runtime.model.ties import by_group, refuse_undeclared
from chimera_runtime.optimizer.sharded_optimizer import ShardedOptimizer
from chimera_runtime.program.job import Job
from chimera_runtime.program.weight_groups import Group
from chimera_runtime.stage.auxiliary_losses import collecting
from chimera_runtime.stage.module_state import state_of
from chimera_runtime.stage.saved_tensors import memory_of
from chimera_runtime.stage.stage import Stage
from chimera_runtime.start import assemble as build
from chimera_runtime.start.lane_components import components_of, lane_of, run_stream
from chimera_runtime.start.rank_context import RankContext
from chimera_runtime.values.losses import added
from chimera_runtime.values.meta_weights import require_values
from chimera_runtime.values.tensors import all_generators_kept

MakeOptimizer = Callable[[Group, list[torch.nn.Parameter]], Any]
"""Function that makes the optimizer of a weight group."""


@dataclass
class WatchedOptimizer:
    """Optimizer that copies the gradients of each of its steps to the host's memory."""

    parameters: list[torch.nn.Parameter]
    optimizer: Any
    gradients: list[list[torch.Tensor | None]] = field(default_factory=list)

    def step(self) -> None:
        """Copies every gradient, and steps."""
        self.gradients.append([None if p.grad is None else _copy(p.grad) for p in self.parameters])
        self.optimizer.step()

    def gather(self) -> None:
        """Gathers the shards of other replicas, if the state is sharded."""
        if isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer.gather()


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def check(
    context: RankContext,
    model: ModelFile,
    micro_batch_size: int,
    built: dict[int, torch.nn.Module],
    optimizer_of: MakeOptimizer,
) -> str | None:
    """Trains some updates on the ranks and in one process; returns the differences as text on rank 0, else None.

    ``built`` are the modules of this rank's stages, which do not change: the check trains others. ``optimizer_of``
    makes the optimizer with which the ranks step a weight group.

    Raises `CheckFailed` on rank 0, if they differ by more than the tolerance.
    """
    world, job = context.world, context.world.job
    require_values(
        {f"{name} of stage {stage}": p for stage, module in built.items() for name, p in module.named_parameters()},
        "the check compares gradients at the initial weights, which only a build_stage on a real device gives",
    )
    reference = Reference(
        model=model,
        stages=job.stages,
        micro_batch_size=micro_batch_size,
        micro_batches=job.micro_batches,
        parts=job.parts,
        copies=world.place.copies,
        seed=context.seed,
        device=world.device,
        ties={tie.stages: tie.parameters for tie in context.ties},
        listening=collecting,
        slices=job.slices,
        lengths=job.lengths,
        label=lambda modules: label(parameters_by_name(model, dict(enumerate(modules)), context.ties)),
    )
    period, reads = (job.period, job.reads) if job.period else (job.passes, (((0, job.passes),),) * job.stages)
    updates = checked_updates(job)
    with all_generators_kept():
        own_model = _compare_own_model(context, model, reference)

        # The check trains stages that it builds itself; memory that they share with the training's is put back.
        states = [state_of(module, context.probed.traits[number].touched) for number, module in built.items()]
        rebuilt = build.modules(world, model, context.seed)
        in_common = [Snapshot(tensor) for tensor in shared(built, rebuilt)]
        result = _run(context, rebuilt, updates, optimizer_of)
        for snapshot in in_common:
            snapshot.restore()
        verdict = compare(
            world.control_group,
            job,
            result,
            names=context.probed.auxiliary,
            updates=updates,
            begin=lambda: Training(reference, period, reads),
            inspect=lambda modules: refuse_undeclared(dict(enumerate(modules)), context.ties, model),
        )
        for snapshot in in_common:
            snapshot.restore()
        for state, contents in states:
            state.restore(contents)
    if verdict is not None and not verdict.passed:
        raise ranks_differ_from_one_process(f"{verdict}")
    return None if verdict is None else "\n  ".join([str(verdict), *own_model])


def _compare_own_model(context: RankContext, model: ModelFile, reference: Reference) -> list[str]:
    """Compares the stages with ``reference()``, if there is one, and on slices with themselves on whole sequences.

    Returns on rank 0 a line for each comparison. The other ranks wait for rank 0, which compares.
    """
    world = context.world
    if model.reference is None and reference.slices == 1:
        return []
    if world.place.rank:
        world.control_group.wait_for_key("check/own", 0, "for the model in one process", math.inf)
        return []
    agreements: list[object] = []
    if reference.slices > 1:
        agreements.append(whole_sequences.compare(reference, model.autocast))
    if model.reference is not None:
        tied = [ends for tie in context.ties for ends in tie.parameters]
        agreements.append(full_model.compare(whole_sequences.unsliced(reference), model, tied))
    world.control_group.store.set("check/own", "1")
    return [*map(str, agreements)]


def shared(built: dict[int, torch.nn.Module], rebuilt: dict[int, torch.nn.Module]) -> list[torch.Tensor]:
    """Returns the tensors of ``built`` whose memory ``rebuilt`` uses too, as ``build_stage`` may reuse weights."""
    memory = memory_of([*_tensors(rebuilt)]).keys()
    return [tensor for tensor in _tensors(built) if memory_of(tensor).keys() & memory]


def _tensors(modules: dict[int, torch.nn.Module]) -> Iterator[torch.Tensor]:
    for module in modules.values():
        yield from (*module.parameters(), *module.buffers())


class Snapshot:
    """Values of a tensor, and the memory that they are in: `restore` gives the tensor both."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._place = tensor.data
        self._values = tensor.detach().clone()

    def restore(self) -> None:
        """Gives the tensor its memory and values again, without a gradient."""
        self._tensor.data = self._place
        self._tensor.data.copy_(self._values)
        self._tensor.grad = None


def checked_updates(job: Job) -> int:
    """Number of updates that are checked: 3, or where they overlap at least 4 and 2 * workers + 2 micro-batches."""
    return max(4, -(-(2 * job.workers + 2) // job.micro_batches)) if job.period else 3


def _run(
    context: RankContext, built: dict[int, torch.nn.Module], updates: int, optimizer_of: MakeOptimizer
) -> RankResult:
    watched: list[WatchedOptimizer] = []
    groups = iter(by_group(built, context.ties))

    def watch(parameters: list[torch.nn.Parameter]) -> WatchedOptimizer:
        watched.append(WatchedOptimizer(parameters, optimizer_of(next(groups), parameters)))
        return watched[-1]

    stages = build.assemble(context, built, watch, partial(Stage, is_compared=lambda _update: True))
    lane = lane_of(context, components_of(context, stages))
    if context.world.job.period:
        run_stream(context, lane, updates)
    else:
        for update in range(updates):
            lane.begin(update)
            context.script.update(lane)
            for optimizer in watched:
                optimizer.gather()
    optimizers = dict(zip(by_group(built, context.ties), watched, strict=True))
    return RankResult(
        {group: optimizer.gradients for group, optimizer in optimizers.items()},
        {group: [_copy(p) for p in optimizer.parameters] for group, optimizer in optimizers.items()},
        [added(stage.take_loss(update) for stage in stages.values()) for update in range(updates)],
    )
