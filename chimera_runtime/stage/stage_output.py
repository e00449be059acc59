"""The output of a stage: tensors for the next stage, or the loss of the last one."""

import math
import numbers
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import compress
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

import torch

from chimera_runtime.errors import BadModel
from chimera_runtime.errors import stage as mistakes
from chimera_runtime.errors.stage import tensor_was_unused_at_first
from chimera_runtime.program.absence import Absence
from chimera_runtime.program.numbering import Numbering
from chimera_runtime.ranks.messages import Numbers, Reader, from_host
from chimera_runtime.stage.engine import Roots, edge_of
from chimera_runtime.values.boundary import KIND, Boundary
from chimera_runtime.values.losses import Loss, Tally, as_pair
from chimera_runtime.values.mesh_tensors import is_spread
from chimera_runtime.values.nested import ONE_TENSOR, Tensors, fresh, is_rows, leaves, mapped, parts, taken_apart
from chimera_runtime.values.shared_memory import note_received, unshared

# Auxiliary losses, which are terms of the loss, and reports, for people: numbers of a forward beside its output.


class Report(NamedTuple):
    """A number that a forward has reported, and its weight, by default the number of micro-batches; tensors are read
    later.
    """

    name: str
    value: float | torch.Tensor
    weight: float | torch.Tensor | None


class Auxiliary(list[tuple[str, torch.Tensor]]):
    """The auxiliary losses of a forward, by name, and its ``reports``; in an evaluation it ``takes`` reports alone."""

    def __init__(self, takes: bool = True) -> None:
        self.reports: list[Report] = []
        self.takes = takes

    def weigh(self, micro_batches: int) -> None:
        """Gives the reports so far that have no weight that of their ``micro_batches``."""
        self.reports[:] = [r if r.weight is not None else r._replace(weight=micro_batches) for r in self.reports]


_NO_BACKWARD = -1
"""Number that torch gives for the running backward in a thread in which no backward runs."""

COLLECTED: ContextVar[Auxiliary | None] = ContextVar("auxiliary losses", default=None)
"""Where `auxiliary_loss` and `report` put what the running forward tells: None outside of forwards."""


def auxiliary_loss(name: str, value: torch.Tensor) -> None:
    """Adds a term to the loss of a micro-batch; call it within the forward of a stage or within the loss.

    It does nothing if the module is used by itself, outside of a pipeline. It also does nothing in a backward, in which
    torch.utils.checkpoint runs a forward again whose losses have been counted before.

    Parameters
    ----------
    name
        The key of the loss in `Outcome.auxiliary`; losses of one name are added up, over layers and stages.
    value
        A tensor of one number, already multiplied by its weight: the mean over the micro-batch. If ``loss`` returns a
        sum and a count, the value is a sum, which is divided by the same count.

    Raises
    ------
    TypeError
        If the value is not a tensor of one number.
    BadModel
        If torch records no graph at the call, so that the loss would have no gradient.
    """
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise TypeError(f"the auxiliary loss {name} is to be a tensor of one number")
    collected = COLLECTED.get()
    if collected is None or not collected.takes or torch._C._current_graph_task_id() != _NO_BACKWARD:
        return
    if not torch.is_grad_enabled():
        raise mistakes.auxiliary_loss_has_no_gradient(name=name)
    collected.append((name, value))


