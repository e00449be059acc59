"""Sums of gradients: over micro-batches, over ranks, and of parameters that have none."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from chimera_runtime.errors import BadModel, PeerLost
from chimera_runtime.program.rank_facts import Group
from chimera_runtime.ranks.messages import Names, waiter
from chimera_runtime.ranks.world import World
from chimera_runtime.stage.gradient_sums import (
    GradientSum,
    WideGradientSum,
    agree_on_infinite,
    main_gradient,
    total_norm,
)
from chimera_runtime.values.losses import Count
from chimera_runtime.values.nested import Tensors
from tests.unit.runtime.thread_ranks import groups, job, together, worlds

WIDTH = 3


def gradient_sum(parameters: Sequence[nn.Parameter], group: Any = None, size: int = 1, timeout: float = 20.0) -> Any:
    names = Names(0, 0, 2, timeout)
    return GradientSum("s1", parameters, group, tuple(range(size)), names, waiter(timeout))


def parameter(*values: float, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=dtype))


def backward(*pairs: tuple[nn.Parameter, float]) -> None:
    """Adds so much to the gradient of each element of some parameters."""
    loss = sum((p * scale).sum() for p, scale in pairs)
    assert isinstance(loss, torch.Tensor)
    loss.backward()


@pytest.fixture
def members(alone: World) -> Iterator[Sequence[Any]]:
    with groups(2) as connected:
        yield connected


def replicas(members: Sequence[Any], *shapes: int) -> tuple[list[list[nn.Parameter]], list[Any]]:
    """The parameters of two replicas, and their sums."""
    parameters = [[parameter(*[1.0] * n) for n in shapes] for _ in members]
    return parameters, [gradient_sum(own, group, 2) for own, group in zip(parameters, members, strict=True)]


def summed(sums: Sequence[Any]) -> None:
    """Ends an update on every rank."""
    for each in sums:
        each.launch()
    for each in sums:
        each.wait()


# A stage on one rank.


def test_gradients_add_up_over_backwards_in_one_flat_piece_of_memory() -> None:
    first, second = parameter(1, 1), parameter(2)
    sums = gradient_sum([first, second])
    for scale in (1.0, 2.0, 4.0):
        backward((first, scale), (second, 10 * scale))
        sums.collect()
    sums.launch().wait()
    assert first.grad is not None
    assert second.grad is not None
    assert first.grad.tolist() == [7, 7]
    assert second.grad.tolist() == [70]
    assert first.grad.untyped_storage().data_ptr() == second.grad.untyped_storage().data_ptr()


def test_a_parameter_that_is_used_late_joins_and_one_that_is_not_used_has_no_gradient() -> None:
    always, late, never = parameter(1), parameter(1), parameter(1)
    sums = gradient_sum([always, late, never])
    backward((always, 1.0))
    sums.collect()
    backward((always, 1.0), (late, 5.0))
    sums.collect()
    sums.launch().wait()
    assert [None if p.grad is None else p.grad.item() for p in (always, late, never)] == [2, 5, None]


def test_the_next_update_begins_from_nothing() -> None:
    p, never = parameter(1), parameter(1)
    sums = gradient_sum([p, never])
    for scale in (1.0, 3.0):
        backward((p, scale))
        sums.collect()
        sums.launch().wait()
        assert p.grad is not None
        assert p.grad.item() == scale
        sums.clear()
        assert p.grad is None


@pytest.mark.parametrize("is_wide", [False, True])
def test_what_a_loop_keeps_of_gradients_stays_as_it_was(is_wide: bool) -> None:
    """The tensor itself, a view of it, or a graph that has saved it; memory that nothing keeps is used again."""
    first, second = (half(1, 1), half(2)) if is_wide else (parameter(1, 1), parameter(2))
    sums = wide([first, second]) if is_wide else gradient_sum([first, second])
    kept: list[Any] = []
    addresses = []
    keeps: list[Any] = [None, None, lambda g: g, lambda g: g[:1], lambda g: g.numpy(), None, None]
    for number, keep in enumerate(keeps, start=1):
        backward((first, float(number)), (second, 1.0))
        sums.collect()
        sums.launch().wait()
        gradient = main_gradient(first)
        assert gradient is not None
        assert gradient[0] == number
        addresses.append(gradient.data_ptr())
        kept += [] if keep is None else [(number, keep(gradient))]
        del gradient
        first.grad = None
        sums.clear()
    leaf = parameter(3, 3)
    backward((first, 9.0))
    sums.collect()
    sums.launch().wait()
    graph = (main_gradient(first) * leaf).sum()  # type: ignore[operator]
    sums.clear()
    backward((first, 1.0))
    sums.collect()
    graph.backward()
    assert [number for number, value in kept if value[0] != number] == []
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [9, 9]
    assert [a == b for a, b in pairwise(addresses)] == [True, True, False, False, False, True]


def test_a_gradient_that_is_taken_away_is_missed_until_the_next_update() -> None:
    kept, taken, never = parameter(1), parameter(1), parameter(1)
    sums = gradient_sum([kept, taken, never])
    assert sums.disturbed is None
    backward((kept, 1.0), (taken, 1.0))
    sums.collect()
    assert sums.disturbed is None
    taken.grad = None
    assert sums.disturbed is taken
    sums.clear()
    assert sums.disturbed is None


def test_dtypes_have_a_piece_of_memory_each_and_complex_numbers_are_summed() -> None:
    parameters = [parameter(1, dtype=dtype) for dtype in (torch.float64, torch.float32, torch.complex64)]
    sums = gradient_sum(parameters)
    torch.view_as_real(parameters[2]).sum().backward()
    backward((parameters[0], 2.0), (parameters[1], 3.0))
    sums.collect()
    assert [p.grad.item() for p in parameters if p.grad is not None] == [2, 3, 1 + 1j]
    assert [p.grad.dtype for p in parameters if p.grad is not None] == [p.dtype for p in parameters]


def embedded(table: nn.Embedding, *words: int) -> None:
    table(torch.tensor(words)).sum().backward()


def test_sparse_gradients_are_made_dense_and_add_up() -> None:
    """A dense gradient may come before or after."""
    table = nn.Embedding(4, 2, sparse=True)
    sums = gradient_sum([table.weight])
    embedded(table, 1, 1)
    sums.collect()
    embedded(table, 3)
    sums.collect()
    backward((table.weight, 10.0))
    sums.collect()
    embedded(table, 0)
    sums.collect()
    assert table.weight.grad is not None
    assert not table.weight.grad.is_sparse
    assert table.weight.grad[:, 0].tolist() == [11, 12, 10, 11]


def test_a_stage_without_parameters_has_nothing_to_sum() -> None:
    sums = gradient_sum([])
    sums.collect()
    sums.launch().wait()
    sums.clear()


# Replicas on several ranks.


def test_every_rank_has_the_sum_of_all(members: Sequence[Any]) -> None:
    parameters, sums = replicas(members, 2, 3)
    for update in range(2):
        for rank, (own, of_rank) in enumerate(zip(parameters, sums, strict=True)):
            backward((own[0], 1.0 + rank), (own[1], 10.0 * (update + rank)))
            of_rank.collect()
        summed(sums)
        for own in parameters:
            assert [p.grad.unique().tolist() for p in own if p.grad is not None] == [[3], [10 * (2 * update + 1)]]
        for of_rank in sums:
            of_rank.clear()


def test_a_parameter_with_a_gradient_on_one_rank_has_it_on_all_and_one_with_none_stays_without(
    members: Sequence[Any],
) -> None:
    """Whatever the update before has left in the memory of the sums."""
    parameters, sums = replicas(members, 1, 1, 1)
    for own, of_rank in zip(parameters, sums, strict=True):
        backward((own[0], 1.0), (own[1], 100.0), (own[2], 100.0))
        of_rank.collect()
    summed(sums)
    for of_rank in sums:
        of_rank.clear()
    for own, of_rank in zip(parameters, sums, strict=True):
        backward((own[0], 1.0))
        of_rank.collect()
    backward((parameters[1][1], 5.0))
    sums[1].collect()
    summed(sums)
    for own in parameters:
        assert [None if p.grad is None else p.grad.item() for p in own] == [2, 5, None]


def test_a_parameter_that_had_no_gradient_anywhere_may_have_one_in_the_next_update(members: Sequence[Any]) -> None:
    parameters, sums = replicas(members, 1)
    for ranks_with_one in ([], [1], [], [0]):
        for rank in ranks_with_one:
            backward((parameters[rank][0], 5.0))
            sums[rank].collect()
        summed(sums)
        gradients = [None if own[0].grad is None else own[0].grad.item() for own in parameters]
        assert gradients == ([5, 5] if ranks_with_one else [None, None])
        for of_rank in sums:
            of_rank.clear()


def test_a_gradient_of_zeros_is_a_gradient(members: Sequence[Any]) -> None:
    """An optimizer with momentum or weight decay does something with it."""
    parameters, sums = replicas(members, 1)
    for own, of_rank in zip(parameters, sums, strict=True):
        backward((own[0], 0.0))
        of_rank.collect()
    summed(sums)
    assert [own[0].grad.item() for own in parameters if own[0].grad is not None] == [0, 0]


def test_a_rehearsal_sums_messages_of_the_same_size_and_leaves_gradients_alone(members: Sequence[Any]) -> None:
    parameters, sums = replicas(members, 2, 3)
    for of_rank in sums:
        of_rank.rehearse()
    for _ in range(2):
        summed(sums)
        assert all(p.grad is None for own in parameters for p in own)
    assert [flat.numel() for flat in sums[0]._flats] == [2 + 3 + 2]


def test_a_rank_that_does_not_come_is_named_with_the_stage(alone: World) -> None:
    with groups(3) as members:
        sums = gradient_sum([parameter(1)], members[0], 3, timeout=0.05)
        with pytest.raises(PeerLost, match=r"wait all_reduce s1: ranks 1, 2: ") as lost:
            sums.launch().wait()
    assert lost.value.peers == (1, 2)


# Sums in a wider dtype.

TINY = 2.0**-9
"""A number that bfloat16 cannot add to 1; it can add eight of them."""


def wide(parameters: Sequence[nn.Parameter], group: Any = None, size: int = 1) -> Any:
    arguments = parameters, group, tuple(range(size)), Names(0, 0, 2, 20.0), waiter(20.0)
    return WideGradientSum(1, *arguments, torch.float32)


def half(*values: float) -> nn.Parameter:
    return parameter(*values, dtype=torch.bfloat16)


def micro_batches(sums: Any, of: nn.Parameter) -> None:
    """One large gradient, and then small ones, each lost if it is added to the large one in bfloat16."""
    for scale in (1.0, *[TINY] * 8):
        backward((of, scale))
        sums.collect()
        assert of.grad is None


def test_small_gradients_are_not_lost_beside_large_ones() -> None:
    weight = half(1, 1)
    plain, sums = half(1, 1), wide([weight])
    micro_batches(sums, weight)
    sums.launch().wait()
    assert weight.main_grad.tolist() == [1 + 8 * TINY] * 2  # type: ignore[attr-defined]
    assert weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16
    assert weight.grad.tolist() == [1 + 8 * TINY] * 2
    for scale in (1.0, *[TINY] * 8):
        backward((plain, scale))
    assert plain.grad is not None
    assert plain.grad.tolist() == [1, 1], "or the test tells nothing"


def test_replicas_are_summed_in_the_wider_dtype_and_what_none_has_stays_none(members: Sequence[Any]) -> None:
    parameters = [[half(1), half(1), half(1)] for _ in members]
    sums = [wide(of_rank, group, 2) for of_rank, group in zip(parameters, members, strict=True)]
    for rank, (both, one, _) in enumerate(parameters):
        micro_batches(sums[rank], both)
        if rank:
            backward((one, 3.0))
            sums[rank].collect()
    summed(sums)
    for both, one, none in parameters:
        assert main_gradient(both) == torch.tensor([2 + 16 * TINY])
        assert main_gradient(one) == torch.tensor([3.0])
        assert main_gradient(none) is None
        assert none.grad is None


def test_the_next_update_begins_without_gradients_in_either_dtype() -> None:
    weight = half(1)
    sums = wide([weight])
    micro_batches(sums, weight)
    sums.launch().wait()
    sums.clear()
    assert weight.grad is None
    assert weight.main_grad is None  # type: ignore[attr-defined]
    backward((weight, 5.0))
    sums.collect()
    sums.launch().wait()
    assert main_gradient(weight) == torch.tensor([5.0])


def test_a_gradient_that_was_cleared_is_gone_in_both_dtypes() -> None:
    weight = half(1)
    sums = wide([weight])
    micro_batches(sums, weight)
    sums.launch().wait()
    weight.grad = None
    assert main_gradient(weight) is None


# Counts.


def counting(parameters: Sequence[nn.Parameter], group: Any = None, size: int = 1) -> Any:
    count = Count(1, 8.0, torch.device("cpu"))
    names = Names(0, 0, 2, 20.0)
    return GradientSum(1, parameters, group, tuple(range(size)), names, waiter(20.0), loss_count=count)


def test_gradients_are_corrected_by_what_the_update_counts() -> None:
    weight = parameter(1, 1)
    sums = counting([weight])
    for counts in ([3.0], [0.0], [2.0]):
        backward((weight, 1.0))
        sums.collect()
        sums.count((torch.tensor(counts, dtype=torch.float64),))
    sums.launch().wait()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, torch.full((2,), 3.0 * 8 / 5))
    sums.clear()
    backward((weight, 1.0))
    sums.collect()
    sums.count((torch.ones(1, dtype=torch.float64),))
    sums.launch().wait()
    assert weight.grad.tolist() == [8.0, 8.0], "the count begins anew"


def test_replicas_count_together(members: Sequence[Any]) -> None:
    """One of them ran no micro-batch at all."""
    weights = [parameter(1.0), parameter(1.0)]
    sums = [counting([weight], group, 2) for weight, group in zip(weights, members, strict=True)]
    backward((weights[0], 1.0))
    sums[0].collect()
    sums[0].count((torch.full((1,), 2.0, dtype=torch.float64),))
    summed(sums)
    assert [weight.grad for weight in weights] == [torch.tensor([4.0])] * 2


def test_where_nothing_counts_gradients_are_zero() -> None:
    weight = parameter(1.0)
    sums = counting([weight])
    backward((weight, 0.0))
    sums.collect()
    sums.count((torch.zeros(1, dtype=torch.float64),))
    sums.launch().wait()
    assert weight.grad == torch.tensor([0.0])


@pytest.mark.parametrize("count", [-1.0, float("nan"), float("inf")])
def test_a_count_that_is_none_is_an_error_of_the_model(count: float) -> None:
    sums = counting([parameter(1.0)])
    sums.collect()
    sums.count((torch.tensor([count], dtype=torch.float64),))
    with pytest.raises(BadModel, match="stage 1: the counts that loss returned for an update add up to"):
        sums.launch().wait()


# The norm of the whole model's gradients, by ranks that hold replicas of its stages.

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
