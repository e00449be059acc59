"""Forwards alone: the loss or the outputs of a model with its weights as they are, by ``evaluate`` of the rank scripts.

Modules run in evaluation mode and without a graph, and are as before afterwards. No seed is drawn from: the caller sees
to the generators. A micro-batch may hold fewer items than in training, or none: then what the script does about it
does nothing.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch

from chimera_runtime.blame import UserCode
from chimera_runtime.data.evaluation_batches import EvaluationBatch, evaluation_batches
from chimera_runtime.errors import FAILED, BadModel, Misuse
from chimera_runtime.lane.lane import Lane
from chimera_runtime.lane.message_links import Incoming, Outgoing
from chimera_runtime.lane.stream_lane import StreamIncoming, StreamOutgoing
from chimera_runtime.program.numbering import Micros
from chimera_runtime.stage.stage import Stage
from chimera_runtime.start.rank_context import Setting
from chimera_runtime.start.varying_shapes import First, Lengths
from chimera_runtime.values.aliases import Slots, unshared
from chimera_runtime.values.boundary import Boundary, keyword_names
from chimera_runtime.values.keywords import Keywords
from chimera_runtime.values.losses import Loss, as_pair
from chimera_runtime.values.nested import mapped, taken_apart, to_device
from chimera_runtime.values.shards import rest, settled
from chimera_runtime.values.tensors import Tensors, join, plain


class EvaluationEnding(Protocol):
    """The end of a stage in an evaluation."""

    def finish(self, micro: int, items: int, returned: Any, target: Any) -> Tensors:
        """What is handed on of what was returned for a micro-batch."""


class Passing:
    """The end of a stage that has a next one; raises BadModel if tensors differ from those of training."""

    def __init__(self, number: int, now: "_Now", whole: int) -> None:
        self._number = number
        self._now = now
        self._whole = whole

    def finish(self, micro: int, items: int, returned: Any, _target: Any) -> Tensors:
        """The tensors that were returned."""
        boundary = self._now.boundaries[self._number]
        after = boundary if items == self._whole else boundary.of_items(items, self._whole)
        assert after is not None, "Evaluation.rounds has refused that"
        tensors, form = taken_apart(returned)
        wrong = after.mismatch(tensors, form, 1)
        if wrong:
            raise BadModel(
                f"stage {self._number} returned for micro-batch {micro} of an evaluation: {wrong}; return the same in "
                "evaluation mode"
            )
        return tuple([plain(tensor.detach()) for tensor in tensors])


class Weighing:
    """The end of the last stage, with the loss: its sum, in which a mean counts as often as its micro-batch has items.

    ``items`` and ``count`` are of all that was judged on this rank.
    """

    def __init__(self, judge: Callable[[Any, Any], Loss]) -> None:
        self._judge = judge
        self._total = torch.zeros((), dtype=torch.float64)
        self.items = 0
        self.count = 0.0

    def finish(self, _micro: int, items: int, returned: Any, target: Any) -> Tensors:
        """Nothing is handed on."""
        loss, count = as_pair(self._judge(returned, target))
        total = loss.reshape(()).double()
        self._total = self._total.to(loss.device) + (total * items if count is None else total)
        self.items += items
        self.count += items if count is None else count.item()
        return ()

    @property
    def total(self) -> float:
        """The sum over all that was judged on this rank."""
        return self._total.item()


class Keeping:
    """The end of the last stage that keeps its outputs, by micro-batch, in memory of their own."""

    def __init__(self) -> None:
        self._outputs: dict[int, Any] = {}

    def finish(self, micro: int, _items: int, returned: Any, _target: Any) -> Tensors:
        """Nothing is handed on."""
        self._outputs[micro] = mapped(returned, lambda tensor: settled(tensor).clone())
        return ()

    def take(self) -> dict[int, Any]:
        """The outputs of the micro-batches that ended on this rank; they are forgotten."""
        outputs, self._outputs = self._outputs, {}
        return outputs


class _Now:
    """The round that is under way, and what the stages hand on of a whole micro-batch of it."""

    def __init__(self, boundaries: Sequence[Boundary]) -> None:
        self.boundaries = boundaries
        self.round = EvaluationBatch((), lambda _micro: (None, None, {}))

    def size(self, micros: Micros) -> int:
        """The items of some micro-batches together."""
        return sum(self.round.sizes[micro] for micro in (micros if isinstance(micros, tuple) else (micros,)))

    def has(self, micros: Micros) -> bool:
        """Whether any of some micro-batches is there."""
        return self.size(micros) > 0

    def load(self, micro: int, which: int, device: torch.device) -> Any:
        """The inputs, the targets or the keyword arguments of a micro-batch; None if it is not there."""
        return to_device(self.round.load(micro)[which], device) if self.has(micro) else None


class EvaluationStage:
    """A stage for forwards alone: it keeps what it hands on until that is taken, and nothing else."""

    def __init__(
        self,
        number: int,
        module: torch.nn.Module,
        before: Boundary | None,
        ending: EvaluationEnding,
        now: _Now,
        last: bool,
        load_keywords: Callable[[int], Keywords] = lambda _micro: {},
    ) -> None:
        self._module = module
        self._before = before
        self._ending = ending
        self._now = now
        self._last = last
        self._load_keywords = load_keywords
        self._outputs: dict[Micros, Tensors] = {}
        self._running = UserCode(f"the forward of stage {number} in an evaluation", FAILED)

    def begin(self, _update: int) -> None:
        """Does nothing: an evaluation numbers its micro-batches anew in every round."""

    def forward(self, micros: Micros, inputs: Any, targets: Any = None) -> None:
        """Runs the stage on a micro-batch or on several, one after the other; arguments as of `Stage.forward`."""
        if not self._now.has(micros):
            return
        arguments = [(micros, inputs, targets)] if isinstance(micros, int) else self._apart(micros, inputs, targets)
        outputs = [self._run(micro, *values) for micro, *values in arguments if self._now.has(micro)]
        if not self._last:
            self._outputs[micros] = outputs[0] if len(outputs) == 1 else join(outputs)

    def outputs(self, micros: Micros) -> Tensors:
        """What the forward of these micro-batches hands on: once; nothing of those that are not there."""
        return self._outputs.pop(micros) if self._now.has(micros) else ()

    def _apart(self, micros: tuple[int, ...], inputs: Any, targets: Any) -> Iterator[tuple[int, Any, Any]]:
        """Each micro-batch with its inputs, which lie one after another in dimension 0 if they were received."""
        total, end = self._now.size(micros), 0
        for number, micro in enumerate(micros):
            start, end = end, end + self._now.size(micro)
            shares = inputs[number] if self._before is None else tuple(_share(t, start, end, total) for t in inputs)
            yield micro, shares, None if targets is None else targets[number]

    def _run(self, micro: int, inputs: Any, target: Any) -> Tensors:
        argument = inputs if self._before is None else self._before.form.filled(inputs)
        keywords = self._load_keywords(micro)
        with self._running:
            returned = self._module(argument, **keywords)
        outputs = self._ending.finish(micro, self._now.size(micro), returned, target)
        del returned  # what then still holds the memory of an output may write it in a later forward
        return tuple(map(unshared, outputs))


def _share(tensor: torch.Tensor, start: int, end: int, items: int) -> torch.Tensor:
    """The rows of the items from ``start`` to before ``end`` in a tensor that has the same number of rows for each."""
    first = len(tensor) * start // items
    return tensor.narrow(0, first, len(tensor) * end // items - first)


class _PartlyIncoming(Incoming):
    """An incoming link whose messages may hold fewer items than a slot has room for, and smaller ones."""

    def __init__(self, link: tuple[Any, int, int, int], slots: Slots, now: _Now, whole: int) -> None:
        super().__init__(*link, slots)
        self._now = now
        self._whole = whole

    def _buffers(self, micros: Micros, into: int) -> Tensors:
        room = self._slots.rooms[into]
        buffers = self._now.boundaries[self._source].views(self._slots.vacant(into), room)
        items, whole = self._now.size(micros), room * self._whole
        return buffers if items == whole else tuple(_share(tensor, 0, items, whole) for tensor in buffers)


class Evaluation:
    """Runs rounds of micro-batches through the copy's pipelines; every rank of the copy runs the same rounds.

    Nothing waits between one round and the next, so the pipelines stay full from the first to the last.

    Parameters
    ----------
    setting, stages
        What the rank trains with; no update is under way.
    size
        The items of a micro-batch as it was at start.
    last
        What becomes of what the last stage returns.
    lengths
        Where batches may be of other shapes than the example: what the stages hand on then.
    """

    def __init__(
        self,
        setting: Setting,
        stages: Mapping[int, Stage],
        size: int,
        last: Weighing | Keeping,
        lengths: Lengths | None = None,
    ) -> None:
        self._lengths = lengths
        self._names = keyword_names(setting.findings.traits, stages)
        world, facts, self._boundaries = setting.world, setting.facts.evaluation, setting.findings.boundaries
        job, device = world.job, world.device
        self._device = device
        self._keywords = [traits.keywords for traits in setting.findings.traits]
        self._script, self._stages, self._job, self._size = setting.script, stages, job, size
        whole = self._whole = size // job.parts
        now = self._now = _Now(self._boundaries)
        slots = {
            stage: Slots(rooms, partial(self._boundaries[stage - 1].buffers, device))
            for stage, rooms in facts.slots.items()
        }
        peers = {worker: world.peer(worker) for *_, worker in (*facts.incoming, *facts.outgoing)}
        ranges = setting.ranges

        def incoming(source: int, target: int, worker: int) -> Incoming:
            route = peers[worker], source, target, job.stages
            return _PartlyIncoming(route, slots[target], now, whole)

        def outgoing(source: int, target: int, worker: int) -> Outgoing:
            return Outgoing(peers[worker], source, target, job.stages)

        self._lane = Lane(
            {number: ranges.stage(number, self._stage(number, stage, last)) for number, stage in stages.items()},
            {route: StreamIncoming(ranges.incoming(incoming(*route), *route), now) for route in facts.incoming},
            {route: StreamOutgoing(ranges.outgoing(outgoing(*route), *route), now) for route in facts.outgoing},
            lambda _update, micro: now.load(micro, 0, device),
            lambda _update, micro: now.load(micro, 1, device),
        )

    def evaluation_batches(self, batch: Any) -> Iterator[EvaluationBatch]:
        """A batch as `evaluation_batches`, of which each can be run.

        Raises
        ------
        Misuse
            As `evaluation_batches`, and if a micro-batch lacks items and a stage hands on tensors whose rows are not of
            items, or if a tensor is larger than that of the example.
        """
        for of in evaluation_batches(self._job, self._size, batch, self._names):
            if self._lengths is not None:
                self._lengths.require_fitting(self._first(of))
            for size in {*of.sizes} - {0, self._whole}:
                self._require_rows_of_items(size)
            yield of

    def run(self, of: EvaluationBatch) -> None:
        """The forwards of a round.

        Raises
        ------
        BadModel, ModelError, PeerLost
            If a forward or a message fails.
        """
        self._now.round = of
        if self._lengths is not None:
            self._now.boundaries = self._lengths.boundaries(self._first(of))
        with evaluating([stage.newest().module for stage in self._stages.values()]):
            self._script.evaluate(self._lane)

    def _first(self, of: EvaluationBatch) -> First:
        """The first micro-batch, whole: what it lacks is there with items repeated."""
        inputs, _, keywords = of.load(0)

        def fill(tensor: torch.Tensor) -> torch.Tensor:
            items = torch.arange(self._whole, device=tensor.device) % of.sizes[0]
            return tensor[items] if tensor.dim() else tensor

        return mapped((inputs, keywords), fill) if of.sizes[0] < self._whole else (inputs, keywords)

    def _require_rows_of_items(self, size: int) -> None:
        for stage, boundary in enumerate(self._boundaries):
            if boundary.of_items(size, self._whole) is None:
                raise Misuse(
                    f"the last micro-batch of an evaluation is smaller, {size} in place of {self._whole}, and what "
                    f"stage {stage} hands on has no rows of single items in dimension 0: leave the last items out "
                    "(drop_last=True)"
                )

    def _stage(self, number: int, stage: Stage, last: Weighing | Keeping) -> EvaluationStage:
        is_last = number == len(self._boundaries)
        ending: EvaluationEnding = last if is_last else Passing(number, self._now, self._whole)
        before = self._boundaries[number - 1] if number else None
        names = self._keywords[number]

        def load_keywords(micro: int) -> Keywords:
            loaded = self._now.load(micro, 2, self._device) if names else {}
            if missing := [name for name in names if name not in loaded]:
                raise Misuse(f"a batch of an evaluation has no keyword argument {missing[0]}, and the example had")
            return {name: loaded[name] for name in names}

        return EvaluationStage(number, stage.module, before, ending, self._now, is_last, load_keywords)


@contextmanager
def evaluating(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Inside, modules are in evaluation mode and nothing is recorded; afterwards each is in the mode of before."""
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
