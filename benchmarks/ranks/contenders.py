"""The systems that are compared: each makes one update of the same model on the same ranks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import pipelining
from torch.distributed.distributed_c10d import PrefixStore
from torch.utils.data import default_collate

from chimera_runtime.data.micro_batch_source import Batches
from chimera_runtime.model.model import ModelFile
from chimera_runtime.pipeline import Pipeline
from chimera_runtime.program.compiled_program import load
from chimera_runtime.program.job import Job
from chimera_runtime.ranks.world import World
from chimera_runtime.stage.stage import Stage
from chimera_runtime.start import assemble as build
from chimera_runtime.start import probe
from chimera_runtime.start.assemble import RankContext, components_of, lane_of
from chimera_runtime.tools.loop.saving import Optimizers, rehearsed
from chimera_runtime.values.nested import to_device


@dataclass(frozen=True)
class Task:
    """What all contenders of a comparison do: ``micro_batches`` of ``micro_batch_size`` items through a model.

    ``rehearsal`` holds where a generated program is to sleep as ``--rehearse`` does, without the model's modules.
    """

    model: ModelFile
    micro_batches: int
    micro_batch_size: int
    rehearsal: Mapping[str, float] | None


class Contender(Protocol):
    """A system, ready to run."""

    def step(self) -> None:
        """Runs this rank's part of one update."""

    def close(self) -> None:
        """Gives back the communicators of its own, whose threads would be charged to what is measured next."""


class Generated:
    """A directory that chimera-compile wrote."""

    def __init__(self, world: World, task: Task, directory: Path) -> None:
        compiled = load(directory)
        job, script = compiled.job, compiled.script(world.place.worker)
        world = _world(world, job, directory.name)
        batches = Batches(task.model.dataset(), task.micro_batch_size, job.micro_batches, job.parts, 1, 0, seed=0)
        built = build.modules(world, task.model, 0)
        findings = probe.probe_stages(world, task.model, batches, built, seed=0, measures=False)
        facts = compiled.ranks[world.place.worker]
        source = batches if task.rehearsal is None else None
        setting = RankContext(world, script, facts, task.model, findings, 0, source)
        self._world = world
        make_stage = Stage if task.rehearsal is None else rehearsed(task.rehearsal, job)
        self._stages = build.assemble(setting, built, task.model.steps, make_stage)
        self._lane = lane_of(setting, components_of(setting, self._stages))
        self._update = script.update
        self._number = 0

    def step(self) -> None:
        """As train.py runs an update."""
        self._lane.begin(self._number)
        self._update(self._lane)
        for stage in self._stages.values():
            stage.take_loss(self._number)
        self._number += 1

    def close(self) -> None:
        """Destroys the groups of its gradient sums."""
        for group, _ in self._world.sums.values():
            if group is not None:
                dist.destroy_process_group(group)


class Loop:
    """A directory that chimera-compile wrote, in a training loop as train.py has it."""

    def __init__(self, world: World, task: Task, directory: Path) -> None:
        job, model = load(directory).job, task.model
        self._batches = Batches(model.dataset(), task.micro_batch_size, job.micro_batches, job.parts, 1, 0, seed=0)
        timeout = world.control_group.timeout
        self._pipe = Pipeline(directory, model.build_stage, model.loss, self._batches, timeout=timeout)
        self._optimizers = Optimizers(model, self._pipe.stages, seed=0, idle=False)

    def step(self) -> None:
        """Forward, backward, sums; then the steps."""
        self._pipe.step(self._batches)
        self._optimizers.step()
        self._optimizers.zero_grad()

    def close(self) -> None:
        """Destroys the groups of the pipeline."""
        self._pipe.close()


def _world(world: World, job: Job, name: str) -> World:
    """The same ranks with the communicators of another job."""
    control = world.control_group
    names, store = replace(control.names, stages=job.stages), PrefixStore(name, control.store)
    world = replace(world, job=job, control_group=replace(control, names=names, store=store), sums={})
    for stage in range(job.stages):
        ranks = world.ranks_of(stage)
        group = dist.new_group(ranks) if len(ranks) > 1 else None
        if world.place.rank in ranks:
            world.sums[stage,] = group, tuple(ranks)
    return world


class WholeBatches(Loop):
    """As `Loop`, with mini-batches that are made as those of `Peer`, on ranks that use them."""

    def __init__(self, world: World, task: Task, directory: Path) -> None:
        super().__init__(world, task, directory)
        self._data = _Data(task, world.device)

    def step(self) -> None:
        """Forward, backward, sums; then the steps."""
        held = self._pipe.stages
        inputs = self._data.inputs() if 0 in held else None
        targets = self._data.targets() if self._pipe.job.stages - 1 in held else None
        self._pipe.step((inputs, targets))
        self._data.advance()
        self._optimizers.step()
        self._optimizers.zero_grad()


