"""The output of a stage: tensors for the next stage, or the loss of the last one."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, ClassVar

import torch

from chimera_runtime.errors import BadModel
from chimera_runtime.errors import stage as mistakes
from chimera_runtime.program.numbering import Numbering
from chimera_runtime.ranks.device_to_host import Numbers, Reader, from_host
from chimera_runtime.values.boundary import Boundary
from chimera_runtime.values.losses import Loss, Tally, added, as_pair
from chimera_runtime.values.nested import is_rows, leaves, parts, taken_apart
from chimera_runtime.values.shared_memory import note_received
from chimera_runtime.values.tensors import Tensors

Finished = tuple[Tensors, Tensors]
"""The tensors for the next stage, and the roots at which the backward will begin."""


@dataclass
class SendOutput:
    """The output of a stage that has a next stage: tensors, which the `Boundary` ``after`` describes.

    ``moves_operands`` says that what the second half of a backward needs moves to the host. Gradients that were
    received from the next stage do not move.
    """

    number: int
    after: Boundary
    share: float = 1.0
    scale: float = 1.0
    moves_operands: bool = False

    def finish(self, micros: Sequence[int], returned: Any, _targets: Sequence[Any]) -> Finished:
        """Returns tensors to send, and roots of the backward, from what the module ``returned`` for micro-batches.

        ``returned`` has the micro-batches joined along dimension 0. The tensors are in memory that the stage does not
        keep; the roots take no memory.

        Raises `BadModel` if the tensors differ from those of the first micro-batch of the run.
        """
        tensors, form = taken_apart(returned)
        difference = self.after.at(micros[0]).mismatch(tensors, form, len(micros))
        if difference:
            raise mistakes.output_differs(self.number, micros[0], difference)
        roots = tuple([root_of(t) for t in compress(tensors, self.after.differentiable)])
        if any(self.after.owned_by_stage):
            pairs = zip(tensors, self.after.owned_by_stage, strict=True)
            tensors = tuple([t.detach().clone() if is_kept else t for t, is_kept in pairs])
        return tensors, roots

    def gradients(self, _roots: Tensors, received: Tensors) -> Tensors:
        """Returns the received gradients as new tensors: if a hook keeps one, its slot moves to new memory."""
        if self.moves_operands:
            note_received(received)
        return tuple([t.detach() for t in (received[:-1] if self.after.counted else received)])

    def counts(self, _micro: int, received: Tensors) -> Tensors:
        """The loss count, which is the last tensor of the received message; none if the loss is a mean."""
        return received[-1:] if self.after.counted else ()

    def forget(self, _micros: Sequence[int]) -> None:
        """Does nothing: there is nothing to forget."""

    def take_loss(self, _update: int) -> Tally:
        """Returns an empty tally, because the last stage computes the loss."""
        return Tally()


@dataclass
class LossOutput:
    """The output of the last stage: the ``loss`` of output and target.

    ``counted`` says that the loss is a sum and a count, not a mean; ``read`` reads losses from the device; ``trains``
    says that some weight needs the gradient of the loss.
    """

    loss: Callable[[Any, Any], Loss]
    share: float
    numbering: Numbering
    counted: bool = False
    read: Reader = from_host
    trains: bool = False
    scale: float = 1.0
    after: ClassVar[None] = None
    _with_graph: set[int] = field(default_factory=set)  # updates of which a loss has a graph
    _losses: defaultdict[int, dict[int, Numbers]] = field(default_factory=lambda: defaultdict(dict))
    _counts: dict[int, torch.Tensor] = field(default_factory=dict)

    def finish(self, micros: Sequence[int], returned: Any, targets: Sequence[Any]) -> Finished:
        """Computes the losses, which are the roots, and begins to read them. There are no tensors to send.

        Raises `BadModel` if the output for several micro-batches cannot be cut into their parts, or the loss is a sum
        and a count for some micro-batches and a mean for others.
        """
        outputs = [returned] if len(micros) == 1 else _apart(micros, returned)
        pairs = [as_pair(self.loss(output, target)) for output, target in zip(outputs, targets, strict=True)]
        for micro, (value, count) in zip(micros, pairs, strict=True):
            if (count is not None) != self.counted:
                raise BadModel(mistakes.LOSS_COUNTS_AT_TIMES)
            update, number = self.numbering.place(micro)
            if number not in self._losses[update]:  # else this is the second run of a recomputed forward
                self._losses[update][number] = self.read([value.detach(), *(() if count is None else (count,))])
            if value.requires_grad:
                self._with_graph.add(update)
            if count is not None:
                self._counts[micro] = count.clone()  # a later call of the loss may write it
        return (), tuple([value for value, _ in pairs if value.requires_grad])

    def forget(self, micros: Sequence[int]) -> None:
        """Forgets the losses of micro-batches, whose forwards run anew."""
        for micro in micros:
            update, number = self.numbering.place(micro)
            self._losses[update].pop(number, None)
            self._counts.pop(micro, None)

    def gradients(self, roots: Tensors, _received: Tensors) -> Tensors:
        """Returns ``share`` times ``scale`` as the gradient of each root; a root is the loss of a micro-batch."""
        return tuple([torch.full_like(root, self.share * self.scale) for root in roots])

    def counts(self, micro: int, _received: Tensors) -> Tensors:
        """The loss count that the loss has returned; none if the loss is a mean."""
        return (self._counts.pop(micro),) if self.counted else ()

    def take_loss(self, update: int) -> Tally:
        """Returns the sum of the losses of an update and forgets them.

        Raises `BadModel` if some weight needs the gradient of the loss and the loss has counted items, but no loss of
        the update has a graph.
        """
        read = [numbers() for numbers in self._losses.pop(update, {}).values()]
        tally = added(Tally(*(numbers if self.counted else (*numbers, 1.0))) for numbers in read)
        if self.trains and tally.count and update not in self._with_graph:
            raise BadModel(mistakes.LOSS_HAS_NO_GRADIENT)
        self._with_graph.discard(update)
        return tally


StageOutput = SendOutput | LossOutput
"""The output of a stage, with the number by which the gradient of each loss that it computes is multiplied.

That number is ``share``, the weight of a micro-batch in the loss of its update, times ``scale`` of a gradient scaler.
"""


def _apart(micros: Sequence[int], returned: Any) -> list[Any]:
    if not is_rows(returned) or any(len(leaf) % len(micros) for leaf in leaves(returned) if leaf is not None):
        raise mistakes.output_has_no_rows(micros)
    return parts(returned, len(micros))


class _Root(torch.autograd.Function):
    """A root at which the backward of a result begins: a tensor of the same shape that does not keep its memory."""

    @staticmethod
    def forward(_context: Any, result: torch.Tensor) -> torch.Tensor:
        return result.new_empty(()).expand(result.shape)

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def root_of(result: torch.Tensor) -> torch.Tensor:
    """Returns a root at which the backward of a result begins; it does not keep the memory of the result."""
    root: torch.Tensor = _Root.apply(result)  # type: ignore[no-untyped-call]
    return root
