"""`Pipeline`: a compiled schedule in the training loop of its user."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from chimera_runtime.blame import Located, UserCode
from chimera_runtime.data.batches import Batches
from chimera_runtime.data.epoch_length import Messages
from chimera_runtime.data.feed import Feed, Pair, items_of
from chimera_runtime.data.mini_batch_facts import EvaluationDataFacts
from chimera_runtime.errors import MISUSED, Misuse, PeerLost
from chimera_runtime.evaluate.inference import Inference
from chimera_runtime.lane.profiler_ranges import Ranges, Unranged
from chimera_runtime.model.layers import Layers
from chimera_runtime.model.model import Model, file_of, require_build_stage
from chimera_runtime.model.naming import parameters_by_name
from chimera_runtime.model.ties import End, by_group
from chimera_runtime.optimizer.optimizer_facts import OptimizerFacts
from chimera_runtime.optimizer.sharded_optimizer import ShardedOptimizer, sharded
from chimera_runtime.program.compiled_program import load
from chimera_runtime.ranks.rendezvous import failures_shared
from chimera_runtime.ranks.world import join_group
from chimera_runtime.stage.norms import agree_on_infinite, gradients_of, scale_down, total_norm
from chimera_runtime.stage.replicas import Replicas, is_due
from chimera_runtime.start import assemble, probe
from chimera_runtime.start.memory_report import memory_state
from chimera_runtime.start.rank_context import Setting
from chimera_runtime.start.uses import uses
from chimera_runtime.start.varying_shapes import Lengths
from chimera_runtime.state.holding import Holding
from chimera_runtime.state.state import State
from chimera_runtime.update.accumulation import Accumulation
from chimera_runtime.update.flushing import Flushing
from chimera_runtime.update.hooks import Hooks
from chimera_runtime.update.outcome import Outcome
from chimera_runtime.update.shared_facts import FlushFacts, StreamFacts
from chimera_runtime.update.stage_optimizer import Hook, Named, Steppers
from chimera_runtime.update.streaming import Streaming, hooks_of
from chimera_runtime.values.boundary import keyword_names
from chimera_runtime.values.losses import Loss
from chimera_runtime.values.tensors import generators_kept

_NO_HOOKS = Hooks()
_MAKING = UserCode("make(named_parameters)", MISUSED)


class Pipeline(Holding):
    """Trains a model with a compiled schedule; process group, loop, data and optimizer are the caller's.

    It takes no signal, prints nothing and never ends the process. All ranks of the process group make it, with the same
    arguments; several live side by side. The random numbers of the process are as before after every call.

    Parameters
    ----------
    directory
        What ``chimera compile`` wrote.
    build_stage
        ``build_stage(stage, num_stages)``, the module of a stage; called for the stages that this rank holds. Or the
        `Layers` that stages are made of.
    loss
        ``loss(output, target)``, the mean over the micro-batch, a tensor of one number; or ``(sum, count)``, and then
        the loss of a mini-batch is the sum of all sums through that of all counts.
    example
        One micro-batch ``(input, target)`` or ``(input, target, keywords)``, of B items along dimension 0, or
        `Batches`, of which it is the first: it says what the stages hand on, and which keyword arguments each takes.
    group
        The ranks of the pipelines, W copies of the workers; by default all. With one such as ``mesh["pp"].get_group()``
        every rank of the default process group makes a pipeline, over the group that it is a part of.
    device
        Where the stages are: the CPU, with messages over gloo, or a GPU, over NCCL. By default what the group is for.
    layout
        Which ranks are neighbours: those of one ``"pipeline"``, or the ``"replica"``\\ s of one worker.
    communicators
        Of messages, where the backend is not gloo: one for each direction between two workers, ``"directed"``, or for
        both, ``"pair"``, which is the default if the program is proven to finish with that.
    seed
        Of weights and dropout: with update, copy, micro-batch and stage it decides every number that is drawn.
    timeout
        Seconds that any wait for another rank may take.
    tied
        The parameters that stages share, each by its ends ``(stage, name)``, the first of which gives the initial
        value: ``[[(0, "words.weight"), (3, "head.weight")]]``, for a schedule compiled with ``--tied 0,3``. Or a
        function of num_stages that returns that. With `Layers` the numbers are those of layers.
    name
        ``name(stage, parameter)``, what the model calls a parameter of a stage, or with `Layers` of a layer: the names
        of `named_parameters`.
    sum_dtype
        Adds gradients up over micro-batches and replicas in this dtype, as float32 for weights in bfloat16: parameters
        then have the sum as ``main_grad``, and rounded as ``grad``. By default the parameters' own.
    optimizer
        For a schedule without a flush, whose stages step inside it: ``optimizer(named_parameters)``, called once for
        what stages share, and for the rest of each stage that this rank holds, with its (name, parameter) pairs.
    before_step, after_step
        There, called with a `StageStep` before and after each of these steps: to clip, or to step a scheduler.
    varying
        The shapes of a mini-batch may be smaller than the example's, in other dimensions than 0 and from step to step:
        every rank then looks at the input of each. Messages take a part of buffers that are made for the example.
    ranges
        Every update and every line of the program is a range of its name for torch.profiler, on a GPU for NVTX, too.
    hooks
        Where tools take part; those of train.py do.

    Raises
    ------
    Misuse
        If directory, process group, stages or example do not fit together, or ``build_stage`` is no function.
    ModelError
        If ``build_stage`` or a stage raises an error.
    PeerLost
        If another rank does not answer in time, or has ended.
    """

    def __init__(
        self,
        directory: str | Path,
        build_stage: Callable[[int, int], torch.nn.Module] | Layers,
        loss: Callable[[Any, Any], Loss],
        example: Pair | Batches,
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
        compiled = load(Path(directory))
        require_build_stage(build_stage)
        job = compiled.job
        steps = hooks_of(job, optimizer, before_step, after_step)
        size = items_of(example)
        if size % job.parts:
            raise Misuse(
                f"{job.name} cuts every micro-batch into {job.parts}, and dimension 0 of the example is {size}"
            )
        same = {"seed": seed, "sum_dtype": sum_dtype, "varying": varying, "the size of the example": size}
        world = join_group(job, group, layout, device, timeout, communicators, hooks.lost, same)
        place = world.place
        script, facts = compiled.script(place.worker), compiled.ranks[place.worker]
        abandon = partial(world.leak_groups, explains=hooks.explains)
        self._located = Located(place.rank, place.worker, lambda: memory_state(world.device, facts), abandon)
        file, of_stages = file_of(build_stage), tied if callable(tied) else lambda _stages: tied
        model = Model(file, build_stage, loss, tied=of_stages, name=name)
        self._feed = Feed(job, size, place.copy)
        self._feed.put_example(example)
        with self._located, failures_shared(world.control_group.store, place.rank), generators_kept():
            built = assemble.modules(world, model, seed)
            assemble.agree_on_weights(world, built)
            findings = probe.find(world, model, self._feed, built, seed, hooks.measures)
        self._feed.names = keyword_names(findings.traits, built)
        self._uses = [
            uses(job, of_worker, any(findings.traits[stage].keywords for stage in of_worker.stages), varying)
            for of_worker in compiled.ranks
        ]
        self._messages = Messages()
        loaded, named = self._feed if hooks.loads else None, Ranges(world.device) if ranges else Unranged()
        self._setting = Setting(world, script, facts, model, findings, seed, loaded, named)
        hooks.ready(self._setting, built)
        self._modules, self._named = built, parameters_by_name(model, built, self._setting.ties)
        self._groups = by_group(built, self._setting.ties)
        self._steppers = None if steps is None else Steppers(built, self._named, steps, self._setting.ties)
        self._stages = assemble.assemble(
            self._setting, built, self._steppers, hooks.stage_maker(self._setting), sum_dtype=sum_dtype
        )
        lane = hooks.lane(self._setting, self._stages)
        self._outcomes = hooks.outcomes(world, findings.expected_count is not None, findings.auxiliary)
        running = (self._setting, lane, self._stages, self._feed, self._outcomes)
        accumulation = Accumulation(dict(self.named_parameters()), world if findings.expected_count else None)
        self._schedule = Streaming(*running) if job.period else Flushing(*running, accumulation, sum_dtype is not None)
        self._lengths = Lengths(world, self._feed, built, self._stages, findings) if varying else None
        self._inference = Inference(self._setting, self._stages, size, self._located, self._lengths)
        self._state = State(self._setting, built, dict(self.named_parameters()))
        self._compare_ranks()

    # ---- training

    def step(
        self,
        batch: Pair | Callable[[int], Pair] | Batches | None = None,
        *,
        micro_batches: Sequence[Pair] | None = None,
        accumulate: bool = False,
        scaler: torch.amp.GradScaler | None = None,
    ) -> Outcome | None:
        """Forward, backward and sums of one update: afterwards ``.grad`` is the gradient of the mini-batch's loss.

        Without a flush it gives the schedule one update more, and each stage makes its steps when their time has come:
        the outcome is that of the newest update that all stages have made, None while there is none.

        Parameters
        ----------
        batch
            What this rank's copy trains on: a pair (input, target) of pytrees with B*N items along dimension 0 of every
            tensor, or a function of the micro-batch's number that gives a pair with B items. It is asked for what this
            rank needs alone. A third is a dict of keyword arguments, for the stages that know their names. `Batches`
            give those of the update, inputs, targets and keyword arguments apart.
        micro_batches
            The same as N pairs.
        accumulate
            Keeps the gradients that there are, as if the mini-batches since they were cleared had been one; each weighs
            its count, where ``loss`` returns one.
        scaler
            Multiplies the loss by its scale, the same on all ranks: see `unscale_`.

        Raises
        ------
        Misuse
            If the batch has another size, or gradients of the step before are still there.
        BadModel, ModelError, PeerLost
            If the step fails; there is no further one then.
        RanksDiffer
            If ranks differ in something that must be the same on them, in this step or the one before.
        """
        self._require_sound()
        self._outcomes.require_agreement()
        self._state.require_values()
        if not self._is_known or is_due(self.updates):
            self._state.require_known()
            self._is_known = True
        if (batch is None) == (micro_batches is None):
            raise Misuse("step takes either a batch or micro_batches")
        update = self._schedule.given
        if micro_batches is None:
            self._feed.put(update, batch)
        else:
            self._feed.put_micro_batches(update, micro_batches)
        if self._lengths is not None:
            self._lengths.check(update)
        self._schedule.begin(accumulate, scaler)
        try:
            with self._located, self._setting.generators_kept(), self._setting.ranges.update(update):
                if self._lengths is not None:
                    self._lengths.begin(update)
                return self._schedule.give()
        except PeerLost:
            self._outcomes.explain()
            raise

    def ask_to_stop(self) -> None:
        """Lets all ranks know, with the loss of the next update, that it is to be the last: `Outcome.is_last`.

        One rank may call it, at any time and from any thread or signal handler; it returns at once.
        """
        self._outcomes.asked_to_stop = True

    def drain(self) -> list[Outcome]:
        """Completes the updates that are under way: their outcomes, and others that no call has returned yet.

        Every rank calls it. Afterwards all parameters are those of the last update, and the next step begins anew: its
        first micro-batches read them. With a flush nothing is ever under way.

        Raises
        ------
        BadModel, ModelError, PeerLost
            If that fails; there is no further step then.
        """
        self._finish()
        return self._schedule.untold()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """As torch.nn.utils.clip_grad_norm_, over the whole model: each parameter counts once, replicas or not.

        Every rank calls it, and gets the same norm: a number in float64, of before.

        Raises
        ------
        RuntimeError
            If the norm is no finite number and ``error_if_nonfinite``.
        PeerLost
            If another rank does not answer in time, or has ended.
        """
        self._require_flush(
            "the stages make an update at different times, so there is no norm of all its gradients: clip those of a "
            "stage in before_step, as in clip_grad_norm_([p for _, p in step.named_parameters], 1.0)"
        )
        with self._located:
            norm = total_norm(self._setting.world, gradients_of(self._groups), float(norm_type))
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(f"the norm of order {norm_type:g} of the gradients is {float(norm)}")
        scale_down(self.parameters(), max_norm, norm)
        return norm

    def unscale_(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """As ``scaler.unscale_(optimizer)``; infinity or NaN on any rank is known to all, so that all skip the step.

        Every rank calls it, between `step` and ``scaler.step(optimizer)``, with an optimizer of this rank's parameters.
        """
        self._require_flush("stages step without a scaler: train in bfloat16, which needs none")
        if scaler.is_enabled():
            scaler.unscale_(optimizer)
            with self._located:
                agree_on_infinite(self._setting.world, scaler, optimizer)

    def sharded_optimizer(self, make: Callable[[Named], Any], elementwise: bool = False) -> ShardedOptimizer:
        """An optimizer whose state is sharded over the replicas of each stage: weights are those of one that is not.

        A rank keeps the state of its shard of each parameter, steps that, and has the shards of the other replicas
        after each step. Every rank makes it and calls its ``step``, with others of its kind in the same order. Else it
        is used like any optimizer.

        Parameters
        ----------
        make
            ``make(named_parameters)``, an optimizer of the shards of this rank, as (name, parameter) pairs: a shard is
            a part of a parameter along one dimension. What requires no gradient is left out. Replicas make the same.
        elementwise
            That optimizer treats every number of a parameter by itself. Known of those of torch.

        Raises
        ------
        Misuse
            If the schedule has no flush, or the optimizer may look at a parameter as a whole.
        """
        self._require_flush(
            "its stages step inside the schedule, which leaves no place to gather their weights; its optimizers keep "
            "the state of whole stages"
        )
        trained = {group: [p for p in all_ if p.requires_grad] for group, all_ in self._groups.items()}
        names = {parameter: name for name, parameter in self.named_parameters()}
        listed = [names[parameter] for parameters in trained.values() for parameter in parameters]

        def made(shards: list[torch.nn.Parameter]) -> Any:
            with _MAKING:
                return make(list(zip(listed, shards, strict=True)))

        return sharded(self._setting.world, trained, made, elementwise)

    # ---- evaluation

    def evaluate(self, batches: Iterable[Pair | Callable[[int], Pair]]) -> float:
        """The mean loss over all items of some batches, on the weights as they are: the same number on every rank.

        Modules are in evaluation mode meanwhile, and nothing that training depends on changes. But for the updates of
        a stream that are under way: they are completed first, and `drain` returns their outcomes.

        Parameters
        ----------
        batches
            What this rank's copy evaluates, the same on all of its ranks: (input, target) or (input, target, keywords)
            with items along dimension 0, any number of them; or functions as `step` takes them. Copies may have
            different numbers of batches. A micro-batch counts by its items if ``loss`` is a mean over them, and else by
            its count; where nothing counts the result is not a number.

        Raises
        ------
        Misuse
            If a batch is none of these, or there is no item at all.
        RanksDiffer
            If ranks of a copy have other batches; it is seen at the end.
        BadModel, ModelError, PeerLost
            If a forward or a message fails; nothing more runs on this pipeline then.
        """
        self._finish()
        self._state.require_values()
        given = EvaluationDataFacts(self.copy)
        loss = self._inference.mean_loss(map(given.note, batches))
        with self._located:
            self._outcomes.compare(given.facts(), "an evaluation")
        return loss

    def predict(self, batches: Iterable[Pair | Callable[[int], Pair]]) -> Iterator[Any]:
        """The outputs of the last stage for some batches, one by one, items in their order, on the CPU.

        Every rank of the copy gets them. Modules and weights are as in `evaluate`.

        Parameters
        ----------
        batches
            As `evaluate` takes them. No target is looked at: it may be None.

        Raises
        ------
        Misuse, BadModel, ModelError, PeerLost
            As `evaluate`; Misuse also if the outputs have no dimension 0 to put them together along.
        """
        self._finish()
        self._state.require_values()
        outputs_of = self._inference.predictor()
        for batch in batches:
            self._finish()
            yield outputs_of(batch)

    # ---- the end

    def close(self) -> None:
        """Lets go of the communicators; all ranks call it. The process group that was given stays.

        Outcomes can be read afterwards: what is under way of them is waited for.
        """
        if self._located.closed:
            return
        try:
            if not self._located.failed:
                self._outcomes.settle()
        finally:
            self._located.failed = self._located.closed = True
            self._optimizer_facts.close()
            self._setting.world.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if error is None:
            if not self._located.failed:
                self.drain()
            self._setting.world.control_group.barrier("for everybody to finish")
            self.close()

    def _compare_ranks(self) -> None:
        """From now on facts that ranks must have the same travel with the losses."""
        names, shared = self.names, self._outcomes.agreement.shared
        trained = {group: [p for p in all_ if p.requires_grad] for group, all_ in self._groups.items()}
        stepped = trained if self._steppers is None else self._steppers.parameters
        self._optimizer_facts = OptimizerFacts(stepped, shared, names)
        compared = self._groups if self._steppers is None else stepped
        self._replicas = Replicas(
            {group: compared[group] for group in shared if group in compared}, self._setting.world.read
        )
        facts = self._feed, self._optimizer_facts, self._replicas
        if isinstance(self._schedule, Flushing):
            schedule = self._schedule
            self._outcomes.facts_of = FlushFacts(*facts, lambda: schedule.terms)
        elif self._steppers is not None:
            of_stream = self._outcomes.facts_of = StreamFacts(*facts)
            self._steppers.watch(of_stream.stepped)

    def _require_flush(self, reason: str) -> None:
        if isinstance(self._schedule, Streaming):
            raise Misuse(f"{self._setting.world.job.name} has no flush: {reason}")
