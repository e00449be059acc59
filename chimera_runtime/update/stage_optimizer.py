"""Steps inside a schedule without a flush: each weight group of a rank has an optimizer of its own."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from chimera_runtime.blame import UserCode
from chimera_runtime.errors import FAILED, MISUSED
from chimera_runtime.errors.stage import not_an_optimizer
from chimera_runtime.model.ties import Modules, Tie, by_group
from chimera_runtime.program.rank_facts import Group, group_key, group_name
from chimera_runtime.values.last_stage import alone

Named = list[tuple[str, torch.nn.Parameter]]
"""Parameters with their names in the model: see `Pipeline.named_parameters`."""

_MAKING = UserCode("optimizer(named_parameters)", MISUSED)


@dataclass
class StageStep:
    """A step inside the schedule, of a stage or of the parameters that stages share: the argument of a hook.

    Attributes
    ----------
    stage
        The number of the stage; for shared parameters the numbers of all stages that share them.
    update
        The number of the update, from 0.
    module
        The module of the stage; for shared parameters, of the first stage on this rank that has them. The module may
        hold an older version of the weights than the step changes.
    optimizer
        The optimizer that ``optimizer`` has made for these parameters.
    named_parameters
        The parameters that are stepped, with their names. They are the newest weights; before the step they have
        gradients, summed over the replicas and scaled.
    """

    stage: int | Group
    update: int
    module: torch.nn.Module
    optimizer: Any
    named_parameters: Named


Hook = Callable[[StageStep], None]


@dataclass(frozen=True)
class StepHooks:
    """Functions of the user: one that makes an optimizer, and those that are called before and after each step."""

    optimizer: Callable[[Named], Any]
    before: Hook | None
    after: Hook | None


class StageOptimizer:
    """The optimizer of a weight group with its hooks; a step does nothing if all parameters are frozen.

    ``next_step`` is what the hooks get at the next step. ``on_step`` is called after each step with the weight group
    and the number of the update.
    """

    def __init__(self, group: Group, module: torch.nn.Module, named: Named, hooks: StepHooks) -> None:
        self.on_step: Callable[[Group, int], None] = lambda _group, _update: None
        self.group = group
        self._hooks = hooks
        self._before = UserCode(f"before_step of {group_name(group)}", FAILED)
        self._after = UserCode(f"after_step of {group_name(group)}", FAILED)
        self.stage = group_key(group)
        self.optimizer = _made(hooks, named) if named else None
        self.next_step = StageStep(self.stage, 0, module, optimizer=self.optimizer, named_parameters=named)

    @property
    def names(self) -> dict[torch.Tensor, str]:
        """The parameters that are stepped, each with its name."""
        return {parameter: name for name, parameter in self.next_step.named_parameters}

    def step(self) -> None:
        """Steps the optimizer, between the two hooks."""
        if self.optimizer is None:
            return
        if self._hooks.before is not None:
            with self._before:
                self._hooks.before(self.next_step)
        self.optimizer.step()
        if self._hooks.after is not None:
            with self._after:
                self._hooks.after(self.next_step)
        self.on_step(self.group, self.next_step.update)
        self.next_step = replace(self.next_step, update=self.next_step.update + 1)  # a hook may keep its own


def _made(hooks: StepHooks, named: Named) -> Any:
    with _MAKING:
        optimizer = hooks.optimizer(list(named))
    if not callable(getattr(optimizer, "step", None)):
        raise not_an_optimizer(kind=type(optimizer).__name__)
    return optimizer


class StageOptimizers:
    """Makes and holds the optimizers of a rank's weight groups: call it for each group, in the order of `by_group`."""

    def __init__(
        self, built: Modules, parameters: Mapping[str, torch.nn.Parameter], hooks: StepHooks, ties: Sequence[Tie] = ()
    ) -> None:
        names = {parameter: name for name, parameter in parameters.items()}
        self._coming = iter(
            [
                (
                    group,
                    alone(next(built[s] for s in group if s in built)),
                    [names[p] for p in of_group if p.requires_grad],
                )
                for group, of_group in by_group(built, ties).items()
            ]
        )
        self._hooks = hooks
        self._made: list[StageOptimizer] = []

    def __call__(self, parameters: list[torch.nn.Parameter]) -> StageOptimizer:
        """Makes the optimizer of the next weight group; ``parameters`` are the newest weights of the group."""
        group, module, names = next(self._coming)
        self._made.append(StageOptimizer(group, module, list(zip(names, parameters, strict=True)), self._hooks))
        return self._made[-1]

    @property
    def parameters(self) -> dict[Group, list[torch.Tensor]]:
        """The parameters that are stepped, by weight group."""
        return {made.group: [*made.names] for made in self._made}

    def watch(self, on_step: Callable[[Group, int], None]) -> None:
        """Sets the function that is called after each step, with the weight group and the number of the update."""
        for made in self._made:
            made.on_step = on_step

    @property
    def names(self) -> dict[torch.Tensor, str]:
        """The parameters that any of the optimizers steps, each with its name."""
        return {parameter: name for made in self._made for parameter, name in made.names.items()}

    def count_from(self, updates: int) -> None:
        """Sets the number of the update that the next step of each group belongs to."""
        for made in self._made:
            made.next_step = replace(made.next_step, update=updates)

    @property
    def optimizers(self) -> dict[int | Group, Any]:
        """The user's optimizers, by stage, or by the stages that share parameters."""
        return {made.stage: made.optimizer for made in self._made if made.optimizer is not None}
