"""``--check`` of slices: compares the stages on slices of sequences with the same stages on whole sequences.

It finds a model that is not causal, and a stage whose carry lacks something. All runs in one process, in evaluation
mode, on the first micro-batch: in training mode dropout would draw other numbers for a slice than for a sequence.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch

from chimera_runtime.blame import UserCode
from chimera_runtime.check.compare import TOLERANCES, share_of, tolerance
from chimera_runtime.check.reference import Gradients, Reference, differences, items_of_slices, size
from chimera_runtime.errors import FAILED
from chimera_runtime.errors import tools as mistakes
from chimera_runtime.values.nested import leaves


@dataclass(frozen=True)
class SliceAgreement:
    """Errors of the stages on slices compared with whole sequences: of the loss, and of gradients, both relative."""

    slices: int
    loss: float
    gradients: float
    bound: float

    def __str__(self) -> str:
        return (
            f"{self.slices} slices: loss off from that of whole sequences by {self.loss:.2e}, gradients by "
            f"{self.gradients:.2e} of the largest of their stage, at most {self.bound:.0e}"
        )


class _CheckedStages:
    """Runs the stages on one micro-batch, in slices or as a whole; keeps loss, gradients and outputs to compare."""

    def __init__(self, reference: Reference, make: Callable[[Reference], Sequence[torch.nn.Module]]) -> None:
        self.stages = [stage.eval() for stage in make(reference)]
        self.dtypes = {p.dtype for module in self.stages for p in module.parameters()}
        self._outputs: dict[int, list[Any]] = {}
        carries: dict[int, Any] = {}
        losses = [
            reference.loss(self.stages, batch, 0, 0, micro, carries, self._note)
            for micro, batch in enumerate(islice(next(reference.batches()), reference.slices))
        ]
        count = sum(count for _, count, _ in losses) or 1.0
        roots = [value.reshape(()) for loss, _, auxiliary in losses for value in (loss, *(v for _, v in auxiliary))]
        if differentiated := [root / count for root in roots if root.requires_grad]:
            torch.autograd.backward(differentiated)
        self.loss = sum(root.item() for root in roots) / count

    def _note(self, stage: int, output: Any) -> None:
        tensors = [leaf.detach() for leaf in leaves(output) if isinstance(leaf, torch.Tensor) and leaf.dim() > 1]
        self._outputs.setdefault(stage, []).append(tensors)

    def outputs(self, stage: int) -> list[torch.Tensor]:
        """The outputs of a stage for the whole sequence."""
        return [torch.cat(tensors, 1) for tensors in zip(*self._outputs[stage], strict=True)]

    def gradients(self, stage: int) -> Gradients:
        """The gradients of the parameters of a stage."""
        return [p.grad for p in self.stages[stage].parameters()]


def compare(
    reference: Reference,
    autocast: torch.dtype | None,
    make: Callable[[Reference], Sequence[torch.nn.Module]] = lambda of: [*map(of.build, range(of.stages))],
) -> SliceAgreement:
    """Compares loss and gradients of slices, which ``reference`` runs, with those of whole sequences.

    ``make`` makes the stages of a reference.

    Raises `CheckFailed` if they differ.
    """
    with UserCode("the stages on slices and on whole sequences, side by side", FAILED):
        sliced, whole = (_CheckedStages(of_kind, make) for of_kind in (reference, unsliced(reference)))
    dtypes = {*whole.dtypes, *([] if autocast is None else [autocast])} & TOLERANCES.keys()
    bound = tolerance(max(dtypes, key=TOLERANCES.__getitem__, default=torch.float64), reference.slices)
    off = share_of(abs(sliced.loss - whole.loss), abs(whole.loss))
    errors = [_error(sliced.gradients(stage), whole.gradients(stage)) for stage in range(reference.stages)]
    if off <= bound and max(errors) <= bound:
        return SliceAgreement(reference.slices, off, max(errors), bound)
    # The first stage whose outputs differ is the one to mend; if none does, a carry has lost its gradients.
    for stage in range(reference.stages - 1):
        lengths = reference.lengths or (1,) * reference.slices
        for place, error in enumerate(_errors_of_slices(sliced.outputs(stage), whole.outputs(stage), lengths)):
            if error > bound:
                raise mistakes.slice_differs(stage, place, error)
    if off > bound:
        raise mistakes.slice_differs(reference.stages - 1, None, off)
    raise mistakes.carry_loses_gradients(stage=errors.index(max(errors)), error=max(errors))


def _error(mine: Gradients, theirs: Gradients) -> float:
    """Returns the largest difference of two lists of gradients, relative to the largest gradient of the second."""
    return share_of(max(differences(mine, theirs), default=0.0), size(theirs))


def _errors_of_slices(
    mine: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], lengths: Sequence[int]
) -> Iterator[float]:
    """Yields for each slice the largest difference of outputs, relative to the largest output.

    ``mine`` are the joined outputs on slices, ``theirs`` the outputs on whole sequences.
    """
    for place in range(len(lengths)):
        here, there = (
            [torch.split(tensor, items_of_slices(tensor.shape[1], lengths), 1)[place] for tensor in tensors]
            for tensors in (mine, theirs)
        )
        yield share_of(max(differences(here, there), default=0.0), size(theirs))


def unsliced(reference: Reference) -> Reference:
    """Returns a reference that runs whole sequences."""
    return replace(reference, parts=reference.parts // reference.slices, slices=1, lengths=())
