"""`CompiledSchedule`: a compiled schedule with the interface of those of torch.distributed.pipelining."""

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch.distributed.pipelining.microbatch import TensorChunkSpec, merge_chunks, split_args_kwargs_into_chunks
from torch.utils import _pytree as pytree

from chimera_runtime.data.evaluation_batches import EvaluationBatch
from chimera_runtime.data.micro_batch_source import CutBatch
from chimera_runtime.errors import Misuse
from chimera_runtime.errors import start as mistakes
from chimera_runtime.errors.tools import module_cannot_be_sent
from chimera_runtime.model.model import Model
from chimera_runtime.pipeline import Pipeline
from chimera_runtime.program.compiled_program import load
from chimera_runtime.program.job import Job
from chimera_runtime.ranks.agreement import Enquiry, ObjectExchange, gathered
from chimera_runtime.ranks.refusals import Refusals
from chimera_runtime.ranks.world import refuse_to_join
from chimera_runtime.values.boundary import Keywords, Whole, borders_in, cut_alone
from chimera_runtime.values.last_stage import alone, modules_in
from chimera_runtime.values.mesh_tensors import local, settled
from chimera_runtime.values.nested import is_mask, mapped, to_device

# Batches of a schedule of torch: cuts them into micro-batches as torch does, and merges outputs.


@dataclass(frozen=True)
class Cutting:
    """Says how batches are cut into ``micro_batches`` micro-batches, and how outputs are merged.

    ``args``, ``kwargs`` and ``outputs`` are the chunk specs of torch, or None. Where the compiled schedule cuts a
    micro-batch into ``parts``, each part counts as one of the micro-batches here.
    """

    micro_batches: int
    parts: int
    args: Any
    kwargs: Any
    outputs: Any

    def cut(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        arg_mbs: list[Any] | None,
        kwarg_mbs: list[Any] | None,
        target_mbs: list[Any] | None,
    ) -> "TorchBatch":
        """Returns a batch as micro-batches; inputs that are given as lists (``.._mbs``) are cut already.

        In the triple of a micro-batch, the target is a pair of the micro-batch's number and the target, and the keyword
        arguments have the number, too: `Results.judge` and `CalledStage` take them so.
        """
        self._require_one_form("positional inputs", bool(args), "arg_mbs", arg_mbs)
        self._require_one_form("keyword arguments", bool(kwargs), "kwarg_mbs", kwarg_mbs)
        self._require_one_form("target", target is not None, "target_mbs", target_mbs)
        wholes = {str(name): value for name, value in kwargs.items() if isinstance(name, Whole)}
        kwargs = cut_alone(kwargs)
        rows = [*self._rows("input ", args, self.args), *self._rows("", kwargs, self.kwargs)]
        size = rows[0].size if args and rows else None  # keyword arguments alone do not say how many rows there are
        for argument in rows:  # with fewer rows torch would make fewer micro-batches of all
            is_short = argument.size is not None and argument.size < self.micro_batches and not argument.is_declared
            if argument.size is None or (is_short and argument.size != size):
                raise mistakes.argument_has_other_rows(argument.name, argument.shape, size)
        inputs, keywords = self._chunks(args, kwargs, self.args, self.kwargs)
        keywords = [{**of_micro, **wholes} for of_micro in keywords]
        targets = [None if not part else part[0] for part in self._chunks(() if target is None else (target,), {})[0]]
        triples = [
            (args, (micro, target), {"micro_batch": micro, "keywords": kwargs})
            for micro, (args, kwargs, target) in enumerate(
                zip(arg_mbs or inputs, kwarg_mbs or keywords, target_mbs or targets, strict=True)
            )
        ]
        return TorchBatch(triples, self.parts, tuple(rows), kwargs if self.kwargs is None else {})

    def merged(self, outputs: list[Any]) -> Any:
        """Returns the outputs of all micro-batches as one, as torch merges them."""
        return merge_chunks(outputs, self.outputs)

    def _chunks(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], args_spec: Any = None, kwargs_spec: Any = None
    ) -> tuple[list[Any], list[Any]]:
        if not args and not kwargs:
            return [()] * self.micro_batches, [{}] * self.micro_batches
        try:
            inputs, keywords = split_args_kwargs_into_chunks(args, kwargs, self.micro_batches, args_spec, kwargs_spec)
        except AssertionError as error:
            raise mistakes.batch_cannot_be_cut(micro_batches=self.micro_batches, reason=str(error)) from error
        if len(inputs) != self.micro_batches:
            raise mistakes.batch_cannot_be_cut(micro_batches=self.micro_batches, reason=f"it gives {len(inputs)}")
        return inputs, keywords

    def _rows(self, name: str, arguments: Any, specs: Any) -> Iterator["CutArgument"]:
        flat = pytree.tree_flatten_with_path(arguments, is_leaf=is_mask)[0]
        chunked = [None] * len(flat) if specs is None else pytree.tree_leaves(specs)
        for (path, leaf), spec in zip(flat, chunked, strict=False):  # a spec of another form is refused by torch
            if isinstance(leaf, torch.Tensor) and (spec is None or isinstance(spec, TensorChunkSpec)):
                dimension = 0 if spec is None else spec.split_dim
                size = leaf.size(dimension) if leaf.dim() > dimension else None
                first, *inside = path
                place = f"{name}{getattr(first, 'key', getattr(first, 'idx', ''))}{pytree.keystr((*inside,))}"
                yield CutArgument(place, tuple(leaf.shape), size, spec is not None)

    def _require_one_form(self, name: str, is_given: bool, list_name: str, listed: list[Any] | None) -> None:
        if listed is None:
            return
        if is_given:
            raise mistakes.batch_is_given_twice(whole=name, listed=list_name)
        if len(listed) != self.micro_batches:
            raise mistakes.wrong_number_of_micro_batches(
                name=list_name, micro_batches=self.micro_batches, length=len(listed)
            )


