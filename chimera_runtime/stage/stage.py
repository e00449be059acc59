"""A stage on a rank: forwards, backwards and their halves, and what a forward keeps for its backward."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from functools import partial, partialmethod
from typing import Any, Self

import torch

from chimera_runtime.blame import ModelError, UserCode, during
from chimera_runtime.errors import FAILED
from chimera_runtime.errors.stage import backward_of_pair_did_not_run, memory_was_written
from chimera_runtime.program.absence import Absence
from chimera_runtime.program.job import WHOLE, Backwards
from chimera_runtime.program.numbering import Micros, Numbering, numbers_of
from chimera_runtime.program.rank_facts import VALUES, Rooms
from chimera_runtime.ranks.messages import LinkToHost, Reader, from_host
from chimera_runtime.stage import engine
from chimera_runtime.stage.carries import NO_CARRIES, Carries
from chimera_runtime.stage.engine import Roots
from chimera_runtime.stage.gradient_sums import GradientSum
from chimera_runtime.stage.module_runs import METHOD, Backward, LoadKeywords, ModuleRuns
from chimera_runtime.stage.recomputation import (
    ForwardArguments,
    ForwardResult,
    IsCompared,
    RecomputedForwards,
    SavedGraph,
    SavedInput,
    in_some,
    versions_of_arguments,
)
from chimera_runtime.stage.saved_tensors import TensorMoves
from chimera_runtime.stage.splitting import HalfBackward, run_first_half
from chimera_runtime.stage.stage_output import SendOutput, SendToSeveral, SideNumbers, StageInput, StageOutput, roots_of
from chimera_runtime.stage.weight_versions import WeightGroup, Weights
from chimera_runtime.values.boundary import NO_CARRY, Boundary, Traits, called
from chimera_runtime.values.last_stage import alone
from chimera_runtime.values.losses import Tally
from chimera_runtime.values.nested import Tensors, fresh, in_message, join, joined, leaves, part
from chimera_runtime.values.shared_memory import VERSION, Slots, lend

_NOTHING: tuple[Tensors, list[int]] = (), []
"""No tensors and no versions: the value of a micro-batch that a stage does not have."""


def _handed_on(value: str) -> Callable[..., Tensors]:
    """Returns a method that removes and returns what `Stage._hand_on` kept, for the stages ``readers`` if several read
    it. It raises `BadModel` if a tensor was written in the meantime.
    """

    def taken(self: "Stage", micros: Micros, reader: int | None = None, *readers: int) -> Tensors:
        try:
            tensors, before = self._made.pop((value, micros, reader))
        except KeyError:  # it was made together with that of other micro-batches
            tensors, before = self._take_part(value, micros, reader)
        if [*map(VERSION, tensors)] != before:
            raise memory_was_written(self.number, "another stage", micros)
        for other in readers:  # they get the same message; by the data some may not be there
            tensors = taken(self, micros, other) or tensors
        return tensors

    return taken


ValueReader = tuple[int | None, tuple[int, ...] | None]
"""A reader of a value, by its number if there are several, and the places of the tensors that are for it, if not all.
"""


def _readers_of(output: StageOutput) -> tuple[ValueReader, ...]:
    if isinstance(output, SendToSeveral):
        return tuple((reader, None) for reader in output.readers)
    return () if output.after is None else ((None, None),)


def _gradient_readers(before: Boundary | None) -> tuple[ValueReader, ...]:
    if before is None or not before.feeds:
        return () if before is None else ((None, None),)
    are_several = sum(feed.backs for feed in before.feeds) > 1
    return tuple((source if are_several else None, places) for source, places in before.gradient_places())


class Stage(WeightGroup):
    """A stage on this rank: its module, its receive buffers, and what its forwards keep for their backwards.

    As a weight group it has the parameters that belong to this stage alone; ``ties`` are the groups that it shares with
    others. Results stay here until `outputs` and `input_gradients` take them. ``inputs`` and ``gradients`` are the
    receive buffers, or slots, for each stage that makes the value; a message of gradients ends with the loss counts of
    its micro-batches, if the loss has counts.

    ``recomputed`` are the micro-batches, modulo ``numbering.cycle``, whose forward keeps only its input and runs again
    later; ``is_compared`` says, by the number of updates since the run began, whether the two runs are compared.
    ``backwards`` is the part of the stage in backwards: without any, its forwards keep nothing. ``absence`` says which
    stages a micro-batch has, if there are some that it may lack.
    ``read`` reads auxiliary losses and results of comparisons from the device.
    """

    def __init__(
        self,
        number: int,
        module: torch.nn.Module,
        weights: Weights,
        before: Boundary | None,
        output: StageOutput,
        gradient_sum: GradientSum,
        traits: Traits,
        numbering: Numbering,
        recomputed: Set[int] = frozenset(),
        ties: Sequence[WeightGroup] = (),
        load_keywords: LoadKeywords | None = None,
        read: Reader = from_host,
        is_compared: IsCompared = in_some,
        host_link: LinkToHost | None = None,
        backwards: Backwards = WHOLE,
        absence: Absence | None = None,
    ) -> None:
        super().__init__((number,), weights, gradient_sum, numbering)
        self.ties = ties
        self.number = number
        self.module = module
        self.inputs = self.gradients = tuple[Slots, ...]()
        self._absence = absence
        self._input = StageInput(number, before, bool(traits.in_place), host_link is not None, absence)
        self._backwards_of = backwards
        readers = {True: _readers_of(output), False: _gradient_readers(before) if backwards.returns else ()}
        self._readers = {letter: readers[value.onward] for letter, value in VALUES.items()}
        self.runs = ModuleRuns(number, alone(module), self._input, output, traits, numbering, load_keywords)
        self.carries = Carries(number, numbering.slices, traits.takes)
        self._output = output
        self._traits = traits
        self._recomputed = recomputed
        self._reruns = RecomputedForwards(number, module, is_compared, traits.touched, read)
        self._side_numbers = SideNumbers(read, traits.auxiliary)
        self._in_backward = UserCode(f"the backward of stage {number}", FAILED)
        # What waits, by micro-batch: for its backward, for the second half of it, and, by value, to be handed on.
        self._saved: dict[int, SavedGraph | SavedInput] = {}
        self._half_backwards: dict[int, HalfBackward] = {}
        self._made: dict[tuple[str, Micros, int | None], tuple[Tensors, list[int]]] = {}
        self._taken: defaultdict[tuple[str, Micros, int | None], set[int]] = defaultdict(set)  # micro-batches of it
        self._moves = TensorMoves(number, self._saved, self._half_backwards, host_link)

    @property
    def groups(self) -> tuple[WeightGroup, ...]:
        """This group and the ties: no attribute, so that the stage is freed as soon as nothing else refers to it."""
        return (self, *self.ties)

    def reserve(self, rooms: Mapping[str, Rooms], device: torch.device) -> None:
        """Allocates the receive buffers; ``rooms`` says for each value how many micro-batches each slot holds."""
        before, after = self._input.before, self._output.after
        for letter, value in VALUES.items():
            of_makers = rooms.get(letter, ())
            ends = (() if before is None else before.apart) if value.onward else (after,) * len(of_makers)
            slots = list[Slots]()
            for sizes, end in zip(of_makers, filter(None, ends), strict=False):
                make = partial(getattr(end, value.buffers), device)
                slots.append(Slots(sizes, make, getattr(end, value.views) if end.of_micros else None))
            setattr(self, value.slots, (*slots,))

    def resize(self, before: Boundary | None, after: Boundary | None, *, are_equal: bool = True) -> None:
        """Changes the shapes that the stage receives and sends, which ``are_equal`` for all micro-batches or not; none
        may be larger than at first.
        """
        self._input.resize(before)
        self.carries.resize(fixed=are_equal)
        for slots, end in zip(self.inputs, () if before is None else before.apart, strict=False):
            slots.resize(end.views)
        if after is not None:
            assert isinstance(self._output, SendOutput)
            self._output.after = after
            for slots in self.gradients:
                slots.resize(after.gradient_views)

    def begin(self, update: int) -> None:
        """Makes the first micro-batch of an update number 0, and the newest weights version 0."""
        self._numbering.first = update
        self.runs.begin()
        for group in self.groups:
            group.weights.begin()

    def count_from(self, updates: int) -> None:
        """Continues a run that has made ``updates`` updates; random numbers depend on that number."""
        for group in self.groups:
            group.updates = updates
        self._reruns.first_update = updates

    def at(self, version: int) -> Self:
        """Makes the module show a version of its weights that is in memory, and returns the stage."""
        for group in self.groups:
            group.weights.select(version)
        return self

    def newest(self) -> Self:
        """Makes the module show the newest version of its weights, and returns the stage."""
        for group in self.groups:
            group.weights.select_newest()
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
            self._blame(error, "F", micros)
            raise
        if outputs:
            self._hand_on("y", micros, outputs)

    def _hand_on(self, value: str, micros: Micros, tensors: Tensors) -> None:
        """Keeps a value, such as ``y``, until `_handed_on` takes it for each stage that reads it."""
        readers = self._readers[value] if self._absence is None else self._present_readers(value, micros, self._absence)
        for reader, places in readers:
            read = tensors if places is None else tuple([tensors[place] for place in places])
            self._made[value, micros, reader] = read, [*map(VERSION, read)]

    def _take_part(self, value: str, micros: Micros, reader: int | None) -> tuple[Tensors, list[int]]:
        """Takes what an operation over several micro-batches has made of some of them, which a reader takes apart."""
        wanted = numbers_of(micros)
        made = (key for key in self._made if key[::2] == (value, reader) and wanted[0] in numbers_of(key[1]))
        key = next(made, None)
        if key is None and self._absence is not None:
            return _NOTHING
        block = () if key is None else numbers_of(key[1])
        start = block.index(wanted[0]) if block else 0
        if key is None or block[start : start + len(wanted)] != wanted:
            raise KeyError(value, micros, reader)
        (tensors, before), taken = self._made[key], self._taken[key]
        taken.update(wanted)
        if taken.issuperset(block):
            del self._made[key], self._taken[key]
        return part(tensors, start, start + len(wanted), len(block)), before

    def _present_readers(self, value: str, micros: Micros, absence: Absence) -> Iterator[ValueReader]:
        """Yields the readers of a value that a micro-batch has."""
        first = numbers_of(micros)[0]
        before = None if VALUES[value].onward or not self._backwards_of.returns else self._input.at(first)
        for reader, places in self._readers[value] if before is None else _gradient_readers(before):
            if reader is None or absence.has(first, reader):
                yield reader, places

    outputs, input_gradients = _handed_on("y"), _handed_on("dx")

    def _forward(self, micro: int, inputs: Any, target: Any) -> Tensors:
        if self._recomputed and self._is_recomputed(micro):
            outputs = self._forward_keeping_inputs((micro,), inputs, [inputs], (target,))
        else:
            carry, are_carried = NO_CARRY, self.carries.are_used
            if are_carried or self._traits.keywords:
                arguments = self._arguments_of(micro, inputs)
                carry, result = arguments.carry, self.runs.run((micro,), (target,), *arguments)
            else:
                result = self.runs.run((micro,), (target,), self._numbering.forward_seed(micro, self.number), inputs)
            auxiliary = result.auxiliary
            if auxiliary or auxiliary.reports:
                self._side_numbers.add(self.number, micro, self._numbering.place(micro)[0], auxiliary)
            if are_carried:
                self.carries.keep(micro, carry, inputs, result.carry)
            if not self._backwards_of.has:
                self.carries.release(micro - 1)
            elif auxiliary or are_carried:
                self._saved[micro] = self._saved_graph(result)
            else:
                self._saved[micro] = tuple.__new__(SavedGraph, (result.leaves, result.roots, (), NO_CARRIES))
            outputs = result.results
        # An error if these outputs overwrite those of a micro-batch that still waits for its backward.
        if outputs:
            return lend(self.number, micro, outputs, self._saved, lambda: (inputs, self.runs.keywords_of(micro)))
        return outputs

    def _forward_several(self, micros: tuple[int, ...], inputs: Any, targets: Any) -> Tensors:
        """Runs several micro-batches, in one call if they are recomputed later and the stage allows it, else one by
        one.
        """
        first = self._input.before is None
        batches = list(inputs) if first else [part(inputs, i, i + 1, len(micros)) for i in range(len(micros))]
        targets = (None,) * len(micros) if targets is None else targets
        if self._is_recomputed(micros[0]) and not (self._traits.alone or self._reruns.one_by_one):
            return self._forward_keeping_inputs(micros, joined(inputs) if first else inputs, batches, targets)
        return self._one_by_one(micros, batches, targets)

    def _one_by_one(self, micros: tuple[int, ...], batches: Sequence[Any], targets: Sequence[Any]) -> Tensors:
        return join([self._forward(*arguments) for arguments in zip(micros, batches, targets, strict=True)])

    def _forward_keeping_inputs(
        self, micros: tuple[int, ...], inputs: Any, batches: Sequence[Any], targets: Sequence[Any]
    ) -> Tensors:
        update, count = self._numbering.place(micros[0])[0], len(micros)
        arguments = [self._arguments_of(*of_micro) for of_micro in zip(micros, batches, strict=True)]
        together = arguments[0]._replace(inputs=inputs, keywords=joined([a.keywords for a in arguments]))
        before = [versions_of_arguments(*values) for values in zip(arguments, targets, strict=True)]

        run = partial(self.runs.run, micros, [*map(fresh, targets)], *together)
        first_run = self._reruns.first_run(update, count, run)
        if first_run is None:  # a joint call changes the module's state otherwise than one call after the other
            self._output.forget(micros)
            return self._one_by_one(micros, batches, targets)
        # Each micro-batch gets what its own second run begins with, and what that run must give again.
        result, state = first_run
        self.carries.keep(micros[0], together.carry, inputs, result.carry)
        digests = self._reruns.digests(update, partial(self._compared_values, result, count), count)
        for micro, values, target, numbers, digest in zip(micros, arguments, targets, before, digests, strict=True):
            self._saved[micro] = SavedInput(values, target, numbers, state, count, digest)
        self._side_numbers.add(self.number, micros[0], update, result.auxiliary)
        return tuple(map(in_message, result.results))

    def _compared_values(self, result: ForwardResult, count: int) -> list[Any]:
        """The values in which the two runs of a forward over ``count`` micro-batches must agree."""
        if count > 1:
            return leaves(result.returned)
        losses = result.roots if self._output.after is None else ()
        return [*leaves((result.returned, result.carry)), *losses, *[value for _, value in result.auxiliary]]

    def _is_recomputed(self, micro: int) -> bool:
        return micro % self._numbering.cycle in self._recomputed

    def _arguments_of(self, micro: int, inputs: Any) -> ForwardArguments:
        """Returns what the forward of a micro-batch depends on. Call it once, because it takes the carry."""
        seed, keywords = self._numbering.forward_seed(micro, self.number), self.runs.keywords_of(micro)
        if not self.carries.are_used:
            return ForwardArguments(seed, inputs, keywords, NO_CARRY, leaves_carry=False)
        return ForwardArguments(seed, inputs, keywords, self.carries.take(micro), self.carries.has_reader(micro))

    def _saved_graph(self, result: ForwardResult) -> SavedGraph:
        carries = self.carries.graph(result.carry_leaves, result.carry)
        return SavedGraph(result.leaves, result.roots, roots_of(result.auxiliary), carries)

    def recompute(self, micros: Micros) -> None:
        """Runs the forward of a micro-batch, or of several, again; the backward needs what it saves."""
        with self._during("recompute", micros):
            for micro in numbers_of(micros):
                saved = self._saved.pop(micro)
                self._saved[micro] = saved if isinstance(saved, SavedGraph) else self._run_again(micro, saved)

    # ---- backward

    def backward(self, micros: Micros, gradients: Tensors = ()) -> None:
        """Runs a backward, which adds to the gradients of the weights; first again its forward, if that is recomputed.
        ``gradients`` are those of the tensors sent, with the micro-batches along dimension 0.
        """
        self._backwards("B", self._backward, micros, gradients)

    def backward_input(self, micros: Micros, gradients: Tensors = ()) -> None:
        """Runs the first half of a `backward`, which makes the gradients for the stage before: all of it if the stage
        is frozen.
        """
        run = partial(self._backward, splits=True) if self._backwards_of.trains else self._backward
        self._backwards("I", run, micros, gradients)

    def backward_weights(self, micros: Micros) -> None:
        """Runs the second half of a `backward`, which adds to the gradients of the weights."""
        with self._during("W", micros):
            for micro in numbers_of(micros):
                second_half, counts = self._half_backwards.pop(micro)
                with self._in_backward:
                    second_half.finish()
                for group in (self, *self.ties):
                    group.gradient_sum.collect()
                self._count(counts)

    def pair(self, forward: tuple[Any, ...], other: "Stage", backward: tuple[Any, ...]) -> None:
        """Runs a pair, see `paired_operations`, with the arguments of `forward` here and of `backward` of ``other``;
        both may be one stage. If the module has the method `METHOD`, it runs both, after the second run of a recomputed
        forward of ``other``; the forward here must be over one micro-batch, and keep its graph.
        """
        method = getattr(self.runs.module, METHOD, None)
        if not callable(method) or isinstance(forward[0], tuple) or self._is_recomputed(forward[0]):
            self.forward(*forward)
            other.backward(*backward)
            return

        # The backward comes first. At the point where it would run its graph it runs the forward instead, whose module
        # gets the backward as an argument.
        def run_both(roots: Roots, gradients: Tensors) -> None:
            other.runs.backward = engine.run
            backward_of_pair = Backward(other.runs.module, roots, gradients)
            own, both = self.runs.forward, partial(method, backward=backward_of_pair)
            self.runs.forward = called(both, self._input.before)
            try:
                self.forward(*forward)
            finally:
                self.runs.forward = own
            if not backward_of_pair.begun:
                raise backward_of_pair_did_not_run(method=METHOD, stage=self.number)

        other.runs.backward = run_both
        try:
            other.backward(*backward)
        finally:
            other.runs.backward = engine.run

    def _backwards(
        self, kind: str, run: Callable[[int, Tensors], Tensors], micros: Micros, gradients: Tensors
    ) -> Tensors:
        try:
            if isinstance(micros, tuple):
                apart = [part(gradients, i, i + 1, len(micros)) for i in range(len(micros))]
                results = join([run(*arguments) for arguments in zip(micros, apart, strict=True)])
            else:
                results = run(micros, gradients)
        except ModelError as error:
            self._blame(error, kind, micros)
            raise
        if self._input.before is not None:
            self._hand_on("dx", micros, results)
        return results

    def _backward(self, micro: int, gradients: Tensors, splits: bool = False) -> Tensors:
        """Runs a backward or, if it ``splits``, its first half; returns the gradients for the stage before."""
        saved, output = self._saved.pop(micro), self._output
        graph = saved if isinstance(saved, SavedGraph) else self._run_again(micro, saved)
        counts = output.counts(micro, gradients) if output.counted else ()
        # The results begin with the gradients received, or the loss with its share of the update's mean.
        roots, initial = graph.roots, output.gradients(graph.roots, gradients)
        if graph.auxiliary:  # an auxiliary loss is a root of its own on any stage, and has the same share
            roots = (*roots, *graph.auxiliary)
            initial += tuple([torch.full_like(value, output.share * output.scale) for value in graph.auxiliary])
        are_carried = self.carries.are_used
        if are_carried:
            carried, carried_gradients = self.carries.begin_backward(micro, graph.carries)
            roots, initial = (*roots, *carried), (*initial, *carried_gradients)
        try:
            if splits:
                leaves, is_whole = (*graph.leaves, *graph.carries.leaves), bool(self._traits.whole)
                parameters, apart = self.module.parameters(), self.weights.overlap
                second_half = run_first_half(roots, initial, leaves, parameters, is_whole=is_whole, apart=apart)
                self._half_backwards[micro] = HalfBackward(second_half, counts)
            else:
                self.runs.backward(roots, initial)
        except BaseException as error:
            self._in_backward.blame(error)
            raise
        if not splits:
            for group in (self, *self.ties):
                group.gradient_sum.collect()
            if counts and self._backwards_of.trains:
                self._count(counts)
        if are_carried:
            self.carries.end_backward(micro, graph.carries)
        return self._input.take_gradients(graph.leaves, counts, micro) if graph.leaves else ()

    def _run_again(self, micro: int, saved: SavedInput) -> SavedGraph:
        """Runs the forward of a micro-batch a second time, and returns its graph."""
        update = self._numbering.place(micro)[0]
        with self._reruns.second_run(update, saved):
            result = self.runs.run((micro,), (fresh(saved.target),), *saved.arguments)
        self._reruns.compare(update, micro, saved, partial(self._compared_values, result, saved.micro_batches))
        return self._saved_graph(result)

    def _count(self, counts: Tensors) -> None:
        """Adds the loss count of a backward to the sums of those groups whose first stage this is."""
        for group in self.groups:
            if group.group[0] == self.number:
                group.gradient_sum.count(counts)

    def _blame(self, error: ModelError, kind: str, micros: Micros) -> None:
        """Names the operation in which an error came up, as `_during` does."""
        error.operation = error.operation or self._numbering.operation(kind, micros, self.number)

    def _during(self, kind: str, micros: Micros) -> AbstractContextManager[None]:
        return during(partial(self._numbering.operation, kind, micros, self.number))

    # ---- moves

    def _move(self, run: str, micros: Micros) -> None:
        """Calls the method ``run`` of `TensorMoves` for each micro-batch: it launches a move, or waits for its end."""
        with self._during(run.replace("wait_", "wait "), micros), self._in_backward:
            for micro in numbers_of(micros):
                getattr(self._moves, run)(micro)

    offload, reload = partialmethod(_move, "offload"), partialmethod(_move, "reload")
    wait_offload, wait_reload = partialmethod(_move, "wait_offload"), partialmethod(_move, "wait_reload")
    offload_operands = partialmethod(_move, "offload_operands")
    wait_offload_operands = partialmethod(_move, "wait_offload_operands")
    reload_operands = partialmethod(_move, "reload_operands")
    wait_reload_operands = partialmethod(_move, "wait_reload_operands")

    # ---- update

    def weigh_loss(self, share: float, scale: float) -> None:
        """Makes later backwards multiply the gradients of this stage's losses by both: see `StageOutput`."""
        self._output.share, self._output.scale = share, scale

    def take_loss(self, update: int) -> Tally:
        """Returns the losses and reports of an update, and forgets them; errors as in `RecomputedForwards.compare`,
        whose results end here.
        """
        self._reruns.check(update)
        return self._output.take_loss(update) + self._side_numbers.take(update)
