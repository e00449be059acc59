"""An optimizer whose state is sharded: weights are those of one that is not, and a rank keeps its share alone."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim

from chimera_runtime.errors import Misuse
from chimera_runtime.optimizer.optimizer_state import by_name, restore
from chimera_runtime.optimizer.sharding import ELEMENTWISE, ShardedOptimizer
from chimera_runtime.ranks.world import World
from tests.unit.runtime.optimizer.test_sharding import replicas
from tests.unit.runtime.thread_ranks import together

Make = Callable[[list[nn.Parameter]], optim.Optimizer]

COPIES, STEPS = 3, 4
SHAPES = ((6, 4), (3,), (5, 2), (), (1, 9))


def weights() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, dtype=torch.float64, generator=generator)) for shape in SHAPES]


def give_gradients(parameters: list[nn.Parameter], step: int) -> None:
    """Gradients that are the same everywhere; the second parameter has none at first."""
    generator = torch.Generator().manual_seed(100 + step)
    for number, parameter in enumerate(parameters):
        gradient = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
        parameter.grad = None if (number, step) == (1, 0) else gradient


def trained(optimizer: optim.Optimizer, parameters: list[nn.Parameter], scheduled: bool = False) -> None:
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1, 0.5) if scheduled else None
    for step in range(STEPS):
        give_gradients(parameters, step)
        optimizer.step()
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in parameters)
        if scheduler is not None:
            scheduler.step()


def on_all(alone: World, make: Make, **options: Any) -> list[tuple[list[nn.Parameter], ShardedOptimizer]]:
    """Weights and optimizers of all ranks after some steps."""

    def run(world: World) -> tuple[list[nn.Parameter], ShardedOptimizer]:
        parameters = weights()
        optimizer = ShardedOptimizer(world, {(0,): parameters}, make)
        trained(optimizer, parameters, **options)
        return parameters, optimizer

    with replicas(alone, COPIES) as ranks:
        return together([partial(run, world) for world in ranks])


@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
def test_weights_are_bitwise_those_of_an_optimizer_that_is_not_sharded(alone: World, kind: type[Any]) -> None:
    alone_trained = weights()
    trained(kind(alone_trained, lr=0.1), alone_trained)
    for parameters, _ in on_all(alone, lambda shards: kind(shards, lr=0.1)):
        for mine, theirs in zip(parameters, alone_trained, strict=True):
            assert torch.equal(mine, theirs), tuple(mine.shape)


def test_groups_have_the_whole_parameters_and_a_scheduler_acts_on_them(alone: World) -> None:
    def make(parameters: list[nn.Parameter]) -> optim.Optimizer:
        flat = [p for p in parameters if p.dim() < 2]
        return optim.AdamW([{"params": flat, "lr": 0.3}, {"params": [p for p in parameters if p.dim() > 1]}], lr=0.1)

    alone_trained = weights()
    trained(make(alone_trained), alone_trained, scheduled=True)
    for parameters, optimizer in on_all(alone, make, scheduled=True):
        assert [[*map(id, group["params"])] for group in optimizer.param_groups] == [
            [id(parameters[1]), id(parameters[3])],
            [id(parameters[0]), id(parameters[2]), id(parameters[4])],
        ]
        assert [group["lr"] for group in optimizer.param_groups] == [0.3 * 0.5**STEPS, 0.1 * 0.5**STEPS]
        for mine, theirs in zip(parameters, alone_trained, strict=True):
            assert torch.equal(mine, theirs)


def test_a_rank_keeps_the_state_of_its_rows_alone(alone: World) -> None:
    rows = [(2 * 4 + 1 + 2 * 2 + 3), (2 * 4 + 1 + 2 * 2 + 3), (2 * 4 + 1 + 1 * 2 + 3)]
    results = on_all(alone, lambda shards: optim.SGD(shards, lr=0.1, momentum=0.9))
    sizes = [sum(state["momentum_buffer"].numel() for state in o.of_shards.state.values()) for _, o in results]
    assert sizes == [count + 1 for count in rows], "and the number that no rank can have a row of"
    assert sum(rows) == sum(p.numel() for p in weights()) - 1


def test_the_state_is_saved_in_the_shape_of_the_whole_and_read_from_a_whole(alone: World) -> None:
    """A rank alone has no shards; the two of DTensors are tested where there are processes."""
    whole = weights()
    plain = optim.AdamW(whole, lr=0.1)
    trained(plain, whole)
    names = [f"p{number}" for number in range(len(SHAPES))]
    saved = by_name([plain], dict(zip(whole, names, strict=True)))

    def run(world: World) -> list[nn.Parameter]:
        parameters = [nn.Parameter(p.detach().clone()) for p in whole]
        optimizer = ShardedOptimizer(world, {(0,): parameters}, lambda shards: optim.AdamW(shards, lr=0.7))
        restore([optimizer], dict(zip(parameters, names, strict=True)), deepcopy(saved))
        assert optimizer.param_groups[0]["lr"] == 0.1
        trained(optimizer, parameters)
        return parameters

    with replicas(alone, COPIES) as ranks:
        results = together([partial(run, world) for world in ranks])
    trained(plain, whole)
    for parameters in results:
        for mine, theirs in zip(parameters, whole, strict=True):
            assert torch.equal(mine, theirs)


def test_what_may_look_at_a_whole_parameter_is_refused_unless_it_is_said_not_to(alone: World) -> None:
    class Mine(optim.AdamW):
        pass

    with replicas(alone, 1) as (world,):
        with pytest.raises(Misuse, match=r"a Mine may look at a parameter as a whole.*SGD, Adam, AdamW.*elementwise"):
            ShardedOptimizer(world, {(0,): weights()}, Mine)
        with pytest.raises(Misuse, match="a int cannot be sharded"):
            ShardedOptimizer(world, {(0,): weights()}, lambda _: 1)
        assert isinstance(ShardedOptimizer(world, {(0,): weights()}, Mine, elementwise=True).of_shards, Mine)


def test_no_parameters_can_be_added_later(alone: World) -> None:
    with replicas(alone, 1) as (world,):
        optimizer = ShardedOptimizer(world, {(0,): weights()}, optim.SGD)
    with pytest.raises(Misuse, match="takes no further parameters"):
        optimizer.add_param_group({"params": weights()})


def test_one_that_does_not_gather_leaves_the_other_rows_until_it_is_told(alone: World) -> None:
    def run(world: World) -> tuple[torch.Tensor, torch.Tensor]:
        parameters = weights()[:1]
        optimizer = ShardedOptimizer(world, {(0,): parameters}, lambda shards: optim.SGD(shards, lr=1.0), gathers=False)
        give_gradients(parameters, 1)
        optimizer.step()
        before = parameters[0].detach().clone()
        optimizer.gather()
        return before, parameters[0].detach()

    with replicas(alone, COPIES) as ranks:
        results = together([partial(run, world) for world in ranks])
    for rank, (before, after) in enumerate(results):
        unchanged = [row for row in range(6) if torch.equal(before[row], weights()[0][row])]
        assert unchanged == [row for row in range(6) if row // 2 != rank]
        assert torch.equal(after, results[0][1])


def test_a_closure_is_run_before_the_step(alone: World) -> None:
    with replicas(alone, 1) as (world,):
        parameter = nn.Parameter(torch.ones(2))
        optimizer = ShardedOptimizer(world, {(0,): [parameter]}, lambda shards: optim.SGD(shards, lr=1.0))

    def closure() -> float:
        (parameter.sum() * 3).backward()
        return 7.0

    assert optimizer.step(closure) == 7.0
    assert parameter.tolist() == [-2.0, -2.0]