def report(name: str, value: float | torch.Tensor, count: float | torch.Tensor | None = None) -> None:
    """Reports a number beside the loss, such as an accuracy; call it within the forward of a stage or within the loss.

    `Outcome.reports` has the mean of all numbers of a name, over micro-batches, stages and copies, weighted by their
    counts; so has the result of `Pipeline.evaluate`. Nothing is trained by it. A forward that runs again for its
    backward does not report again.

    Parameters
    ----------
    name
        The key in `Outcome.reports`. Not every micro-batch, stage or rank has to report it.
    value
        A number, or a tensor of one number, of which no gradient is kept: a mean over ``count`` items, say.
    count
        The weight of the number: by default a micro-batch counts by its items.

    Raises
    ------
    TypeError
        If the name is no text, or the value or the count no real number.
    ValueError
        If the count is not positive, or not finite; of a count on a GPU this is known after the update, as BadModel.
    Misuse
        If it is called outside of a step or an evaluation of a pipeline.
    """
    if torch._C._current_graph_task_id() != _NO_BACKWARD:
        return
    collected = COLLECTED.get()
    if collected is None:
        raise mistakes.report_is_outside(name=name)
    if not isinstance(name, str):
        raise TypeError(mistakes.REPORT_HAS_NO_NAME)
    weight = None if count is None else _number(count)
    number = _number(value)
    if number is None or (weight is None and count is not None):
        raise TypeError(mistakes.report_is_no_number(name=name, what="value" if number is None else "count"))
    if isinstance(weight, float) and not 0 < weight < math.inf:
        raise ValueError(mistakes.report_has_wrong_count(name=name, count=weight))
    collected.reports.append(Report(name, number, weight))


def _number(value: Any) -> float | torch.Tensor | None:
    """The number in a value, in a tensor of its own if that has to be read later; None if it is no real number."""
    if not isinstance(value, torch.Tensor):
        return float(value) if isinstance(value, numbers.Real) else None
    if value.numel() != 1 or value.is_complex() or is_spread(value):
        return None
    value = value.detach()
    return 1.0 if value.is_meta else value.item() * 1.0 if value.device.type == "cpu" else value.clone()


@contextmanager
def collecting(before: Auxiliary | None = None) -> Iterator[Auxiliary]:
    """Collects what the forwards that this thread runs inside tell, in the list ``before`` if given."""
    collected = Auxiliary() if before is None else before
    token = COLLECTED.set(collected)
    try:
        yield collected
    finally:
        COLLECTED.reset(token)


def roots_of(auxiliary: Auxiliary) -> tuple[torch.Tensor, ...]:
    """The auxiliary losses that have a graph, at which a backward begins."""
    return tuple([value for _, value in auxiliary if value.requires_grad])


@dataclass
class SideNumbers:
    """The auxiliary losses and reports of forwards, by update, until the update is over; ``read`` reads numbers from
    the device. ``names`` are those of the auxiliary losses of the first micro-batch.
    """

    read: Reader
    names: Collection[str] = ()
    _losses: dict[int, list[tuple[Sequence[str], Numbers]]] = field(default_factory=dict)
    _reports: dict[int, list[tuple[list[Report], Numbers | None]]] = field(default_factory=dict)

    def add(self, stage: int, micro: int, update: int, auxiliary: Auxiliary) -> None:
        """Begins to read the numbers of a forward. Raises `BadModel` if an auxiliary loss is not in ``names``."""
        names = [name for name, _ in auxiliary]
        if unknown := [name for name in names if name not in self.names]:
            raise mistakes.auxiliary_loss_is_new(stage=stage, name=unknown[0], micro=micro)
        if names:
            numbers = self.read(update, [value for _, value in auxiliary])
            self._losses.setdefault(update, []).append((names, numbers))
        if reports := auxiliary.reports:
            on_device = [n for _, *both in reports for n in both if isinstance(n, torch.Tensor)]
            self._reports.setdefault(update, []).append((reports, self.read(update, on_device) if on_device else None))

    def take(self, update: int) -> Tally:
        """Returns the sums of an update, and forgets them. Raises `BadModel` if a report's count is not positive."""
        losses: dict[str, float] = {}
        for names, read_losses in self._losses.pop(update, ()):
            for name, number in zip(names, read_losses(), strict=True):
                losses[name] = losses.get(name, 0.0) + number
        sums: dict[str, tuple[float, float]] = {}
        for reports, read in self._reports.pop(update, ()):
            coming = iter(read() if read is not None else ())
            for name, value, weight in reports:
                value = next(coming) if isinstance(value, torch.Tensor) else value
                weight = next(coming) if isinstance(weight, torch.Tensor) else 1.0 if weight is None else weight
                if not 0 < weight < math.inf:
                    raise mistakes.report_had_wrong_count(name=name, count=weight)
                total, weights = sums.get(name, (0.0, 0.0))
                sums[name] = total + value * weight, weights + weight
        return Tally(auxiliary=losses, reports=sums)


