"""Messages that share ports, worked out by hand: b seconds each if it were alone."""

import pytest

from chimera_ir.ir.kinds import ACTIVATIONS
from chimera_ir.ir.ops import Message, Micro, Send, Stage, Worker
from chimera_ir.predict.events import Events, Node, Port, Role, with_shared_ports
from chimera_ir.profile.cluster import Link

LINK = Link(0.0, 1.0, shared=True)


def wires(*several: tuple[int, int, float, float], own: bool = False) -> list[float]:
    """How long messages take, of each the sender, the receiver, when it is sent, and its b."""
    nodes: list[Node] = []
    before: list[list[int]] = []
    ports: dict[int, tuple[Port, Port]] = {}
    for number, (source, target, posted, alone) in enumerate(several):
        send = Send(Message((Micro(number),), Stage(0), Stage(1), ACTIVATIONS), Worker(target))
        ends = Worker(source), Worker(target)
        nodes += [Node(Role.POST, send, ends[:1], posted), Node(Role.WIRE, send, ends, alone)]
        before += [[], [2 * number]]
        if not own:
            ports[2 * number + 1] = Port(ends[0], True, LINK), Port(ends[1], False, LINK)
    found = with_shared_ports(Events(nodes, before, {}, [], ports))
    return [node.seconds for node in found.nodes if node.role is Role.WIRE]


def test_one_alone_takes_its_time() -> None:
    assert wires((0, 1, 3.0, 4.0)) == [4.0]


def test_two_that_leave_at_once_get_half_each() -> None:
    assert wires((0, 1, 0.0, 4.0), (0, 2, 0.0, 4.0)) == [8.0, 8.0]


def test_two_that_arrive_at_once_get_half_each() -> None:
    assert wires((0, 2, 0.0, 4.0), (1, 2, 0.0, 4.0)) == [8.0, 8.0]


def test_opposite_directions_do_not_meet() -> None:
    assert wires((0, 1, 0.0, 4.0), (1, 0, 0.0, 4.0), (1, 2, 9.0, 4.0)) == [4.0, 4.0, 4.0]


def test_a_later_one_takes_a_share_of_what_is_left() -> None:
    """The first sends 1 of 4 alone, then 3 in 6; the second then has 1 left."""
    assert wires((0, 1, 0.0, 4.0), (0, 2, 1.0, 4.0)) == [7.0, 7.0]


def test_a_short_one_leaves_the_port_to_the_others() -> None:
    """Three thirds until 3, two halves until 7, then all."""
    assert wires((0, 1, 0.0, 1.0), (0, 2, 0.0, 3.0), (0, 3, 0.0, 5.0)) == [3.0, 7.0, 9.0]


def test_who_is_held_up_at_one_end_leaves_room_at_the_other() -> None:
    """Three arrive at 9 with a third each; one of their senders has two thirds for another message."""
    taken = wires((0, 9, 0.0, 4.0), (1, 9, 0.0, 4.0), (2, 9, 0.0, 4.0), (2, 3, 0.0, 4.0))
    assert taken == pytest.approx([12.0, 12.0, 12.0, 6.0])


def test_ports_of_their_own_change_nothing() -> None:
    assert wires((0, 1, 0.0, 4.0), (0, 2, 0.0, 4.0), own=True) == [4.0, 4.0]
