"""Weights that are cut over ranks: who has which rows, that all come together again, and what stays whole."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim

from chimera_runtime.errors import Misuse, PeerLost
from chimera_runtime.optimizer import sharding
from chimera_runtime.optimizer.optimizer_state import by_name, restore
from chimera_runtime.optimizer.sharding import ELEMENTWISE, ShardedOptimizer, Sharding, buckets, cut, overlap_in_part
from chimera_runtime.ranks.messages import Staging
from chimera_runtime.ranks.world import World
from tests.unit.runtime.gpu_model import ModelGpu
from tests.unit.runtime.thread_ranks import alone_job, groups, together, worlds

SHAPES = ((7, 4), (3,), (), (1, 6, 2), (2, 2), (0, 3))


@contextmanager
def replicas(alone: World, copies: int, timeout: float = 20.0) -> Iterator[list[World]]:
    """The worlds of the ranks that hold the only stage, and can sum."""
    with worlds(alone, alone_job(stages=1), copies, timeout) as ranks, groups(copies) as members:
        sums = [{(0,): (member if copies > 1 else None, tuple(range(copies)))} for member in members]
        yield [replace(world, sums=group) for world, group in zip(ranks, sums, strict=True)]


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    transposed, single = torch.randn(6, 5, generator=generator).t(), torch.randn(4, 3, generator=generator)
    return [*made, nn.Parameter(transposed), nn.Parameter(single)]


def test_a_parameter_is_cut_along_the_first_dimension_that_has_a_row_for_each_rank() -> None:
    cuts = [made and (made.dimension, made.rows) for made in (cut(p, 3) for p in parameters())]
    assert cuts == [(0, 3), (0, 1), None, (1, 2), None, (1, 1), (0, 2), (0, 2)]
    assert [cut(p, 1) for p in parameters()] == [None] * len(parameters()), "a rank alone has all"


@pytest.mark.parametrize(
    ("views", "is_refused"),
    [
        (lambda base: (base[:4], base[4:]), False),
        (lambda base: (base[::2], base[1::2]), False),
        (lambda base: (base[:, :2], base[:, 2:]), False),
        (lambda base: (base[:4], base[:4]), False),
        (lambda base: (base[:4], base[2:6]), True),
        (lambda base: (base[:4], base[:2]), True),
        (lambda base: (base[:4], base[:4].t()), True),
        (lambda base: (base[0].expand(4, 4), base[:4]), True),
        (lambda base: (base[:4], base[:4].view(torch.int32)), True),
    ],
)
def test_parameters_overlap_in_part_if_they_share_some_numbers(
    views: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]], is_refused: bool
) -> None:
    first, second = (nn.Parameter(view, requires_grad=False) for view in views(torch.randn(8, 4)))
    assert [overlap_in_part(first, second), overlap_in_part(second, first)] == [is_refused] * 2


def test_shards_are_the_parameters_without_gap_or_overlap_in_their_memory(alone: World) -> None:
    with replicas(alone, 3) as ranks:
        shared = parameters()
        shared[0].mark = "kept"  # type: ignore[attr-defined]
        shards = [Sharding(world, (0,), shared).shards for world in ranks]
    assert [[tuple(shard.shape) for shard in of_rank[:2]] for of_rank in shards] == [
        [(3, 4), (1,)],
        [(3, 4), (1,)],
        [(1, 4), (1,)],
    ]
    assert all(of_rank[0].mark == "kept" for of_rank in shards)  # type: ignore[attr-defined]
    for place, parameter in enumerate(shared):
        made = cut(parameter, 3)
        with torch.no_grad():
            for of_rank in shards if made else shards[:1]:
                of_rank[place].add_(1)
    for parameter, before in zip(shared, parameters(), strict=True):
        torch.testing.assert_close(parameter.data, before.data + 1, msg=f"{tuple(parameter.shape)}")


@pytest.mark.parametrize(
    ("copies", "bucket", "dtype", "lazy"),
    [
        *((copies, size, torch.float64, None) for copies in (1, 2, 3, 5) for size in (1, 64, sharding.BUCKET)),
        *((2, sharding.BUCKET, dtype, None) for dtype in (torch.bfloat16, torch.complex128)),
        *((2, 1, torch.float64, lazy) for lazy in ((), ("outgoing",), ("incoming",), ("outgoing", "incoming"))),
    ],
)
def test_what_each_rank_changes_of_its_shards_all_have_afterwards(
    alone: World,
    monkeypatch: pytest.MonkeyPatch,
    copies: int,
    bucket: int,
    dtype: torch.dtype,
    lazy: tuple[str, ...] | None,
) -> None:
    """With ``lazy`` as on a GPU by gloo: the CPU computes at once, and copies are as late as they may be."""
    monkeypatch.setattr(sharding, "BUCKET", bucket)

    def changed(world: World) -> list[nn.Parameter]:
        gpu, held = ModelGpu(lazy or ()), parameters(dtype)
        made = Sharding(world if lazy is None else replace(world, staging=Staging(gpu)), (0,), held)
        for shard in made.shards:
            shard.data.neg_()
        made.gather()
        assert (gpu.blocked["staging"] > 0) == (lazy is not None)
        return held

    with replicas(alone, copies) as ranks:
        results = together([partial(changed, world) for world in ranks])
    for held in results:
        assert_equal(held, [-before for before in parameters(dtype)])


def test_a_bucket_has_at_most_its_bytes_and_one_row_where_that_is_more() -> None:
    made = cut(nn.Parameter(torch.zeros(10, 4)), 2)
    other = cut(nn.Parameter(torch.zeros(4, 2)), 2)
    assert made is not None
    assert other is not None
    listed = [[(made is piece.cut, piece.first, piece.count) for piece in b] for b in buckets([made, other], 40)]
    assert listed == [[(True, 0, 2)], [(True, 2, 2)], [(True, 4, 1), (False, 0, 2)]]
    assert [len(bucket) for bucket in buckets([made], 3)] == [1] * 5


def test_a_rank_that_does_not_gather_is_named(alone: World) -> None:
    with replicas(alone, 2, timeout=0.3) as ranks:
        made = Sharding(ranks[1], (0,), parameters())
        with pytest.raises(PeerLost, match=r"rank 1 \(worker 0\): wait for the weights of stage 0: rank 0: no answer"):
            made.gather()


def test_shards_show_the_gradients_of_the_parameters_and_let_them_go(alone: World) -> None:
    first, second = nn.Parameter(torch.zeros(4, 2)), nn.Parameter(torch.zeros(4))
    first.grad = torch.arange(8.0).reshape(4, 2)
    first.main_grad = first.grad.double()  # type: ignore[attr-defined]
    with replicas(alone, 2) as ranks:
        made = Sharding(ranks[1], (0,), [first, second])
    made.show_gradients()
    shard, without = made.shards
    assert shard.grad is not None
    assert shard.grad.tolist() == [[4.0, 5.0], [6.0, 7.0]]
    assert shard.main_grad.tolist() == shard.grad.tolist()  # type: ignore[attr-defined]
    assert without.grad is None
    made.hide_gradients()
    assert (shard.grad, shard.main_grad) == (None, None)  # type: ignore[attr-defined]
    assert first.grad is not None


# An optimizer whose state is sharded: weights are those of one that is not, and a rank keeps its share alone.


Make = Callable[[list[nn.Parameter]], optim.Optimizer]

COPIES, STEPS = 3, 4
STEPPED_SHAPES = ((6, 4), (3,), (5, 2), (), (1, 9))


def weights() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, dtype=torch.float64, generator=generator)) for shape in STEPPED_SHAPES]


def assert_equal(mine: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> None:
    for one, other in zip(mine, theirs, strict=True):
        assert torch.equal(one, other), tuple(one.shape)


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
        assert_equal(parameters, alone_trained)


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
        assert_equal(parameters, alone_trained)


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
    names = [f"p{number}" for number in range(len(STEPPED_SHAPES))]
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
        assert_equal(parameters, whole)


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
