"""The check: trains some updates on the ranks, by their scripts, and in one process, and compares them.

On the ranks it trains the modules of the pipeline itself, and restores them. In one process it trains modules that are
made anew, so that it finds what the pipeline's have become by then, and memory that stages share in one process alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch

from chimera_runtime.blame import Located, UserCode
from chimera_runtime.check import side_by_side
from chimera_runtime.check.compare import RankResult, ResultsOfRanks, compare, sample
from chimera_runtime.check.reference import Reference, Training
from chimera_runtime.data.feed import Feed
from chimera_runtime.data.micro_batch_source import MicroBatchSource
from chimera_runtime.errors import FAILED, CheckFailed
from chimera_runtime.errors import tools as mistakes
from chimera_runtime.model.model import Model, ModelFile, label
from chimera_runtime.model.naming import parameters_by_name
from chimera_runtime.model.ties import by_group, refuse_undeclared
from chimera_runtime.optimizer.sharding import ShardedOptimizer
from chimera_runtime.program.job import Job
from chimera_runtime.program.numbering import Micros, numbers_of
from chimera_runtime.program.rank_facts import Group
from chimera_runtime.ranks.agreement import Enquiry
from chimera_runtime.stage.module_state import ModuleSnapshot, equal
from chimera_runtime.stage.stage import Stage
from chimera_runtime.stage.stage_output import collecting
from chimera_runtime.start import assemble as build
from chimera_runtime.start.assemble import RankContext, components_of, lane_of, run_stream
from chimera_runtime.start.decided_by_data import agree_on_absence, agree_on_counts
from chimera_runtime.values.last_stage import alone, judge_in
from chimera_runtime.values.losses import added
from chimera_runtime.values.mesh_tensors import require_values
from chimera_runtime.values.nested import Tensors, all_generators_kept, leaves, mapped, part, taken_apart, to_device

MakeOptimizer = Callable[[Group, list[torch.nn.Parameter]], Any]
"""Function that makes the optimizer of a weight group."""


class Report(NamedTuple):
    """Result of a check, the same on every rank: whether it has ``passed``, and a text with all figures.

    ``is_error`` says that rank 0 has raised another error, of which ``text`` is the message.
    """

    passed: bool
    text: str
    is_error: bool = False


@dataclass
class WatchedOptimizer:
    """Optimizer that copies the gradients of its steps to the host's memory."""

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


