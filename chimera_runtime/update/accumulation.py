"""Accumulation: gradients of several steps become those of one larger mini-batch.

The steps whose mean a gradient is are its window. A window ends when the loop clears the gradient, or when an optimizer
steps the parameter. A parameter without a gradient cannot show that it was cleared. If no optimizer of torch has
stepped it, what the loop did to the gradients of other parameters decides, on any rank: ranks tell each other with the
sum of the loss of the next step.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar
from weakref import WeakSet

import torch

from chimera_runtime.errors import update as mistakes
from chimera_runtime.optimizer.optimizer_facts import next_moment
from chimera_runtime.stage.gradient_sums import main_gradient, set_gradient
from chimera_runtime.update.outcome import NOTHING_CLEARED, Clearings, Outcome
from chimera_runtime.values.mesh_tensors import is_spread, local, mesh_of


@dataclass(frozen=True, eq=False)
class Step:
    """A step in the windows of parameters, or several steps joined to one.

    ``items`` is the weight of the step; it is None if that is the count of the mini-batch. ``scale`` is the factor of
    the loss. ``moment`` tells when the step ended, and ``key`` which steps it is.
    """

    outcome: Outcome
    items: float | None
    is_counted: bool
    scale: float
    moment: int
    key: int

    @property
    def weight(self) -> float:
        """Weight of the step among others. It waits for the sum of the loss if that has the count."""
        return self.outcome.weight if self.items is None else self.items

    @property
    def begins_anew(self) -> bool:
        """Whether a parameter without a gradient counts as cleared before the step. Waits for the sum of the loss."""
        return self.outcome.clearings.cleared and not self.outcome.clearings.kept

    @property
    def is_ambiguous(self) -> bool:
        """Whether it is unknown if such a parameter was cleared. Waits for the sum of the loss."""
        return self.outcome.clearings.cleared and self.outcome.clearings.kept


@dataclass(eq=False)
class Window:
    """The steps whose mean the gradient of a parameter is. All pipelines that train the parameter have the same window.

    Before the steps at the places ``unclear`` the parameter had no gradient. ``left`` has address and version counter
    of the gradient after the last step, or is None if there was none.
    """

    steps: list[Step] = field(default_factory=list)
    unclear: list[int] = field(default_factory=list)
    left: tuple[int, int] | None = None

    def end(self) -> None:
        """Begins anew: no step counts so far."""
        self.steps, self.unclear = [], []

    def resolve(self, until: int) -> None:
        """Removes the steps of an earlier window, if one of the unclear places below ``until`` turns out to end it."""
        start = max((place for place in self.unclear if place < until and self.steps[place].begins_anew), default=0)
        open_places = [p for p in self.unclear if p >= until or (p > start and self.steps[p].is_ambiguous)]
        self.steps, self.unclear = self.steps[start:], [place - start for place in open_places]


class Accumulation:
    """Averages the gradients of a new step with those of earlier steps, or refuses a step while there are gradients.

    The average of a parameter is over all steps of its window, also over steps that gave it no gradient. A step weighs
    as much as its mini-batch has ``items``, or by the count of the mini-batch if ``loss`` returns counts.

    Parameters in ``named`` that require no gradient when this is made are frozen. If ``loss`` returns counts,
    ``mean_in_mesh`` returns the means of numbers over the ranks of a mesh: for a parameter that is spread over a mesh,
    the weight of a step is the mean of the counts there. ``last_steps`` returns the parameters that optimizers have
    stepped, each with the moment of the last step.
    """

    _living: ClassVar[WeakSet["Accumulation"]] = WeakSet()

    def __init__(
        self,
        named: Mapping[str, torch.nn.Parameter],
        items: int = 1,
        mean_in_mesh: Callable[[Sequence[float], Any], list[float]] | None = None,
    ) -> None:
        self.last_steps: Callable[[], Mapping[torch.Tensor, int]] = dict
        self._items = items
        self._mean_in_mesh = mean_in_mesh
        self._named = {name: (parameter, parameter.requires_grad) for name, parameter in named.items()}
        known: dict[torch.nn.Parameter, Window] = {}
        for other in self._living:
            known |= other._windows
        self._windows: dict[torch.nn.Parameter, Window] = {
            p: known.get(p) or Window() for p, trained in self._named.values() if trained
        }
        self._spread = {parameter for parameter in self._windows if is_spread(parameter)}
        # About the step that has begun: gradients to average with, parameters that may have been cleared, and so on.
        self._earlier_gradients: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._unclear: set[torch.nn.Parameter] = set()
        self._clearings = NOTHING_CLEARED
        self._scale = 1.0
        self._living.add(self)

    def begin(self, accumulate: bool, scale: float = 1.0) -> None:
        """Copies the gradients that a step is to be averaged with; call it before the step.

        ``scale`` is the factor of the loss. Raises `Misuse` if there are gradients and ``accumulate`` is false, if a
        gradient cannot be averaged with that of the step, or if ``requires_grad`` of a parameter has changed.
        """
        changed = next((name for name, (p, trained) in self._named.items() if p.requires_grad != trained), None)
        if changed is not None:
            raise mistakes.training_of_parameter_changed(changed)
        kept = {name: p for name, (p, _) in self._named.items() if self._is_set(p)}
        if kept and not accumulate:
            raise mistakes.gradient_is_still_there(next(iter(kept)))
        last_steps = self.last_steps() if accumulate else {}
        stepped = {p for p, w in self._windows.items() if w.steps and last_steps.get(p, 0) > w.steps[-1].moment}
        # Copies of the gradients that are kept, as the update will overwrite them. No step writes those of frozen ones.
        self._earlier_gradients = {}
        for name, parameter in kept.items():
            if parameter in self._windows and (gradient := main_gradient(parameter)) is not None:
                self._require_mean(name, parameter, scale, parameter in stepped)
                self._earlier_gradients[parameter] = gradient.clone()
        # Which windows end here; those of other parameters without a gradient may end as well.
        cleared, self._unclear = False, set()
        for parameter, window in self._windows.items():
            if not accumulate or parameter in stepped:
                window.end()
            elif parameter not in self._earlier_gradients:
                cleared = cleared or window.left is not None
                if window.left is not None and parameter.grad is None:
                    window.end()
                elif window.steps:
                    self._unclear.add(parameter)
        self._clearings, self._scale = Clearings(cleared, bool(self._earlier_gradients), False), scale

    def _require_mean(self, name: str, parameter: torch.nn.Parameter, scale: float, is_stepped: bool) -> None:
        """Raises `Misuse` unless a gradient is the mean of earlier steps, of the same kind as the one that begins."""
        window = self._windows[parameter]
        if window.left is None:
            raise mistakes.gradient_is_of_no_step(name)
        if is_stepped:
            raise mistakes.gradient_was_stepped(name)
        if window.steps[-1].scale != scale:
            raise mistakes.scale_has_changed(name, window.steps[-1].scale, scale)
        if window.steps[-1].is_counted != (self._mean_in_mesh is not None):
            raise mistakes.means_and_counts(name)

    def clearings(self) -> Clearings:
        """What the loop did to gradients before the step, for the other ranks; call it when the step has gradients."""
        new = [self._windows[parameter] for parameter in self._unclear if parameter.grad is not None]
        if any(window.steps[place].is_ambiguous for window in new for place in window.unclear):
            return Clearings(True, True, True)
        return self._clearings._replace(unknown=bool(new))

    @torch.no_grad()
    def end(self, outcome: Outcome) -> None:
        """Replaces each gradient by its mean with the earlier gradients, weighted by step; call it after the step.

        Raises `RanksDiffer` if it cannot be known whether earlier steps count for a parameter.
        """
        is_counted, moment = self._mean_in_mesh is not None, next_moment()
        items = None if is_counted else float(self._items)
        step = Step(outcome, items, is_counted, self._scale, moment, moment)
        averaged = []
        for parameter, window in self._windows.items():
            if parameter in self._unclear:
                window.unclear.append(len(window.steps))
            window.steps.append(step)
            has_gradient = parameter.grad is not None or parameter in self._earlier_gradients
            if window.unclear:
                window.resolve(len(window.steps) - (not has_gradient))
            if has_gradient and len(window.steps) > 1:
                averaged.append(parameter)
        self._average(averaged)
        self._earlier_gradients = {}
        for parameter, window in self._windows.items():
            window.left = self._mark(parameter)

    def note_scaled(self, unscaled: Iterable[torch.nn.Parameter] = ()) -> None:
        """Call it after the gradients that the last step left were scaled; some were ``unscaled`` by a GradScaler."""
        for parameter in unscaled:
            if (window := self._windows.get(parameter)) is not None and window.steps:
                window.steps = [*window.steps[:-1], replace(window.steps[-1], scale=1.0)]
        for parameter, window in self._windows.items():
            if window.left is not None and parameter.grad is not None:
                window.left = self._mark(parameter)

    def _average(self, averaged: Sequence[torch.nn.Parameter]) -> None:
        """Averages the gradients of parameters over their windows, of which one step has just ended."""
        keys = {p: (mesh_of(p), *[step.key for step in self._windows[p].steps]) for p in averaged}
        windows = {key: self._windows[p].steps for p, key in keys.items()}
        weights = {key: [sum(s.weight for s in before), last.weight] for key, (*before, last) in windows.items()}
        joined = {key: replace(w[-1], items=sum(weights[key]), key=hash(key[1:])) for key, w in windows.items()}
        if self._mean_in_mesh is not None:
            for mesh in dict.fromkeys(key[0] for key in windows if key[0] is not None):
                of_mesh = [key for key in windows if key[0] is mesh]
                means = iter(self._mean_in_mesh([number for key in of_mesh for number in weights[key]], mesh))
                weights |= {key: [next(means), next(means)] for key in of_mesh}
        for parameter, key in keys.items():
            before, last = weights[key]
            self._add_earlier(parameter, before / (before + last) if before else 0.0)
            self._windows[parameter].steps = [joined[key]]

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

    def _is_set(self, parameter: torch.nn.Parameter) -> bool:
        """Whether a parameter has a gradient, other than the zeros of ``zero_grad(set_to_none=False)``."""
        if parameter.grad is None:
            return False
        window = self._windows.get(parameter)
        return (window is not None and window.left == self._mark(parameter)) or bool(local(parameter.grad).any())

    def _mark(self, parameter: torch.nn.Parameter) -> tuple[int, int] | None:
        """Address and version counter of a gradient, which show whether it was replaced or written; None without."""
        gradient = parameter.grad
        if gradient is None:
            return None
        shown = local(gradient) if parameter in self._spread else gradient
        return 0 if shown.is_sparse else shown.data_ptr(), shown._version
