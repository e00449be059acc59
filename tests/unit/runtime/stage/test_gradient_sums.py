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
from chimera_runtime.ranks.messages import BlockingWait, Names, Staging, from_host
from chimera_runtime.ranks.world import World
from chimera_runtime.stage.gradient_sums import (
    GradientSum,
    Replicas,
    WideGradientSum,
    agree_on_infinite,
    bits,
    is_due,
    main_gradient,
    total_norm,
)
from chimera_runtime.values.losses import Count
from chimera_runtime.values.nested import Tensors
from tests.unit.runtime.gpu_model import ModelGpu
from tests.unit.runtime.thread_ranks import groups, job, together, worlds

WIDTH = 3


def gradient_sum(parameters: Sequence[nn.Parameter], group: Any = None, size: int = 1, timeout: float = 20.0) -> Any:
    names = Names(0, 0, 2, timeout)
    return GradientSum("s1", parameters, group, tuple(range(size)), names, BlockingWait(timeout))


def parameter(*values: float, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=dtype))


def backward(*pairs: tuple[nn.Parameter, float]) -> None:
    """Adds so much to the gradient of each element of some parameters."""
    loss = sum((p * scale).sum() for p, scale in pairs)
    assert isinstance(loss, torch.Tensor)
    loss.backward()


def add(sums: Any, *pairs: tuple[nn.Parameter, float]) -> None:
    """The backward of a micro-batch, as in `backward`, and its place in the sums."""
    backward(*pairs)
    sums.collect()


def grads(parameters: Sequence[nn.Parameter]) -> list[list[float] | None]:
    return [None if p.grad is None else p.grad.tolist() for p in parameters]


@pytest.fixture
def members(alone: World) -> Iterator[Sequence[Any]]:
    with groups(2) as connected:
        yield connected


def replicas(members: Sequence[Any], *shapes: int) -> tuple[list[list[nn.Parameter]], list[Any]]:
    """The parameters of two replicas, and their sums."""
    parameters = [[parameter(*[1.0] * n) for n in shapes] for _ in members]
    return parameters, [gradient_sum(own, group, 2) for own, group in zip(parameters, members, strict=True)]


def summed(*sums: Any) -> None:
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
        add(sums, (first, scale), (second, 10 * scale))
    summed(sums)
    assert grads([first, second]) == [[7, 7], [70]]
    assert len({p.grad.untyped_storage().data_ptr() for p in (first, second)}) == 1  # type: ignore[union-attr]


def test_a_parameter_that_is_used_late_joins_and_one_that_is_not_used_has_no_gradient() -> None:
    always, late, never = parameter(1), parameter(1), parameter(1)
    sums = gradient_sum([always, late, never])
    add(sums, (always, 1.0))
    add(sums, (always, 1.0), (late, 5.0))
    summed(sums)
    assert grads([always, late, never]) == [[2], [5], None]


def test_the_next_update_begins_from_nothing() -> None:
    p, never = parameter(1), parameter(1)
    sums = gradient_sum([p, never])
    for scale in (1.0, 3.0):
        add(sums, (p, scale))
        summed(sums)
        assert grads([p, never]) == [[scale], None]
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
        add(sums, (first, float(number)), (second, 1.0))
        summed(sums)
        gradient = main_gradient(first)
        assert gradient is not None
        assert gradient[0] == number
        addresses.append(gradient.data_ptr())
        kept += [] if keep is None else [(number, keep(gradient))]
        del gradient
        first.grad = None
        sums.clear()
    leaf = parameter(3, 3)
    add(sums, (first, 9.0))
    summed(sums)
    graph = (main_gradient(first) * leaf).sum()  # type: ignore[operator]
    sums.clear()
    add(sums, (first, 1.0))
    graph.backward()
    assert [number for number, value in kept if value[0] != number] == []
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [9, 9]
    assert [a == b for a, b in pairwise(addresses)] == [True, True, False, False, False, True]


