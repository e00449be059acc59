"""Optimizer whose state is sharded over the replicas of each stage."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import optim

from chimera_runtime.blame import UserCode
from chimera_runtime.errors import MISUSED, Misuse
from chimera_runtime.errors import optimizer as mistakes
from chimera_runtime.optimizer.optimizer_state import parameters_of
from chimera_runtime.optimizer.sharding import Sharding, require_memory_apart
from chimera_runtime.program.weight_groups import Group
from chimera_runtime.ranks.world import World
from chimera_runtime.values.mesh_tensors import is_spread, local

ELEMENTWISE = (
    *(optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adagrad, optim.Adadelta),
    *(optim.RMSprop, optim.Rprop, optim.ASGD),
)
"""Optimizers of torch that compute each number of a parameter by itself: stepping shards gives the same weights."""

_MAKING = UserCode("make(named_parameters)", MISUSED)


class ShardedOptimizer(optim.Optimizer):
    """Steps this rank's shards of parameters, and gathers the shards that the other replicas have stepped.

    Its parameter groups have the whole parameters: a scheduler, a scaler and `zero_grad` act on these. Weights after a
    step are the same as with an optimizer that is not sharded. ``state_dict`` returns DTensors in the shape of the
    parameters, which torch.distributed.checkpoint stores like whole tensors; ``load_state_dict`` takes both.

    All ranks that hold a parameter must step together, and make the steps of several sharded optimizers in one order.

    ``groups`` has the parameters of this rank by weight group, in the order of `by_group`. ``make`` gets the shards of
    these parameters, in the same order, and makes their optimizer: ``of_shards``, with all the state that this rank
    keeps. If all are frozen, it gets one empty parameter instead, and the optimizer steps nothing. ``elementwise`` says
    that this optimizer computes each number of a parameter by itself; that is known of those in `ELEMENTWISE`. If
    ``gathers`` is false, the caller calls `gather` after all steps of the rank.

    Raises `Misuse` if ``make`` returns something else than an optimizer, or an optimizer that may not be elementwise.
    """

    def __init__(
        self,
        world: World,
        groups: Mapping[Group, Sequence[torch.nn.Parameter]],
        make: Callable[[list[torch.nn.Parameter]], Any],
        elementwise: bool = False,
        gathers: bool = True,
    ) -> None:
        self._shardings = shardings = [Sharding(world, group, parameters) for group, parameters in groups.items()]
        self._gathers = gathers
        self._sharding_of = {p: sharding for sharding in shardings for p in sharding.parameters}
        whole = {s: p for sharding in shardings for s, p in zip(sharding.shards, sharding.parameters, strict=True)}
        # torch refuses an optimizer of nothing: where all is frozen, it is made of a stand-in, which then leaves it.
        self.of_shards: optim.Optimizer = make([*whole] or [torch.nn.Parameter(torch.empty(0))])
        _require_elementwise(self.of_shards, elementwise)
        if not whole:
            for group in self.of_shards.param_groups:
                group.update({key: [] for key in ("params", "param_names") if key in group})
        of_whole = [
            {**_settings(group), "params": [whole[shard] for shard in group["params"]]}
            for group in self.of_shards.param_groups
        ]
        self._is_made = False
        super().__init__(of_whole, dict(self.of_shards.defaults))
        self._is_made = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps the shards of this rank, with the gradients of the parameters, and gathers the other shards.

        Raises `PeerLost` if another rank does not step in time, or has ended.
        """
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        for sharding in self._shardings:
            sharding.show_gradients()
        _take_settings(self.of_shards, self)
        self.of_shards.step()
        _take_settings(self, self.of_shards)
        for sharding in self._shardings:
            sharding.hide_gradients()
        if self._gathers:
            self.gather()
        return value

    def gather(self) -> None:
        """Gathers the shards that other ranks have stepped, one weight group after the other; errors as in `step`."""
        for sharding in self._shardings:
            sharding.gather()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group; only the constructor may call it. Raises `Misuse` if it is called later."""
        if self._is_made:
            raise Misuse(mistakes.SHARDED_TAKES_NO_FURTHER_PARAMETERS)
        super().add_param_group(param_group)

    def spread(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Returns a parameter as a DTensor that is sharded like its optimizer state, or unchanged if it is not cut."""
        sharding = self._sharding_of[parameter]
        return sharding.spread(parameter, sharding.part(parameter, parameter.data))

    def state_dict(self) -> dict[str, Any]:
        """Returns the optimizer's state in the form of one that is not sharded; sharded tensors are DTensors."""
        of_shards = self.of_shards.state_dict()
        return {**of_shards, **super().state_dict(), "state": self._converted(of_shards["state"], self._whole)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a state that `state_dict` returned, or the state of an optimizer that is not sharded."""
        super().load_state_dict({**state_dict, "state": {}})
        self.of_shards.load_state_dict({**state_dict, "state": self._converted(state_dict["state"], self._part)})

    def _converted(self, state: Mapping[Any, Any], convert: Callable[[torch.nn.Parameter, Any], Any]) -> dict[Any, Any]:
        """Returns an optimizer's state with ``convert`` applied to each value that belongs to a parameter."""
        parameters = parameters_of(self)
        converted = dict(state)
        for index, entries in state.items():
            if isinstance(index, int):
                converted[index] = {key: convert(parameters[index], value) for key, value in entries.items()}
        return converted

    def _whole(self, parameter: torch.nn.Parameter, value: Any) -> Any:
        sharding = self._sharding_of[parameter]
        if isinstance(value, torch.Tensor) and value.shape == sharding.part(parameter, parameter).shape:
            return sharding.spread(parameter, value)
        return value

    def _part(self, parameter: torch.nn.Parameter, value: Any) -> Any:
        if is_spread(value):
            return local(value)
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
            return self._sharding_of[parameter].part(parameter, value).clone()
        return value


def sharded_by_name(
    world: World,
    groups: Mapping[Group, Sequence[torch.nn.Parameter]],
    names: Mapping[torch.Tensor, str],
    make: Callable[[list[tuple[str, torch.nn.Parameter]]], Any],
    *,
    elementwise: bool,
) -> ShardedOptimizer:
    """Makes a sharded optimizer of the trained parameters; ``make`` is called with (name, shard) pairs."""
    trained = {group: [p for p in parameters if p.requires_grad] for group, parameters in groups.items()}
    listed = [names[p] for parameters in trained.values() for p in parameters] or ["nothing"]
    require_memory_apart(world, trained, names)

    def made(shards: list[torch.nn.Parameter]) -> Any:
        with _MAKING:
            return make(list(zip(listed, shards, strict=True)))

    return ShardedOptimizer(world, trained, made, elementwise)


def _require_elementwise(optimizer: Any, elementwise: bool) -> None:
    name = type(optimizer).__name__
    if not isinstance(optimizer, optim.Optimizer):
        raise mistakes.sharded_is_no_optimizer(name)
    if not elementwise and type(optimizer) not in ELEMENTWISE:
        raise mistakes.sharded_may_not_be_elementwise(name, [optimizer.__name__ for optimizer in ELEMENTWISE])


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the learning rate and the like of a group, without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _take_settings(optimizer: optim.Optimizer, other: optim.Optimizer) -> None:
    for group, of_other in zip(optimizer.param_groups, other.param_groups, strict=True):
        group.update(_settings(of_other))
