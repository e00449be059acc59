"""What one rank refuses ends the calls of the others, unless all refuse the same."""

import time
from collections.abc import Iterator

import pytest
from torch.distributed import HashStore

from chimera_runtime.errors import BadModel, Misuse, PeerLost, Refused
from chimera_runtime.ranks.refusals import Refusals
from tests.patience import PATIENCE


@pytest.fixture
def pair() -> Iterator[list[Refusals]]:
    store = HashStore()
    ranks = [Refusals(store, rank, 2, timeout=0.3, period=0.05) for rank in range(2)]
    for rank in ranks:
        rank.watch()
    yield ranks
    for rank in ranks:
        rank.close()


def refuse(rank: Refusals, error: Exception) -> None:
    with pytest.raises(type(error)), rank.call():
        raise error


def send(rank: Refusals) -> None:
    with rank.call():
        rank.note_sending()


def wait_for_error(rank: Refusals) -> PeerLost:
    deadline = time.monotonic() + PATIENCE
    while rank.error is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert rank.error is not None
    return rank.error


@pytest.mark.parametrize("error", [Misuse("too small"), BadModel("too small")])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_call_that_another_rank_refuses_ends(pair: list[Refusals], error: Exception, is_late: bool) -> None:
    broken: list[PeerLost] = []
    pair[0].break_off = broken.append
    for refuses in (False, True) if is_late else (True, False):
        if refuses:
            refuse(pair[1], error)
        else:
            send(pair[0])
    found = wait_for_error(pair[0])
    assert isinstance(found, Refused)
    assert (str(found), found.peers) == ("rank 1: too small", (1,))
    with pytest.raises(Misuse, match="rank 1: too small"):
        pair[0].check()
    wait_for_error(pair[1])  # the rank that goes on learns that the other one cannot
    pair[0].close()
    assert broken == [found]


def test_a_call_that_all_ranks_refuse_leaves_no_trace(pair: list[Refusals]) -> None:
    for rank in pair:
        send(rank)
    refuse(pair[0], Misuse("too small"))
    time.sleep(0.2)
    refuse(pair[1], Misuse("too small"))
    for rank in pair:
        with rank.call(), rank.call():
            rank.note_sending()
    time.sleep(0.2)
    assert [rank.error for rank in pair] == [None, None]


def test_an_error_of_a_loader_is_a_cause_and_ends_nothing(pair: list[Refusals]) -> None:
    pair[1].note_loading(Misuse("no such file"))
    send(pair[0])
    time.sleep(0.2)
    assert pair[0].error is None
    assert str(pair[0].cause()) == "rank 1: no such file"


def test_an_error_after_messages_ends_every_call(pair: list[Refusals]) -> None:
    pair[1].tell(PeerLost("rank 1: wait"))
    assert pair[0].cause() is None, "it has a cause elsewhere"
    pair[1].tell(BadModel("another shape"))
    assert str(wait_for_error(pair[0])) == "rank 1: another shape"