# The input of a stage: what its module is called on, and the gradients for the stage before.


@dataclass
class StageInput:
    """The input of a stage; ``before`` is None for one that no other feeds, which with ``copies`` is called on copies
    of the data, and ``notes`` the memory of data, which no stage moves to the host. ``absence`` says which feeding
    stages a micro-batch has, if it may lack some.
    """

    number: int
    before: Boundary | None
    copies: bool = False
    notes: bool = False
    absence: Absence | None = None
    _of_present: dict[tuple[int, ...], Boundary] = field(default_factory=dict)

    def at(self, micro: int) -> Boundary | None:
        """Returns ``before`` as it is for a micro-batch, which may lack some of the stages that feed this one."""
        if self.absence is None or self.before is None or not self.before.feeds:
            return self.before
        absence, before = self.absence, self.before
        lacking = tuple([feed.source for feed in before.feeds if not absence.has(micro, feed.source)])
        if not lacking:
            return before
        if lacking not in self._of_present:
            self._of_present[lacking] = before.without(lacking)
        return self._of_present[lacking]

    def resize(self, before: Boundary | None) -> None:
        """Changes the shapes that the stage receives."""
        self.before = before
        self._of_present.clear()

    def argument(self, inputs: Any, micro: int = 0) -> tuple[Tensors, Any]:
        """Returns the leaves of a new graph, and the argument of the module: the leaves in new containers."""
        before = self.before if self.absence is None else self.at(micro)
        if before is None:
            if self.copies or type(inputs) is not torch.Tensor:
                inputs = mapped(inputs, torch.clone) if self.copies else fresh(inputs)
            if self.notes:
                note_received(inputs)
            return (), inputs
        if before.form is ONE_TENSOR:
            leaf = inputs[0].detach()
            leaf.requires_grad = before.recorded[0]
            return (leaf,), leaf
        leaves = tuple(map(torch.Tensor.detach, inputs))
        for leaf, is_recorded in zip(leaves, before.recorded, strict=True):
            leaf.requires_grad = is_recorded
        return leaves, before.form.filled(leaves)

    def take_gradients(self, leaves: Tensors, counts: Tensors, micro: int = 0) -> Tensors:
        """Returns the message to the stages before: the gradients of the leaves, whose ``grad`` it clears, and the loss
        count. Raises `BadModel` if a tensor has a gradient although it had none for the first micro-batch.
        """
        before = self.before if self.absence is None else self.at(micro)
        if before is None:
            return ()
        gradients: list[torch.Tensor] = []
        for place, leaf in enumerate(leaves):
            gradient, leaf.grad = leaf.grad, None
            if before.differentiable[place]:  # in memory that neither a later message nor a later backward writes
                gradients.append(torch.zeros_like(leaf) if gradient is None else unshared(gradient))
            elif gradient is not None and before.recorded[place]:
                # If it is not recorded, the stage called requires_grad_(); no parameter before it needs the gradient.
                raise tensor_was_unused_at_first(stage=self.number)
        return (*gradients, *map(torch.clone, counts)) if counts else tuple(gradients)


Finished = tuple[Tensors, Roots]
"""The tensors for the next stage, and the roots at which the backward will begin."""