def test_a_gradient_that_is_taken_away_is_missed_until_the_next_update() -> None:
    kept, taken, never = parameter(1), parameter(1), parameter(1)
    sums = gradient_sum([kept, taken, never])
    assert sums.disturbed is None
    add(sums, (kept, 1.0), (taken, 1.0))
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


def test_sparse_gradients_are_made_dense_and_add_up() -> None:
    """A dense gradient may come before or after."""
    table = nn.Embedding(4, 2, sparse=True)
    sums = gradient_sum([table.weight])
    for words in ([1, 1], [3], None, [0]):
        (10.0 * table.weight if words is None else table(torch.tensor(words))).sum().backward()
        sums.collect()
    assert table.weight.grad is not None
    assert not table.weight.grad.is_sparse
    assert table.weight.grad[:, 0].tolist() == [11, 12, 10, 11]


def test_a_stage_without_parameters_has_nothing_to_sum() -> None:
    sums = gradient_sum([])
    sums.collect()
    summed(sums)
    sums.clear()


# Replicas on several ranks.


def test_every_rank_has_the_sum_of_all(members: Sequence[Any]) -> None:
    parameters, sums = replicas(members, 2, 3)
    for update in range(2):
        for rank, (own, of_rank) in enumerate(zip(parameters, sums, strict=True)):
            add(of_rank, (own[0], 1.0 + rank), (own[1], 10.0 * (update + rank)))
        summed(*sums)
        for own in parameters:
            assert [p.grad.unique().tolist() for p in own if p.grad is not None] == [[3], [10 * (2 * update + 1)]]
        for of_rank in sums:
            of_rank.clear()


@pytest.mark.parametrize(
    "updates",
    [
        pytest.param([((100.0, 100.0), (100.0, 100.0)), ((None, None), (None, 5.0))], id="whatever was there before"),
        pytest.param([((0.0,), (0.0,))], id="zeros are a gradient for momentum or weight decay"),
    ],
)
def test_a_parameter_with_a_gradient_on_one_rank_has_it_on_all_and_one_with_none_stays_without(
    members: Sequence[Any], updates: list[list[tuple[float | None, ...]]]
) -> None:
    """Gradients that each rank adds to each parameter in an update, beside one that always has a gradient."""
    parameters, sums = replicas(members, 1, *[1 for _ in updates[0][0]])
    for update in updates:
        for (always, *own), of_rank, added in zip(parameters, sums, update, strict=True):
            add(of_rank, (always, 1.0), *((p, a) for p, a in zip(own, added, strict=True) if a is not None))
        summed(*sums)
        of_parameters = [[a for a in adds if a is not None] for adds in zip(*update, strict=True)]
        expected = [[2.0], *([sum(adds)] if adds else None for adds in of_parameters)]
        assert [grads(own) for own in parameters] == [expected, expected]
        for of_rank in sums:
            of_rank.clear()


@pytest.mark.parametrize("absent", [0, 1, 5])
def test_one_read_says_which_parameters_without_a_gradient_have_one_elsewhere(
    members: Sequence[Any], monkeypatch: pytest.MonkeyPatch, absent: int
) -> None:
    """Each read of a device is a wait, however many parameters there are; none if each of them has a gradient."""
    parameters, sums = replicas(members, *[1] * 6)
    for rank, (own, of_rank) in enumerate(zip(parameters, sums, strict=True)):
        add(of_rank, *((p, 1.0) for place, p in enumerate(own) if place >= absent or place < rank))
    reads: list[str] = []
    for name in ("item", "tolist", "__bool__", "__float__", "__int__"):
        read = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda t, read=read, name=name: [reads.append(name), read(t)][1])
    summed(*sums)
    monkeypatch.undo()
    assert reads == ["tolist"] * (2 if absent > 1 else absent)
    expected = [[[2.0]] * 6, [[1.0], *[[2.0]] * 5], [[1.0], *[None] * 4, [2.0]]][min(absent, 2)]
    assert [grads(own) for own in parameters] == [expected, expected]


