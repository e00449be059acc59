"""Accumulation: gradients of several steps become those of one larger mini-batch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from chimera_runtime.errors.update import gradient_is_still_there, training_of_parameter_changed
from chimera_runtime.stage.gradient_sums import main_gradient, set_gradient
from chimera_runtime.update.outcome import Outcome
from chimera_runtime.values.mesh_tensors import local, mesh_of, meshes_of


class Accumulation:
    """Averages the gradients of a new step with those of earlier steps, or refuses a step while there are gradients.

    The average of a parameter is over all steps since its gradient was cleared, also over steps that gave it no
    gradient. A parameter that has got no gradient so far cannot show that it was cleared: it counts as cleared when no
    parameter of this rank has a gradient.

    Parameters in ``named`` that require no gradient when this is made are frozen. If ``loss`` returns counts,
    ``mean_in_mesh`` returns the means of numbers over the ranks of a mesh: for a parameter that is spread over a mesh,
    the weight of a step is the mean of the counts there.
    """

    def __init__(
        self,
        named: Mapping[str, torch.nn.Parameter],
        mean_in_mesh: Callable[[Sequence[float], Any], list[float]] | None = None,
    ) -> None:
        self._mean_in_mesh = mean_in_mesh
        self._named = {name: (parameter, parameter.requires_grad) for name, parameter in named.items()}
        self._parameters = [parameter for parameter, trained in self._named.values() if trained]
        self._earlier_gradients: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._versions_left: dict[torch.nn.Parameter, int] = {}
        self._earlier_steps: list[Outcome] = []
        # For each parameter the index in `_earlier_steps` of the first step that counts.
        self._first_step = dict.fromkeys(self._parameters, 0)

    def begin(self, accumulate: bool) -> None:
        """Copies the gradients that a step is to be averaged with; call it before the step.

        Raises `Misuse` if there are gradients and ``accumulate`` is false, or if ``requires_grad`` of a parameter has
        changed.
        """
        present = {name: p for name, (p, _) in self._named.items() if self._is_set(p)}
        changed = next((name for name, (p, trained) in self._named.items() if p.requires_grad != trained), None)
        if changed is not None:
            raise training_of_parameter_changed(changed)
        if present and not accumulate:
            raise gradient_is_still_there(next(iter(present)))
        # Copies of the gradients that are kept: the update will overwrite them.
        self._earlier_gradients = {p: g.clone() for p in present.values() if (g := main_gradient(p)) is not None}
        # Steps count anew for a parameter whose gradient was cleared; steps that count for none are forgotten.
        for parameter in self._parameters:
            if not accumulate or (parameter not in self._earlier_gradients and self._is_cleared(parameter)):
                self._first_step[parameter] = len(self._earlier_steps)
        if all(first == len(self._earlier_steps) for first in self._first_step.values()):
            self._earlier_steps, self._first_step = [], dict.fromkeys(self._parameters, 0)

    @torch.no_grad()
    def end(self, outcome: Outcome) -> None:
        """Replaces each gradient by its mean with the earlier gradients, weighted by step; call it after the step."""
        if self._earlier_steps:
            weights = [step.weight for step in (*self._earlier_steps, outcome)]
            weights_of = dict.fromkeys((None, *meshes_of(self._parameters)), weights)
            if self._mean_in_mesh is not None:
                meshes = [mesh for mesh in weights_of if mesh is not None]
                weights_of |= {mesh: self._mean_in_mesh(weights, mesh) for mesh in meshes}
            for parameter, first in self._first_step.items():
                if first < len(self._earlier_steps):
                    self._add_earlier(parameter, _share(weights_of[mesh_of(parameter)][first:]))
        self._earlier_steps.append(outcome)
        self._earlier_gradients = {}
        self._versions_left = {p: local(p.grad)._version for p in self._parameters if p.grad is not None}

    def _add_earlier(self, parameter: torch.nn.Parameter, share: float) -> None:
        """Replaces a gradient by ``share`` times the earlier one plus (1 - ``share``) times the new one."""
        earlier, made = self._earlier_gradients.get(parameter), main_gradient(parameter)
        if made is None:
            made = earlier if earlier is None else earlier.mul_(share)
        else:
            made.mul_(1 - share)
            if earlier is not None:
                made.add_(earlier, alpha=share)
        if made is not None:
            set_gradient(parameter, made)

    def _is_cleared(self, parameter: torch.nn.Parameter) -> bool:
        """Whether a parameter without a gradient counts as cleared since the last step, as `Accumulation` says."""
        return parameter in self._versions_left or (bool(self._versions_left) and not self._earlier_gradients)

    def _is_set(self, parameter: torch.nn.Parameter) -> bool:
        """Whether a parameter has a gradient, other than the zeros of ``zero_grad(set_to_none=False)``."""
        if parameter.grad is None:
            return False
        gradient = local(parameter.grad)
        return gradient._version == self._versions_left.get(parameter) or bool(gradient.any())


def _share(weights: Sequence[float]) -> float:
    """Returns the weight of all steps but the last, divided by the weight of all; 0 if they have none."""
    *before, last = weights
    return sum(before) / (sum(before) + last) if sum(before) else 0.0
