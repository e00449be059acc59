"""Evaluation: forwards alone, by the function ``evaluate`` of a rank's script. `Inference` calls it between updates.

Modules run in evaluation mode and without a graph, and their mode is restored afterwards; the caller restores random
generators. A micro-batch may have fewer items than in training. It may also have none, that is be absent: then the
calls of the script for this micro-batch do nothing.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import torch

from chimera_runtime.blame import Located, UserCode
from chimera_runtime.data.evaluation_batches import EvaluationBatch, evaluation_batches
from chimera_runtime.data.mini_batch import KEYWORDS, CutSlice
from chimera_runtime.errors import FAILED, Misuse
from chimera_runtime.errors import stage as mistakes
from chimera_runtime.lane.lane import Incoming, Lane, LaneComponents, Outgoing, shared
from chimera_runtime.lane.profiler_ranges import ranged, ranges_on
from chimera_runtime.lane.stream_lane import StreamLink
from chimera_runtime.program.absence import Absence
from chimera_runtime.program.job import Job
from chimera_runtime.program.numbering import Micros, numbers_of
from chimera_runtime.program.rank_facts import Route
from chimera_runtime.ranks.agreement import ObjectExchange, added_over_all, gathered, largest_in_copy
from chimera_runtime.ranks.messages import Peer
from chimera_runtime.stage.carries import Carries
from chimera_runtime.stage.module_state import unchanged
from chimera_runtime.stage.stage import Stage
from chimera_runtime.stage.stage_output import Auxiliary, SideNumbers, StageInput, collecting
from chimera_runtime.start.assemble import RankContext
from chimera_runtime.start.decided_by_data import inputs_here, lacking_stages
from chimera_runtime.start.varying_shapes import ShapeList, VaryingShapes
from chimera_runtime.values.boundary import Boundary, Keywords, called, cut, keyword_names, slice_length
from chimera_runtime.values.last_stage import alone
from chimera_runtime.values.losses import Loss, Tally, added, as_pair, loss_name
from chimera_runtime.values.mesh_tensors import rest, settled
from chimera_runtime.values.nested import (
    Tensors,
    all_generators_kept,
    is_rows,
    join,
    joined,
    leaves,
    mapped,
    plain,
    slice_bounds,
    taken_apart,
    to_device,
)
from chimera_runtime.values.shared_memory import Slots, unshared

# Output of the last stage in an evaluation: losses are added up, or outputs are stored.


LastOutput = Callable[[int, int, Any, Any], None]
"""Takes a micro-batch's number and items, what the last stage has returned for it, and its target."""


class LossTotal:
    """Output of the last stage that adds up its losses; a mean is weighted by the items of its micro-batch.

    ``items`` and ``counted`` are those of the micro-batches of which this stage is to count them.
    """

    def __init__(self, judge: Callable[[Any, Any], Loss], counts: Callable[[int], bool] = lambda _micro: True) -> None:
        self._judge = judge
        self._counts = counts
        self.counted = 0.0
        self.total = torch.zeros((), dtype=torch.float64)
        self.items = 0
        self.count = 0.0

    def __call__(self, micro: int, items: int, returned: Any, target: Any) -> None:
        """Adds the loss of a micro-batch."""
        loss, count = as_pair(self._judge(returned, target))
        total = loss.reshape(()).double()
        self.total = self.total.to(loss.device) + (total * items if count is None else total)
        count_of_loss = items if count is None else count.item()
        self.count += count_of_loss
        if self._counts(micro):
            self.items += items
            self.counted += count_of_loss


class OutputStore:
    """Output of the last stage that stores a copy of what the module returns for each micro-batch."""

    def __init__(self) -> None:
        self._outputs: dict[int, Any] = {}

    def __call__(self, micro: int, _items: int, returned: Any, _target: Any) -> None:
        """Stores what the module ``returned`` for a micro-batch."""
        self._outputs[micro] = mapped(returned, lambda tensor: settled(tensor).clone())

    def take(self) -> dict[int, Any]:
        """Returns the stored values and forgets them."""
        outputs, self._outputs = self._outputs, {}
        return outputs