class CutArgument(NamedTuple):
    """A tensor that torch cuts along a dimension of this ``size``, because a chunk spec says so or by default."""

    name: str
    shape: tuple[int, ...]
    size: int | None
    is_declared: bool


@dataclass(frozen=True)
class TorchBatch(CutBatch):
    """A batch of a schedule of torch.

    ``cut`` are the tensors of this rank's inputs before they were cut, ``by_default`` the keyword arguments that no
    chunk spec was given for.
    """

    cut: tuple[CutArgument, ...] = ()
    by_default: Keywords = field(default_factory=dict)


def require_rows(arguments: Sequence[CutArgument], rows: int | None) -> None:
    """Raises `Misuse` if a tensor that is cut by default has another number of rows than the batch."""
    for argument in arguments:
        if not argument.is_declared and argument.size != rows:
            raise mistakes.argument_has_other_rows(argument.name, argument.shape, rows)


# Stages that a user's script gives, as PipelineStage objects or as modules, and their wrappers for a `Pipeline`.


@dataclass(frozen=True)
class GivenStages:
    """The stages of a rank that a script has given, by functions: a module may be replaced before the first step.

    ``group`` and ``device`` are those of the PipelineStage objects; None if modules are given.
    """

    modules: Mapping[int, Callable[[], torch.nn.Module]]
    group: dist.ProcessGroup | None = None
    device: torch.device | None = None

    @classmethod
    def of(cls, stages: Any, job: Job) -> Self:
        """Takes one or several PipelineStage objects, or modules by the numbers of their stages."""
        if isinstance(stages, Mapping):
            return cls({number: partial(stages.__getitem__, number) for number in stages})
        listed = [*stages] if isinstance(stages, Sequence) else [stages]
        for stage in listed:
            if stage.num_stages != job.stages:
                raise mistakes.number_of_stages_differs(scheme=job.name, stages=job.stages, num_stages=stage.num_stages)
            if stage.dw_builder is not None:
                raise Misuse(mistakes.STAGE_HAS_ITS_OWN_BACKWARD)
        modules = {stage.stage_index: partial(getattr, stage, "submod") for stage in listed}
        first = next(iter(listed), None)
        return cls(modules, getattr(first, "group", None), getattr(first, "device", None))