@dataclass
class SendOutput:
    """Output of a stage with a next one, described by ``after``; if it ``moves_operands``, received gradients stay."""

    number: int
    after: Boundary
    share: float = 1.0
    scale: float = 1.0
    moves_operands: bool = False

    def __post_init__(self) -> None:
        self.counted = self.after.counted

    def finish(self, micros: Sequence[int], returned: Any, _targets: Sequence[Any]) -> Finished:
        """Returns tensors to send, in memory that the stage does not keep, and the edges at which the backward begins.
        Raises `BadModel` if the tensors differ from those of the first micro-batch of the run.
        """
        tensors, form = taken_apart(returned) if type(returned) is not torch.Tensor else ((returned,), ONE_TENSOR)
        after = self.after.at(micros[0]) if self.after.of_micros else self.after
        if form is not after.form or [*map(KIND, tensors)] != after.kinds:
            tensors = after.with_leaves(tensors) if torch.is_grad_enabled() else tensors
            if difference := after.mismatch(tensors, form, len(micros)):
                raise mistakes.output_differs(stage=self.number, micro=micros[0], difference=difference)
        roots = tuple(map(edge_of, compress(tensors, after.differentiable)))
        if after.owned_by_stage and any(after.owned_by_stage):
            pairs = zip(tensors, after.owned_by_stage, strict=True)
            tensors = tuple([t.detach().clone() if is_kept else t for t, is_kept in pairs])
        return tensors, roots

    def gradients(self, _roots: Roots, received: Tensors) -> Tensors:
        """Returns the received gradients as new tensors: if a hook keeps one, its slot moves to new memory."""
        if self.moves_operands:
            note_received(received)
        return tuple(map(torch.Tensor.detach, received[:-1] if self.after.counted else received))

    def counts(self, _micro: int, received: Tensors) -> Tensors:
        """The loss count, which is the last tensor of the received message."""
        return received[-1:]

    def forget(self, _micros: Sequence[int]) -> None:
        """Does nothing: there is nothing to forget."""

    def take_loss(self, _update: int) -> Tally:
        """Returns an empty tally, because the last stage computes the loss."""
        return Tally()


@dataclass
class SendToSeveral(SendOutput):
    """Output of a stage that feeds several: the gradients that it gets from these ``readers`` are added up.

    The stage receives the gradients of all readers, ascending, as one tuple of tensors. They are added in this order,
    so that the sum has the same bits each time. A reader gives zeros for a tensor that it does not use.
    """

    readers: tuple[int, ...] = ()

    def gradients(self, _roots: Roots, received: Tensors) -> Tensors:
        """Returns the sums of the received gradients, in new tensors; of readers that a micro-batch lacks come none."""
        kept = sum(self.after.differentiable)
        size, end = kept + self.after.counted, len(received)  # each message ends with the same loss count
        first, *others = [received[start : start + kept] for start in range(0, end, size)]
        sums = [*first] if others else [*map(torch.Tensor.detach, first)]
        for number, gradients in enumerate(others):
            add = torch.add if number == 0 else torch.Tensor.add_
            sums = [add(total, gradient) for total, gradient in zip(sums, gradients, strict=True)]
        if self.moves_operands:
            note_received(tuple(sums))
        return tuple(sums)


_LIKE = attrgetter("shape", "dtype", "device", "__class__")