class Numbers(Loop):
    """As `Loop`, several updates in a step, each of so many micro-batches."""

    def __init__(self, world: World, task: Task, directory: Path, numbers: Sequence[int]) -> None:
        super().__init__(world, task, directory)
        self._values = [torch.zeros(number * task.micro_batch_size, 1) for number in numbers]

    def step(self) -> None:
        """All updates, one after the other."""
        for values in self._values:
            self._pipe.step((values, values))
            self._optimizers.step()
            self._optimizers.zero_grad()


class Peer:
    """A schedule with the interface of torch.distributed.pipelining, used as its documentation says."""

    def __init__(
        self, task: Task, make_schedule: Callable[[pipelining.PipelineStage], Any], device: torch.device
    ) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        module = task.model.stage(rank, ranks, 0, device)
        self._optimizer = task.model.steps(list(module.parameters()))
        stage = pipelining.PipelineStage(module, rank, ranks, device)
        self._schedule = make_schedule(stage)
        self._data = _Data(task, device)
        self._module = module
        self._first, self._last = stage.is_first, stage.is_last

    def step(self) -> None:
        """Forwards and backwards of all micro-batches, then the optimizer's step."""
        inputs = (self._data.inputs(),) if self._first else ()
        targets = {"target": self._data.targets(), "losses": []} if self._last else {}
        self._schedule.step(*inputs, **targets, return_outputs=False)
        self._data.advance()
        self._optimizer.step()
        self._module.zero_grad()

    def close(self) -> None:
        """Gives back what a compiled schedule has made; those of torch have used the group of all ranks alone."""
        getattr(self._schedule, "close", lambda: None)()


class ListedPeer:
    """A schedule of torch.distributed.pipelining that takes a list of stages, some of so many in all."""

    def __init__(self, task: Task, schedule: str, numbers: Sequence[int], stages: int, device: torch.device) -> None:
        modules = [task.model.stage(number, stages, 0, device) for number in numbers]
        parts = zip(modules, numbers, strict=True)
        listed = [pipelining.PipelineStage(module, number, stages, device) for module, number in parts]
        self._optimizer = task.model.steps([parameter for module in modules for parameter in module.parameters()])
        self._schedule = getattr(pipelining, schedule)(listed, task.micro_batches, loss_fn=task.model.loss)
        self._data = _Data(task, device)
        self._modules = modules
        self._first, self._last = 0 in numbers, stages - 1 in numbers

    def step(self) -> None:
        """Forwards and backwards of all micro-batches, then the optimizer's step."""
        inputs = (self._data.inputs(),) if self._first else ()
        targets = {"target": self._data.targets(), "losses": []} if self._last else {}
        self._schedule.step(*inputs, **targets, return_outputs=False)
        self._data.advance()
        self._optimizer.step()
        for module in self._modules:
            module.zero_grad()

    def close(self) -> None:
        """Has used the group of all ranks alone."""


class OneProcess:
    """Rank 0 alone, with so many threads; the other ranks wait."""

    def __init__(self, task: Task, threads: int, device: torch.device) -> None:
        self._task = task
        self._threads = threads
        self._data = _Data(task, device)
        self._works = dist.get_rank() == 0
        stages = dist.get_world_size()
        parts = [task.model.stage(s, stages, 0, device) for s in range(stages)] if self._works else []
        self._module = torch.nn.Sequential(*parts)
        self._optimizer = task.model.steps(list(self._module.parameters()))

    def step(self) -> None:
        """One micro-batch after the other."""
        if not self._works:
            return
        threads = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        count = self._task.micro_batches
        for x, y in zip(self._data.inputs().chunk(count), self._data.targets().chunk(count), strict=True):
            torch.autograd.backward(self._task.model.loss(self._module(x), y) / count)
        self._data.advance()
        self._optimizer.step()
        self._module.zero_grad()
        torch.set_num_threads(threads)

    def close(self) -> None:
        """Has used no group."""


class _Data:
    """The items of one update after the other, in the dataset's order, on a device."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self._dataset = task.model.dataset()
        self._device = device
        self._size = task.micro_batches * task.micro_batch_size
        self._next = 0

    def _collated(self, part: int) -> Any:
        items = [self._dataset[i][part] for i in range(self._next, self._next + self._size)]
        return to_device(default_collate(items), self._device)

    def inputs(self) -> Any:
        """The whole batch's inputs."""
        return self._collated(0)

    def targets(self) -> Any:
        """The whole batch's targets."""
        return self._collated(1)

    def advance(self) -> None:
        """Goes on to the next update."""
        self._next = (self._next + self._size) % (len(self._dataset) - self._size)