class CalledStage(torch.nn.Module):
    """A stage of torch as one of a `Pipeline`: its module is called with positional arguments, in the mode it has.

    The number of the micro-batch is a keyword argument so that the runtime joins no micro-batches: tensors need not
    have items in dimension 0. In one process, ``given`` has the stage's own keyword arguments of each micro-batch.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module
        self.given: Sequence[dict[str, Any]] | None = None

    def forward(self, inputs: Any, *, micro_batch: int, keywords: dict[str, Any]) -> Any:
        """Calls the module with a tuple or list of inputs, or with one."""
        named = keywords if self.given is None else self.given[micro_batch]
        return self.module(*(inputs if isinstance(inputs, tuple | list) else (inputs,)), **named)

    def train(self, mode: bool = True) -> Self:
        """Does nothing: the mode of the module is its owner's."""
        return self


@torch.no_grad()
def make_replicas_equal(
    job: Job, modules: Mapping[int, torch.nn.Module], worker: int, ranks: Sequence[int], group: dist.ProcessGroup | None
) -> None:
    """Copies parameters and buffers of each stage from the first of the ``ranks`` that holds it to the others."""
    device = "cuda" if "nccl" in str(dist.get_backend(group)) else "cpu"
    for stage, (first, *others) in enumerate(job.holders):
        if not others or stage not in modules:
            continue
        module = modules[stage]
        tensors = [local(t) for t in (*module.parameters(), *module.buffers()) if not t.is_meta and t.numel()]
        if not tensors:
            continue
        values = torch.cat([t.contiguous().reshape(-1).view(torch.uint8).to(device) for t in tensors])
        if worker == first:
            for other in others:
                dist.send(values, ranks[other], group)
            continue
        dist.recv(values, ranks[first], group)
        sizes = [t.numel() * t.element_size() for t in tensors]
        for tensor, value in zip(tensors, torch.split(values, sizes), strict=True):
            tensor.copy_(value.clone().view(tensor.dtype).view(tensor.shape))


# Results of a batch: losses and outputs of the last stage by micro-batch; and the scale of the losses.


class Result(NamedTuple):
    """Loss and output of a micro-batch, without graphs, as far as there are any; the output is in a tuple."""

    loss: torch.Tensor | None
    output: tuple[Any] | None


@dataclass
class Results:
    """Collects the results of micro-batches whose last stage runs on this rank; also a `LastOutput`."""

    loss_fn: Callable[..., Any] | None
    loss_kwargs: dict[str, Any] = field(default_factory=dict)
    by_micro: dict[int, Result] = field(default_factory=dict)
    _keeps_outputs: bool = False

    def clear(self, *, keeps_outputs: bool = False) -> None:
        """Forgets all results; later ones have outputs only if ``keeps_outputs``."""
        self.by_micro.clear()
        self._keeps_outputs = keeps_outputs

    @property
    def loss(self) -> Callable[[Any, Any], torch.Tensor]:
        """`judge` as a function that shows the module of the loss, if that is one."""
        return partial(self.judge, self.loss_fn)

    def judge(self, loss_fn: Callable[..., Any] | None, output: Any, numbered_target: tuple[int, Any]) -> torch.Tensor:
        """Computes and notes the loss of a micro-batch; returns zero if there is no target, or no ``loss_fn``."""
        micro, target = numbered_target
        loss = None if loss_fn is None or target is None else loss_fn(output, target, **self.loss_kwargs)
        noted = (mapped(output, lambda tensor: settled(tensor).detach()),) if self._keeps_outputs else None
        self.by_micro[micro] = Result(None if loss is None else loss.detach(), noted)
        return torch.zeros(()) if loss is None else loss

    def __call__(self, _micro: int, _items: int, returned: Any, target: Any) -> None:
        """Notes the output of a forward without a backward, and its loss."""
        self.judge(self.loss_fn, returned, target)


@dataclass(frozen=True)
class LossFactor:
    """Factor of the losses of an update, of which the runtime takes the mean: N makes that the sum."""

    factor: int

    def scale(self, outputs: torch.Tensor) -> torch.Tensor:
        """Returns a tensor multiplied by the factor."""
        return outputs * self.factor


# `BatchPipeline`: the `Pipeline` behind a `CompiledSchedule`.