class _CurrentRound:
    """The round that is running, and what each stage sends for a micro-batch of it with all of its ``whole`` items."""

    def __init__(self, boundaries: Mapping[int, Boundary], whole: int) -> None:
        self.boundaries = boundaries
        self.whole = whole
        self.round = EvaluationBatch((), lambda _micro: (None, None, {}))

    def size(self, micros: Micros) -> int:
        """Number of items in a micro-batch, or in several together."""
        return sum(self.round.sizes[micro] for micro in numbers_of(micros))

    def has(self, micros: Micros) -> bool:
        """Whether a micro-batch, or at least one of several, has items."""
        return self.size(micros) > 0

    def load(self, micro: int, which: int, device: torch.device) -> Any:
        """Inputs (``which`` 0), targets (1) or keyword arguments (2) of a micro-batch; None if it has no items."""
        return to_device(self.round.load(micro)[which], device) if self.has(micro) else None

    def sent(self, stage: int, micro: int, returned: Any) -> Tensors:
        """Returns the tensors to send. Raises `BadModel` if they are not as in training, but for their rows."""
        boundary, items = self.boundaries[stage].at(micro), self.size(micro)
        expected = boundary if items == self.whole else boundary.of_items(items, self.whole)
        assert expected is not None, "Evaluation.evaluation_batches has refused that"
        tensors, form = taken_apart(returned)
        if difference := expected.mismatch(tensors, form, 1):
            raise mistakes.evaluation_output_differs(stage=stage, micro=micro, difference=difference)
        return tuple([plain(tensor.detach()) for tensor in tensors])


@dataclass
class EvaluationStage:
    """A stage for forwards alone, which keeps nothing but its outputs until they are sent, or its ``readers`` have them
    if these are several; one that feeds no other has ``output``.
    """

    number: int
    module: torch.nn.Module
    before: Boundary | None
    output: LastOutput | None
    current: _CurrentRound
    load_keywords: Callable[[int], Keywords]
    carries: Carries
    reports: SideNumbers | None
    readers: tuple[int | None, ...] = (None,)
    absence: Absence | None = None
    _outputs: dict[tuple[int, int | None], Tensors] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.forward_of_module = called(self.module, self.before)
        self._input = StageInput(self.number, self.before, absence=self.absence)

    def forward(self, micros: Micros, inputs: Any, targets: Any = None) -> None:
        """Runs the stage on a micro-batch, or on several one after the other; arguments as of `Stage.forward`."""
        if not self._has(micros):
            return
        arguments = [(micros, inputs, targets)] if isinstance(micros, int) else self._split(micros, inputs, targets)
        for micro, *values in arguments:
            if self._has(micro):
                outputs = self._run(micro, *values)
                if self.output is None:
                    self._outputs.update(((micro, reader), outputs) for reader in self.readers)

    def outputs(self, micros: Micros, *readers: int) -> Tensors:
        """Returns the outputs of forwards and forgets them; an empty tuple if the micro-batches have no items."""
        there = [micro for micro in numbers_of(micros) if self._has(micro)]
        of_readers = [[self._outputs.pop((micro, reader)) for micro in there] for reader in readers or (None,)]
        made = of_readers[0]
        return join(made) if len(made) > 1 else made[0] if made else ()

    def _has(self, micros: Micros) -> bool:
        return self.current.has(micros) and (self.absence is None or self.absence.has(micros, self.number))

    def _split(self, micros: tuple[int, ...], inputs: Any, targets: Any) -> Iterator[tuple[int, Any, Any]]:
        """Yields number, inputs and target of each micro-batch; inputs from a message are cut along dimension 0."""
        total, end = self.current.size(micros), 0
        for number, micro in enumerate(micros):
            start, end = end, end + self.current.size(micro)
            shares = inputs[number] if self.before is None else tuple(_share(t, start, end, total) for t in inputs)
            yield micro, shares, None if targets is None else targets[number]

    def _run(self, micro: int, inputs: Any, target: Any) -> Tensors:
        before = self._input.at(micro)
        argument = inputs if before is None else before.form.filled(inputs)
        carry, takes = self.carries.take(micro), self.carries.takes
        keywords = {**self.load_keywords(micro), **carry.arguments(takes, carry.tensors)}
        auxiliary = Auxiliary(takes=False)
        with UserCode(f"the forward of stage {self.number} in an evaluation", FAILED), collecting(auxiliary):
            returned, new_carry = takes.split_result(
                f"stage {self.number}", self.forward_of_module(argument, **keywords)
            )
        self.carries.keep(micro, carry, inputs, new_carry)
        outputs: Tensors = ()
        if self.output is None:
            outputs = self.current.sent(self.number, micro, returned)
        else:
            with collecting(auxiliary):
                self.output(micro, self.current.size(micro), returned, target)
        if self.reports is not None:
            auxiliary.weigh(self.current.size(micro))
            self.reports.add(self.number, micro, 0, auxiliary)
        del returned  # only then does `unshared` see whether the module still holds the memory of an output
        return tuple(map(unshared, outputs))


