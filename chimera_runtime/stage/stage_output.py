"""What becomes of what a stage returns: it is handed on to the next stage, or goes to the loss."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, Protocol

import torch

from chimera_runtime.errors import BadModel
from chimera_runtime.program.numbering import Numbering
from chimera_runtime.ranks.readout import Numbers, Reader, from_host
from chimera_runtime.values.boundary import Boundary
from chimera_runtime.values.losses import Loss, Tally, added, as_pair
from chimera_runtime.values.nested import is_rows, leaves, parts, taken_apart
from chimera_runtime.values.tensors import Tensors

Finished = tuple[Tensors, Tensors]
"""What a forward hands on, and where its backward begins."""


class StageOutput(Protocol):
    """The end of a stage.

    ``share`` and ``scale`` multiply the gradients of what the stage adds to the loss: what a micro-batch counts in the
    loss of its update, and the scale of a scaler.
    """

    share: float
    scale: float

    @property
    def after(self) -> Boundary | None:
        """What the stage hands on; None for the last stage."""

    def resize(self, after: Boundary | None) -> None:
        """From now on the stage hands on tensors of other shapes."""

    def finish(self, micros: Sequence[int], returned: Any, targets: Sequence[Any]) -> Finished:
        """What was returned for some micro-batches, together along dimension 0, as results and roots."""

    def gradients(self, roots: Tensors, received: Tensors) -> Tensors:
        """The gradient of each root, with which the backward begins."""

    def counts(self, micro: int, received: Tensors) -> Tensors:
        """What a micro-batch counts in the loss, once: a tensor of one number, or none where the loss is a mean."""

    def take_loss(self, update: int) -> Tally:
        """The sum of the losses of an update; they are forgotten."""


class SendOutput:
    """The end of a stage that has a next one.

    Raises in `finish`: BadModel, if tensors differ from those of the first micro-batch.
    """

    def __init__(self, number: int, after: Boundary, share: float = 1.0) -> None:
        self.share = share
        self.scale = 1.0
        self.after: Boundary | None = after
        self._boundary = after
        self._number = number

    def resize(self, after: Boundary | None) -> None:
        """From now on the tensors are of other shapes."""
        assert after is not None
        self.after = self._boundary = after

    def finish(self, micros: Sequence[int], returned: Any, _targets: Sequence[Any]) -> Finished:
        """The tensors that were returned, in memory that the stage does not keep; the roots have none of it."""
        tensors, form = taken_apart(returned)
        wrong = self._boundary.mismatch(tensors, form, len(micros))
        if wrong:
            raise BadModel(
                f"stage {self._number} returned for micro-batch {micros[0]}: {wrong}; return the same every time"
            )
        roots = tuple([_root(t) for t in compress(tensors, self._boundary.differentiable)])
        if any(self._boundary.kept):
            pairs = zip(tensors, self._boundary.kept, strict=True)
            tensors = tuple([t.detach().clone() if is_kept else t for t, is_kept in pairs])
        return tensors, roots

    def gradients(self, _roots: Tensors, received: Tensors) -> Tensors:
        """Those that were received, as tensors of their own: so a slot notices that a hook keeps one."""
        return tuple([t.detach() for t in (received[:-1] if self._boundary.counted else received)])

    def counts(self, _micro: int, received: Tensors) -> Tensors:
        """What comes with the gradients."""
        return received[-1:] if self._boundary.counted else ()

    def take_loss(self, _update: int) -> Tally:
        """Always nothing: the loss is computed by the last stage."""
        return Tally()


class LossOutput:
    """The end of the last stage: ``loss`` of output and target, whose gradient is multiplied by ``share``.

    ``counted`` says that the loss is a sum and a count; ``read`` is how losses are read; ``trains`` says that something
    needs the gradient of the loss.

    Raises in `finish`: BadModel, if the output for several micro-batches cannot be taken apart, or the loss is a sum
    and a count for some of them and a mean for others.
    """

    after: Boundary | None = None

    def __init__(
        self,
        loss: Callable[[Any, Any], Loss],
        share: float,
        numbering: Numbering,
        counted: bool = False,
        read: Reader = from_host,
        trains: bool = False,
    ) -> None:
        self.scale = 1.0
        self._trains = trains
        self._with_graph: set[int] = set()  # updates of which a loss has a graph
        self._loss = loss
        self.share = share
        self._numbering = numbering
        self._counted = counted
        self._read = read
        self._losses: defaultdict[int, dict[int, Numbers]] = defaultdict(dict)
        self._counts: dict[int, torch.Tensor] = {}

    def resize(self, after: Boundary | None) -> None:
        """Nothing: nothing is handed on."""

    def finish(self, micros: Sequence[int], returned: Any, targets: Sequence[Any]) -> Finished:
        """Nothing is handed on; the losses are noted, and are the roots."""
        outputs = [returned] if len(micros) == 1 else _apart(micros, returned)
        pairs = [as_pair(self._loss(output, target)) for output, target in zip(outputs, targets, strict=True)]
        for micro, (value, count) in zip(micros, pairs, strict=True):
            if (count is not None) != self._counted:
                raise BadModel("loss returns (sum, count) for one micro-batch and a mean for another")
            update, number = self._numbering.place(micro)
            if number not in self._losses[update]:  # else it is run again for its backward
                self._losses[update][number] = self._read([value.detach(), *(() if count is None else (count,))])
            if value.requires_grad:
                self._with_graph.add(update)
            if count is not None:
                self._counts[micro] = count.clone()  # a later call of the loss may write it
        return (), tuple([value for value, _ in pairs if value.requires_grad])

    def gradients(self, roots: Tensors, _received: Tensors) -> Tensors:
        """Those by which an update averages over all micro-batches of all copies."""
        return tuple([torch.full_like(root, self.share * self.scale) for root in roots])

    def counts(self, micro: int, _received: Tensors) -> Tensors:
        """What came with the loss."""
        return (self._counts.pop(micro),) if self._counted else ()

    def take_loss(self, update: int) -> Tally:
        """The sum of the losses of an update; they are forgotten.

        Raises
        ------
        BadModel
            If none of them has a graph and something was to be trained. Where nothing counts none needs to.
        """
        read = [numbers() for numbers in self._losses.pop(update, {}).values()]
        tally = added(Tally(*(numbers if self._counted else (*numbers, 1.0))) for numbers in read)
        if self._trains and tally.count and update not in self._with_graph:
            raise BadModel(
                "loss returned tensors that need no gradient for all micro-batches of an update, so nothing would be "
                "trained: compute it from the output, without detach(), item() or no_grad()"
            )
        self._with_graph.discard(update)
        return tally


def _apart(micros: Sequence[int], returned: Any) -> list[Any]:
    """What the last stage returned for several micro-batches, by micro-batch."""
    if not is_rows(returned) or any(len(leaf) % len(micros) for leaf in leaves(returned) if leaf is not None):
        raise BadModel(
            f"the last stage returned for micro-batches {', '.join(map(str, micros))} together something that does not "
            "have them one after another in dimension 0, as for the first micro-batch; return the same every time"
        )
    return parts(returned, len(micros))


class _Root(torch.autograd.Function):
    """Where the backward of a result begins: of the result's shape, without its memory."""

    @staticmethod
    def forward(_context: Any, result: torch.Tensor) -> torch.Tensor:
        return result.new_empty(()).expand(result.shape)

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def _root(result: torch.Tensor) -> torch.Tensor:
    root: torch.Tensor = _Root.apply(result)  # type: ignore[no-untyped-call]
    return root
