"""Messages: what arrives is what was sent, and what is said of one that does not arrive."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chimera_runtime.errors import PeerLost
from chimera_runtime.ranks.messages import Names, Peer, tag_of, unrecorded, waiter
from chimera_runtime.ranks.world import World
from chimera_runtime.values.nested import Tensors
from tests.unit.runtime.thread_ranks import groups

MICROS = st.integers(0, 2**40)
STAGES = st.integers(2, 1000)


def names(timeout: float = 20.0) -> Names:
    return Names(rank=3, worker=1, stages=4, timeout=timeout)


@pytest.fixture
def pair(alone: World) -> Iterator[tuple[Peer, Peer]]:
    """Two ranks: the first one's way to the second, and back."""
    with groups(2) as members:
        yield tuple(Peer(1 - r, 1 - r, members[r], members[r], names(), waiter(20.0)) for r in range(2))  # type: ignore[misc]


@pytest.fixture
def impatient(alone: World) -> Iterator[Peer]:
    """A way to a rank that says nothing; each wait is over soon."""
    with groups(2) as members:
        yield Peer(1, 1, members[0], members[0], names(0.05), waiter(0.05))


# Tags.


@given(micro=MICROS, stages=STAGES, data=st.data())
def test_the_words_for_a_tag_are_the_message_it_stands_for(micro: int, stages: int, data: st.DataObject) -> None:
    source = data.draw(st.integers(0, stages - 1))
    target = data.draw(st.sampled_from([s for s in (source - 1, source + 1) if 0 <= s < stages]))
    tag = tag_of(micro, source, "y" if source < target else "dx", stages)
    operation = Names(0, 0, stages, 1.0).operation("recv", tag)
    assert operation == f"recv m{micro} s{source}->s{target}"
    operation = Names(0, 0, stages, 1.0, slices=3).operation("recv", tag)
    assert operation == f"recv m{micro // 3} q{micro % 3} s{source}->s{target}"


@given(stages=STAGES, messages=st.lists(st.tuples(MICROS, st.integers(0, 999), st.booleans()), max_size=20))
def test_no_two_messages_share_a_tag(stages: int, messages: list[tuple[int, int, bool]]) -> None:
    """Tags differ in micro-batches, or in the value that crosses the same two stages."""
    distinct = {(micro, source % (stages - 1) + back, "dx" if back else "y") for micro, source, back in messages}
    assert len({tag_of(*message, stages) for message in distinct}) == len(distinct)


@given(st.lists(MICROS, min_size=1, max_size=5))
def test_of_several_micro_batches_the_first_names_the_message(micros: list[int]) -> None:
    assert tag_of(tuple(micros), 1, "y", 4) == tag_of(micros[0], 1, "y", 4)


# What arrives.


def test_tensors_arrive_as_they_were_sent_all_of_a_message(pair: tuple[Peer, Peer]) -> None:
    there, back = pair
    message = (torch.arange(6.0).reshape(2, 3), torch.tensor([1, -1]), torch.tensor([1 + 2j, 3j]), torch.tensor(True))
    buffers = tuple(torch.zeros_like(tensor) for tensor in message)
    tag = tag_of(5, 0, "y", 4)
    received = back.irecv(buffers, tag)
    sent = there.isend(message, tag)
    received.wait()
    sent.wait()
    assert received.tensors is buffers
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(buffers, message, strict=True))


def test_a_transport_is_given_complex_numbers_as_pairs_of_real_ones(pair: tuple[Peer, Peer]) -> None:
    """NCCL knows no others."""

    class Transport:
        def send(self, tensors: list[torch.Tensor], _rank: int, _tag: int) -> None:
            posted.extend(tensors)

        recv = send

    posted: list[torch.Tensor] = []
    there, message = pair[0], (torch.tensor([1 + 2j, 3j]), torch.ones(1))
    there._outgoing = there._incoming = Transport()  # type: ignore[assignment]
    there.isend(message, 0)
    there.irecv(message, 0)
    assert [tensor.tolist() for tensor in posted] == [[[1, 2], [0, 3]], [1]] * 2
    assert posted[2].untyped_storage().data_ptr() == message[0].untyped_storage().data_ptr()


