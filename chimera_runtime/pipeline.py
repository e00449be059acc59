"""`Pipeline`: a compiled schedule in the training loop of its user."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist

from chimera_runtime.check.check import check_batch
from chimera_runtime.data.feed import EvaluationDataFacts, Feed, Pair, items_of
from chimera_runtime.data.loader import DataWorkers, Loader
from chimera_runtime.data.micro_batch_source import Batches, CutBatch
from chimera_runtime.errors import Misuse, PeerLost
from chimera_runtime.errors import start as mistakes
from chimera_runtime.errors.tools import CHECK_TAKES_ONE_OF_TWO, parameter_is_spread
from chimera_runtime.evaluate.evaluation import EvaluationLoss, Inference
from chimera_runtime.lane.profiler_ranges import ranges_on
from chimera_runtime.model.model import Layers, Model, file_of, require_build_stage
from chimera_runtime.model.naming import parameters_by_name
from chimera_runtime.model.ties import End, by_group, parameter_of
from chimera_runtime.optimizer.sharding import ShardedOptimizer, sharded_by_name
from chimera_runtime.program.compiled_program import load
from chimera_runtime.program.numbering import Round, rounds_of
from chimera_runtime.program.rank_facts import Group
from chimera_runtime.ranks.agreement import Enquiry, ObjectExchange
from chimera_runtime.ranks.world import join_group
from chimera_runtime.stage.gradient_sums import agree_on_infinite, gradients_of, scale_down, total_norm
from chimera_runtime.start.assemble import (
    LoaderMaker,
    RankContext,
    assemble,
    build_and_probe,
    components_of,
    lane_of,
    located_at,
)
from chimera_runtime.start.decided_by_data import agree_on_absence, agree_on_counts
from chimera_runtime.start.inventory import compare_stages
from chimera_runtime.start.varying_shapes import ShapeList, VaryingShapes
from chimera_runtime.state.exporting import export_weights, load_weights
from chimera_runtime.state.state import Average, AverageState, State
from chimera_runtime.update.rounds import agree_on_numbers, remarks_on
from chimera_runtime.update.shared_facts import SharedFacts
from chimera_runtime.update.stage_optimizer import Hook, Named, StageOptimizers
from chimera_runtime.update.updates import (
    FlushedUpdates,
    Hooks,
    LossScale,
    Outcome,
    step_hooks_of,
    updates_of,
)
from chimera_runtime.values.last_stage import alone
from chimera_runtime.values.losses import Loss
from chimera_runtime.values.mesh_tensors import is_spread

OLDEST_TORCH = "2.10"
"""The oldest release of torch that shows what the runtime asks of autograd's graph: who saved a tensor, and how."""

T = TypeVar("T")

_PATIENCE = 600.0
"""Smallest number of seconds that ranks wait for a rank whose modules return or load their state."""

_NO_HOOKS = Hooks()


