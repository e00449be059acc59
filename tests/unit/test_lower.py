"""The policies of lowering, each on a program small enough to check by eye; the goldens show whole programs."""

from pathlib import Path

import pytest

from chimera_ir.ir.kinds import BACKWARD, FORWARD
from chimera_ir.ir.levels import Header, Pipe, Plan, Program, Schedule
from chimera_ir.ir.ops import (
    AllReduce,
    Communicators,
    Compute,
    Planned,
    Recv,
    Send,
    Step,
    WaitAllReduce,
    WaitRecv,
    WaitSend,
)
from chimera_ir.ir.text.printer import line, show
from chimera_ir.ir.text.reader import parse
from chimera_ir.lower.lower import lower, order
from chimera_ir.source import Source, Span
from chimera_ir.verify.verify import verify_program
from tests.instructions import what
from tests.property.programs import one_direction, two_directions

GOLDEN = Path(__file__).parent.parent / "golden"


def lanes(program: Program) -> list[list[str]]:
    return [[line(each, program.header) for each in lane] for lane in program.lanes]


def read(text: str) -> Schedule:
    return parse(Source("test.sir", text))


@pytest.mark.parametrize(
    ("name", "plan"), [("one_direction_D2_N2", one_direction(2, 2)), ("two_directions_D4_N4", two_directions(4, 4))]
)
def test_whole_programs(name: str, plan: Plan, update_goldens: bool) -> None:
    said = show(lower(order(plan)))
    path = GOLDEN / f"{name}.sir"
    if update_goldens:
        path.write_text(said, encoding="utf-8")
    assert said == path.read_text(encoding="utf-8")


def test_lanes_are_ordered_by_clock_and_then_by_the_text():
    header = Header("x", (), 1, 1, 2, (Pipe("p", (0,), (0, 1)),))
    ops = [Compute(FORWARD, (1,), 0), Compute(FORWARD, (0,), 0), Compute(BACKWARD, (0,), 0), Compute(BACKWARD, (1,), 0)]
    plan = Plan(header, tuple(Planned(clock, 0, op) for clock, op in zip([3, 3, -1, 4], ops, strict=True)))
    assert order(plan).lanes == ((ops[2], ops[0], ops[1], ops[3]),)


@pytest.mark.parametrize("ahead", [0, 1, 2, 5])
def test_a_receive_is_posted_so_many_operations_before_its_use(ahead: int):
    for lane in lower(order(one_direction(4, 8)), ahead).lanes:
        computes = [place for place, each in enumerate(lane) if isinstance(each, Compute)]
        for place, each in enumerate(lane):
            if isinstance(each, Recv):
                wait = lane.index(WaitRecv(each.message))
                use = next(i for i, compute in enumerate(computes) if compute > wait)
                before = next(i for i, compute in enumerate(computes) if compute > place)
                assert before == max(0, use - ahead)


def test_no_stage_posts_a_negative_number_of_operations_ahead():
    with pytest.raises(ValueError, match="at least 0"):
        lower(order(one_direction(2, 2)), -1)


IN_TURN = """schedule in_turn
workers 2
stages 2
micro_batches 3
pipe down on 0 1 micros 0..3

worker 0:
  F m0 s0
  F m1 s0
  B m0 s0
  F m2 s0
  B m1 s0
  B m2 s0

worker 1:
  F m0 s1
  B m0 s1
  F m1 s1
  B m1 s1
  F m2 s1
  B m2 s1
"""
"""1F1B, where two workers send to each other in turn; the sums of the places:

    m0 s0->s1: 0 + 0    m1 s0->s1: 1 + 2    m2 s0->s1: 3 + 4
    m0 s1->s0: 1 + 2    m1 s1->s0: 3 + 4    m2 s1->s0: 5 + 5
"""


def posts_and_computes(program: Program) -> list[list[str]]:
    return [
        [line(each, program.header) for each in lane if isinstance(each, Compute | Send | Recv)]
        for lane in program.lanes
    ]


def test_with_a_communicator_for_both_directions_two_workers_post_their_messages_in_one_order():
    assert posts_and_computes(lower(read(IN_TURN), communicators=Communicators.PAIR)) == [
        [
            "F m0 s0",
            "send m0 s0->s1 to w1",
            "F m1 s0",
            "send m1 s0->s1 to w1",
            "recv m0 s1->s0 from w1 into 0",
            "B m0 s0",
            "F m2 s0",
            "send m2 s0->s1 to w1",
            "recv m1 s1->s0 from w1 into 1",
            "recv m2 s1->s0 from w1 into 0",
            "B m1 s0",
            "B m2 s0",
        ],
        [
            "recv m0 s0->s1 from w0 into 0",
            "F m0 s1",
            "recv m1 s0->s1 from w0 into 1",
            "B m0 s1",
            "send m0 s1->s0 to w0",
            "F m1 s1",
            "recv m2 s0->s1 from w0 into 0",
            "B m1 s1",
            "send m1 s1->s0 to w0",
            "F m2 s1",
            "B m2 s1",
            "send m2 s1->s0 to w0",
        ],
    ]


