"""`CompiledSchedule`: a compiled schedule with the interface of those of torch.distributed.pipelining."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from chimera_runtime.adapter.batch_pipeline import BatchPipeline
from chimera_runtime.adapter.batches import Cutting, TorchBatch, require, require_rows
from chimera_runtime.adapter.given_stages import CalledStage, GivenStages, make_replicas_equal
from chimera_runtime.adapter.results import LossFactor, Results, losses_of
from chimera_runtime.errors import Misuse
from chimera_runtime.errors import adapter as mistakes
from chimera_runtime.errors.ranks import NO_PROCESS_GROUP
from chimera_runtime.pipeline import Pipeline
from chimera_runtime.program.compiled_program import load
from chimera_runtime.ranks.world import refuse_to_join
from chimera_runtime.values.last_stage import modules_in


def stages_of(directory: str | Path, rank: int) -> tuple[int, ...]:
    """The stages that a rank of the pipeline's process group holds, ascending; it makes a module for each.

    Parameters
    ----------
    directory
        The directory that ``chimera compile`` wrote.
    rank
        The rank within the process group of the pipeline, such as ``dist.get_rank(group)``.

    Raises
    ------
    Misuse
        If there is no program in the directory.
    """
    return tuple(s for s, workers in enumerate(load(Path(directory)).job.holders) if rank in workers)


class CompiledSchedule:
    """A compiled schedule with the interface of those of torch.distributed.pipelining.

    A script or a trainer that uses one of torch's changes the line that makes it. In bidirectional schedules several
    ranks hold the first stage, or the last one: each of them is given the inputs, or the targets, of the whole batch.
    Gradients are summed over the replicas of a stage; losses and outputs are there on every rank with the last stage.
    Calls raise Misuse if arguments do not fit together, else the errors of `Pipeline`.

    The first `step` or `eval` joins the ranks, gives the replicas of a stage the parameters and buffers of the first
    rank that holds it, and learns shapes from the batch; later batches have these shapes. Until then the modules may be
    built on the meta device, wrapped and initialized. All ranks make the same calls in the same order.

    Parameters
    ----------
    directory
        The directory that ``chimera compile`` wrote; its schedule has a flush, and no slices.
    stages
        The stages of this rank, which `stages_of` names: PipelineStage objects, or one of them, or their modules by the
        number of the stage. A module is called as in torch: with the inputs of `step`, or with the outputs of the stage
        before, as positional arguments, and with this rank's keyword arguments.
    loss_fn
        ``loss_fn(output, target, **loss_kwargs)``, the loss of a micro-batch. Without it `step` runs forwards alone.
    args_chunk_spec, kwargs_chunk_spec, output_merge_spec
        Along which dimensions batches are cut, and outputs are merged, as in torch.
    scale_grads
        Whether gradients are those of the mean of the losses of the micro-batches, or else of their sum.
    group
        The process group of the pipeline; by default that of the PipelineStage objects, or all ranks.
    device
        The device of the stages; by default that of the PipelineStage objects, or as for `Pipeline`.
    communicators, seed, timeout
        As for `Pipeline`. Random numbers of the stages follow from the seed.

    Attributes
    ----------
    n_microbatches
        The number of micro-batches into which a batch is cut; where a schedule cuts these in parts, that of the parts.
    """

    def __init__(
        self,
        directory: str | Path,
        stages: Any,
        loss_fn: Callable[..., Any] | None = None,
        *,
        args_chunk_spec: tuple[Any, ...] | None = None,
        kwargs_chunk_spec: dict[str, Any] | None = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        communicators: str | None = None,
        seed: int = 0,
        timeout: float = 60.0,
    ) -> None:
        # The program, the ranks and the stages must fit together; the pipeline is made when there is a batch.
        job = self._job = load(Path(directory)).job
        if job.period:
            raise mistakes.schedule_without_flush(job.name)
        if job.slices > 1:
            raise mistakes.schedule_has_slices(job.name)
        if not dist.is_initialized():
            raise Misuse(NO_PROCESS_GROUP)
        of_rank = GivenStages.of(stages, job)
        self._modules, self._group = of_rank.modules, group or of_rank.group
        self._ranks = dist.get_process_group_ranks(self._group or dist.group.WORLD)
        if len(self._ranks) != job.workers:
            raise mistakes.group_has_another_size(job.name, job.workers, len(self._ranks))
        self._worker = self._ranks.index(dist.get_rank())
        held = stages_of(directory, self._worker)
        if sorted(of_rank.modules) != [*held]:
            raise mistakes.stages_are_others(self._worker, held, sorted(of_rank.modules))
        self._has_first, self._has_last = 0 in held, job.stages - 1 in held
        self.n_microbatches = job.passes
        self._cutting = Cutting(job.passes, job.parts, args_chunk_spec, kwargs_chunk_spec, output_merge_spec)
        self._results = Results(loss_fn)
        self._factor = LossFactor(1 if scale_grads else job.passes)
        self._make = partial(
            BatchPipeline,
            directory,
            results=self._results,
            group=self._group,
            device=device or of_rank.device,
            communicators=communicators,
            seed=seed,
            timeout=timeout,
        )
        self._pipeline: BatchPipeline | None = None
        self._has_trained = False

    # ---- the interface of torch

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Runs forwards and backwards of a batch; its gradients are added to ``.grad``, as by a backward of torch.

        Parameters
        ----------
        args, kwargs
            Inputs, used on ranks with stage 0, and keyword arguments, for the stages of this rank; they are cut into
            micro-batches, and of those without a chunk spec all tensors have as many rows. ``**{whole("borders"): ..}``
            goes to every micro-batch as it is.
        target
            The targets, on ranks with the last stage.
        losses
            On ranks with the last stage: a list that is filled with the losses of all micro-batches, without a graph.
        return_outputs
            Whether ranks with the last stage return its outputs, merged and without a graph; the same on each of them.
        loss_kwargs
            Keyword arguments of ``loss_fn``.
        arg_mbs, kwarg_mbs, target_mbs
            Inputs (tuples), keyword arguments (dicts) and targets that are cut already, in place of the others.

        Returns
        -------
            The outputs, on ranks with the last stage; elsewhere, or without ``return_outputs``, None.
        """
        trains = self._results.loss_fn is not None
        if trains and not torch.is_grad_enabled():
            raise Misuse(mistakes.STEP_NEEDS_GRADIENTS)
        given = args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs
        return self._call(
            trains, trains, given, lambda batch: self._run(batch, trains, losses, return_outputs, loss_kwargs)
        )

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Runs forwards alone, without a graph, on modules in the mode in which they are; arguments as of `step`.

        There are losses only where there are targets.
        """
        given = args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs
        return self._call(
            False, False, given, lambda batch: self._run(batch, False, losses, return_outputs, loss_kwargs)
        )

    # ---- what the schedules of torch lack

    def check(
        self,
        *args: Any,
        target: Any = None,
        loss_kwargs: dict[str, Any] | None = None,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        **kwargs: Any,
    ) -> str:
        """Compares some updates on a batch with the same in one process: see `Pipeline.check`. Arguments as of `step`.

        Rank 0 runs copies of all modules, which must be made of classes and functions that can be pickled.
        """
        if self._results.loss_fn is None:
            raise Misuse(mistakes.CHECK_NEEDS_A_LOSS)
        self._results.loss_kwargs = loss_kwargs or {}
        given = args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs
        report: str = self._call(True, True, given, lambda batch: self._ready(batch, True).check_batch(batch))
        return report

    @property
    def pipeline(self) -> Pipeline:
        """The `Pipeline` that runs the schedule. Raises Misuse before the first `step` or `eval`."""
        if self._pipeline is None:
            raise Misuse(mistakes.NOTHING_HAS_RUN)
        return self._pipeline

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clips gradients by the norm of the whole model, replicas counted once: see `Pipeline.clip_grad_norm_`."""
        return self.pipeline.clip_grad_norm_(max_norm, norm_type)

    def close(self) -> None:
        """Frees the communicators; all ranks call it, or none does. The process group stays."""
        if self._pipeline is not None:
            self._pipeline.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None:
            self.close()

    def _call(self, trains: bool, has_targets: bool, given: tuple[Any, ...], run: Callable[[TorchBatch], Any]) -> Any:
        """Cuts a batch and returns what ``run`` does for it. If this rank refuses, the other ranks' calls end, too."""
        pipeline = self._pipeline
        if pipeline is not None and not self._joins(trains):
            with pipeline.refusals.call():
                return run(self._cut(given, has_targets))
        try:
            batch = self._cut(given, has_targets)
        except Misuse as error:
            refuse_to_join(self._ranks, error)  # the other ranks wait for this one to make the pipeline
            raise
        return run(batch)

    def _cut(self, given: tuple[Any, ...], has_targets: bool) -> TorchBatch:
        batch = self._cutting.cut(*given)
        require(batch, inputs=self._has_first, targets=self._has_last and has_targets)
        return batch

    def _joins(self, trains: bool) -> bool:
        """Whether the next batch makes the pipeline.

        If the first batch runs forwards alone, the first batch to train on makes the pipeline anew: only then is it
        known which outputs of a stage have gradients.
        """
        return self._pipeline is None or (trains and not self._has_trained)

    def _run(
        self,
        batch: TorchBatch,
        trains: bool,
        losses: list[Any] | None,
        return_outputs: bool,
        loss_kwargs: dict[str, Any] | None,
    ) -> Any:
        """Runs a batch; returns its outputs on ranks with the last stage."""
        self._results.loss_kwargs = loss_kwargs or {}
        pipeline = self._ready(batch, trains)
        self._results.clear(keeps_outputs=return_outputs)
        if trains:
            pipeline.add_gradients(batch, self._factor)
        else:
            pipeline.run_forwards(batch)
        if not self._has_last:
            return None
        results = pipeline.take_results()
        if losses is not None:
            losses[:] = losses_of(results)
        if not return_outputs:
            return None
        outputs = [result.output for result in results]
        if None in outputs:
            raise mistakes.outputs_are_missing(self._worker)
        return self._cutting.merged([output for (output,) in filter(None, outputs)])

    def _ready(self, batch: TorchBatch, trains: bool) -> BatchPipeline:
        """Returns the pipeline, and makes it when the first batch comes."""
        if self._pipeline is None or self._joins(trains):
            self.close()
            modules = {number: module() for number, module in self._modules.items()}
            with_loss, last = dict(modules), self._job.stages - 1
            if self._has_last:
                with_loss[last] = torch.nn.ModuleList([modules[last], *modules_in(self._results.loss_fn)])
            make_replicas_equal(self._job, with_loss, self._worker, self._ranks, self._group)
            with torch.set_grad_enabled(trains):
                called = {number: CalledStage(module) for number, module in modules.items()}
                self._pipeline = self._make(called, batch)
            self._has_trained = trains
        else:
            require_rows(batch.cut, self._pipeline.rows)
        return self._pipeline
