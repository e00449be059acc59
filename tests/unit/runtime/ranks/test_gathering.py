"""Results of ranks put together: sums over all, outputs of a copy on each of its ranks."""

from functools import partial

import pytest
import torch

from chimera_runtime.errors import PeerLost
from chimera_runtime.ranks.gathering import added_over_all, gathered
from chimera_runtime.ranks.world import World
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
