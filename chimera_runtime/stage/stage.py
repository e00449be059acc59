"""A stage on a rank: forwards, backwards and their halves, and what a forward keeps for its backward."""

from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import Any, NamedTuple, Self

import torch

from chimera_runtime.blame import LaneOperation, ModelError, UserCode
from chimera_runtime.errors import FAILED, BadModel
from chimera_runtime.errors.values import memory_was_written
from chimera_runtime.program.numbering import Micros, Numbering
from chimera_runtime.ranks.readout import Reader, from_host
from chimera_runtime.stage.auxiliary_losses import Auxiliary, AuxiliaryLosses, collecting, roots_of
from chimera_runtime.stage.paired_operations import ModuleCalls, run_pair
from chimera_runtime.stage.recomputation import RecomputedForwards, SavedInput, versions_of
from chimera_runtime.stage.rerun_comparison import ForwardDigest, IsCompared, in_some
from chimera_runtime.stage.splitting import HalfBackward, SecondHalf, SplitBackward, WholeBackward
from chimera_runtime.stage.stage_input import StageInput
from chimera_runtime.stage.stage_output import StageOutput
from chimera_runtime.stage.sums import GradientSum
from chimera_runtime.stage.weight_group import WeightGroup
from chimera_runtime.stage.weight_versions import Weights
from chimera_runtime.values.aliases import Slots, lend, versions
from chimera_runtime.values.boundary import Boundary, Traits
from chimera_runtime.values.keywords import Keywords, Watched
from chimera_runtime.values.losses import Tally
from chimera_runtime.values.nested import fresh, joined, leaves, mapped
from chimera_runtime.values.tensors import Tensors, join, part, plain, seed_all, seed_torch


class SavedGraph(NamedTuple):
    """A micro-batch between its forward and its backward: the graph, from its leaves to its roots.

    ``auxiliary`` are further roots, those of auxiliary losses.
    """

    leaves: Tensors
    roots: Tensors
    auxiliary: Tensors


class ForwardResult(NamedTuple):
    """A forward: the tensors whose gradients are wanted, what the module returned, and its auxiliary losses."""

    leaves: Tensors
    returned: Any
    auxiliary: Auxiliary


