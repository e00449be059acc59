"""Optimizers of a model file: one for each weight group of a rank, stepped together like a single one."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from chimera_runtime.blame import LaneOperation, during
from chimera_runtime.model.model import ModelFile
from chimera_runtime.model.ties import Modules, Tie, by_group
from chimera_runtime.optimizer.sharded_optimizer import ShardedOptimizer
from chimera_runtime.program.weight_groups import Group, group_key
from chimera_runtime.ranks.world import World
from chimera_runtime.stage.weight_versions import WeightGroup, Weights
from chimera_runtime.values.tensors import draw_seed, seed_torch


class Optimizers:
    """Steps every weight group of this rank; all ranks that hold a group draw the same random numbers for its step.

    If ``idle``, no step is made: a rehearsal does not change the weights. ``updates`` is the number of updates of the
    run, which the model file's ``scheduler`` gets; ``schedulers`` are the schedulers that it made, stepped after the
    optimizers. If ``sharded_over`` is given, the state of each weight group is sharded over the ranks of it that hold
    the group.
    """

    def __init__(
        self,
        model: ModelFile,
        modules: Modules,
        seed: int,
        idle: bool,
        ties: Sequence[Tie] = (),
        updates: int = 0,
        sharded_over: World | None = None,
    ) -> None:
        groups = by_group(modules, ties)
        trained = {group: [p for p in parameters if p.requires_grad] for group, parameters in groups.items()}
        self._parameters = [parameter for parameters in trained.values() for parameter in parameters]
        self._optimizers = {
            group: optimizer_of(model, group, parameters, sharded_over) for group, parameters in trained.items()
        }
        self._sharded = [made for made in self._optimizers.values() if isinstance(made, ShardedOptimizer)]
        made = [model.schedule(optimizer, updates) for optimizer in self._optimizers.values()]
        self.schedulers = [scheduler for scheduler in made if scheduler is not None]
        self._seed = seed
        self._idle = idle
        self._update = 0
        self._stepped: set[Group] = set()

    def step(self) -> None:
        """Steps the groups that the lane has not stepped already, and the schedulers."""
        for group in self._optimizers:
            if group not in self._stepped:
                self._step(group)
        self._stepped.clear()
        self._update += 1
        if self._idle:
            return
        for optimizer in self._sharded:
            optimizer.gather()
        for scheduler in self.schedulers:
            scheduler.step()

    def step_in_lane(self, weights: WeightGroup) -> None:
        """Steps a group at its place in the schedule; called at the end of `WeightGroup.step`."""
        self._stepped.add(weights.group)
        self._step(weights.group)

    def count_from(self, updates: int) -> None:
        """Sets the number of updates so far, which decides on the random numbers of the next step."""
        self._update = updates

    def __iter__(self) -> Iterator[Any]:
        """The optimizers of the groups that have any parameters to train."""
        return (optimizer for optimizer in self._optimizers.values() if hasattr(optimizer, "param_groups"))

    def zero_grad(self) -> None:
        """Removes the gradients of all parameters."""
        for parameter in self._parameters:
            parameter.grad = None

    @property
    def learning_rates(self) -> dict[str, list[float]]:
        """Learning rates of each optimizer's parameter groups, by stage (``0``) or stages of a tie (``0+3``)."""
        return {
            "+".join(map(str, stages)): [
                float(group["lr"]) for group in getattr(optimizer, "param_groups", ()) if "lr" in group
            ]
            for stages, optimizer in self._optimizers.items()
        }

    def _step(self, group: Group) -> None:
        if self._idle:
            return
        seed_torch(draw_seed("step", self._seed, self._update, *group))
        with during(lambda: LaneOperation("step", group_key(group), (), self._update)):
            Weights(self._optimizers[group]).step()


def optimizer_of(
    model: ModelFile, group: Group, parameters: list[torch.nn.Parameter], sharded_over: World | None
) -> Any:
    """Makes the model file's optimizer of a weight group; if its state is sharded, the caller must gather weights."""
    if sharded_over is None or not parameters:
        return model.steps(parameters)
    return ShardedOptimizer(sharded_over, {group: parameters}, model.steps, gathers=False)
