"""The net of a turn: its waits on small streams, and against the waits between the operations of many turns."""

import pytest

from chimera_ir import compile
from chimera_ir.flow.net import net_of, turn_net
from chimera_ir.ir.streams import ScheduleStream
from chimera_ir.ir.text.reader import parse
from chimera_ir.ir.turns import in_turn
from chimera_ir.source import Source

HEADER = "schedule x\nworkers 2\nstages 2\nmicro_batches 1\nupdates 1 per turn\npipe p on 0 1 micros 0..1\n"


def read(lanes: str) -> ScheduleStream:
    return parse(Source("test.sir", HEADER + lanes))


def test_the_waits_of_two_stages() -> None:
    net = turn_net(read("worker 0:\n F m s0 v-1\n B m-1 s0 v-2\nworker 1:\n F m s1 v\n B m s1 v\n"))
    assert [{*waits} for waits in net.waits] == [{(1, 1)}, {(0, 0), (3, 1)}, {(0, 0), (3, 1)}, {(2, 0)}]


def test_the_lane_waits_for_a_move_where_the_program_does() -> None:
    """The reload takes the link after the offload; the backward waits for it, and for the offload one turn before."""
    net = turn_net(
        read("worker 0:\n F m s0 v-1\n offload m s0\n reload m-1 s0\n B m-1 s0 v-2\nworker 1:\n F m s1 v\n B m s1 v\n")
    )
    forward, offload, reload, backward = range(4)
    assert (forward, 0) in net.waits[offload]
    assert (offload, 0) in net.waits[reload]
    assert (reload, 0) in net.waits[backward]
    assert (offload, 1) in net.waits[backward]


@pytest.mark.parametrize(
    ("scheme", "sizes"), [("pipedream", {"D": 4}), ("pipedream_2bw", {"D": 3, "N": 5}), ("amdp", {"D": 4})]
)
def test_operations_wait_as_those_of_many_turns_do(scheme: str, sizes: dict[str, int]) -> None:
    """In the middle of many turns an operation waits directly for what the turn says, or for operations that do."""
    stream = compile(scheme, **sizes).schedule
    net, shown = turn_net(stream), net_of(stream.view(stream.updates_shown))
    header, middle = stream.header, stream.updates_shown // stream.header.per_turn // 2
    node_of = {
        in_turn(header, operation)[0]: (node, in_turn(header, operation)[1])
        for node, operation in enumerate(net.operations)
    }

    def place(number: int) -> tuple[int, int]:
        """The node of an operation that is shown, and the turn of its lane."""
        name, turn = in_turn(header, shown.operations[number])
        node, offset = node_of[name]
        return node, turn - offset

    of_middle = [
        number for number in range(len(shown.operations)) if in_turn(header, shown.operations[number])[1] == middle
    ]
    assert len(of_middle) == len(net.operations)
    for number in of_middle:
        node, turn = place(number)
        nearest: dict[int, int] = {}
        for other, before in map(place, shown.predecessors[number]):
            nearest[other] = min(turn - before, nearest.get(other, turn - before))
        assert dict(net.waits[node]) == nearest