@dataclass
class LossOutput:
    """The output of a stage that feeds no other: the ``loss``, which is a sum and a count if ``counted``. ``trains``
    says that some weight needs its gradient. If several stages have a loss, the last one ``counts_items``, or by
    ``absence`` the last one that a micro-batch has; and each reports its own as ``name``. One with a count is then
    multiplied by its entry in ``factors``, which makes a sum a term of a mean over micro-batches.
    """

    loss: Callable[[Any, Any], Loss]
    share: float
    numbering: Numbering
    counted: bool = False
    read: Reader = from_host
    trains: bool = False
    scale: float = 1.0
    counts_items: bool = True
    name: str = ""
    stage: int = 0
    absence: Absence | None = None
    factors: Mapping[int, float] | None = None
    after: ClassVar[None] = None
    _with_graph: set[int] = field(default_factory=set)  # updates of which a loss has a graph
    # Of each update and micro-batch the numbers, whether they count as items, and the factor of the update.
    _losses: defaultdict[int, dict[int, tuple[Numbers, bool, float]]] = field(default_factory=lambda: defaultdict(dict))
    _counts: dict[int, torch.Tensor] = field(default_factory=dict)
    _last_seed: tuple[torch.Tensor | None, Any, float, int] = (None, None, 0.0, 0)

    def finish(self, micros: Sequence[int], returned: Any, targets: Sequence[Any]) -> Finished:
        """Computes the losses, which are the roots, and begins to read them. Raises `BadModel` if the output for
        several micro-batches cannot be cut, or the loss is a sum and a count at times.
        """
        outputs = [returned] if len(micros) == 1 else _apart(micros, returned)
        roots = []
        for micro, output, target in zip(micros, outputs, targets, strict=True):
            value, count = self.loss(output, target), None
            if type(value) is not torch.Tensor:
                value, count = as_pair(value)
            if (count is not None) != (self.counted or self.factors is not None):
                raise BadModel(mistakes.LOSS_COUNTS_AT_TIMES)
            later, number = divmod(micro, self.numbering.passes)
            update = self.numbering.first + later
            number += self.numbering.start
            losses = self._losses[update]
            if number not in losses:  # else this is the second run of a recomputed forward
                is_counted = self.counts_items if self.absence is None else self.absence.is_last_sink(micro, self.stage)
                reading = self.read(update, (value,) if count is None else (value, count))
                losses[number] = reading, is_counted, 1.0 if self.factors is None else self.factors[self.stage]
            if value.requires_grad:
                self._with_graph.add(update)
                roots.append(value)
            if self.counted and count is not None:
                self._counts[micro] = count.clone()  # a later call of the loss may write it
        return (), tuple(roots)

    def forget(self, micros: Sequence[int]) -> None:
        """Forgets the losses of micro-batches, whose forwards run anew."""
        for micro in micros:
            update, number = self.numbering.place(micro)
            self._losses[update].pop(number, None)
            self._counts.pop(micro, None)

    def gradients(self, roots: Sequence[Any], _received: Tensors) -> Tensors:
        """Returns ``share`` times ``scale``, and the factor of the loss, as the gradient of the root, the loss of a
        micro-batch, if there is one.
        """
        if not roots:
            return ()
        # The tensor is made again where it would differ from the last one, or that was written.
        (loss,) = roots
        factor, (seed, like, made_with, version) = self.share * self.scale, self._last_seed
        if self.factors is not None:
            factor *= self.factors[self.stage]
        is_known = seed is not None and factor == made_with and version == seed._version and _LIKE(loss) == like
        if seed is None or not is_known or type(loss) is not torch.Tensor:
            seed = torch.full_like(loss, factor, requires_grad=False)
            self._last_seed = seed, _LIKE(loss), factor, seed._version
        return (seed,)

    def counts(self, micro: int, _received: Tensors) -> Tensors:
        """The loss count that the loss has returned."""
        count = self._counts.pop(micro)
        if self.absence is not None:
            self.absence.counts.append(count)
        return (count,)

    def take_loss(self, update: int) -> Tally:
        """Returns the sum of the losses of an update and forgets them. Raises `BadModel` if some weight needs the
        gradient of the loss, and no loss that counts items has a graph.
        """
        total = reported = items = counted_items = 0.0
        for read, is_counted, factor in self._losses.pop(update, {}).values():
            value, *count = read()
            items_of_loss = count[0] if count else 1.0
            total, reported, items = total + value * factor, reported + value, items + items_of_loss
            if is_counted:
                counted_items += items_of_loss if self.factors is None else 1.0
        if self.trains and items and update not in self._with_graph:
            raise BadModel(mistakes.LOSS_HAS_NO_GRADIENT)
        self._with_graph.discard(update)
        return Tally(total, counted_items, reports={self.name: (reported, items)} if self.name and items else {})


StageOutput = SendOutput | LossOutput
"""The output of a stage, with the number by which the gradient of each loss that it computes is multiplied.

That number is ``share``, the weight of a micro-batch in the loss of its update, times ``scale`` of a gradient scaler.
"""


def _apart(micros: Sequence[int], returned: Any) -> list[Any]:
    if not is_rows(returned) or any(len(leaf) % len(micros) for leaf in leaves(returned) if leaf is not None):
        raise mistakes.output_has_no_rows(micros=micros)
    return parts(returned, len(micros))
