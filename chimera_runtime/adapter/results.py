"""Results of a batch: losses and outputs of the last stage by micro-batch; and the scale of the losses."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from chimera_runtime.values.mesh_tensors import settled
from chimera_runtime.values.nested import mapped
from chimera_runtime.values.tensors import Tensors


class Result(NamedTuple):
    """Loss and output of a micro-batch, without graphs.

    The loss is None if there is no target. The output is None if outputs are not kept, else a tuple with the output,
    which may itself be None.
    """

    loss: torch.Tensor | None
    output: tuple[Any] | None


@dataclass
class Results:
    """Collects the results of micro-batches whose last stage runs on this rank.

    ``loss_fn`` and ``loss_kwargs`` compute the loss. An object is also the `LastOutput` of forwards without backwards.
    """

    loss_fn: Callable[..., Any] | None
    loss_kwargs: dict[str, Any] = field(default_factory=dict)
    by_micro: dict[int, Result] = field(default_factory=dict)
    _keeps_outputs: bool = False

    def clear(self, *, keeps_outputs: bool = False) -> None:
        """Forgets all results; later ones have outputs only if ``keeps_outputs``."""
        self.by_micro.clear()
        self._keeps_outputs = keeps_outputs

    @property
    def loss(self) -> Callable[[Any, Any], torch.Tensor]:
        """`judge` as a function that shows the module of the loss, if that is one."""
        return partial(_judged, self, self.loss_fn)

    def judge(self, output: Any, numbered_target: tuple[int, Any]) -> torch.Tensor:
        """Computes and notes the loss of a micro-batch; returns zero if there is no target, or no ``loss_fn``."""
        micro, target = numbered_target
        has_loss = self.loss_fn is not None and target is not None
        loss = self.loss_fn(output, target, **self.loss_kwargs) if has_loss else None  # type: ignore[misc]
        noted = (mapped(output, lambda tensor: settled(tensor).detach()),) if self._keeps_outputs else None
        self.by_micro[micro] = Result(None if loss is None else loss.detach(), noted)
        return torch.zeros(()) if loss is None else loss

    def finish(self, _micro: int, _items: int, returned: Any, target: Any) -> Tensors:
        """Notes the output of a forward without a backward, and its loss; returns no tensors to send."""
        self.judge(returned, target)
        return ()


def _judged(results: Results, _loss: Any, output: Any, numbered_target: tuple[int, Any]) -> torch.Tensor:
    return results.judge(output, numbered_target)


def losses_of(results: Iterable[Result]) -> list[torch.Tensor]:
    """The losses of micro-batches that have one."""
    return [result.loss for result in results if result.loss is not None]


@dataclass(frozen=True)
class LossFactor:
    """Factor by which the losses of an update are multiplied.

    The runtime takes the mean of the N losses: ``factor`` 1 leaves the mean, N makes it the sum.
    """

    factor: int

    def scale(self, outputs: torch.Tensor) -> torch.Tensor:
        """Returns a tensor multiplied by the factor."""
        return outputs * self.factor