def test_an_update_in_which_no_parameter_has_a_gradient_anywhere(members: Sequence[Any]) -> None:
    parameters, sums = replicas(members, 1)
    for ranks_with_one in ([], [1], [], [0]):
        for rank in ranks_with_one:
            add(sums[rank], (parameters[rank][0], 5.0))
        summed(*sums)
        assert [grads(own) for own in parameters] == [[[5.0] if ranks_with_one else None]] * 2
        for of_rank in sums:
            of_rank.clear()


def test_a_rehearsal_sums_messages_of_the_same_size_and_leaves_gradients_alone(members: Sequence[Any]) -> None:
    parameters, sums = replicas(members, 2, 3)
    for of_rank in sums:
        of_rank.rehearse()
    for _ in range(2):
        summed(*sums)
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
    arguments = parameters, group, tuple(range(size)), Names(0, 0, 2, 20.0), BlockingWait(20.0)
    return WideGradientSum(1, *arguments, torch.float32)


def half(*values: float) -> nn.Parameter:
    return parameter(*values, dtype=torch.bfloat16)


def micro_batches(sums: Any, of: nn.Parameter) -> None:
    """One large gradient, and then small ones, each lost if it is added to the large one in bfloat16."""
    for scale in (1.0, *[TINY] * 8):
        add(sums, (of, scale))
        assert of.grad is None


def test_small_gradients_are_not_lost_beside_large_ones() -> None:
    weight = half(1, 1)
    plain, sums = half(1, 1), wide([weight])
    micro_batches(sums, weight)
    summed(sums)
    assert weight.main_grad.tolist() == [1 + 8 * TINY] * 2  # type: ignore[attr-defined]
    assert weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16
    for scale in (1.0, *[TINY] * 8):
        backward((plain, scale))
    assert grads([weight, plain]) == [[1 + 8 * TINY] * 2, [1, 1]], "or the test tells nothing"


def test_replicas_are_summed_in_the_wider_dtype_and_what_none_has_stays_none(members: Sequence[Any]) -> None:
    parameters = [[half(1), half(1), half(1)] for _ in members]
    sums = [wide(of_rank, group, 2) for of_rank, group in zip(parameters, members, strict=True)]
    for rank, (both, one, _) in enumerate(parameters):
        micro_batches(sums[rank], both)
        if rank:
            add(sums[rank], (one, 3.0))
    summed(*sums)
    for both, one, none in parameters:
        assert main_gradient(both) == torch.tensor([2 + 16 * TINY])
        assert main_gradient(one) == torch.tensor([3.0])
        assert main_gradient(none) is None
        assert none.grad is None


def test_a_gradient_that_was_cleared_is_gone_in_both_dtypes() -> None:
    """By hand, and at the end of the update."""
    weight = half(1)
    sums = wide([weight])
    micro_batches(sums, weight)
    summed(sums)
    weight.grad = None
    assert main_gradient(weight) is None
    sums.clear()
    micro_batches(sums, weight)
    summed(sums)
    sums.clear()
    assert weight.grad is None
    assert weight.main_grad is None  # type: ignore[attr-defined]
    add(sums, (weight, 5.0))
    summed(sums)
    assert main_gradient(weight) == torch.tensor([5.0])


# Counts.


def counting(parameters: Sequence[nn.Parameter], group: Any = None, size: int = 1) -> Any:
    count = Count(1, 8.0, torch.device("cpu"))
    names = Names(0, 0, 2, 20.0)
    return GradientSum(1, parameters, group, tuple(range(size)), names, BlockingWait(20.0), loss_count=count)


def count(sums: Any, *numbers: float) -> None:
    sums.count((torch.tensor(numbers, dtype=torch.float64),))