class Pipeline:
    """Trains a model with a compiled schedule; process group, loop, data and optimizer are the caller's.

    It handles no signals, prints nothing and never ends the process. All ranks of the process group make it, with the
    same arguments; a process may have several. Every call restores the random generators of the process. Calls raise
    Misuse if arguments do not fit together, ModelError if a stage fails, PeerLost if another rank does not answer.

    Parameters
    ----------
    directory
        The directory that ``chimera compile`` wrote.
    build_stage
        ``build_stage(stage, num_stages)``, called for the module of each stage of this rank; or the `Layers` of stages.
    loss
        ``loss(output, target)``, which returns the mean over the micro-batch, a tensor of one number; or
        ``(sum, count)``: then the loss of a mini-batch is the sum of all sums divided by the sum of all counts. Where
        several stages feed no other, each has a loss: this one, or one of a dict of functions by their groups' names.
    example
        One micro-batch ``(input, target)`` or ``(input, target, keywords)``, of B items along dimension 0, or
        `Batches`. It shows which tensors the stages send to each other and which keyword arguments they take.
    group
        The ranks of the pipelines, W copies of the workers; by default all ranks. If it is a part of them, such as
        ``mesh["pp"].get_group()``, every rank of the default process group makes a pipeline, each over its own group.
    device
        The device of the stages: the CPU, with messages over gloo, or a GPU, over NCCL. By default the backend decides.
    layout
        Which ranks are neighbours: those of one ``"pipeline"``, or the ``"replica"``\\ s of one worker.
    communicators
        With another backend than gloo, the communicators of two workers: ``"directed"``, one for each direction, or
        ``"pair"``, one for both, which is the default if the program is proven to finish with that.
    seed
        The seed of weights and dropout: every random number follows from it, update, copy, micro-batch and stage.
    timeout
        Seconds that any wait for another rank may take.
    tied
        The parameters that stages share, or a function of num_stages that returns them. Each is a list of its ends
        ``(stage, name)``, or (layer, name) with `Layers`; the first end gives the initial value. An example for a
        schedule compiled with ``--tied 0,3`` is ``[[(0, "words.weight"), (3, "head.weight")]]``.
    name
        ``name(stage, parameter)``, the model's own name for a parameter of a stage, or with `Layers` of a layer.
    sum_dtype
        The dtype in which gradients are added up, by default each parameter's own. With float32 for weights in
        bfloat16, parameters have the sum as ``main_grad``, and the rounded sum as ``grad``.
    optimizer
        For a schedule without a flush, which has the steps in it: ``optimizer(named_parameters)``, called with (name,
        parameter) pairs for the parameters of each tie, and for the other parameters of each stage of this rank.
    before_step, after_step
        For such a schedule: called with a `StageStep` before and after each step, to clip or to step a scheduler.
    varying
        Whether micro-batches may be smaller than the example, in items or in any other dimension, each in its own way.
        Then the ranks agree on their shapes before each step, and messages use a part of the example's buffers.
    ranges
        Whether every update and every line of the program is a named range for torch.profiler, on a GPU also for NVTX.
    hooks
        Functions by which tools take part, such as those of train.py.

    Attributes
    ----------
    job
        The schedule, as ``program.json`` has it.
    items, micro_batches, copies
        B*N*W, the items of a mini-batch over all copies; N, the micro-batches of a step; W, the pipelines' copies. If
        there are programs for several N, these are of the largest.
    items_used
        The number of items of all copies in the steps so far, without those before a loaded checkpoint.
    numbers
        The numbers N of micro-batches for which there are programs, ascending.
    copy, worker, first_rank
        This rank's copy and worker, from 0; the first rank of these pipelines in the default process group.
    needs
        The micro-batches of a mini-batch that this rank uses, in whole or in part: a loader may leave out the others.
    remarks
        Remarks on stages that do not run as the schedule has them, and on parameters that may be one in the model, the
        same on every rank; the first rank gives them to the logger ``chimera_runtime``, which writes to stderr.
    """

    def __init__(
        self,
        directory: str | Path,
        build_stage: Callable[[int, int], torch.nn.Module] | Layers,
        loss: Callable[[Any, Any], Loss] | Mapping[str, Callable[[Any, Any], Loss]],
        example: Pair | Batches | CutBatch,
        *,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        layout: str = "pipeline",
        communicators: str | None = None,
        seed: int = 0,
        timeout: float = 60.0,
        tied: Sequence[Sequence[End]] | Callable[[int], Sequence[Sequence[End]]] = (),
        name: Callable[[int, str], str] | None = None,
        sum_dtype: torch.dtype | None = None,
        varying: bool = False,
        optimizer: Callable[[Named], Any] | None = None,
        before_step: Hook | None = None,
        after_step: Hook | None = None,
        ranges: bool = False,
        hooks: Hooks = _NO_HOOKS,
    ) -> None:
        if torch.__version__ < OLDEST_TORCH:
            raise mistakes.torch_is_too_old(version=torch.__version__, oldest=OLDEST_TORCH)
        # The program, and whether the arguments fit it.
        compiled = load(Path(directory))
        job = self.job = compiled.job
        require_build_stage(build_stage)
        step_hooks = step_hooks_of(job, optimizer, before_step, after_step)  # None with a flush: the caller steps
        size = items_of(example)
        if size % job.row_parts:
            raise mistakes.example_cannot_be_cut(scheme=job.name, parts=job.row_parts, items=size)
        # The ranks: communicators, and this rank's place; `shared` must be equal on all of them.
        shared: dict[str, object] = {
            "seed": seed,
            "sum_dtype": sum_dtype,
            "varying": varying,
            "the size of the example": size,
        }
        if job.numbers:
            shared["the programs for other numbers of micro-batches"] = job.numbers
        world = self._world = join_group(
            *(job, group, layout, device),
            timeout=timeout,
            communicators=communicators,
            end=hooks.lost,
            arguments=shared,
            shares_refusals=hooks.explains,
        )
        self._compare_example(example)
        control, place, facts = world.control_group, world.place, compiled.ranks[world.place.worker]
        # A context for calls: an error inside names the rank and its worker.
        located = self._located = located_at(world, facts, explains=hooks.explains)
        self.micro_batches, self.items = job.micro_batches, size * job.micro_batches * place.copies
        self.items_used = 0
        self._programs, self._has_rounds = compiled.programs, False  # whether an update had several, which is said
        self.numbers = (*self._programs,)
        self.copies, self.copy, self.worker = place.copies, place.copy, place.worker
        self.first_rank = control.members[0]
        # The model: modules with equal weights on all replicas, and what they do with the example.
        ties_of = tied if callable(tied) else lambda _stages: tied
        model = Model(file_of(build_stage), build_stage, loss, tied=ties_of, name=name, groups=job.named)
        self._feed = Feed(job, size, place.copy)
        self._feed.put_example(example)
        modules, probed, remarks = build_and_probe(
            world, located, model, self._feed, seed=seed, measures=hooks.measures
        )
        self._hooks, self._loads, self.remarks = hooks, 0, tuple[str, ...]()
        self._add_remarks(remarks)
        script, source = compiled.script(place.worker), self._feed if hooks.loads else None
        self._range = ranges_on(world.device) if ranges else nullcontext
        context = self._context = RankContext(
            *(world, script, facts, model, probed),
            seed=seed,
            source=source,
            ranges=ranges,
            programs={n: (other.job, other.ranks[place.worker]) for n, other in compiled.others.items()},
        )
        self._feed.keeps = probed.by_source or bool(context.counts)
        hooks.ready(context, modules)
        # The stages with optimizers and receive buffers, and the lane, which the rank's script is called with.
        parameters, self._groups = parameters_by_name(model, modules, context.ties), by_group(modules, context.ties)
        optimizers = None if step_hooks is None else StageOptimizers(modules, parameters, step_hooks, context.ties)
        self._modules, self._parameters, self._stage_optimizers = modules, parameters, optimizers
        self._sum_dtype, self._checks = sum_dtype, 0
        stages = assemble(context, modules, optimizers, hooks.stage_maker(job), sum_dtype=sum_dtype)
        components = hooks.wrapped(components_of(context, stages), stages)  # a tool may record the calls of each
        lane = lane_of(context, components)
        # The updates, their losses, and the facts that are compared over the ranks with these.
        counted = probed.expected_count is not None
        outcomes_class = hooks.outcomes_class(job)
        self._outcomes = outcomes_class(
            control, job, world.read, counted=counted, names=probed.auxiliary, reported=probed.reports
        )
        self._updates = updates_of(
            context,
            lane,
            stages,
            self._feed,
            outcomes=self._outcomes,
            parameters=parameters,
            scripts=compiled.updates(place.worker),
            sum_dtype=sum_dtype,
        )
        self._varying = VaryingShapes(world, self._feed, modules, stages, probed, compiled) if varying else None
        if self._varying is not None and isinstance(self._updates, FlushedUpdates):
            self._updates.fit = self._varying.begin_round
        self._shared_facts = SharedFacts(
            *(self._feed, self._outcomes, self._updates),
            groups=self._groups,
            names=self.names,
            written={
                p for s, m in modules.items() for n in probed.traits[s].changed if (p := parameter_of(m, n)) is not None
            },
            steps=optimizers,
        )
        # Everything between updates: loaders, forwards alone, checkpoints.
        self._loaders = LoaderMaker(
            control,
            {number: (program.job, program.ranks) for number, program in compiled.programs.items()},
            located,
            self._feed,
            traits=probed.traits,
            seed=seed,
        )
        self.needs = frozenset(self._loaders.needed)
        self._inference = Inference(context, stages, size, located, self._varying, self._feed.cut_slice)
        self._state = State(
            control, world.store_of_all, job, model, ties=context.ties, modules=modules, parameters=parameters
        )
        control.refusals.watch()

    def _compare_example(self, example: Any) -> None:
        """Compares the examples of all ranks, where each gives a part of one."""

    def step(
        self,
        batch: Pair | Callable[[int], Pair] | Batches | CutBatch | None = None,
        *,
        micro_batches: Sequence[Pair] | None = None,
        number: int | None = None,
        accumulate: bool = False,
        scaler: LossScale | None = None,
    ) -> Outcome | None:
        """Runs forwards, backwards and sums of one update; ``.grad`` is then the gradient of the mini-batch's loss.

        Without a flush it starts one more update, and each stage steps where the schedule has the step. It returns the
        outcome of the newest update for which all stages have stepped, or None while there is no such update.

        Parameters
        ----------
        batch
            The mini-batch of this rank's copy: a pair (input, target) of pytrees with B*N items along dimension 0 of
            every tensor, for any N, also 0, if the directory has programs for several; or a function of a micro-batch's
            number that returns a pair with B items, called only for the micro-batches that this rank needs. A third
            entry is a dict of keyword arguments, for the stages that take them. Of a dict of inputs for several groups
            of stages, an entry may be None, or lack: then these groups have no part in the micro-batch. `Batches` give
            inputs, targets and keyword arguments of the update separately.
        micro_batches
            The mini-batch as N pairs.
        number
            How many micro-batches there are, if ``batch`` is a function and that is not N.
        accumulate
            Whether to keep the gradients that are there: ``.grad`` is then as if all mini-batches since it was cleared
            had been one, those of other pipelines with the same parameters too. Mini-batches weigh by their items, or
            by their counts if ``loss`` returns counts.
        scaler
            Multiplies the loss by its scale, the same on all ranks: see `unscale_`.

        Raises
        ------
        Misuse
            If the batch has another size, or gradients of the step before are still there.
        BadModel, ModelError, PeerLost
            If the step fails; then no further step is possible.
        RanksDiffer
            If ranks differ, in this step or the one before, in something that must be the same on all of them.
        """
        with self._world.control_group.refusals.call():
            return self._step(batch, micro_batches, number, accumulate, scaler)

    def _step(
        self,
        batch: Any,
        micro_batches: Sequence[Pair] | None,
        number: int | None,
        accumulate: bool,
        scaler: LossScale | None,
    ) -> Outcome | None:
        # Refuse a step that cannot succeed while nothing has changed.
        self._require_sound()
        self._outcomes.require_agreement()
        self._state.require_trainable(self.updates)
        if (batch is None) == (micro_batches is None):
            raise Misuse(mistakes.STEP_TAKES_ONE_OF_TWO)
        # Give the mini-batch to the feed, from which the lane loads micro-batches until the update is complete.
        update = self._updates.started
        if micro_batches is None:
            self._feed.put(update, batch, number)
            self._add_remarks(self._feed.remarks_on(batch))
        else:
            self._feed.put_micro_batches(update, micro_batches)
        rounds = self._agree_on_numbers(update) if self.job.numbers else ()
        total = sum(of_copy[-1].stop for of_copy in rounds) or self.micro_batches * self.copies
        shapes = self._agree_on_shapes(self._feed, update, rounds)
        self._agree_before(update, rounds)
        self._updates.prepare(accumulate, scaler)
        self._world.control_group.refusals.note_sending()
        # Run the script. Forwards seed the random generators; afterwards those of the loop are restored.
        try:
            with self._located, self._context.probed.generators_kept(), self._range(f"update {update}"):
                if self._varying is not None and shapes is not None:
                    self._varying.begin(shapes)  # new shapes: runs forwards, on all ranks of the copy
                self.items_used += self._feed.size * total
                return self._updates.run_update()
        except PeerLost:
            self._outcomes.explain()  # the lost rank may have stopped because it saw that ranks differ
            raise

    def _agree_on_numbers(self, update: int) -> list[tuple[Round, ...]]:
        """Chooses the rounds of the update by the micro-batches that each copy has; returns those of each copy."""
        assert isinstance(self._updates, FlushedUpdates)
        control, feed = self._world.control_group, self._feed
        with self._located.for_loader():
            numbers = agree_on_numbers(control, feed.number(update))
            rounds = [rounds_of(number, self.numbers) for number in numbers]
        feed.set_number(update, numbers[self.copy])
        self._updates.choose(rounds[self.copy], sum(numbers))
        if not self._has_rounds and (remarks := remarks_on(rounds)):
            self._has_rounds = True
            self._add_remarks(remarks)
        return rounds

    def _agree_on_shapes(self, feed: Feed, update: int, rounds: Sequence[Sequence[Round]]) -> ShapeList | None:
        """Refuses what does not fit while gradients are as they were."""
        if self._varying is None:
            return None
        with self._located.for_loader():
            return self._varying.agree(feed, update, rounds)

    def _agree_before(self, update: int, rounds: Sequence[Sequence[Round]]) -> None:
        if self._context.absence is not None or self._context.counts:
            with self._located.for_loader():
                agree_on_absence(self._context, update, rounds)
                agree_on_counts(self._context, update, rounds)

    def ask_to_stop(self) -> None:
        """Tells all ranks, with the next loss, to stop: `Outcome.is_last`. Any thread or signal handler may call it."""
        self._outcomes.asked_to_stop = True

    def drain(self) -> list[Outcome]:
        """Completes the updates that are under way; returns all outcomes that no call has returned yet.

        Every rank calls it. Afterwards all parameters are those of the last update, and the first micro-batches of the
        next step read them. With a flush there is nothing to complete. Errors as in `step`.
        """
        self._finish()
        return self._updates.take_outcomes()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clips gradients as torch.nn.utils.clip_grad_norm_, by the norm of the whole model, replicas counted once.

        Every rank calls it. Returns the norm before clipping, in float64, the same on all ranks. Raises RuntimeError if
        the norm is not finite and ``error_if_nonfinite`` is true.
        """
        self._require_flush(mistakes.NO_NORM)
        with self._located:
            norm = total_norm(self._world.control_group, self.job, gradients_of(self._groups), float(norm_type))
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(f"the norm of order {norm_type:g} of the gradients is {float(norm)}")
        scale_down(self.parameters(), max_norm, norm)
        if isinstance(self._updates, FlushedUpdates):
            self._updates.accumulation.note_scaled()
        return norm

    def unscale_(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """Unscales as ``scaler.unscale_(optimizer)``; infinity or NaN on any rank makes all ranks skip the step.

        Every rank calls it, between `step` and ``scaler.step(optimizer)``, with an optimizer of this rank's parameters.
        """
        self._require_flush(mistakes.NO_SCALER)
        if scaler.is_enabled():
            scaler.unscale_(optimizer)
            with self._located:
                agree_on_infinite(self._world.control_group, self._world.device, scaler, optimizer)
            if isinstance(self._updates, FlushedUpdates):
                self._updates.accumulation.note_scaled(p for group in optimizer.param_groups for p in group["params"])

    def sharded_optimizer(self, make: Callable[[Named], Any], elementwise: bool = False) -> ShardedOptimizer:
        """An optimizer whose state is sharded over the replicas of each stage: see `ShardedOptimizer`.

        ``make(named_parameters)`` makes an optimizer of the shards of this rank: parts of parameters along one
        dimension, as (name, parameter) pairs, without frozen parameters. The optimizer must treat every number by
        itself: say so by ``elementwise`` if it is none of torch's, or Misuse is raised. Every rank makes it and calls
        ``step``; if there are several, all ranks do so in the same order.
        """
        self._require_flush(mistakes.NO_SHARDS)
        return sharded_by_name(self._world, self._groups, self.names, make, elementwise=elementwise)

    # ---- forwards alone, and data for both

    def evaluate(self, batches: Iterable[Pair | Callable[[int], Pair]]) -> EvaluationLoss:
        """Returns the mean loss over all items of some batches with the present weights, the same on every rank.

        It is a number of which the attribute ``reports`` has what was reported, as `Outcome.reports`.

        Modules are in evaluation mode meanwhile, and nothing changes on which training depends, except that the updates
        of a stream that are under way are completed first; `drain` returns their outcomes. Errors are as in `step`;
        RanksDiffer is raised at the end if ranks of a copy have different batches.

        Parameters
        ----------
        batches
            The same on all ranks of a copy: (input, target) or (input, target, keywords) with any number of items along
            dimension 0, or functions as `step` takes them. Copies may have different numbers of batches. A micro-batch
            is weighted by its items if ``loss`` is a mean, else by its count; if all counts are 0, the result is NaN.
        """
        with self._world.control_group.refusals.call():
            self._finish()
            self._state.require_values()
            given = EvaluationDataFacts(self.copy)
            loss = self._inference.mean_loss(map(given.note, batches))
        with self._located:
            self._outcomes.compare(given.facts(), "an evaluation")
        return loss

    def predict(self, batches: Iterable[Pair | Callable[[int], Pair]]) -> Iterator[Any]:
        """Yields the outputs of the last stage for each batch, with the items in their order, on the CPU.

        Every rank of the copy gets them. Modules, weights, batches and errors are as in `evaluate`, but targets may be
        None, and outputs are joined along dimension 0, which they must have. If several stages feed no other, there is
        a dict of their outputs by the names of their groups.
        """
        self._finish()
        self._state.require_values()
        outputs_of = self._inference.predictor()
        for batch in batches:
            self._finish()
            yield outputs_of(batch)

    def loader(
        self,
        dataset: Any,
        *,
        shuffle: bool = False,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Any] | None = None,
        seed: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = True,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        multiprocessing_context: str | None = None,
        pin_memory: bool = False,
    ) -> Loader:
        """Returns the dataset as mini-batches for `step` and `evaluate`; this rank loads only the items that it uses.

        Every rank makes it, with the same arguments. Item j of a mini-batch, the next B*N*W items, goes to copy
        j // (B*N) and to micro-batch (j // B) % N. With a ``batch_sampler`` a mini-batch has any number of items. Each
        rank that uses any item reads the whole of an iterable dataset.
        Parameters are those of `Loader`; Misuse is raised if they do not go together.
        """
        workers = DataWorkers(num_workers, prefetch_factor, multiprocessing_context, pin_memory)
        return self._loaders.make(
            dataset,
            workers,
            shuffle=shuffle,
            sampler=sampler,
            batch_sampler=batch_sampler,
            seed=seed,
            collate_fn=collate_fn,
            drop_last=drop_last,
        )

    # ---- checks, checkpoints and files of weights

    def check(
        self,
        batch: Pair | Callable[[int], Pair] | Batches | CutBatch | None = None,
        *,
        micro_batches: Sequence[Pair] | None = None,
        number: int | None = None,
    ) -> str:
        """Compares some updates on a mini-batch with the same in one process; returns a report, the same on all ranks.

        All copies have as many micro-batches, and there is a program for them.
        The comparison is that of ``train.py --check``: gradients, weights after steps of its own, losses, and replicas
        bit by bit. Parameters, gradients, buffers and random generators are as before afterwards; the updates of a
        stream that are under way are completed first. Every rank calls it; arguments are those of `step`. Rank 0 builds
        all stages by ``build_stage``, gives them the state of those that the ranks hold, and holds the whole model.

        Raises CheckFailed on all ranks if anything differs: it names stage, parameter and the first tensor that does.
        Raises Misuse, on all ranks, if the mini-batch does not fit or rank 0 cannot build the model.
        """
        self._finish()
        feed = self._on_all_ranks(lambda: self._checked_feed(batch, micro_batches, number))
        context = self._context
        rounds: list[tuple[Round, ...]] = []
        if self.job.numbers:
            with self._located.for_loader():
                numbers = agree_on_numbers(self._world.control_group, feed.number(0))
                context = self._context_of(numbers)
            feed.job = context.world.job
            feed.set_number(0, feed.job.micro_batches)
            rounds = [(Round(number),) for number in numbers]
        shapes = self._agree_on_shapes(feed, 0, rounds)
        if self._varying is not None and shapes is not None:
            with self._located, context.probed.generators_kept():
                self._varying.begin(shapes)
                boundaries = self._varying.boundaries(shapes.keys)
            context = replace(context, probed=replace(context.probed, boundaries=boundaries))
        self._checks += 1
        return check_batch(
            context,
            self._modules,
            feed,
            model_of=self._model_alone,
            located=self._located,
            tells=not self.updates and not self._loads,
            sum_dtype=self._sum_dtype,
            number=self._checks,
            answers=self._check_answers(),
        )

    def _context_of(self, numbers: Sequence[int]) -> RankContext:
        """The context of the program for so many micro-batches on each copy. Raises `Misuse` if there is none."""
        number, context = numbers[0], self._context
        if {*numbers} != {number} or number not in self._programs:
            raise mistakes.check_has_no_program(copies=numbers, numbers=self.numbers)
        if number == self.micro_batches:
            return context
        program = self._programs[number]
        world = replace(context.world, job=program.job)
        return replace(context, world=world, script=program.script(self.worker), facts=program.ranks[self.worker])

    def _checked_feed(self, batch: Any, micro_batches: Sequence[Pair] | None, number: int | None) -> Feed:
        """Returns a feed that has a mini-batch as update 0. Raises `Misuse` if it does not fit."""
        if (batch is None) == (micro_batches is None):
            raise Misuse(CHECK_TAKES_ONE_OF_TWO)
        self._state.require_values()
        self._state.require_known()
        for stage, module in self._modules.items():
            if (name := next((n for n, p in module.named_parameters() if is_spread(p)), None)) is not None:
                raise parameter_is_spread(stage=stage, name=name)
        feed = Feed(self.job, self._feed.size, self.copy, self._feed.names, self._feed.cut_slice)
        feed.varies = feed.keeps = self._varying is not None
        if micro_batches is None:
            feed.put(0, batch, number)
        else:
            feed.put_micro_batches(0, micro_batches)
        return feed

    def _model_alone(self, _enquiry: Enquiry) -> Model:
        """The model that rank 0 builds in one process."""
        return self._context.model

    def _check_answers(self) -> dict[str, Callable[..., Any]]:
        """Further answers of this rank to questions of `_model_alone`."""
        return {}

    def check_replicas(self) -> None:
        """Raises RanksDiffer unless the replicas of each stage have the same weights, bit by bit; every rank calls it.

        `Checkpoints` and `export_weights` do so before they write. Buffers are local to a replica and not compared.
        The updates of a stream that are under way are completed first.
        """
        self._catch_up()
        self._on_all_ranks(self._state.require_known)
        with self._located:
            self._shared_facts.compare_weights(self.updates)

    def state_dict(self, replica: int | None = None) -> dict[str, Any]:
        """Parameters and buffers of this rank for torch.distributed.checkpoint, which may read into them, too.

        ``model`` has the parameters by name; those of all ranks together are the model. ``replicas`` has the buffers by
        ``<k>/<name>`` for the k-th replica of the stage, or for ``replica`` if that is given, and ``extra``, pickled,
        further entries of the modules' ``state_dict``. ``update`` is `updates`. Updates of a stream that are under way
        are completed first. Every rank calls it, and all raise the error of a module whose state cannot be saved.
        """
        self._catch_up()
        saved = self._on_all_ranks(lambda: self._state.saved(replica))
        return {**saved, "update": {"0": (self.updates,)}}

    def load_state_dict(self, state: Mapping[str, Any], replica: int | None = None) -> None:
        """Loads a state that `state_dict` has returned, here or on another rank with the same stages.

        Every rank calls it. All raise BadCheckpoint or ModelError if, on any rank, an entry is missing or refused.
        """
        self._finish()
        self._on_all_ranks(lambda: self._state.load(state, replica))
        ((updates,),) = state["update"].values()
        self._updates.count_from(updates)
        if self._stage_optimizers is not None:
            self._stage_optimizers.count_from(updates)

    def unsaved_buffers(self) -> dict[str, str]:
        """Digests of the buffers of this rank that are in no state dict (``persistent=False``), by their names."""
        return self._state.unsaved()

    def average_state(self, average: Average, what: str) -> AverageState:
        """Returns the object that saves and loads an average of the weights, called ``what``; see `AverageState`."""
        return AverageState(what, average, self._state)

    def export_weights(self, path: str | Path, names: Mapping[str, str] | None = None) -> None:
        """Writes the state dict of the whole model into one file, under the model's own names.

        Every rank calls it, and rank 0 holds the model meanwhile; where pipelines in several rows of a mesh hold parts
        of one model, all call it and the first row writes. A path that ends in ``.safetensors`` gets that format, any
        other a state dict for ``torch.load(path, weights_only=True)``. A tied parameter has all of its names, but in
        safetensors the first alone, as is usual there. Buffers and further entries are those of the first replica.
        With ``names`` the file has only some entries: their names in the file, each with that in the model.
        Raises BadCheckpoint if the file cannot be written or could not be read again; a former file stays then.
        """
        self.check_replicas()
        export_weights(self._state, Path(path), names)

    def load_weights(self, path: str | Path) -> list[str]:
        """Loads the parameters and buffers of this rank from a file as `export_weights` writes it; every rank calls it.

        The file must have each parameter, in its shape; a buffer that it lacks stays as it is. Returned are the names
        in the file that the model does not have. Raises BadCheckpoint if the file cannot be read, or lacks a parameter.
        """
        self._finish()
        unknown = load_weights(self._state, Path(path))
        self._loads += 1
        with self._located.for_loader():
            context = self._context
            self._add_remarks(
                compare_stages(self._world.control_group, context.model, self._modules, context.ties, self._loads)
            )
        return unknown

    def _add_remarks(self, remarks: Iterable[str]) -> None:
        for remark in remarks:
            if remark not in self.remarks:
                self.remarks += (remark,)
                if self._world.place.rank == 0:
                    self._hooks.remark(remark)

    # ---- stages and parameters, and the end

    @property
    def stages(self) -> dict[int, torch.nn.Module]:
        """The modules of the stages that this rank holds, by their number."""
        return {stage: alone(module) for stage, module in self._modules.items()}

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The parameters of this rank by the model's own names, which ``name`` returns.

        Without it they are ``stages.<stage>.<name>``, or with `Layers` ``layers.<layer>.<name>``. A shared parameter is
        there once, on every rank by the end that is declared first.
        """
        yield from self._parameters.items()

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """The parameters of this rank. To clip by the norm of the model, use `clip_grad_norm_`, not torch's own."""
        yield from self._parameters.values()

    @property
    def names(self) -> dict[torch.Tensor, str]:
        """The name of each parameter that an optimizer may be given: those of `named_parameters` and `optimizers`."""
        stepped = {} if self._stage_optimizers is None else self._stage_optimizers.names
        return {parameter: name for name, parameter in self.named_parameters()} | stepped

    @property
    def optimizers(self) -> dict[int | Group, Any]:
        """The optimizers that ``optimizer`` has made, by stage, or by the stages that share; none with a flush."""
        return {} if self._stage_optimizers is None else self._stage_optimizers.optimizers

    @property
    def updates(self) -> int:
        """Number of calls of `step` so far, with ``accumulate=True`` too, those before a loaded checkpoint included."""
        return self._updates.started

    def close(self) -> None:
        """Waits for the losses of all updates, and frees communicators, threads and data workers; all ranks call it.

        Outcomes can still be read afterwards. The caller's process group stays. After an error, or with updates of a
        stream under way, communicators stay until the process ends: other ranks may never answer their messages.
        """
        if self._located.closed:
            return
        is_idle = False
        try:
            if not self._located.failed:
                self._outcomes.settle()
                is_idle = self._updates.are_complete
        finally:
            self._located.failed = self._located.closed = True
            self._shared_facts.close()
            self._loaders.close()
            self._world.close(is_idle)

    # ---- what comes before a call

    def _require_sound(self) -> None:
        """Raises `Misuse` if the pipeline is closed or an update has failed, `PeerLost` if a wait has failed."""
        if self._located.closed:
            raise Misuse(mistakes.PIPELINE_IS_CLOSED)
        if self._located.failed:
            raise Misuse(mistakes.UPDATE_HAS_FAILED)
        with self._located:
            self._world.control_group.check()

    def _require_flush(self, consequence: str) -> None:
        """Raises a Misuse unless the schedule has a flush; ``consequence`` says why a method needs one."""
        if self.job.period:
            raise mistakes.schedule_has_no_flush(scheme=self.job.name, consequence=consequence)

    def _finish(self) -> None:
        """Completes the updates that are under way; errors as in `_require_sound`, and those of an update."""
        self._require_sound()
        with self._located, self._context.probed.generators_kept():
            self._updates.finish()

    def _catch_up(self) -> None:
        """Completes the updates that are under way, and waits for the device to end them: then weights can be saved."""
        self._finish()
        with self._located:
            self._world.synchronize()

    def _on_all_ranks(self, call: Callable[[], T]) -> T:
        """Returns the result of a call on this rank, or raises an error on all ranks if it fails on any; not fatal."""

        def call_here() -> T:
            with self._located.for_loader():
                return call()

        control = self._world.control_group
        exchange = ObjectExchange(control.group, "the state of a pipeline", max(control.timeout, _PATIENCE))
        return exchange.on_all_ranks(call_here)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None:
            if not self._located.failed:
                self.drain()
                self._world.control_group.barrier("for everybody to finish")
            self.close()
