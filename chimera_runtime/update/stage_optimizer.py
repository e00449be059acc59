"""The steps of a stream's weight groups: each has an optimizer of its own, which steps inside the schedule."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from chimera_runtime.blame import UserCode
from chimera_runtime.errors import FAILED, MISUSED, Misuse
from chimera_runtime.model.ties import Modules, Tie, by_group
from chimera_runtime.program.weight_groups import Group, group_key, group_name

Named = list[tuple[str, torch.nn.Parameter]]
"""Parameters with their names in the model: see `Pipeline.named_parameters`."""

_MAKING = UserCode("optimizer(named_parameters)", MISUSED)


@dataclass
class StageStep:
    """A step of a stage, or of the parameters that stages share, as hooks see it.

    Attributes
    ----------
    stage
        The number of the stage; of shared parameters the numbers of the stages that share them.
    update
        The number of the update, from 0.
    module
        The stage, or the first of those that share which this rank holds. Its parameters may show an older version of
        the weights than the step changes.
    optimizer
        What ``optimizer`` made for them.
    named_parameters
        What it was given: the newest weights, and before the step their gradients, summed and scaled.
    """

    stage: int | Group
    update: int
    module: torch.nn.Module
    optimizer: Any
    named_parameters: Named


Hook = Callable[[StageStep], None]


@dataclass(frozen=True)
class StepHooks:
    """How stages step: ``optimizer`` makes an optimizer of named parameters; None stands for no hook."""

    optimizer: Callable[[Named], Any]
    before: Hook | None
    after: Hook | None


class Stepper:
    """The optimizer of a weight group with its hooks; a group that has nothing to train has neither."""

    def __init__(self, group: Group, module: torch.nn.Module, named: Named, hooks: StepHooks) -> None:
        self.on_step: Callable[[Group, int], None] = lambda _group, _update: None
        self.group = group
        self._hooks = hooks
        self._before = UserCode(f"before_step of {group_name(group)}", FAILED)
        self._after = UserCode(f"after_step of {group_name(group)}", FAILED)
        self._next = StageStep(group_key(group), 0, module, self._made(named) if named else None, named)

    def _made(self, named: Named) -> Any:
        with _MAKING:
            optimizer = self._hooks.optimizer(list(named))
        if not callable(getattr(optimizer, "step", None)):
            raise Misuse(f"optimizer returned a {type(optimizer).__name__}, not a torch.optim.Optimizer")
        return optimizer

    @property
    def names(self) -> dict[torch.Tensor, str]:
        """The names of what it steps."""
        return {parameter: name for name, parameter in self._next.named_parameters}

    def count_from(self, updates: int) -> None:
        """The next step is that of update ``updates``."""
        self._next.update = updates

    @property
    def stage(self) -> int | Group:
        """The number of the stage, or the stages that share what is stepped."""
        return self._next.stage

    @property
    def optimizer(self) -> Any:
        """What was made for the group; None if it has nothing to train."""
        return self._next.optimizer

    def step(self) -> None:
        """The step, between the two hooks."""
        if self._next.optimizer is None:
            return
        if self._hooks.before is not None:
            with self._before:
                self._hooks.before(self._next)
        self._next.optimizer.step()
        if self._hooks.after is not None:
            with self._after:
                self._hooks.after(self._next)
        self.on_step(self.group, self._next.update)
        self._next.update += 1


class Steppers:
    """Makes the steppers of a rank's weight groups, in the order of `by_group`, of parameters by their names."""

    def __init__(
        self, built: Modules, parameters: Mapping[str, torch.nn.Parameter], hooks: StepHooks, ties: Sequence[Tie] = ()
    ) -> None:
        names = {parameter: name for name, parameter in parameters.items()}
        self._coming = iter(
            [
                (group, next(built[s] for s in group if s in built), [names[p] for p in of_group if p.requires_grad])
                for group, of_group in by_group(built, ties).items()
            ]
        )
        self._hooks = hooks
        self._made: list[Stepper] = []

    def __call__(self, parameters: list[torch.nn.Parameter]) -> Stepper:
        """The stepper of the next weight group, whose newest weights ``parameters`` are."""
        group, module, names = next(self._coming)
        self._made.append(Stepper(group, module, list(zip(names, parameters, strict=True)), self._hooks))
        return self._made[-1]

    @property
    def parameters(self) -> dict[Group, list[torch.Tensor]]:
        """What each of them steps, by weight group."""
        return {stepper.group: [*stepper.names] for stepper in self._made}

    def watch(self, on_step: Callable[[Group, int], None]) -> None:
        """Lets each step be told, with the number of its update."""
        for stepper in self._made:
            stepper.on_step = on_step

    @property
    def names(self) -> dict[torch.Tensor, str]:
        """The name of each parameter that any of them steps."""
        return {parameter: name for stepper in self._made for parameter, name in stepper.names.items()}

    def count_from(self, updates: int) -> None:
        """The next steps are those of update ``updates``."""
        for stepper in self._made:
            stepper.count_from(updates)

    @property
    def optimizers(self) -> dict[int | Group, Any]:
        """The optimizers of the groups that have any."""
        return {stepper.stage: stepper.optimizer for stepper in self._made if stepper.optimizer is not None}