def test_a_receive_that_is_wanted_late_is_posted_before_the_send_that_comes_next():
    """Posted where it is needed, m2 s0->s1 would come behind the send of m1 s1->s0."""
    late = posts_and_computes(lower(read(IN_TURN), 0, communicators=Communicators.PAIR))
    assert late[1].index("recv m2 s0->s1 from w0 into 0") == late[1].index("B m1 s1") - 1


PAIRED = """schedule paired
workers 2
stages 2
micro_batches 3
pipe down on 0 1 micros 0..1
pipe up on 1 0 micros 1..3

worker 0:
  F m1 s1
  F m0 s0 & B m1 s1
  B m0 s0
  F m2 s1
  B m2 s1

worker 1:
  F m1 s0
  F m0 s1
  B m0 s1
  F m2 s0
  B m1 s0
  B m2 s0
"""
"""The pair sends two messages, which are first used at the places 1 and 4. Between them m0 s1->s0 is sent: 2 + 2."""


@pytest.mark.parametrize("ahead", range(4))
def test_what_one_operation_sends_is_posted_together(ahead: int):
    program = lower(read(PAIRED), ahead, communicators=Communicators.PAIR)
    assert (
        posted(program, 0) == posted(program, 1) == ["m1 0->1", "m0 0->1", "m1 1->0", "m0 1->0", "m2 0->1", "m2 1->0"]
    )


def posted(program: Program, worker: int) -> list[str]:
    """The messages that a worker posts, in this order."""
    posts = [each.message for each in program.lanes[worker] if isinstance(each, Send | Recv)]
    return [f"m{message.micros[0]} {message.source}->{message.target}" for message in posts]


def test_receives_from_a_peer_are_posted_in_the_order_of_its_sends_even_if_used_in_another():
    schedule = read(
        "schedule crossed\nworkers 2\nstages 2\nmicro_batches 2\npipe p on 0 1 micros 0..2\n"
        "worker 0:\n F m0 s0\n F m1 s0\n B m0 s0\n B m1 s0\n"
        "worker 1:\n F m1 s1\n F m0 s1\n B m0 s1\n B m1 s1\n"
    )
    lane = lanes(lower(schedule))[1]
    assert lane[:4] == [
        "recv m0 s0->s1 from w0 into 0",
        "recv m1 s0->s1 from w0 into 1",
        "wait recv m1 s0->s1",
        "F m1 s1",
    ]
    assert verify_program(lower(schedule)).live == (2, 2)


def test_a_holder_without_micro_batches_takes_part_in_the_sum():
    schedule = read(
        "schedule idle\nworkers 2\nstages 1\nmicro_batches 1\npipe p on 0 micros 0..1\npipe q on 1 micros none\n"
        "worker 0:\n F m0 s0\n B m0 s0\nworker 1:\n"
    )
    program = lower(schedule)
    assert lanes(program)[1] == ["all_reduce s0", "wait all_reduce s0", "step s0"]
    assert verify_program(program).weights == (1, 1)


def test_all_workers_launch_their_sums_in_one_order():
    schedule = read(
        "schedule contrary\nworkers 2\nstages 2\nmicro_batches 2\npipe p on 0 0 micros 0..1\npipe q on 1 1"
        " micros 1..2\n"
        "worker 0:\n F m0 s0\n F m0 s1\n B m0 s1\n B m0 s0\n"
        "worker 1:\n F m1 s0\n F m1 s1\n B m1 s1\n B m1 s0\n"
    )
    orders = {tuple(each.group[0] for each in lane if isinstance(each, AllReduce)) for lane in lower(schedule).lanes}
    assert orders == {(1, 0)}


def test_a_wait_for_a_send_stands_where_an_answer_proves_it_over_or_at_the_end():
    """1F1B: the send of an activation is over by the time its gradient comes back."""
    for lane in lower(order(one_direction(4, 8))).lanes[:-1]:
        for place, each in enumerate(lane):
            if isinstance(each, WaitSend) and each.message.source < each.message.target:
                back = next(i for i, op in enumerate(lane) if what(op) is BACKWARD and op.micros == each.message.micros)
                assert place < back


def test_what_is_added_stands_on_the_line_of_the_operation_it_serves():
    header = Header("x", (), 2, 2, 1, (Pipe("p", (0, 1), (0,)),))
    lanes_ = (
        (Compute(FORWARD, (0,), 0, Span(0, 1)), Compute(BACKWARD, (0,), 0, Span(2, 3))),
        (Compute(FORWARD, (0,), 1, Span(4, 5)), Compute(BACKWARD, (0,), 1, Span(6, 7))),
    )
    one, two = lower(Schedule(header, lanes_)).lanes
    assert {
        line(each, header): each.origin.start for each in one if isinstance(each, Send | WaitSend | Recv | WaitRecv)
    } == {
        "recv m0 s1->s0 from w1 into 0": 2,
        "send m0 s0->s1 to w1": 0,
        "wait recv m0 s1->s0": 2,
        "wait send m0 s0->s1": 0,
    }
    assert {each.origin.start for each in two if isinstance(each, Step | AllReduce | WaitAllReduce)} == {6}
