"""Results of ranks put together: sums over all, outputs of a copy on each of its ranks."""

from functools import partial

import pytest
import torch

from chimera_runtime.errors import PeerLost
from chimera_runtime.ranks.agreement import Enquiry, added_over_all, gathered, receive_value, send_value
from chimera_runtime.ranks.world import World
from chimera_runtime.values.nested import leaves
from tests.unit.runtime.thread_ranks import job, together, worlds


def test_numbers_are_added_over_all_ranks_of_all_copies(alone: World) -> None:
    with worlds(alone, job(), copies=2) as ranks:
        calls = [partial(added_over_all, world.control_group, 10.0**rank, rank) for rank, world in enumerate(ranks)]
        assert together(calls) == [[1111.0, 6.0]] * 4


def test_outputs_are_on_every_rank_of_their_copy_in_order(alone: World) -> None:
    """Both workers know some, in two copies that know nothing of each other."""
    with worlds(alone, job(), copies=2) as ranks:

        def mine(rank: int) -> dict[int, tuple[torch.Tensor, str]]:
            micros = (0, 3) if rank % 2 == 0 else (1, 2)
            return {micro: (torch.full((2,), 10.0 * rank + micro), "plain") for micro in reversed(micros)}

        of_copies = together(
            [partial(gathered, world.control_group, [0, 1], mine(rank)) for rank, world in enumerate(ranks)]
        )
    for rank, outputs in enumerate(of_copies):
        first = rank // 2 * 2
        assert list(outputs) == [0, 1, 2, 3]
        assert [tensor[0].item() for tensor, _ in outputs.values()] == [
            10.0 * (first + micro in (first + 1, first + 2)) + 10.0 * first + micro for micro in range(4)
        ]
        assert {text for _, text in outputs.values()} == {"plain"}


def test_outputs_are_gathered_where_there_is_no_numpy(alone: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def numpy(*_: object, **__: object) -> None:
        raise RuntimeError("Numpy is not available")

    monkeypatch.setattr(torch.Tensor, "numpy", numpy)
    with worlds(alone, job()) as ranks:
        calls = [
            partial(gathered, world.control_group, [0], {0: torch.ones(2)} if rank == 0 else {})
            for rank, world in enumerate(ranks)
        ]
        assert [outputs[0].tolist() for outputs in together(calls)] == [[1.0, 1.0]] * 2


def test_of_a_view_only_its_part_travels(alone: World) -> None:
    large = torch.arange(1e6)
    with worlds(alone, job()) as ranks:
        both = together(
            [
                partial(gathered, ranks[0].control_group, [0], {0: large[5:7]}),
                partial(gathered, ranks[1].control_group, [0], {}),
            ],
        )
    assert [outputs[0].tolist() for outputs in both] == [[5.0, 6.0]] * 2
    assert both[1][0].untyped_storage().nbytes() == 8


def test_a_rank_that_does_not_answer_is_named(alone: World) -> None:
    with worlds(alone, job(), timeout=0.2) as ranks, pytest.raises(PeerLost, match="for the outputs of an evaluation"):
        gathered(ranks[0].control_group, [1], {})


def test_values_of_any_dtype_and_layout_in_memory_are_sent(alone: World) -> None:
    """gloo itself knows few dtypes, and no gaps in memory."""
    dtypes = torch.bool, torch.int16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64
    value = {
        "turned": torch.arange(6.0).view(2, 3).t(),
        "channels last": torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "nothing": [None, torch.zeros(0, 2), torch.tensor(3)],
        (1, "of"): [torch.ones(3).to(dtype) for dtype in dtypes],
    }
    with worlds(alone, job()) as (first, second):
        _, received = together(
            [
                partial(send_value, first.control_group, value, 1, "for a test"),
                partial(receive_value, second.control_group, 0, "for a test"),
            ]
        )
    assert received.keys() == value.keys()
    assert received["nothing"][0] is None
    for sent, came in zip(leaves(value), leaves(received), strict=True):
        if sent is not None:
            assert (came.shape, came.dtype) == (sent.shape, sent.dtype)
            assert torch.equal(came.to(torch.complex128), sent.to(torch.complex128))


def test_rank_0_asks_and_all_others_get_the_outcome(alone: World) -> None:
    with worlds(alone, job(), copies=2) as ranks:

        def take_part(world: World) -> list[object]:
            answers = {"sum": lambda *numbers: torch.tensor(sum(numbers) + world.place.rank)}
            enquiry = Enquiry(world.control_group, "asked", answers, "for rank 0")
            if world.place.rank:
                return enquiry.serve()
            of_ranks = [enquiry.ask(rank, "sum", 10, 20).item() for rank in (3, 0, 1, 2)]
            enquiry.end(True, of_ranks)
            return [True, of_ranks]

        assert together([partial(take_part, world) for world in ranks]) == [[True, [33, 30, 31, 32]]] * 4
