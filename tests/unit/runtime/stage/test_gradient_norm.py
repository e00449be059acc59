"""The norm of the whole model's gradients, by ranks that hold replicas of its stages."""

from functools import partial

import pytest
import torch

from chimera_runtime.program.rank_facts import Group
from chimera_runtime.ranks.world import World
from chimera_runtime.stage.gradient_sums import agree_on_infinite, total_norm
from chimera_runtime.values.nested import Tensors
from tests.unit.runtime.thread_ranks import job, together, worlds

BOTH_WAYS = ((0, 1), (1, 0))


def gradients() -> dict[Group, Tensors]:
    generator = torch.Generator().manual_seed(3)
    return {(stage,): tuple(torch.randn(4, 3, generator=generator).double() for _ in range(2)) for stage in range(2)}


@pytest.mark.parametrize("order", [1.0, 2.0, 3.5, float("inf")])
@pytest.mark.parametrize(("placement", "copies"), [(((0, 1),), 1), (((0, 1),), 2), (BOTH_WAYS, 1), (BOTH_WAYS, 2)])
def test_every_rank_gets_the_norm_of_one_process(
    alone: World, placement: tuple[tuple[int, ...], ...], copies: int, order: float
) -> None:
    of_stages = gradients()
    flat = torch.cat([g.flatten() for tensors in of_stages.values() for g in tensors])
    with worlds(alone, job(placement=placement), copies) as ranks:

        def norm(world: World) -> float:
            held = {s: g for s, g in of_stages.items() if world.place.worker in world.job.members(s)}
            return float(total_norm(world.control_group, world.job, held, order))

        norms = together([partial(norm, world) for world in ranks])
    assert norms == pytest.approx([float(torch.linalg.vector_norm(flat, order))] * len(norms), rel=1e-14)
    assert len(set(norms)) == 1


def test_what_stages_share_counts_once(alone: World) -> None:
    """Both ranks hold it, each by another end."""
    tie: dict[Group, Tensors] = {(0, 1): (torch.tensor([3.0, 4.0]),)}
    with worlds(alone, job(ties=((0, 1),))) as ranks:
        norms = together([partial(total_norm, world.control_group, world.job, tie, 2.0) for world in ranks])
    assert [float(norm) for norm in norms] == [5.0, 5.0]


def test_a_rank_without_gradients_takes_part(alone: World) -> None:
    with worlds(alone, job()) as ranks:
        held: list[dict[Group, Tensors]] = [{(0,): (torch.tensor([3.0, 4.0]),)}, {(1,): ()}]
        norms = together(
            [
                partial(total_norm, world.control_group, world.job, mine, 2.0)
                for world, mine in zip(ranks, held, strict=True)
            ]
        )
    assert [float(norm) for norm in norms] == [5.0, 5.0]


def test_nan_on_one_rank_is_known_to_all(alone: World) -> None:
    with worlds(alone, job()) as ranks:
        held: list[dict[Group, Tensors]] = [{(0,): (torch.tensor([float("nan")]),)}, {(1,): (torch.ones(2),)}]
        norms = together(
            [
                partial(total_norm, world.control_group, world.job, mine, 2.0)
                for world, mine in zip(ranks, held, strict=True)
            ]
        )
    assert all(norm.isnan() for norm in norms)


@pytest.mark.parametrize("order", [0.0, 1.0, 3.0, float("inf")])
def test_a_norm_of_any_order_is_that_of_one_process(alone: World, order: float) -> None:
    tensors = [torch.tensor([3.0, 4.0]), torch.zeros(2), torch.tensor([1.0, -2.0, 0.0])]
    with worlds(alone, job()) as ranks:
        held: list[dict[Group, Tensors]] = [{(0,): tuple(tensors[:2])}, {(1,): (tensors[2],)}]
        norms = together(
            [
                partial(total_norm, world.control_group, world.job, mine, order)
                for world, mine in zip(ranks, held, strict=True)
            ]
        )
    assert [float(norm) for norm in norms] == pytest.approx([float(torch.nn.utils.get_total_norm(tensors, order))] * 2)


@pytest.mark.parametrize(("gradient", "steps"), [(1.0, True), (float("inf"), False)])
def test_all_ranks_skip_a_step_together_also_one_whose_parameters_are_frozen(
    alone: World, gradient: float, steps: bool
) -> None:
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    weights[1].grad = torch.full((2,), gradient)
    optimizers = [torch.optim.SGD([weight], lr=1.0) for weight in weights]
    scalers = [torch.amp.GradScaler("cpu", init_scale=1.0) for _ in weights]
    for scaler, optimizer in zip(scalers, optimizers, strict=True):
        scaler.scale(torch.zeros(()))
        scaler.unscale_(optimizer)
    with worlds(alone, job()) as ranks:
        controls, devices = [rank.control_group for rank in ranks], [rank.device for rank in ranks]
        together(
            [partial(agree_on_infinite, *each) for each in zip(controls, devices, scalers, optimizers, strict=True)]
        )
    for scaler, optimizer in zip(scalers, optimizers, strict=True):
        scaler.step(optimizer)
        scaler.update()
    assert weights[1].tolist() == ([-gradient] * 2 if steps else [0.0] * 2)
    assert [scaler.get_scale() for scaler in scalers] == [1.0 if steps else 0.5] * 2