def test_gradients_are_corrected_by_what_the_update_counts() -> None:
    """The count begins anew with each update; where nothing counts gradients are zero."""
    weight = parameter(1, 1)
    sums = counting([weight])
    for counts, scale, expected in (([3.0, 0.0, 2.0], 1.0, 3 * 8 / 5), ([1.0], 1.0, 8.0), ([0.0], 0.0, 0.0)):
        for number in counts:
            add(sums, (weight, scale))
            count(sums, number)
        summed(sums)
        torch.testing.assert_close(weight.grad, torch.full((2,), expected))
        sums.clear()


def test_replicas_count_together(members: Sequence[Any]) -> None:
    """One of them ran no micro-batch at all."""
    weights = [parameter(1.0), parameter(1.0)]
    sums = [counting([weight], group, 2) for weight, group in zip(weights, members, strict=True)]
    add(sums[0], (weights[0], 1.0))
    count(sums[0], 2.0)
    summed(*sums)
    assert grads(weights) == [[4.0], [4.0]]


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_a_count_that_is_none_is_an_error_of_the_model(wrong: float) -> None:
    sums = counting([parameter(1.0)])
    sums.collect()
    count(sums, wrong)
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


THREE_FOUR = torch.tensor([3.0, 4.0])
OTHERS = torch.tensor([1.0, -2.0, 0.0])


@pytest.mark.parametrize(
    ("held", "order", "whole"),
    [
        pytest.param([{(0, 1): [THREE_FOUR]}] * 2, 2.0, [THREE_FOUR], id="what stages share counts once"),
        pytest.param([{(0,): [THREE_FOUR]}, {(1,): []}], 2.0, [THREE_FOUR], id="a rank without gradients"),
        pytest.param(
            [{(0,): [torch.tensor([torch.nan])]}, {(1,): [torch.ones(2)]}], 2.0, [torch.tensor([torch.nan])], id="nan"
        ),
        *(
            pytest.param(
                [{(0,): [THREE_FOUR, torch.zeros(2)]}, {(1,): [OTHERS]}],
                order,
                [THREE_FOUR, torch.zeros(2), OTHERS],
                id=f"order {order}",
            )
            for order in (0.0, 1.0, 3.0, float("inf"))
        ),
    ],
)
def test_a_norm_is_that_of_one_process(
    alone: World, held: list[dict[Group, Tensors]], order: float, whole: Tensors
) -> None:
    ties = tuple(group for group in held[0] if len(group) > 1)
    with worlds(alone, job(ties=ties)) as ranks:
        norms = together(
            [partial(total_norm, w.control_group, w.job, mine, order) for w, mine in zip(ranks, held, strict=True)]
        )
    expected = float(torch.nn.utils.get_total_norm(whole, order))
    assert [float(norm) for norm in norms] == pytest.approx([expected] * 2, nan_ok=True)


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


# Sums of gradients of a GPU by gloo: as without one, and what has to be known of them is read on the host.


def staged(
    members: Sequence[Any], kind: Any, lazy: tuple[str, ...], *shapes: int, **options: Any
) -> tuple[list[list[nn.Parameter]], list[Any], list[ModelGpu]]:
    """Replicas as those of `replicas`, with sums that go through a staging."""
    parameters = [[parameter(*[1.0] * n) for n in shapes] for _ in members]
    gpus = [ModelGpu(lazy) for _ in members]
    sums = [
        kind("s1", own, group, (0, 1), Names(0, 0, 2, 20.0), BlockingWait(20.0), staging=Staging(gpu), **options)
        for own, group, gpu in zip(parameters, members, gpus, strict=True)
    ]
    return parameters, sums, gpus


COPYING = (("outgoing",), ("incoming",), ("outgoing", "incoming"), ())
"""The streams that do nothing before they have to; here the CPU computes at once."""