def test_messages_find_their_buffers_in_whatever_order_they_are_posted(pair: tuple[Peer, Peer]) -> None:
    there, back = pair
    tags = [tag_of(micro, 0, "y", 4) for micro in range(3)]
    sends = [there.isend((torch.tensor([float(tag)]),), tag) for tag in tags]
    receives = {tag: back.irecv((torch.zeros(1),), tag) for tag in reversed(tags)}
    for transfer in (*receives.values(), *sends):
        transfer.wait()
    assert {tag: transfer.tensors[0].item() for tag, transfer in receives.items()} == {tag: tag for tag in tags}


def test_tags_of_a_long_run_fit_the_wire(pair: tuple[Peer, Peer]) -> None:
    """Micro-batches that are counted over a whole run outgrow what a transport takes as a tag."""
    there, back = pair
    tag = tag_of(2**40, 0, "y", 4)
    received, sent = back.irecv((torch.zeros(1),), tag), there.isend((torch.ones(1),), tag)
    received.wait()
    sent.wait()
    assert received.tensors[0].item() == 1


def test_what_was_sent_is_let_go_and_what_was_received_is_kept(pair: tuple[Peer, Peer]) -> None:
    there, back = pair
    received, sent = back.irecv((torch.zeros(1),), 0), there.isend((torch.ones(1),), 0)
    assert len(sent.tensors) == 1
    for transfer in (received, sent, received, sent):
        transfer.wait()
    assert sent.tensors == ()
    assert len(received.tensors) == 1


def test_a_message_without_tensors_is_over_at_once(pair: tuple[Peer, Peer]) -> None:
    nothing: Tensors = ()
    pair[0].isend(nothing, 0).wait()
    pair[1].irecv(nothing, 0).wait()


# What is said of one that does not arrive.


def test_a_wait_that_takes_too_long_names_rank_operation_and_peer(impatient: Peer) -> None:
    transfer = impatient.irecv((torch.zeros(1),), tag_of(7, 2, "dx", 4))
    with pytest.raises(PeerLost) as lost:
        transfer.wait()
    assert str(lost.value) == (
        "rank 3 (worker 1): wait recv m7 s2->s1: rank 1: no answer within 0.05 s (timeout); "
        "it may be stuck, or slower than that"
    )
    assert lost.value.peers == (1,)


def test_after_a_loss_nothing_more_can_be_posted_and_that_says_so_too(impatient: Peer) -> None:
    with pytest.raises(PeerLost):
        impatient.irecv((torch.zeros(1),), 0).wait()
    for post, verb in ((impatient.isend, "send"), (impatient.irecv, "recv")):
        with pytest.raises(PeerLost, match=rf"wait {verb} m2 s0->s1: rank 1: "):
            post((torch.zeros(1),), tag_of(2, 0, "y", 4)).wait()


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        ("[/x/buffer.cc:79] Timed out waiting 50ms for recv", "no answer within 20 s (timeout); it may be stuck"),
        ("Wait timeout: timed out", "no answer within 20 s (timeout)"),
        ("Connection closed by peer", "the connection was closed; it has died or ended"),
        ("Read error: Connection reset by peer", "the connection was closed; it has died or ended"),
        ("unexpected EOF", "the connection was closed"),
        ("writev: Broken pipe", "the connection was closed; it has died or ended"),
        ("something else\nwith a second line", "something else"),
    ],
)
def test_what_a_transport_says_is_told_in_the_words_of_a_user(error: str, cause: str) -> None:
    lost = names().lost("recv m0 s0->s1", [5], RuntimeError(error))
    assert str(lost).startswith(f"rank 3 (worker 1): wait recv m0 s0->s1: rank 5: {cause}")
    assert "\n" not in str(lost)


@pytest.mark.parametrize(("peers", "words"), [([], "the other ranks"), ([4], "rank 4"), ([4, 5, 7], "ranks 4, 5, 7")])
def test_those_who_were_waited_for_are_counted(peers: list[int], words: str) -> None:
    lost = names().lost("all_reduce s0", peers, RuntimeError("closed"))
    assert f"wait all_reduce s0: {words}: closed" in str(lost)
    assert lost.peers == tuple(peers)


def test_the_profiler_of_torch_does_not_see_what_is_posted_and_sees_what_follows() -> None:
    x = torch.ones(2)
    with torch.profiler.profile() as profile:
        assert torch.equal(unrecorded(torch.add, x, x, alpha=2), 3 * x)
    names = {event.name for event in profile.events()}
    assert "aten::mul" in names
    assert "aten::add" not in names