def _share(tensor: torch.Tensor, start: int, end: int, items: int) -> torch.Tensor:
    """The rows of items ``start`` to ``end - 1`` in a tensor of ``items`` items, all of equally many rows; a view."""
    first = len(tensor) * start // items
    return tensor.narrow(0, first, len(tensor) * end // items - first)


class _PartlyIncoming(Incoming):
    """An incoming link whose messages may fill only a part of a slot: they have fewer items, or smaller shapes."""

    def __init__(self, peer: Peer, route: Route, job: Job, slots: Slots, *, current: _CurrentRound) -> None:
        super().__init__(peer, route, job, slots)
        self._slots = slots
        self._vacant: Any = self._filled
        self._current = current

    def _filled(self, into: int, micros: Micros) -> Tensors:
        room = self._slots.rooms[into]
        first = micros[0] if isinstance(micros, tuple) else micros
        buffers = self._current.boundaries[self._route.source].views(self._slots.vacant(into), room, first)
        items, whole = self._current.size(micros), room * self._current.whole
        return buffers if items == whole else tuple(_share(tensor, 0, items, whole) for tensor in buffers)


@dataclass(eq=False)
class Evaluation:
    """Runs rounds of micro-batches through the pipelines of a copy; every rank of the copy runs the same rounds.

    Rounds follow each other without a barrier, so the pipelines stay full from the first round to the last. ``stages``
    are those with which the rank trains, ``size`` the items of a micro-batch in training. ``outputs`` receive what the
    stages return that feed no other, by their number, ``reports`` what stages and losses report. ``absence`` has the
    stages that micro-batches of the round lack. ``varying`` fits the stages to smaller shapes.
    """

    context: RankContext
    stages: Mapping[int, Stage]
    size: int
    outputs: Mapping[int, LastOutput]
    varying: VaryingShapes | None = None
    cut_slice: CutSlice | None = None
    reports: SideNumbers | None = None
    absence: Absence | None = None

    def __post_init__(self) -> None:
        context, world, facts = self.context, self.context.world, self.context.facts.evaluation
        self._whole = self.size // world.job.row_parts
        self._boundaries = context.probed.boundaries
        self._names = keyword_names(context.probed.traits, self.stages)
        # The lane has its own stages, slots and links; all of them read the sizes of the current round.
        self._absence = Absence(world.job) if self.absence is None else self.absence
        current = self._current = _CurrentRound(self._boundaries, self._whole)
        self._shapes: ShapeList | None = None  # of the round that comes next
        slots = {
            (feeding, stage): Slots(rooms, partial(self._boundaries[feeding].buffers, world.device))
            for stage, of_makers in facts.slots.items()
            for feeding, rooms in zip(world.job.feeding[stage], of_makers, strict=True)
        }

        def incoming(route: Route) -> Any:
            about = world.peer(route.worker), route, world.job, slots[route.source, route.target]
            return shared(_PartlyIncoming(*about, current=current), route, world.job, self.stages)

        parts = LaneComponents(
            stages={number: self._stage(number, stage) for number, stage in self.stages.items()},
            incoming={route: incoming(route) for route in facts.incoming},
            outgoing={route: Outgoing(world.peer(route.worker), route, world.job) for route in facts.outgoing},
            load_input=partial(self._load, 0, world.job.sources),
            load_target=partial(self._load, 1, world.job.sinks),
        )
        if context.ranges:
            parts = ranged(parts, ranges_on(world.device), world.job.slices)
        receiving = {route: StreamLink(link, self._has_message(route)) for route, link in parts.incoming.items()}
        sending = {route: StreamLink(link, self._has_message(route)) for route, link in parts.outgoing.items()}
        self._lane = Lane(parts._replace(incoming=receiving, outgoing=sending))

    def evaluation_batches(self, batch: Any) -> Iterator[EvaluationBatch]:
        """Yields the rounds into which a batch is cut.

        Raises `Misuse` like the function `evaluation_batches`; also if a tensor is larger than in the example, or if a
        micro-batch has fewer items than in training and a tensor between stages has no rows of items in dimension 0.
        """
        for micro_batches in evaluation_batches(self.context.world.job, self.size, batch, self._names, self.cut_slice):
            if self.varying is not None:
                sizes = micro_batches.sizes[:: self.context.world.job.parts]
                load = partial(self._filled, micro_batches)
                self._shapes = self.varying.agree_in_copy(sizes, load, is_in_one_piece=not callable(batch))
            for items in {*micro_batches.sizes} - {0, self._whole}:
                self._require_rows_of_items(items)
            yield micro_batches

    def run(self, micro_batches: EvaluationBatch) -> None:
        """Runs the forwards of a round."""
        self._current.round = micro_batches
        self._agree_on_absence(micro_batches)
        if self.varying is not None and self._shapes is not None:
            self.varying.begin(self._shapes)
            self._current.boundaries = self.varying.boundaries(self._shapes.keys)
        with evaluating([stage.newest().module for stage in self.stages.values()]):
            self.context.script.evaluate(self._lane)

    def _agree_on_absence(self, micro_batches: EvaluationBatch) -> None:
        """Finds out, with the other ranks of the copy, which stages the micro-batches of a round lack."""
        context, job = self.context, self.context.world.job
        if not context.may_lack_input:
            return

        def input_of(micro: int) -> Any:  # of a micro-batch without items all stages count as present
            items = micro_batches.sizes[micro]
            return micro_batches.load(micro)[0] if items else dict.fromkeys(map(job.end_name, job.sources), ())

        present = largest_in_copy(context.world.control_group, inputs_here(job, context.facts, input_of))
        lacking = lacking_stages(job, context.world.place.copy, present)
        self._absence.by_data = lacking if any(lacking) else ()

    def _has_message(self, route: Route) -> Callable[[Micros], bool]:
        absence, current = self._absence, self._current
        if not absence.job.at_times:
            return current.has
        return lambda micros: current.has(micros) and absence.is_sent(micros, route)

    def _load(self, which: int, ends: Sequence[int], _update: int, micro: int, stage: int | None = None) -> Any:
        job = self.context.world.job
        value = self._current.load(micro, which, self.context.world.device)
        return value if stage is None else job.of_end(value, stage, ends)

    def _filled(self, micro_batches: EvaluationBatch, micro: int, component: int) -> Any:
        """A component of the first part of a micro-batch, with items repeated up to the size of a whole one."""
        place = micro * self.context.world.job.parts
        value, items = micro_batches.load(place)[component], micro_batches.sizes[place]

        def fill(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[torch.arange(self._whole, device=tensor.device) % items] if tensor.dim() else tensor

        if items == self._whole:
            return value
        return cut(value, lambda argument: mapped(argument, fill)) if component == KEYWORDS else mapped(value, fill)

    def _require_rows_of_items(self, items: int) -> None:
        for stage, boundary in self._boundaries.items():
            if boundary.of_items(items, self._whole) is None:
                raise mistakes.rows_are_not_items(items=items, whole=self._whole, stage=stage)

    def _stage(self, number: int, stage: Stage) -> EvaluationStage:
        world, probed = self.context.world, self.context.probed
        names, current = probed.traits[number].keywords, self._current

        def load_keywords(micro: int) -> Keywords:
            loaded = current.load(micro, 2, world.device) if names else {}
            if missing := [name for name in names if name not in loaded]:
                raise mistakes.evaluation_lacks_keyword(name=missing[0])
            return {name: loaded[name] for name in names}

        return EvaluationStage(
            number=number,
            module=alone(stage.module),
            before=probed.before(number, world.job),
            output=self.outputs.get(number),
            current=current,
            load_keywords=load_keywords,
            # Micro-batches may differ in the number of their items, and so may their carries in shapes.
            carries=Carries(number, world.job.slices, probed.traits[number].takes, fixed=False),
            reports=self.reports,
            readers=fed if len(fed := world.job.fed[number]) > 1 else (None,),
            absence=self._absence if world.job.at_times else None,
        )


def _are_slices(outputs: Sequence[Any], length: int | None, lengths: Sequence[int]) -> bool:
    """Whether the outputs of slices, micro-batch after micro-batch, can be joined along dimension 1.

    If the ``length`` of the whole sequence is known, dimension 1 must also have the size of the slice.
    """
    bounds = slice_bounds(length, lengths) if length else []

    def is_slice(tensor: torch.Tensor, number: int) -> bool:
        start, end = bounds[number % len(bounds)] if bounds and tensor.dim() > 1 else (0, 0)
        return tensor.dim() > 1 and (not bounds or tensor.size(1) == end - start)

    of_slices = ((leaf, number) for number, output in enumerate(outputs) for leaf in leaves(output))
    return all(is_slice(leaf, number) for leaf, number in of_slices if isinstance(leaf, torch.Tensor))


@contextmanager
def evaluating(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Context with modules in evaluation mode and without autograd; afterwards each module has its former mode."""
    modules = list(modules)
    modes = [[(submodule, submodule.training) for submodule in module.modules()] for module in modules]
    try:
        for module in modules:
            module.eval()
        with torch.no_grad():
            yield
    finally:
        for module, before in zip(modules, modes, strict=True):
            module.train(before[0][1])
            for submodule, training in before:
                submodule.training = training
            rest(module)


class EvaluationLoss(float):
    """The mean loss of an evaluation; ``reports`` has the means of what stages and loss have reported, by name."""

    reports: dict[str, float]

    def __new__(cls, loss: float, reports: dict[str, float]) -> Self:
        """Joins the loss and the reports."""
        number = super().__new__(cls, loss)
        number.reports = reports
        return number

    def __getnewargs__(self) -> tuple[float, dict[str, float]]:  # type: ignore[override]
        """Arguments of `__new__` for a copy."""
        return float(self), self.reports


@dataclass(frozen=True)
class Inference:
    """Computes losses and outputs of the stages. Call it only while no update is under way.

    Random generators, and the parameters, buffers and attributes of modules, are restored afterwards. ``size``,
    ``varying`` and ``cut_slice`` are as in `Evaluation`.
    """

    context: RankContext
    stages: Mapping[int, Stage]
    size: int
    located: Located
    varying: VaryingShapes | None = None
    cut_slice: CutSlice | None = None

    def mean_loss(self, batches: Iterable[Any]) -> "EvaluationLoss":
        """Returns the mean loss over all items in the batches of all copies, with reports, the same on every rank.

        Raises `Misuse` if a batch has none of the forms of `evaluation_batches`, or there is no item at all.
        """
        job, model = self.context.world.job, self.context.model
        names = {sink: job.end_name(sink) for sink in job.sinks}
        absence = Absence(job)
        of_sinks = {
            sink: LossTotal(model.of_sink(name).judge, partial(absence.is_last_sink, stage=sink))
            for sink, name in names.items()
        }
        reports = SideNumbers(self.context.world.read)
        evaluation = self._evaluation(of_sinks, reports, absence)
        with self._unchanged():
            for batch in batches:
                for micro_batches in evaluation.evaluation_batches(batch):
                    with self.located, all_generators_kept():
                        evaluation.run(micro_batches)
        with self.located:
            control_group = self.context.world.control_group
            reported = reports.take(0)
            if len(of_sinks) > 1:
                losses = {loss_name(names[s]): (each.total.item(), each.count) for s, each in of_sinks.items()}
                reported += Tally(reports={name: sums for name, sums in losses.items() if sums[1]})
            # Each of several losses with counts is divided by its own, once these are added up over all ranks.
            with_counts = [loss_name(names[sink]) for sink in self.context.counts]
            total_here = sum(each.total.item() for s, each in of_sinks.items() if s not in self.context.counts)
            items_here = sum(each.items for each in of_sinks.values())
            counted_here = items_here if with_counts else sum(each.counted for each in of_sinks.values())
            numbers = items_here, total_here, counted_here, len(reported.reports)
            items, total, count, has_reports = added_over_all(control_group, *numbers)
            if has_reports:
                exchange = ObjectExchange(control_group.group, "what an evaluation reports", control_group.timeout)
                reported = added(Tally(reports=of_rank) for of_rank in exchange.all_gather(dict(reported.reports)))
        if not items:
            raise Misuse(mistakes.NOTHING_TO_EVALUATE)
        means = reported.report_means
        return EvaluationLoss(Tally(total, count).mean + sum(means.get(name, 0.0) for name in with_counts), means)

    def predictor(self) -> Callable[[Any], Any]:
        """Returns a function from a batch to the outputs of the last stage, on the CPU, on every rank of the copy; if
        several stages feed no other, to a dict of their outputs by name.

        It raises `Misuse` if outputs cannot be joined along dimension 0, or those of slices along dimension 1.
        """
        world = self.context.world
        stores = {sink: OutputStore() for sink in world.job.sinks}
        evaluation = self._evaluation(stores)

        def outputs_of(batch: Any) -> Any:
            of_sinks: dict[int, list[Any]] = {sink: [] for sink in stores}
            for micro_batches in evaluation.evaluation_batches(batch):
                with self.located, all_generators_kept(), self._unchanged():
                    evaluation.run(micro_batches)
                    for sink, store in stores.items():
                        of_sinks[sink] += gathered(world.control_group, world.job.holders[sink], store.take()).values()
            together = {sink: joined_outputs(batch, outputs) for sink, outputs in of_sinks.items()}
            if len(together) == 1:
                return together.popitem()[1]
            return {world.job.end_name(sink): value for sink, value in together.items()}

        def joined_outputs(batch: Any, outputs: list[Any]) -> Any:
            if not all(map(is_rows, outputs)):
                raise Misuse(mistakes.PREDICTIONS_HAVE_NO_ITEMS)
            slices = world.job.slices
            if slices > 1:
                length = None if callable(batch) else slice_length(batch[0])
                if not _are_slices(outputs, length, world.job.lengths or (1,) * slices):
                    raise Misuse(mistakes.PREDICTIONS_HAVE_NO_SEQUENCE)
            return joined([joined(outputs[i : i + slices], dimension=1) for i in range(0, len(outputs), slices)])

        return outputs_of

    def runner(self, output: LastOutput) -> Callable[[EvaluationBatch], None]:
        """Returns a function that runs a round and gives outputs to ``output``; buffers stay changed."""
        evaluation = self._evaluation(dict.fromkeys(self.context.world.job.sinks, output))

        def run(micro_batches: EvaluationBatch) -> None:
            with self.located, all_generators_kept():
                evaluation.run(micro_batches)

        return run

    def _unchanged(self) -> ExitStack:
        """Context at whose end the stages have their parameters, buffers and attributes; errors as of `unchanged`."""
        stack = ExitStack()
        for number in sorted(self.stages, reverse=True):
            touched = self.context.probed.traits[number].touched
            stack.enter_context(unchanged(number, self.stages[number].newest().module, touched))
        return stack

    def _evaluation(
        self, outputs: Mapping[int, LastOutput], reports: SideNumbers | None = None, absence: Absence | None = None
    ) -> Evaluation:
        about = self.varying, self.cut_slice, reports, absence
        return Evaluation(self.context, self.stages, self.size, outputs, *about)