class SampledStage(Stage):
    """Stage that compares both runs of every recomputed forward, and samples what it hands on in the first update."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(is_compared=lambda _update: True, **arguments)
        self.samples: dict[int, list[torch.Tensor]] = {}

    def _hand_on(self, value: str, micros: Micros, tensors: Tensors) -> None:
        super()._hand_on(value, micros, tensors)
        several = numbers_of(micros)
        for place, micro in enumerate(several if value == "y" else ()):
            update, number = self._numbering.place(micro)
            if update == 0:
                of_micro = tensors if len(several) == 1 else part(tensors, place, place + 1, len(several))
                self.samples[number] = [*map(sample, of_micro)]


@dataclass(frozen=True)
class Checked:
    """Both sides of a check: the ``modules`` of this rank's stages, and one process.

    ``optimizer_of`` makes the optimizer of a weight group on the ranks. If ``is_unchanged``, the modules must be as the
    reference builds them; otherwise the one process begins with their state, and if it ``tells``, the report says where
    that differs. ``number`` counts the checks of a pipeline, ``answers`` has what rank 0 may ask for in addition.
    """

    context: RankContext
    modules: Mapping[int, torch.nn.Module]
    optimizer_of: MakeOptimizer
    is_unchanged: bool = True
    tells: bool = True
    sum_dtype: torch.dtype | None = None
    number: int = 0
    answers: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    located: AbstractContextManager[None] = field(default_factory=nullcontext)

    def run(self, reference_of: Callable[[Enquiry], Reference]) -> Report:
        """Runs the check; every rank calls it. Modules, gradients and random generators are as before afterwards.
        ``reference_of`` makes the reference on rank 0.
        """
        context, control = self.context, self.context.world.control_group
        with torch.enable_grad(), all_generators_kept(), kept(self.modules) as restore:
            with self.located:
                result = self._trained()
                restore()
                name = f"check/{self.number}"
                results = ResultsOfRanks.gather(control, context.world.job, result, context.probed.auxiliary, name)
            answers: dict[str, Callable[..., Any]] = {"part": result.part, "outputs": lambda: result.outputs}
            answers |= {"stage": self._state_of, **self.answers}
            enquiry = Enquiry(control, name, answers, "for the one-process reference")
            if control.place.rank:
                return Report(*enquiry.serve())
            try:
                report = self._compared(enquiry, results, reference_of)
            except Exception as error:
                enquiry.end(*Report(False, f"{error}".partition("\n")[0], is_error=True))
                raise
            enquiry.end(*report)
            return report

    def _compared(
        self, enquiry: Enquiry, results: ResultsOfRanks, reference_of: Callable[[Enquiry], Reference]
    ) -> Report:
        context, job = self.context, self.context.world.job
        period, reads = (job.period, job.reads) if job.period else (job.passes, (((0, job.passes),),) * job.stages)
        with ExitStack() as stack:
            differing: dict[int, str] = {}
            outputs: dict[tuple[int, int, int], list[torch.Tensor]] = {}

            def make(reference: Reference) -> list[torch.nn.Module]:
                with UserCode("making all stages in one process", FAILED):
                    modules = [reference.build(stage) for stage in range(job.stages)]
                stack.enter_context(kept(dict(enumerate(modules))))
                refuse_undeclared(dict(enumerate(modules)), context.ties, context.model)
                for stage, module in enumerate(modules):
                    holder, *_ = context.world.place.ranks_of(job.holders[stage])
                    state = enquiry.ask(holder, "stage", stage)
                    if names := [name.removeprefix(".") for name in self._take_state(stage, module, state)]:
                        differing[stage] = mistakes.begins_otherwise(stage=stage, names=names)
                return modules

            def note(copy: int, micro: int, stage: int, output: Any) -> None:
                tensors = [leaf for leaf in leaves(output) if isinstance(leaf, torch.Tensor)]
                outputs[stage, micro, copy] = [*map(sample, tensors)]

            def begin() -> Training:
                modules = make(reference)
                with UserCode("training in one process, to compare with", FAILED):
                    return Training(reference, period, reads, modules, note)

            try:
                reference = reference_of(enquiry)
                agreements: list[object] = []
                if reference.slices > 1:
                    agreements.append(side_by_side.compare_slices(reference, make))
                if reference.model.reference is not None:
                    if job.lacking:
                        raise mistakes.reference_gets_all(scheme=job.name)
                    agreements.append(side_by_side.compare_with_model(reference))
                verdict = compare(enquiry, job, results, begin, outputs)
            except CheckFailed as failed:
                return Report(False, f"{failed}")
            if self.is_unchanged:
                verdict = replace(verdict, differing=[*differing.values()])
            elif self.tells:
                verdict = replace(verdict, told=[*differing.values()])
            return Report(verdict.passed, "\n  ".join(map(str, [verdict, *agreements])))

    def _trained(self) -> RankResult:
        context, updates = self.context, checked_updates(self.context.world.job)
        watched: list[WatchedOptimizer] = []
        groups = iter(by_group(self.modules, context.ties))

        def watch(parameters: list[torch.nn.Parameter]) -> WatchedOptimizer:
            watched.append(WatchedOptimizer(parameters, self.optimizer_of(next(groups), parameters)))
            return watched[-1]

        stages: dict[int, Any] = build.assemble(
            context, dict(self.modules), watch, SampledStage, sum_dtype=self.sum_dtype
        )
        lane = lane_of(context, components_of(context, stages))
        if context.world.job.period:
            run_stream(context, lane, updates)
        else:
            for update in range(updates):
                agree_on_absence(context, update)
                agree_on_counts(context, update)
                lane.begin(update)
                context.script.update(lane)
                lane.end()
                for optimizer in watched:
                    optimizer.gather()
        optimizers = dict(zip(by_group(self.modules, context.ties), watched, strict=True))
        for stage in {*stages}.intersection(context.world.job.frozen):  # without steps, and without gradients
            optimizers[stage,].gradients = [[] for _ in range(updates)]
        return RankResult(
            {group: optimizer.gradients for group, optimizer in optimizers.items()},
            {group: [_copy(p) for p in optimizer.parameters] for group, optimizer in optimizers.items()},
            [added(stage.take_loss(update) for stage in stages.values()) for update in range(updates)],
            {(number, micro): kept for number, stage in stages.items() for micro, kept in stage.samples.items()},
        )

    # ---- the state with which both begin

    def _state_of(self, stage: int) -> Any:
        module = self.modules[stage]
        tables = {name: _plain(part) for name, part in module.named_modules()}
        trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        return {"tables": tables, "trained": trained}

    def _take_state(self, stage: int, module: torch.nn.Module, state: Mapping[str, Any]) -> Iterator[str]:
        """Yields the names of parameters and buffers that have other values on the ranks, a tied one at its first end.
        ``module`` gets the ranks' ``state`` if theirs need not be as it was made.
        """
        parts = dict(module.named_modules())
        later_ends = {end for tie in self.context.ties for ends in tie.parameters for end in ends[1:]}
        for place, table in state["tables"].items():
            if place not in parts:
                raise mistakes.part_is_missing(stage=stage, place=place)
            here = _plain(parts[place])
            for key in parts[place]._parameters.keys() - table.keys():
                raise mistakes.parameter_is_another(stage=stage, name=f"{place}.{key}" if place else key)
            for key, value in table.items():
                mine, name = here.get(key), f"{place}.{key}" if place else key
                tables: list[dict[str, Any]] = [parts[place]._parameters, parts[place]._buffers, parts[place].__dict__]
                of_parameters, of_buffers, _ = [key in table for table in tables]
                if isinstance(mine, torch.Tensor) and _are_alike(mine, value):
                    if equal(mine, value.to(mine.device)):
                        continue
                    if (of_parameters or of_buffers) and (stage, name) not in later_ends:
                        yield name
                    if not self.is_unchanged:
                        mine.data.copy_(value)
                elif of_parameters and mine is not value:
                    raise mistakes.parameter_is_another(stage=stage, name=name)
                elif not self.is_unchanged:
                    tables[1 if of_buffers else 2][key] = to_device(value, self.context.world.device)
        if not self.is_unchanged:
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(name in state["trained"])


def _plain(part: torch.nn.Module) -> dict[str, Any]:
    attributes = {} if type(part).__module__.startswith("chimera_runtime") else vars(part)
    plain = {
        key: value.detach() if isinstance(value, torch.Tensor) else value
        for key, value in {**attributes, **part._parameters, **part._buffers}.items()
        if value is None or isinstance(value, bool | int | float | str | torch.Tensor)
    }
    return {
        key: value
        for key, value in plain.items()
        if not isinstance(value, torch.Tensor) or (value.layout == torch.strided and not value.is_quantized)
    }


def _are_alike(mine: torch.Tensor, value: Any) -> bool:
    return isinstance(value, torch.Tensor) and mine.shape == value.shape and mine.dtype == value.dtype


@contextmanager
def kept(modules: Mapping[int, torch.nn.Module]) -> Iterator[Callable[[], None]]:
    """Context in which modules may be trained, without gradients at first; its function restores parameters, buffers
    and state, and so does its end.
    """
    parameters = dict.fromkeys(parameter for module in modules.values() for parameter in module.parameters())
    before = [(parameter, parameter.grad, dict(vars(parameter))) for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    states = [ModuleSnapshot(module, dict(module.named_parameters())) for module in modules.values()]

    def restore() -> None:
        for state in states:
            state.restore()
        for parameter in parameters:
            parameter.grad = None

    try:
        yield restore
    finally:
        restore()
        for parameter, gradient, attributes in before:
            parameter.grad = gradient
            vars(parameter).clear()
            vars(parameter).update(attributes)


def checked_updates(job: Job) -> int:
    """Number of updates that are checked: 3, or where they overlap at least 4 and 2 * workers + 2 micro-batches."""
    return max(4, -(-(2 * job.workers + 2) // job.micro_batches)) if job.period else 3


def reference_for(context: RankContext, model: Model, micro_batch_size: int, **changed: Any) -> Reference:
    """Returns the reference of a rank's program: ``model`` in one process. ``changed`` are further fields of it."""
    world, job = context.world, context.world.job
    return Reference(
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
        with_loss=lambda module, name: model.of_sink(name).with_loss(module, copied=True),
        feeds=job.feeds,
        names=[job.end_name(stage) for stage in range(job.stages)],
        lacking={stage: {micro // job.slices for micro in micros} for stage, micros in job.lacking.items()},
        cycle=job.cycle // job.passes,
        counts=context.counts,
        alone=alone,
        judge_in=judge_in,
        slices=job.slices,
        lengths=job.lengths,
        label=lambda modules: label(parameters_by_name(model, dict(enumerate(modules)), context.ties)),
        **changed,
    )


# ---- of train.py and of a loop of one's own


def check(
    context: RankContext,
    model: ModelFile,
    micro_batch_size: int,
    built: dict[int, torch.nn.Module],
    optimizer_of: MakeOptimizer,
) -> str | None:
    """Checks the pipeline of a model file with the modules ``built``, which are restored; returns the report on rank 0,
    else None. ``optimizer_of`` makes the optimizers of the ranks.

    Raises `CheckFailed` on rank 0, if ranks and one process differ by more than the tolerance.
    """
    require_values(
        {f"{name} of stage {stage}": p for stage, module in built.items() for name, p in module.named_parameters()},
        "the check compares gradients at the initial weights, which only a build_stage on a real device gives",
    )

    checked = Checked(context, built, optimizer_of)
    report = checked.run(lambda _enquiry: reference_for(context, model, micro_batch_size))
    if context.world.place.rank:
        return None
    if not report.passed:
        raise mistakes.ranks_differ_from_one_process(verdict=report.text)
    return report.text


@dataclass
class OneBatch(MicroBatchSource):
    """One mini-batch of this copy for every update, which ``feed`` has as update 0; every reader gets copies. ``used``
    are the parts that stages of this rank have read, by micro-batch and number of the part.
    """

    feed: Feed
    used: dict[tuple[int, int], Any] = field(default_factory=dict)

    def component(self, _update: int, micro: int, number: int) -> Any:
        """Copies the inputs, the targets or the keyword arguments of a micro-batch."""
        key = micro % self.feed.job.passes, number
        if key not in self.used:
            with all_generators_kept():
                self.used[key] = mapped(self.feed.component(0, *key), torch.clone)
        return mapped(self.used[key], torch.clone)


class BoundedSteps:
    """Optimizer without a learning rate: moves by a thousandth of a parameter's largest number, or of 0.01."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters

    @torch.no_grad()
    def step(self) -> None:
        """Moves all parameters that have a gradient."""
        for parameter in self._parameters:
            if parameter.grad is not None and parameter.numel():
                largest = parameter.grad.abs().max()
                size = parameter.abs().max().clamp(min=0.01)
                parameter.sub_(parameter.grad * torch.where(largest > 0, 1e-3 * size / largest, 0.0))


def check_batch(
    context: RankContext,
    modules: Mapping[int, torch.nn.Module],
    feed: Feed,
    *,
    model_of: Callable[[Enquiry], Model],
    located: Located,
    **options: Any,
) -> str:
    """Checks a pipeline in a loop of one's own on the mini-batch in ``feed``; returns the report. Every rank calls it.

    ``model_of`` returns the model in one process, on rank 0; ``options`` are fields of `Checked`. Raises `CheckFailed`
    on all ranks if ranks and one process differ, `Misuse` or `ModelError` if the model cannot be made there.
    """
    place, source = context.world.place, OneBatch(feed)
    context = replace(context, source=source)

    def reference_of(enquiry: Enquiry) -> Reference:
        model = model_of(enquiry)
        fields_of_model = {each.name: getattr(model, each.name) for each in fields(model) if each.init}
        alone = ModelFile(**fields_of_model, dataset=tuple, optimizer=BoundedSteps)
        return reference_for(context, alone, feed.size, data=_data(enquiry, context))

    answers = {"data": lambda: source.used, **options.pop("answers", {})}
    checked = Checked(
        context,
        modules,
        lambda _group, parameters: BoundedSteps(parameters),
        is_unchanged=False,
        located=located,
        answers=answers,
        **options,
    )
    with nullcontext() if place.rank else located.for_loader():
        report = checked.run(reference_of)
    if report.is_error:
        raise mistakes.check_has_ended(message=report.text)
    if not report.passed:
        raise mistakes.ranks_differ_from_one_process(verdict=report.text)
    return report.text


def _data(enquiry: Enquiry, context: RankContext) -> Callable[[int], Iterator[list[list[Any]]]]:
    """Returns a function of the number of slices, 1 to join them, that yields the mini-batches that the ranks of all
    copies have used.
    """
    place, job = context.world.place, context.world.job
    micro_batches: list[list[Any]] = []
    for copy in range(place.copies):
        of_copy: list[list[Any]] = [[None, None, {}] for _ in range(job.passes)]
        for worker in range(place.workers):
            for (micro, number), value in enquiry.ask(place.rank_of(copy, worker), "data").items():
                of_copy[micro][number] = {**of_copy[micro][2], **(value or {})} if number == 2 else value
        micro_batches += of_copy

    def data(slices: int) -> Iterator[list[list[Any]]]:
        joined = micro_batches
        if slices < job.slices:
            starts = range(0, len(micro_batches), job.slices)
            joined = [_whole(micro_batches[start : start + job.slices]) for start in starts]
        while True:
            yield mapped(to_device(joined, context.world.device), torch.clone)

    return data


def _whole(slices: Sequence[list[Any]]) -> list[Any]:
    """Joins the slices of a micro-batch along their sequence; a tensor without one is the same in all of them."""
    apart, (form, *_) = zip(*map(taken_apart, slices), strict=True)
    whole: list[Any] = form.filled([torch.cat(ts, 1) if ts[0].dim() > 1 else ts[0] for ts in zip(*apart, strict=True)])
    return whole