class Stage(WeightGroup):
    """A stage's module on this rank, its buffers and its part of an update.

    As a weight group it has the parameters that are the stage's own. ``ties`` are the groups of those that it shares,
    ``groups`` all of these.

    ``inputs`` and ``gradients`` are the receive buffers, of which schedule.sir speaks as slots.

    What a forward or a backward hands on stays here, by its micro-batches, until `outputs` or `input_gradients` takes
    it; so does what a forward keeps for its backward.

    Parameters
    ----------
    before
        What the stage receives, None for the first.
    ending
        What becomes of what the module returns: it is handed on, or goes to the loss.
    recomputed
        The micro-batches, modulo ``numbering.cycle``, of which a forward keeps its input alone.
    load_keywords
        Loads the keyword arguments of a micro-batch, counted from the first of an update; asked for where the stage
        takes any.
    read
        How auxiliary losses and comparisons are read.
    compared
        Of which updates, counted from the start of the run, a forward that is run again is compared with the first.
    """

    def __init__(
        self,
        number: int,
        module: torch.nn.Module,
        weights: Weights,
        before: Boundary | None,
        ending: StageOutput,
        gradients: GradientSum,
        traits: Traits,
        numbering: Numbering,
        recomputed: Set[int] = frozenset(),
        ties: Sequence[WeightGroup] = (),
        load_keywords: Callable[[int, int], Keywords] | None = None,
        read: Reader = from_host,
        compared: IsCompared = in_some,
    ) -> None:
        super().__init__((number,), weights, gradients, numbering)
        self.ties = ties
        self.groups: tuple[WeightGroup, ...] = (self, *ties)
        self.number = number
        self.module = module
        self.calls = ModuleCalls(module)
        self.inputs = self.gradients = Slots()
        self.load_keywords = load_keywords
        self._beginning = StageInput(number, before, bool(traits.in_place))
        self._ending = ending
        self._traits = traits
        self._recomputed = recomputed
        self._recomputing = RecomputedForwards(number, module, compared, read)
        self._seed = seed_all if traits.seeds_all else seed_torch
        self._waiting: dict[int, SavedGraph | SavedInput] = {}
        self._begun: dict[int, HalfBackward] = {}
        self._auxiliary = AuxiliaryLosses(number, traits.auxiliary, read)
        self._outputs: dict[Micros, tuple[Tensors, list[int]]] = {}
        self._input_gradients: dict[Micros, Tensors] = {}
        self._forwarding = UserCode(f"the forward of stage {number}", FAILED)
        self._going_back = UserCode(f"the backward of stage {number}", FAILED)

    def reserve(self, inputs: Sequence[int], gradients: Sequence[int], device: torch.device) -> None:
        """Allocates the receive buffers: for each slot of activations and gradients, room for so many micro-batches."""
        before = self._beginning.before
        if before is not None:
            self.inputs = Slots(inputs, partial(before.buffers, device))
        if self._ending.after is not None:
            self.gradients = Slots(gradients, partial(self._ending.after.gradient_buffers, device))

    def resize(self, before: Boundary | None, after: Boundary | None) -> None:
        """From now on what is received and handed on has other shapes, none larger than at first."""
        self._beginning.before = before
        self._ending.resize(after)
        if before is not None:
            self.inputs.resize(before.views)
        if after is not None:
            self.gradients.resize(after.gradient_views)

    def begin(self, update: int) -> None:
        """From now on micro-batches are counted from the first of an update, and versions from the newest weights."""
        self._numbering.first = update
        for group in self.groups:
            group.restart()

    def count_from(self, updates: int) -> None:
        """From now on it is as if there had been so many updates: the seeds of what is drawn at random count them."""
        for group in self.groups:
            group.updates = updates
        self._recomputing.began = updates

    def at(self, version: int) -> Self:
        """The stage with a version of its weights that is alive."""
        for group in self.groups:
            group.select(version)
        return self

    def newest(self) -> Self:
        """The stage with the newest version of its weights."""
        for group in self.groups:
            group.select_newest()
        return self

    # ---- forward

    def forward(self, micros: Micros, inputs: Any, targets: Any = None) -> None:
        """Runs the stage on a micro-batch or on several.

        Parameters
        ----------
        micros
            Its number, or a tuple of numbers.
        inputs
            Tensors received, with the micro-batches along dimension 0; on stage 0 a batch of the dataset, or a tuple
            with one for each micro-batch.
        targets
            For the loss, on the last stage: a batch, or a tuple with one for each micro-batch.
        """
        try:
            if isinstance(micros, tuple):
                outputs = self._forward_several(micros, inputs, targets)
            else:
                outputs = self._forward(micros, inputs, targets)
        except ModelError as error:
            error.during(self._operation("F", micros))
            raise
        if self._ending.after is not None:
            self._outputs[micros] = outputs, versions(outputs)

    def outputs(self, micros: Micros) -> Tensors:
        """What the forward of these micro-batches hands on, to be sent or to be read by the next stage: once."""
        outputs, before = self._outputs.pop(micros)
        if versions(outputs) != before:
            raise memory_was_written(self.number, self.number + 1, micros)
        return outputs

    def _forward(self, micro: int, inputs: Any, target: Any) -> Tensors:
        if micro % self._numbering.cycle in self._recomputed:
            outputs = self._forward_keeping_inputs((micro,), inputs, [inputs], (target,))
        else:
            passed = self._run(self._seed_of(micro), inputs, self._keywords_of(micro))
            results, roots = self._ending.finish((micro,), passed.returned, (target,))
            self._auxiliary.add(micro, self._numbering.place(micro)[0], passed.auxiliary)
            self._waiting[micro] = SavedGraph(passed.leaves, roots, roots_of(passed.auxiliary))
            outputs = _payload(results)
        lend(self.number, micro, outputs, self._waiting, lambda: (inputs, self._keywords_of(micro)))
        return outputs

    def _forward_several(self, micros: tuple[int, ...], inputs: Any, targets: Any) -> Tensors:
        """At once where the micro-batches are run again later, and the stage can."""
        first = self._beginning.before is None
        apart = list(inputs) if first else [part(inputs, i, i + 1, len(micros)) for i in range(len(micros))]
        targets = (None,) * len(micros) if targets is None else targets
        alone = self._traits.alone or self._recomputing.alone
        if micros[0] % self._numbering.cycle in self._recomputed and not alone:
            return self._forward_keeping_inputs(micros, joined(inputs) if first else inputs, apart, targets)
        return self._one_by_one(micros, apart, targets)

    def _one_by_one(self, micros: tuple[int, ...], apart: Sequence[Any], targets: Sequence[Any]) -> Tensors:
        return join([self._forward(*arguments) for arguments in zip(micros, apart, targets, strict=True)])

    def _forward_keeping_inputs(
        self, micros: tuple[int, ...], together: Any, apart: Sequence[Any], targets: Sequence[Any]
    ) -> Tensors:
        recomputing, update, count = self._recomputing, self._numbering.place(micros[0])[0], len(micros)
        keywords = [self._keywords_of(micro) for micro in micros]
        given = [*zip(apart, targets, keywords, strict=True)]
        numbers = [versions_of(*values) for values in given]

        def run() -> ForwardResult:
            return self._run(self._seed_of(micros[0]), together, joined(keywords))

        def finish(passed: ForwardResult) -> tuple[Tensors, Auxiliary, Sequence[ForwardDigest | None]]:
            results, roots = self._ending.finish(micros, passed.returned, [*map(fresh, targets)])
            made = partial(self._compared, passed, roots, count)
            return results, passed.auxiliary, recomputing.results(update, made, count)

        first = recomputing.first(update, count, run, finish)
        if first is None:
            return self._one_by_one(micros, apart, targets)
        (results, auxiliary, made), contents = first
        for micro, values, before, result in zip(micros, given, numbers, made, strict=True):
            self._waiting[micro] = SavedInput(self._seed_of(micro), *values, before, contents, count, result)
        self._auxiliary.add(micros[0], update, auxiliary)
        return _payload(results)

    def _compared(self, passed: ForwardResult, roots: Tensors, of: int) -> list[Any]:
        """What the two runs of a forward over so many micro-batches are compared by."""
        if of > 1:
            return leaves(passed.returned)
        losses = roots if self._ending.after is None else ()
        return [*leaves(passed.returned), *losses, *[value for _, value in passed.auxiliary]]

    def _seed_of(self, micro: int) -> int:
        return self._numbering.forward_seed(micro, self.number)

    def _keywords_of(self, micro: int) -> Keywords:
        names = self._traits.keywords
        if not names or self.load_keywords is None:
            return {}
        loaded = self.load_keywords(self._numbering.first, micro)
        if missing := [name for name in names if name not in loaded]:
            raise BadModel(
                f"micro-batch {micro} has no keyword argument {missing[0]}, and the first had; give all the same names"
            )
        keywords = {name: loaded[name] for name in names}
        return mapped(keywords, torch.clone) if self._traits.in_place else keywords

    def _run(self, seed: int, inputs: Any, keywords: Keywords) -> ForwardResult:
        self._seed(seed)
        leaves, argument = self._beginning.argument(inputs)
        watched = Watched(self.number, keywords, self._traits.shared) if self._traits.shared else None
        with self._forwarding, collecting() as auxiliary:
            returned = self.calls.forward(argument, **(fresh(keywords) if keywords else {}))
        if watched is not None:
            watched.require_unwritten()
        return ForwardResult(leaves, returned, auxiliary)

    # ---- backward

    def backward(self, micros: Micros, gradients: Tensors = ()) -> None:
        """Adds to the gradients of the weights; runs the forward again first, where it kept its input alone.

        Parameters
        ----------
        micros
            A micro-batch, or a tuple of several.
        gradients
            Those of what the forward handed on, with the micro-batches along dimension 0; none on the last stage.
        """
        self._hand_back("B", self._backward, micros, gradients)

    def backward_input(self, micros: Micros, gradients: Tensors = ()) -> None:
        """The first half of a `backward`: what is handed back. The gradients of the weights are left to the second."""
        self._hand_back("I", self._backward_input, micros, gradients)

    def backward_weights(self, micros: Micros) -> None:
        """The second half of a `backward`: adds to the gradients of the weights."""
        try:
            for micro in micros if isinstance(micros, tuple) else (micros,):
                halfway, counts = self._begun.pop(micro)
                with self._going_back:
                    halfway.finish()
                self._collect(counts)
        except ModelError as error:
            error.during(self._operation("W", micros))
            raise

    def pair(self, forward: tuple[Any, ...], other: "Stage", backward: tuple[Any, ...]) -> None:
        """A pair (`pairs`): a forward, and a backward of this stage or another one, with the arguments of each."""
        if isinstance(forward[0], tuple) or forward[0] % self._numbering.cycle in self._recomputed:
            self.forward(*forward)
            other.backward(*backward)
        else:
            run_pair(self, forward, other, backward)

    def input_gradients(self, micros: Micros) -> Tensors:
        """What the backward of these micro-batches hands back to the stage before: once."""
        return self._input_gradients.pop(micros)

    def _hand_back(self, kind: str, run: Callable[[int, Tensors], Tensors], micros: Micros, gradients: Tensors) -> None:
        """Runs a backward, or the first half of one, on a micro-batch or several."""
        try:
            if isinstance(micros, tuple):
                apart = [part(gradients, i, i + 1, len(micros)) for i in range(len(micros))]
                results = join([run(*arguments) for arguments in zip(micros, apart, strict=True)])
            else:
                results = run(micros, gradients)
        except ModelError as error:
            error.during(self._operation(kind, micros))
            raise
        if self._beginning.before is not None:
            self._input_gradients[micros] = results

    def _backward(self, micro: int, gradients: Tensors) -> Tensors:
        leaves, roots, seeds, counts = self._roots_of(micro, gradients)
        with self._going_back:
            self.calls.differentiate(roots, seeds)
        self._collect(counts)
        return self._beginning.take_gradients(leaves, counts)

    def _backward_input(self, micro: int, gradients: Tensors) -> Tensors:
        leaves, roots, seeds, counts = self._roots_of(micro, gradients)
        with self._going_back:
            halfway: SecondHalf
            if self._traits.whole:
                halfway = WholeBackward(roots, seeds, self.module.parameters(), apart=self._weights.overlap)
            else:
                halfway = SplitBackward(roots, seeds, leaves)
        self._begun[micro] = HalfBackward(halfway, counts)
        return self._beginning.take_gradients(leaves, counts)

    def _roots_of(self, micro: int, gradients: Tensors) -> tuple[Tensors, Tensors, Tensors, Tensors]:
        """The leaves and roots of a micro-batch's graph, the gradient of each root, and what the micro-batch counts."""
        leaves, roots, auxiliary = self._graph(micro)
        counts = self._ending.counts(micro, gradients)
        shares = [torch.full_like(value, self._ending.share * self._ending.scale) for value in auxiliary]
        return leaves, (*roots, *auxiliary), (*self._ending.gradients(roots, gradients), *shares), counts

    def _collect(self, counts: Tensors) -> None:
        """The gradients of the weights are complete for a micro-batch."""
        for group in self.groups:
            group.collect()
            if group.group[0] == self.number:
                group.count(counts)

    def _graph(self, micro: int) -> SavedGraph:
        """The graph of a micro-batch: as its forward left it, or made again."""
        waiting = self._waiting.pop(micro)
        if isinstance(waiting, SavedGraph):
            return waiting
        update = self._numbering.place(micro)[0]
        with self._recomputing.again(update, waiting):
            passed = self._run(waiting.seed, waiting.inputs, waiting.keywords)
        _, roots = self._ending.finish((micro,), passed.returned, (fresh(waiting.target),))
        self._recomputing.compare(update, micro, waiting, partial(self._compared, passed, roots, waiting.of))
        return SavedGraph(passed.leaves, roots, roots_of(passed.auxiliary))

    def _operation(self, kind: str, micros: Micros) -> LaneOperation:
        return self._numbering.operation(kind, micros, self.number)

    # ---- update

    @property
    def disturbed(self) -> str | None:
        """The name of a parameter whose gradient of an update under way was taken away, if there is one."""
        disturbed = next((p for group in self.groups if (p := group.disturbed_parameter) is not None), None)
        if disturbed is None:
            return None
        return next(name for name, parameter in self.module.named_parameters() if parameter is disturbed)

    def scale_loss(self, scale: float) -> None:
        """Multiplies the gradients of what the stage adds to the loss by a number from now on."""
        self._ending.scale = scale

    def take_loss(self, update: int) -> Tally:
        """The losses of an update that were computed here: the loss on the last stage, auxiliary losses on any."""
        self._recomputing.check(update)
        return self._ending.take_loss(update) + self._auxiliary.take(update)


def _payload(results: Tensors) -> Tensors:
    """Results as they are sent: without a graph, in memory of one piece."""
    return tuple([plain(t.detach()) for t in results])