@pytest.mark.parametrize("kind", [GradientSum, WideGradientSum])
@pytest.mark.parametrize("lazy", COPYING)
def test_sums_through_a_staging_are_those_without(members: Sequence[Any], kind: Any, lazy: tuple[str, ...]) -> None:
    """Three parameters: both ranks have a gradient for the first, one for the second, none for the third."""
    options = {"dtype": torch.float32} if kind is WideGradientSum else {}
    parameters, sums, gpus = staged(members, kind, lazy, 2, 1, 1, **options)
    for update in (1.0, 2.0):
        backward((parameters[0][0], update), (parameters[0][1], 3.0))
        backward((parameters[1][0], update))
        for of_rank in sums:
            of_rank.collect()
        summed(*sums)
        for both, first, none in parameters:
            assert torch.equal(both.grad, torch.full((2,), 2 * update))  # type: ignore[arg-type]
            assert torch.equal(first.grad, torch.tensor([3.0]))  # type: ignore[arg-type]
            assert none.grad is None
        for of_rank in sums:
            of_rank.clear()
    assert all(gpu.blocked["MainThread"] == 0 for gpu in gpus)


def test_what_an_update_counts_is_read_on_the_host(members: Sequence[Any]) -> None:
    """The sum has not come to the GPU when it is read."""
    gpus = [ModelGpu(("outgoing", "incoming"), ("wait", "computing")) for _ in members]
    counts = [Count(1, 8.0, torch.device("cpu")) for _ in members]
    weights = [parameter(1.0), parameter(1.0)]
    sums = [
        GradientSum("s1", [weight], group, (0, 1), Names(0, 0, 2, 20.0), BlockingWait(20.0), None, count, Staging(gpu))
        for weight, group, count, gpu in zip(weights, members, counts, gpus, strict=True)
    ]
    backward((weights[0], 1.0))
    sums[0].collect()
    for of_rank, number in zip(sums, (2.0, 6.0), strict=True):
        of_rank.count((torch.full((1,), number, dtype=torch.float64),))
    summed(*sums)
    assert [count.tensor.item() for count in counts] == [2.0, 6.0]
    assert weights[0].grad == torch.tensor([8.0 / (2.0 + 6.0)])
    assert weights[1].grad is not None, "a rank has one, as the host knows"


# Digests of weights: any change of a bit shows.


def number(weights: list[torch.Tensor]) -> int:
    """The number of a group with these weights, which ranks compare."""
    replicas = Replicas({(0,): weights}, dict.fromkeys(weights, "a weight"), from_host)
    return replicas.begin(0)[0,]()[0]


def test_weights_are_compared_often_at_first_and_then_now_and_then() -> None:
    assert [update for update in range(500) if is_due(update)] == [
        *(1, 2, 4, 8, 16, 32, 64, 100, 128, 200, 256, 300, 400),
    ]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex128]
)
def test_a_bit_changes_the_digest_and_a_copy_does_not(dtype: torch.dtype) -> None:
    weights = [torch.randn(5, 7).to(dtype), torch.ones(3).to(dtype)]
    others = [weight.clone() for weight in weights]
    assert number(weights) == number(others) < 2**20
    assert bits(weights[1]) == bits(others[1]) < 2**20
    others[1].view(torch.uint8)[0] ^= 1
    assert number(weights) != number(others)
    assert bits(weights[1]) != bits(others[1])


def test_parameters_count_in_their_order_and_whatever_their_memory_is_like() -> None:
    first, other = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(4, 6))
    assert number([first, other]) != number([other, first])
    assert bits(first) == bits(first.detach().t().contiguous().t())
    assert bits(torch.zeros(0)) == 0


def test_groups_without_parameters_have_no_digest() -> None:
    weight = torch.ones(2)
    replicas = Replicas({(0,): [weight], (1,): []}, {weight: "weight"}, from_host)
    assert list(replicas.begin(0)) == list(replicas.begin(0, [(0,), (1,)])) == [(0,)]
    number, text = replicas.begin(0)[0,]()
    assert text() == {"a digest of weight": f"{number:x}"}