class BatchPipeline(Pipeline):
    """A `Pipeline` of ``modules`` that exist already; the last stage puts losses and outputs into ``results``."""

    def __init__(
        self,
        directory: str | Path,
        modules: Mapping[int, CalledStage],
        batch: TorchBatch,
        results: Results,
        **options: Any,
    ) -> None:
        def build_stage(stage: int, _stages: int) -> torch.nn.Module:
            return modules[stage]

        def name(stage: int, parameter: str) -> str:
            return f"stages.{stage}.{parameter.removeprefix('module.')}"

        self.rows: int | None = None
        self._rising: list[str] = []
        super().__init__(directory, build_stage, results.loss, batch, name=name, **options)
        self._results = results
        self._add_remarks(mistakes.argument_looks_like_borders(name=name) for name in self._rising)
        self._sent: dict[int, Any] = {}
        self._run_round = self._inference.runner(results)

    @property
    def refusals(self) -> Refusals:
        """Refusals of all ranks."""
        return self._world.control_group.refusals

    def _compare_example(self, example: Any) -> None:
        """Raises `Misuse` on all ranks if on any of them a tensor that is cut by default has not the batch's rows."""
        control = self._world.control_group
        exchange = ObjectExchange(control.group, "the inputs of a batch", control.timeout)
        arguments, rising = zip(*exchange.all_gather((example.cut, borders_in(example.by_default))), strict=True)
        self._rising = [*dict.fromkeys(name for name in rising if name is not None)]
        # The batch has the rows of the first tensor on the first rank that has one, those with stage 0 before others.
        first = arguments[self._world.job.holders[0][0]]
        self.rows = next((argument.size for of_rank in (first, *arguments) for argument in of_rank), None)
        for of_rank in arguments:
            require_rows(of_rank, self.rows)

    def add_gradients(self, batch: CutBatch, factor: LossFactor) -> None:
        """Runs an update, and adds its gradients to those that parameters have already."""
        earlier = {p: p.grad.clone() for p in self.parameters() if p.grad is not None}
        for parameter in earlier:
            parameter.grad = None
        self.step(batch, scaler=factor)
        for parameter, gradient in earlier.items():
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    def check_batch(self, batch: CutBatch) -> str:
        """Checks the pipeline on a batch: see `Pipeline.check`. Rank 0 gets copies of the modules of all stages."""
        self._sent = self._on_all_ranks(lambda: self._packed(batch))
        try:
            return self.check(batch)
        finally:
            self._sent = {}
            self._results.clear()

    def _packed(self, batch: CutBatch) -> dict[int, Any]:
        given = [keywords["keywords"] for _, _, keywords in batch.triples]
        packed: dict[int, Any] = {}
        for number, module in self._modules.items():
            content = io.BytesIO()
            try:
                torch.save(alone(module), content)
            except Exception as error:
                raise module_cannot_be_sent(stage=number, cause=f"{type(error).__name__}: {error}") from error
            packed[number] = torch.frombuffer(bytearray(content.getvalue()), dtype=torch.uint8), given
        return packed

    def _check_answers(self) -> dict[str, Callable[..., Any]]:
        return {"module": self._sent.__getitem__, "loss": lambda: self._results.loss_kwargs}

    def _model_alone(self, enquiry: Enquiry) -> Model:
        def holder(stage: int) -> int:
            return self._world.place.ranks_of(self.job.holders[stage])[0]

        def build_stage(stage: int, _stages: int) -> torch.nn.Module:
            content, given = enquiry.ask(holder(stage), "module", stage)
            module: CalledStage = torch.load(io.BytesIO(content.numpy().tobytes()), "cpu", weights_only=False)
            module.given = to_device(given, self._world.device)
            return module

        self._results.loss_kwargs = enquiry.ask(holder(self.job.stages - 1), "loss")
        return replace(self._context.model, build_stage=build_stage)

    def run_forwards(self, batch: CutBatch) -> None:
        """Runs the forwards of a batch."""
        self._require_sound()
        self.refusals.note_sending()
        self._run_round(EvaluationBatch([1] * len(batch.triples), batch.triples.__getitem__))

    def take_results(self) -> list[Result]:
        """Removes and returns the results of all micro-batches of the batch, in order.

        Where several ranks hold the last stage, each gets the results of all of them. These ranks must all call it, and
        no other rank may.
        """
        results, workers = dict(self._results.by_micro), self.job.holders[-1]
        self._results.clear()
        if len(workers) > 1:
            with self._located:
                others = gathered(self._world.control_group, workers, results, everywhere=False)
            results = to_device(others, self._world.device) | results
        return [results[micro] for micro in sorted(results)]


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
            raise mistakes.schedule_without_flush(scheme=job.name)
        if job.slices > 1:
            raise mistakes.schedule_has_slices(scheme=job.name)
        if job.feeds:
            raise mistakes.stages_are_no_chain(scheme=job.name)
        if not dist.is_initialized():
            raise Misuse(mistakes.NO_PROCESS_GROUP)
        of_rank = GivenStages.of(stages, job)
        self._modules, self._group = of_rank.modules, group or of_rank.group
        self._ranks = dist.get_process_group_ranks(self._group or dist.group.WORLD)
        if len(self._ranks) != job.workers:
            raise mistakes.group_has_another_size(scheme=job.name, workers=job.workers, ranks=len(self._ranks))
        self._worker = self._ranks.index(dist.get_rank())
        held = stages_of(directory, self._worker)
        if sorted(of_rank.modules) != [*held]:
            raise mistakes.stages_are_others(rank=self._worker, wanted=held, stages=sorted(of_rank.modules))
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
        return self._run(trains, given, losses, return_outputs, loss_kwargs)

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
        return self._run(False, given, losses, return_outputs, loss_kwargs)

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
        report: str = self._call(True, given, lambda batch: self._ready(batch, True).check_batch(batch))
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

    def _call(self, trains: bool, given: tuple[Any, ...], run: Callable[[TorchBatch], Any]) -> Any:
        """Cuts a batch and returns what ``run`` does for it. If this rank refuses, the other ranks' calls end, too."""
        pipeline = self._made(trains)
        if pipeline is not None:
            with pipeline.refusals.call():
                return run(self._cut(given, trains))
        try:
            batch = self._cut(given, trains)
        except Misuse as error:
            refuse_to_join(self._ranks, error)  # the other ranks wait for this one to make the pipeline
            raise
        return run(batch)

    def _cut(self, given: tuple[Any, ...], trains: bool) -> TorchBatch:
        batch = self._cutting.cut(*given)
        args, (_, target), keywords = batch.triples[0]
        if self._has_first and not (args or keywords["keywords"]):
            raise Misuse(mistakes.INPUTS_ARE_MISSING)
        if self._has_last and trains and target is None:
            raise Misuse(mistakes.TARGETS_ARE_MISSING)
        return batch

    def _made(self, trains: bool) -> BatchPipeline | None:
        """The pipeline, or None if the next batch makes it: anew if it is the first to train on.

        Only then is it known which outputs of a stage have gradients.
        """
        return None if trains and not self._has_trained else self._pipeline

    def _run(
        self,
        trains: bool,
        given: tuple[Any, ...],
        losses: list[Any] | None,
        return_outputs: bool,
        loss_kwargs: dict[str, Any] | None,
    ) -> Any:
        def run(batch: TorchBatch) -> Any:
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
                losses[:] = [result.loss for result in results if result.loss is not None]
            if not return_outputs:
                return None
            outputs = [result.output for result in results]
            if None in outputs:
                raise mistakes.outputs_are_missing(rank=self._worker)
            return self._cutting.merged([output for (output,) in filter(None, outputs)])

        return self._call(trains, given, run)

    def _ready(self, batch: TorchBatch, trains: bool) -> BatchPipeline:
        pipeline = self._made(trains)
        if pipeline is not None:
            require_rows(batch.cut, pipeline.rows)
            return pipeline
        self.close()
        modules = {number: module() for number, module in self._modules.items()}
        with_loss, last = dict(modules), self._job.stages - 1
        if self._has_last:
            with_loss[last] = torch.nn.ModuleList([modules[last], *modules_in(self._results.loss_fn)])
        make_replicas_equal(self._job, with_loss, self._worker, self._ranks, self._group)
        with torch.set_grad_enabled(trains):
            called = {number: CalledStage(module) for number, module in modules.items()}
            pipeline = self._pipeline = self._make(called, batch)
        self._has_trained = trains
        return pipeline
