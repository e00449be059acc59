"""Gradients of several steps as those of one larger mini-batch."""

from collections.abc import Mapping, Sequence

import torch

from chimera_runtime.errors import Misuse
from chimera_runtime.ranks.gathering import averaged_in_mesh
from chimera_runtime.ranks.world import World
from chimera_runtime.stage.sums import main_gradient, set_gradient
from chimera_runtime.update.outcome import Outcome
from chimera_runtime.values.shards import local, mesh_of, meshes_of


class Accumulation:
    """Refuses a step on gradients that were not cleared, or averages its gradients with those that are kept.

    Each parameter counts the steps since its own gradient was cleared, also steps that gave it none. Whether a
    parameter without a gradient was cleared follows from the others of this rank; if none had one, it was not.

    Parameters
    ----------
    named
        The parameters, by the names that messages give them. What requires no gradient now is frozen.
    counting
        This rank, if ``loss`` returns counts: for a parameter that is spread over a mesh, a step weighs the mean of the
        counts there.
    """

    def __init__(self, named: Mapping[str, torch.nn.Parameter], counting: World | None = None) -> None:
        self._counting = counting
        self._named = {name: (parameter, parameter.requires_grad) for name, parameter in named.items()}
        self._parameters = [parameter for parameter, trained in self._named.values() if trained]
        self._kept: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._left: dict[torch.nn.Parameter, int] = {}
        self._before: list[Outcome] = []
        self._since = dict.fromkeys(self._parameters, 0)  # the first step that a parameter counts, in `_before`

    def begin(self, accumulate: bool) -> None:
        """A step begins, and will make new gradients.

        Raises
        ------
        Misuse
            If gradients are there and are not to be kept, or a parameter was frozen or trained at the start and is so
            no longer.
        """
        present = {name: p for name, (p, _) in self._named.items() if self._is_set(p)}
        changed = next((name for name, (p, trained) in self._named.items() if p.requires_grad != trained), None)
        if changed is not None:
            raise Misuse(
                f"requires_grad of {changed} has changed since the pipeline was made; set it where the stage is made, "
                "or make a new pipeline"
            )
        if present and not accumulate:
            raise Misuse(
                f"{next(iter(present))} still has the gradient of the step before: call optimizer.zero_grad() after "
                "optimizer.step(), of an optimizer that holds pipe.parameters(), or step(accumulate=True) to add to it"
            )
        self._kept = {p: g.clone() for p in present.values() if (g := main_gradient(p)) is not None}
        for parameter in self._parameters:
            if not accumulate or (parameter not in self._kept and self._is_cleared(parameter)):
                self._since[parameter] = len(self._before)
        if all(since == len(self._before) for since in self._since.values()):
            self._before, self._since = [], dict.fromkeys(self._parameters, 0)

    @torch.no_grad()
    def end(self, outcome: Outcome) -> None:
        """The step is over: each gradient is the mean over it and the steps that were kept, by what they weigh."""
        if self._before:
            weights = [step.weight for step in (*self._before, outcome)]
            weights_of = dict.fromkeys((None, *meshes_of(self._parameters)), weights)
            if self._counting is not None:
                control, device = self._counting.control_group, self._counting.device
                meshes = [mesh for mesh in weights_of if mesh is not None]
                weights_of |= {mesh: averaged_in_mesh(control, weights, mesh, device) for mesh in meshes}
            for parameter, since in self._since.items():
                if since < len(self._before):
                    self._add_kept(parameter, _share(weights_of[mesh_of(parameter)][since:]))
        self._before.append(outcome)
        self._kept = {}
        self._left = {p: local(p.grad)._version for p in self._parameters if p.grad is not None}

    def _add_kept(self, parameter: torch.nn.Parameter, share: float) -> None:
        """Makes a gradient the mean of the new one and the one that was kept, which has this share in it."""
        kept, made = self._kept.get(parameter), main_gradient(parameter)
        if made is None:
            made = kept if kept is None else kept.mul_(share)
        else:
            made.mul_(1 - share)
            if kept is not None:
                made.add_(kept, alpha=share)
        if made is not None:
            set_gradient(parameter, made)

    def _is_cleared(self, parameter: torch.nn.Parameter) -> bool:
        """Whether the gradient of a parameter that has none now was cleared since the last step."""
        return parameter in self._left or (bool(self._left) and not self._kept)

    def _is_set(self, parameter: torch.nn.Parameter) -> bool:
        """Whether a gradient is there: more than the zeros that ``zero_grad(set_to_none=False)`` has written since."""
        if parameter.grad is None:
            return False
        gradient = local(parameter.grad)
        return gradient._version == self._left.get(parameter) or bool(gradient.any())


def _share(weights: Sequence[float]) -> float:
    """The share of all steps but the last in the mean of all, by what they weigh."""
    *before, last = weights
    return sum(before) / (sum(before) + last) if sum(before) else 0.0
