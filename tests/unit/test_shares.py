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


@pytest.mark.parametrize(
    ("several", "taken"),
    [
        pytest.param([(0, 1, 3.0, 4.0)], [4], id="alone"),
        pytest.param([(0, 1, 0.0, 4.0), (0, 2, 0.0, 4.0)], [8, 8], id="two that leave at once get half each"),
        pytest.param([(0, 2, 0.0, 4.0), (1, 2, 0.0, 4.0)], [8, 8], id="two that arrive at once get half each"),
        pytest.param([(0, 1, 0.0, 4.0), (1, 0, 0.0, 4.0), (1, 2, 9.0, 4.0)], [4, 4, 4], id="opposite directions"),
        # The first sends 1 of 4 alone, then 3 in 6; the second then has 1 left.
        pytest.param([(0, 1, 0.0, 4.0), (0, 2, 1.0, 4.0)], [7, 7], id="a later one takes a share of what is left"),
        # Three thirds until 3, two halves until 7, then all.
        pytest.param([(0, 1, 0.0, 1.0), (0, 2, 0.0, 3.0), (0, 3, 0.0, 5.0)], [3, 7, 9], id="a short one leaves"),
        # Three arrive at 9 with a third each; one of their senders has two thirds for another message.
        pytest.param(
            [(0, 9, 0.0, 4.0), (1, 9, 0.0, 4.0), (2, 9, 0.0, 4.0), (2, 3, 0.0, 4.0)], [12, 12, 12, 6], id="held up"
        ),
    ],
)
def test_messages_share_the_ports_that_they_use(several: list[tuple[int, int, float, float]], taken: list[int]) -> None:
    assert wires(*several) == pytest.approx(taken)


def test_ports_of_their_own_change_nothing() -> None:
    assert wires((0, 1, 0.0, 4.0), (0, 2, 0.0, 4.0), own=True) == [4.0, 4.0]
