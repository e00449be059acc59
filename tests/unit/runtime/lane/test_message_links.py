"""Links: which message goes where, into which slot, under which tag, and that it is taken once."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from chimera_runtime.errors import BadModel
from chimera_runtime.lane import Lane
from chimera_runtime.lane.lane import Incoming, LaneComponents, Outgoing
from chimera_runtime.program.rank_facts import Route
from chimera_runtime.ranks.messages import tag_of
from chimera_runtime.values.nested import Tensors
from chimera_runtime.values.shared_memory import Slots
from tests.unit.runtime.thread_ranks import job

STAGES = 4


class Transfer:
    """A message to or from the peer, which notes that it has been waited for."""

    def __init__(self, peer: "Peer", tensors: Tensors, tag: int) -> None:
        self.peer, self.tensors, self.tag = peer, tensors, tag

    def wait(self) -> None:
        self.peer.waited.append(self.tag)


class Peer:
    """Notes what is posted."""

    def __init__(self) -> None:
        self.sent: list[tuple[Tensors, int]] = []
        self.posted: list[tuple[Tensors, int]] = []
        self.waited: list[int] = []

    def isend(self, tensors: Tensors, tag: int) -> Transfer:
        self.sent.append((tensors, tag))
        return Transfer(self, tensors, tag)

    def irecv(self, buffers: Tensors, tag: int) -> Transfer:
        self.posted.append((buffers, tag))
        return Transfer(self, buffers, tag)


def slot(rows: int) -> Tensors:
    return torch.zeros(rows, 3), torch.zeros(rows)


def incoming(peer: Any, slots: Slots) -> Incoming:
    return Incoming(peer, Route(1, 2, 1), job(stages=STAGES), slots)


def outgoing(peer: Any, source: int, target: int) -> Outgoing:
    return Outgoing(peer, Route(source, target, 1), job(stages=STAGES))


def test_a_message_is_sent_under_the_tag_of_its_micro_batch_and_its_stages() -> None:
    peer, message = Peer(), (torch.ones(2),)
    link = outgoing(peer, 2, 1)
    link.isend(5, message)
    link.isend((7, 8), message)
    assert peer.sent == [(message, tag_of(5, 2, 1, "dx", STAGES)), (message, tag_of((7, 8), 2, 1, "dx", STAGES))]


def test_a_send_is_waited_for_by_its_micro_batches_in_any_order_and_once() -> None:
    peer = Peer()
    link = outgoing(peer, 0, 1)
    for micros in (0, 1, (2, 3)):
        link.isend(micros, ())
    link.wait((2, 3))
    link.wait(0)
    assert peer.waited == [tag_of((2, 3), 0, 1, "y", STAGES), tag_of(0, 0, 1, "y", STAGES)]
    with pytest.raises(KeyError):
        link.wait(0)
    with pytest.raises(KeyError):
        link.wait(2)
    link.isend(0, ())
    link.wait(0)


def test_a_message_comes_into_the_slot_that_it_is_posted_for() -> None:
    peer, slots = Peer(), Slots((1, 1), lambda _room: slot(2))
    link = incoming(peer, slots)
    link.irecv(4, into=1)
    link.irecv(6, into=0)
    assert peer.posted == [(slots[1], tag_of(4, 1, 2, "y", STAGES)), (slots[0], tag_of(6, 1, 2, "y", STAGES))]
    assert link.take(4) is slots[1]
    assert link.take(6) is slots[0]


def test_a_group_comes_into_as_much_of_a_roomy_slot_as_it_fills() -> None:
    """A slot with room for three micro-batches of two rows each."""
    peer, slots = Peer(), Slots((3,), lambda room: slot(2 * room))
    link = incoming(peer, slots)
    for micros, rows in (((0, 1, 2), 6), ((3, 4), 4), (5, 2), ((6,), 2)):
        link.irecv(micros, into=0)
        buffers, tag = peer.posted[-1]
        assert tag == tag_of(micros, 1, 2, "y", STAGES)
        assert [tuple(t.shape) for t in buffers] == [(rows, 3), (rows,)]
        assert [t.data_ptr() for t in buffers] == [t.data_ptr() for t in slots[0]]
        buffers[0].fill_(rows)
        assert (link.take(micros)[0] == rows).all()


def test_a_message_may_be_waited_for_before_it_is_taken_and_is_taken_once() -> None:
    peer = Peer()
    link = incoming(peer, Slots((1,), slot))
    link.irecv(3, into=0)
    link.wait(3)
    assert peer.waited == [tag_of(3, 1, 2, "y", STAGES)]
    link.take(3)
    for again in (link.take, link.wait):
        with pytest.raises(KeyError):
            again(3)


def test_what_was_not_posted_can_neither_be_waited_for_nor_taken() -> None:
    link = incoming(Peer(), Slots((1,), slot))
    with pytest.raises(KeyError):
        link.wait(0)
    with pytest.raises(KeyError):
        link.take(0)


def test_a_message_that_is_written_before_it_has_left_is_an_error_of_the_model() -> None:
    message = torch.ones(2)
    peer = Peer()
    link = outgoing(peer, 2, 3)
    held = sys.getrefcount(message)
    link.isend(5, (message,))
    link.wait(5)
    peer.sent.clear()
    assert sys.getrefcount(message) == held, "what has left is let go"
    link.isend(6, (message,))
    message.add_(1)
    with pytest.raises(BadModel, match=r"stage 2 handed on memory for micro-batch 6 .* before stage 3 had it"):
        link.wait(6)
    back = outgoing(Peer(), 2, 1)
    back.isend((7, 8), (message,))
    message.add_(1)
    with pytest.raises(BadModel, match="stage 2 handed back memory for micro-batch 7"):
        back.wait((7, 8))


# The contents of a lane, for the script of a rank.


def lane(**parts: Any) -> Lane:
    loads = parts.get("loads", (lambda first, micro: ("x", first, micro), lambda first, micro: ("y", first, micro)))
    return Lane(LaneComponents(*(parts.get(name, {}) for name in ("stages", "incoming", "outgoing")), *loads))


def test_stages_are_found_by_number_and_links_by_both_stages_and_the_other_worker() -> None:
    """Two links between the same stages lead to different workers where a stage has replicas."""
    found = lane(
        stages={0: "first", 3: "last"},
        incoming={Route(1, 0, 1): "from 1", Route(1, 0, 2): "from 2"},
        outgoing={Route(0, 1, 1): "to 1", Route(3, 2, 1): "back"},
    )
    assert [found.stage(0), found.stage(3)] == ["first", "last"]
    assert [found.incoming(1, 0, worker=1), found.incoming(1, 0, worker=2)] == ["from 1", "from 2"]
    assert [found.outgoing(0, 1, worker=1), found.outgoing(3, 2, worker=1)] == ["to 1", "back"]
    for absent in (lambda: found.stage(1), lambda: found.incoming(0, 1, worker=1), lambda: found.outgoing(1, 0, 1)):
        with pytest.raises(KeyError):
            absent()


def test_micro_batches_are_loaded_from_the_first_of_the_update_that_has_begun() -> None:
    begun: list[int] = []
    counted = lane(stages={0: SimpleNamespace(begin=begun.append), 1: SimpleNamespace(begin=begun.append)})
    assert counted.input(2) == ("x", 0, 2)
    counted.begin(5)
    assert begun == [5, 5]
    assert counted.input(2) == ("x", 5, 2)
    assert counted.target(0) == ("y", 5, 0)


def test_several_micro_batches_are_loaded_as_a_tuple() -> None:
    assert lane().input((1, 3)) == (("x", 0, 1), ("x", 0, 3))
    assert lane().target((2,)) == (("y", 0, 2),)


def test_where_several_stages_get_data_the_stage_is_told_to_what_loads_them() -> None:
    loaded: list[tuple[int, ...]] = []
    lane = Lane(LaneComponents({}, {}, {}, lambda *numbers: loaded.append(numbers), lambda *numbers: numbers))
    lane.input((4, 5), 2)
    assert loaded == [(0, 4, 2), (0, 5, 2)]
    assert lane.target(1, 3) == (0, 1, 3)


def test_values_that_were_made_apart_are_joined_but_for_those_of_micro_batches_without_items() -> None:
    lane = Lane(LaneComponents({}, {}, {}, lambda *_: None, lambda *_: None))
    first, second = ((torch.full((rows, 2), 1.0), torch.full((rows,), 2.0)) for rows in (1, 3))
    assert [tuple(tensor.shape) for tensor in lane.join(first, second)] == [(4, 2), (4,)]
    assert all(map(torch.equal, lane.join(first, ()), first))
