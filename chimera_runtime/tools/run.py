"""Run of train.py on this rank: everything around the training loop that the options ask for."""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.distributed.distributed_c10d import Store

from chimera_runtime.check.check import check, checked_updates
from chimera_runtime.data.item_order import is_stream
from chimera_runtime.data.loader import Loader
from chimera_runtime.data.micro_batch_source import Batches
from chimera_runtime.errors import Misuse, PeerLost
from chimera_runtime.errors.tools import REHEARSAL_IS_FOR_CPUS
from chimera_runtime.lane.lane import LaneComponents
from chimera_runtime.model.model import ModelFile
from chimera_runtime.model.ties import by_group
from chimera_runtime.optimizer.sharding import require_memory_apart
from chimera_runtime.pipeline import Pipeline
from chimera_runtime.program.compiled_program import CompiledProgram
from chimera_runtime.program.job import Job, Place
from chimera_runtime.ranks.devices import keep_memory
from chimera_runtime.stage.stage import Stage
from chimera_runtime.start.assemble import RankContext
from chimera_runtime.tools.fail.faults import Faults
from chimera_runtime.tools.loop.saving import Optimizers, Saving, optimizer_of, rehearsed, under_autocast
from chimera_runtime.tools.open.stdio import release, reserve, write_error, write_line
from chimera_runtime.tools.record.recorder import Recorder, prepare, traced
from chimera_runtime.tools.watch.memory import (
    PeakMemory,
    RankNeed,
    computing_dtype,
    peak_seconds,
    refuse_beyond,
    resident,
    smallest_share,
)
from chimera_runtime.tools.watch.progress import (
    Log,
    Metrics,
    PartialOutcomes,
    Progress,
    Sinks,
    TensorBoard,
    UpdateEnds,
    Validation,
    torch_profile,
)
from chimera_runtime.tools.watch.progress import prepare as prepare_profile
from chimera_runtime.update.stage_optimizer import Named, StageStep
from chimera_runtime.update.updates import Hooks, Outcome, Outcomes

_DTYPES = {"bf16": torch.bfloat16}

_TERMINATED = "terminated"
"""Key in the store: name of the signal that has come to a rank which saves before it ends."""


