"""The communicators of messages, and which programs may have them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from chimera_runtime.errors import Misuse
from chimera_runtime.program.job import Job, Place
from chimera_runtime.ranks.communicators import CHOICES, DIRECTED, PAIR, channels, chosen
from tests.unit.runtime.thread_ranks import job

RING = replace(job(workers=3, stages=3, placement=((0, 1, 2),)), links=((0, 1), (1, 0), (1, 2), (2, 0), (2, 1)))


class Maker:
    """Makes a name for each communicator, for the rank that asks, and remembers in which order."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.made: list[tuple[int, ...]] = []

    def __call__(self, ranks: Sequence[int], backend: str) -> Any:
        assert backend == "nccl"
        self.made.append(tuple(ranks))
        return f"{len(self.made)}" if self.rank in ranks else None


def made(of: Job, rank: int, communicators: str, copies: int = 1) -> tuple[dict[tuple[int, int], Any], Maker]:
    maker = Maker(rank)
    return channels(of, Place(rank, 3, copies, "pipeline"), "nccl", maker, communicators), maker


def test_each_direction_has_one() -> None:
    mine, maker = made(RING, 1, DIRECTED)
    assert maker.made == [*RING.links]
    assert mine == {(0, 1): "1", (1, 0): "2", (1, 2): "3", (2, 1): "5"}


def test_both_directions_share_one() -> None:
    mine, maker = made(RING, 1, PAIR)
    assert maker.made == [(0, 1), (0, 2), (1, 2)]
    assert mine == {(0, 1): "1", (1, 0): "1", (1, 2): "3", (2, 1): "3"}
    assert made(RING, 0, PAIR)[0] == {(0, 1): "1", (1, 0): "1", (0, 2): "2", (2, 0): "2"}


@pytest.mark.parametrize("communicators", CHOICES)
def test_all_ranks_make_all_of_them_in_one_order_and_have_those_of_their_copy(communicators: str) -> None:
    makers = [made(RING, rank, communicators, copies=2) for rank in range(6)]
    assert len({tuple(maker.made) for _, maker in makers}) == 1
    assert len(makers[0][1].made) == 2 * (5 if communicators == DIRECTED else 3)
    for (first, _), (second, _) in zip(makers[:3], makers[3:], strict=True):
        assert first.keys() == second.keys()
        assert not {*first.values()} & {*second.values()}


def test_gloo_needs_none() -> None:
    assert channels(RING, Place(0, 3, 1, "pipeline"), "gloo", Maker(0), DIRECTED) == {}


@pytest.mark.parametrize("backend", ["gloo", "nccl", "strict"])
def test_one_for_each_direction_is_always_proven(backend: str) -> None:
    assert chosen(RING, backend, DIRECTED) == DIRECTED


def test_what_is_proven_is_taken() -> None:
    assert chosen(replace(RING, communicators=("directed", "pair")), "nccl", PAIR) == PAIR


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize(
    ("proven", "choice"),
    [(("directed",), DIRECTED), (("directed", "pair"), PAIR)],
)
def test_by_default_it_is_the_fewest_that_are_proven(backend: str, proven: tuple[str, ...], choice: str) -> None:
    assert chosen(replace(RING, communicators=proven), backend, None) == choice


@pytest.mark.parametrize(
    ("of", "backend", "communicators", "words"),
    [
        (RING, "nccl", PAIR, "two could wait for ever with one communicator for both directions"),
        (replace(RING, communicators=CHOICES), "gloo", PAIR, "gloo finds messages by their tags, so there is nothing"),
        (RING, "nccl", "single", "communicators single: it is one of directed, pair"),
    ],
)
def test_what_could_wait_for_ever_or_means_nothing_is_refused(
    of: Job, backend: str, communicators: str, words: str
) -> None:
    with pytest.raises(Misuse) as error:
        chosen(of, backend, communicators)
    assert words in str(error.value)