@dataclass
class Run(Hooks):
    """Model file, data and options of a run. As the `Hooks` of a `Pipeline` it does what options ask for at start.

    ``device`` is the device of this rank's stages, and ``model`` has the functions of the model file. With
    ``--eval-every``, ``held_out`` evaluates the items of the model file's ``validation``.
    """

    options: argparse.Namespace
    compiled: CompiledProgram
    store: Store
    place: Place
    device: torch.device
    model: ModelFile
    faults: Faults
    sinks: Sinks = field(init=False)
    held_out: Validation = field(init=False)
    _context: RankContext = field(init=False)
    _modules: dict[int, torch.nn.Module] = field(init=False)
    _stages: dict[int, Stage] = field(init=False)
    _schedulers: dict[Any, Any] = field(default_factory=dict)
    _loaders: list[Loader] = field(default_factory=list)
    _reserved: list[Path | None] = field(default_factory=list)
    _recorder: Recorder | None = None
    _progress: Progress | None = None
    _peak_memory: PeakMemory | None = None
    _torch_profile: torch.profiler.profile | None = None
    explains = False  # a rank that has lost another ends by `Faults.lost`, which follows the waits of all

    def __post_init__(self) -> None:
        options = self.options
        if options.rehearse and self.device.type != "cpu":
            raise Misuse(REHEARSAL_IS_FOR_CPUS)
        self.measures = options.memory_limit is not None or options.peak_memory
        self.loads = options.rehearse is None
        if options.autocast is not None:
            self.model = under_autocast(self.model, self.device.type, _DTYPES[options.autocast])
        _ = self.batches
        self.held_out = Validation(self.model, options, self.compiled.job, self.place)
        self.faults.at_end.append(lambda _message: release(self._reserved))
        self.sinks = self._open()
        if not self.place.rank:
            self.faults.at_end.append(self._keep)
        self._before = resident()

    def _open(self) -> Sinks:
        options, job = self.options, self.compiled.job
        items = options.micro_batch_size * job.micro_batches * self.place.copies
        if self.place.rank:
            return Sinks(items=items)
        if options.metrics is not None:
            self.reserve("--metrics", options.metrics)
        kinds = (Metrics, options.metrics), (TensorBoard, options.tensorboard), (Log, options.log_file)
        return Sinks([kind(path) for kind, path in kinds if path is not None], items, options.stop_on_nan)

    def reserve(self, option: str, path: Path) -> None:
        """Reserves a file that rank 0 writes; raises `Misuse` if another job will write it."""
        if not self.place.rank:
            self._reserved.append(reserve(option, path, self.store))

    def _keep(self, _message: str) -> None:
        if self._progress is not None:
            self._progress.keep()
        for sink in self.sinks.sinks:
            sink.keep()

    # ---- what the training loop asks for

    @cached_property
    def batches(self) -> Batches:
        """Micro-batches of the dataset, for the start and for the check; a rank loads only those that it needs."""
        job, place, size = self.compiled.job, self.place, self.options.micro_batch_size
        dataset, model = self.model.items(), self.model
        sizes = size, job.micro_batches, job.parts, place.copies, place.copy
        rest = self.options.seed, model.collate, model.order(dataset), job.slices, model.cut_slice
        batches = Batches(dataset, *sizes, *rest, lengths=job.lengths)
        batches.check()
        return batches

    def loader(self, pipe: Pipeline) -> Loader:
        """Returns the dataset as mini-batches, loaded by ``--data-workers`` processes while the ranks compute."""
        dataset, options = self.batches.dataset, self.options
        streams, sampler = is_stream(dataset), self.batches.sampler
        loader = pipe.loader(
            self.model.items() if streams else dataset,  # the first items of the other stream have been read
            shuffle=not streams and sampler is None,
            sampler=sampler,
            collate_fn=self.model.collate,
            num_workers=options.data_workers,
            pin_memory=self.device.type == "cuda",
        )
        self._loaders.append(loader)
        return loader

    def mini_batches(self, loader: Loader) -> Iterator[Any]:
        """Yields the mini-batches of all epochs, one after the other; a rehearsal loads none."""
        while self.loads:
            yield from loader
        while True:
            yield self.batches

    @property
    def updates(self) -> int:
        """Number of updates that the run should reach: 0 with ``--check-only``."""
        return 0 if self.options.check_only else int(self.options.steps)

    def optimizers(self, pipe: Pipeline) -> Optimizers:
        """Makes the model file's optimizers; with ``--trace`` each steps at its place in the schedule."""
        options, idle, context = self.options, self.options.rehearse is not None, self._context
        sharded_over = context.world if options.shard_optimizer else None
        if sharded_over is not None:
            require_memory_apart(sharded_over, by_group(pipe.stages, context.ties), pipe.names)
        optimizers = Optimizers(
            self.model, self._modules, options.seed, idle, context.ties, options.steps, sharded_over=sharded_over
        )
        if self._recorder is not None and options.clip_norm is None:
            for group in {group for stage in self._stages.values() for group in stage.groups}:
                group.on_step = optimizers.step_in_lane
        return optimizers

    def stage_optimizer(self, named: Named) -> Any:
        """Makes the model file's optimizer and scheduler for a stage that steps inside the schedule."""
        optimizer = self.model.steps([parameter for _, parameter in named])
        if (scheduler := self.model.schedule(optimizer, self.options.steps)) is not None:
            self._schedulers[optimizer] = scheduler
        return optimizer

    def stage_stepped(self, step: StageStep) -> None:
        """Steps the scheduler of a stage that has stepped inside the schedule."""
        if step.optimizer in self._schedulers:
            self._schedulers[step.optimizer].step()

    def saving(self, pipe: Pipeline, loader: Loader, optimizers: Optimizers | None = None) -> Saving:
        """Loads and resumes as the options ask; with ``--save`` a SIGTERM or Ctrl-C then asks for a checkpoint."""
        made = list(pipe.optimizers.values()) if optimizers is None else list(optimizers)
        schedulers = list(self._schedulers.values()) if optimizers is None else optimizers.schedulers
        write: Callable[[str], None] = (lambda _text: None) if self.place.rank else write_line
        store = self.store

        def termination() -> str | None:
            return store.get(_TERMINATED).decode() if store.check([_TERMINATED]) else None

        def terminate(name: str) -> None:
            store.set(_TERMINATED, name)
            pipe.ask_to_stop()
            if name == "SIGINT" and not self.place.rank:
                write_error("train.py: SIGINT: saving after this update; Ctrl-C again ends at once")

        saving = Saving(
            *(self.options, pipe, made, schedulers),
            shared={"data": loader},
            write=write,
            termination=termination,
            describe=self.model.describe,
            reserve=self.reserve,
        )
        saving.begin()
        if optimizers is not None:
            optimizers.count_from(pipe.updates)
        if self.options.save is not None:
            self.faults.at_sigterm = terminate
        return saving

    def on_step(self, pipe: Pipeline, outcome: Outcome) -> None:
        """Calls the model file's ``on_step`` after an update, on every rank; not in a rehearsal."""
        if self._torch_profile is not None:
            self._torch_profile.step()
        if self._recorder is not None:
            self._recorder.spill()
        if self.loads:
            self.model.stepped(pipe, outcome)

    @contextmanager
    def progress(self, before: int) -> Iterator[Progress]:
        """Reports updates while the loop runs, ``before`` of which were made by an earlier run."""
        world, rehearsal = self._context.world, self.options.rehearse is not None
        progress = self._progress = Progress(world, self.options.steps, rehearsal, self.sinks, before)
        if world.job.period:
            ends = UpdateEnds(progress, len(self._stages))
            for stage in self._stages.values():
                stage.on_step = ends.stepped
        directory = self.options.torch_profile
        updates = self.updates - before
        with nullcontext() if directory is None else torch_profile(directory, self.place.rank, updates) as profile:
            self._torch_profile = profile
            yield progress
        progress.finish()
        if self._peak_memory is not None:
            for line in self._peak_memory.lines():
                progress.write_line(line)
        if self._recorder is not None:
            self._recorder.close()

    def close(self) -> None:
        """Closes files and data workers after the training, when all ranks have ended it."""
        for loader in self._loaders:
            loader.close()
        if self._progress is not None:
            self._progress.close()
        release(self._reserved)

    # ---- the hooks

    def lost(self, error: PeerLost) -> None:
        """Ends this rank with the message of the rank that failed first."""
        self.faults.lost(error)

    def remark(self, remark: str) -> None:
        """Prints a remark."""
        write_line(remark)

    def ready(self, context: RankContext, modules: dict[int, torch.nn.Module]) -> None:
        """Limits memory, checks and measures before the first update, each if options ask for it."""
        options, world, model = self.options, context.world, self.model
        self._context, self._modules = context, modules
        need = RankNeed(context, model.steps, modules, options.shard_optimizer)

        # Files and limits: errors come before the check, which takes long.
        if options.trace is not None:
            prepare(world.control_group, options.trace, self.compiled.directory)
        if options.torch_profile is not None:
            prepare_profile(self.store, options.torch_profile)
        if options.memory_limit is not None:
            limit = options.memory_limit
            if limit == "device":
                limit = smallest_share(world.control_group, world.device)
            remark = refuse_beyond(limit, need)
            if world.place.rank == 0:
                write_line(remark)

        if options.check or options.check_only:
            if world.place.rank == 0:
                updates = checked_updates(world.job)
                write_line(f"checking {updates} updates against training in one process ..")
            sharded_over = world if options.shard_optimizer else None
            verdict = check(
                replace(context, source=self.batches),
                *(model, options.micro_batch_size, modules),
                optimizer_of=lambda group, parameters: optimizer_of(model, group, parameters, sharded_over),
            )
            if verdict is not None:
                write_line(verdict)

        # Measurements of the training that follows.
        if options.device_peak is not None:
            peak = None if options.device_peak == "auto" else options.device_peak
            seconds = peak_seconds(context, modules, peak, computing_dtype(modules, model.autocast))
            self.sinks = replace(self.sinks, peak_seconds=seconds)
        if self.device.type == "cpu":
            keep_memory()
        if options.peak_memory:
            self._peak_memory = PeakMemory(need, self._before)

    def stage_maker(self, job: Job) -> Callable[..., Stage]:
        """Returns the class `Stage`, or in a rehearsal a function that makes stages which sleep."""
        rehearse = self.options.rehearse
        return Stage if rehearse is None else rehearsed(rehearse, job)

    def wrapped(self, components: LaneComponents, stages: dict[int, Stage]) -> LaneComponents:
        """Returns the components of the lane; with ``--trace``, wrapped to record each call, written also if the run
        fails.
        """
        self._stages = stages
        if self.options.trace is None:
            return components
        self._recorder = Recorder(self._context.world, self.options, stages.values())
        self.faults.at_end.append(self._recorder.abandon)
        return traced(components, self._recorder)

    def outcomes_class(self, job: Job) -> type[Outcomes]:
        """The class of outcomes; if updates overlap, one without losses, which `Progress` gathers at less cost, unless
        the model file's ``on_step`` may read them or the first micro-batch reported something.
        """
        reads = self.model.on_step is not None or self._context.probed.reports
        return PartialOutcomes if job.period and not reads else Outcomes
