"""The text of the IR: what is read, and what is said of what is not. Whole messages are in tests/errors/middle."""

import pytest

from chimera_ir.diagnostics.model import Rejected
from chimera_ir.ir.kinds import ACTIVATIONS, BACKWARD, FORWARD, GRADIENTS
from chimera_ir.ir.levels import Bound, Header, Pipe, Plan, Quantity
from chimera_ir.ir.ops import AllReduce, Compute, Drop, Message, Planned, Recv, Stash, Step, WaitAllReduce, WaitSend
from chimera_ir.ir.text.printer import show
from chimera_ir.ir.text.reader import parse
from chimera_ir.ir.turns import Turn
from chimera_ir.source import Source

HEADER = "workers 1\nstages 1\nmicro_batches 1\npipe p on 0 micros 0..1\n"


def codes(text: str) -> list[str]:
    with pytest.raises(Rejected) as rejected:
        parse(Source("test.sir", text))
    return [each.code for each in rejected.value.diagnostics]


def test_a_header_with_everything():
    header = Header(
        scheme="all_of_it",
        parameters=(("D", 2), ("offset", -3)),
        workers=3,
        stages=2,
        micro_batches=6,
        pipes=(Pipe("down[0]", (0, 2), (0, 1, 4)), Pipe("up[-1,2]", (1, 1), (5, 2, 3)), Pipe("idle", (2, 0), ())),
        bounds=(
            Bound(Quantity.WEIGHTS, (2, 2, 2)),
            Bound(Quantity.BYTES, (3, 0, -1)),
            Bound(Quantity.HOST_BYTES, (5, 5, 5)),
        ),
    )
    level = Plan(header, (Planned(-7, 2, Compute(BACKWARD, (3,), 1)), Planned(0, 0, Compute(FORWARD, (3,), 0))))
    text = show(level)
    assert "memory weights <= 2\nmemory bytes <= 3 0 -1\nmemory host_bytes <= 5\n" in text
    assert "pipe up[-1,2] on 1 1 micros 5..6 2..4" in text
    assert "  B m3 s1 @ -7 on w2" in text
    assert parse(Source("x.sir", text)) == level


STREAM = "workers 1\nstages 1\nmicro_batches 4\nupdates 2 per turn\npipe p on 0 micros 0..4\n"
SOME = STREAM.replace("per turn", "period 2")


def test_the_lines_of_an_asynchronous_program():
    lane = (
        Compute(FORWARD, (0, 1), 0, version=0),
        Compute(BACKWARD, (-3,), 0, version=-1),
        Recv(Message((2, -1), 0, 1, ACTIVATIONS), 0, 1),
        WaitSend(Message((0,), 1, 0, GRADIENTS)),
        AllReduce((0,), version=1),
        WaitAllReduce((0,), version=0),
        Stash((0,), -2),
        Step((0,), version=1),
        Drop((0,), 0),
    )
    lines = ("F m,m+1 s0 v", "B m-3 s0 v-1", "recv m+2,m-1 s0->s1 from w0 into 1 of 3", "wait send m s1->s0")
    lines += ("all_reduce s0 v+1", "wait all_reduce s0 v", "stash s0 v-2", "step s0 v+1", "drop s0 v")
    header = STREAM.replace("stages 1", "stages 2").replace("on 0", "on 0 0")
    level = parse(Source("x.sir", "program x\n" + header + "worker 0:\n  " + "\n  ".join(lines)))
    assert level.turns == (Turn(lane, (((0, 1, ACTIVATIONS), 3),)),)
    assert (level.header.updates, level.header.period, level.header.per_update) == (2, 4, 2)
    assert parse(Source("x.sir", show(level))) == level


def test_comments_blank_lines_tabs_and_carriage_returns_change_nothing():
    plain = "schedule x\n" + HEADER + "worker 0:\n  F m0 s0\n  B m0 s0\n"
    dressed = "# hello\n\n" + plain.replace("\n", "  # why\r\n").replace("  F m0 s0", "\t\tF\tm0  s0")
    assert parse(Source("x.sir", dressed)) == parse(Source("x.sir", plain))


def test_header_lines_may_come_in_any_order_and_lanes_too():
    text = (
        "schedule x\nmicro_batches 1\npipe p on 1 0 micros 0..1\nstages 2\nworkers 2\n"
        "worker 1:\n F m0 s0\n B m0 s0\nworker 0:\n F m0 s1\n B m0 s1\n"
    )
    level = parse(Source("x.sir", text))
    assert level.lanes[1] == (Compute(FORWARD, (0,), 0), Compute(BACKWARD, (0,), 0))


def test_all_malformed_lines_are_reported_together():
    assert codes("program x\n" + HEADER + "worker 0:\n F m0\n sned m0\n step\n") == ["CH502", "CH503", "CH502"]


def test_many_mistakes_are_cut_short():
    found = codes("program x\n" + HEADER + "worker 0:\n" + " nonsense\n" * 1000)
    assert found == ["CH503"] * 50 + ["CH515"]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "CH501"),
        ("\0\1\2\3" * 100, "CH501"),
        ("scheme x(D = 4)", "CH501"),
        ("program", "CH502"),
        ("program 7", "CH502"),
        ("schedule x\n" + HEADER + "worker 0:\n F m0 s0 trailing", "CH502"),
        ("plan x\n" + HEADER + " F m0 s0", "CH513"),
        ("plan x\n" + HEADER + " F m0 s0 @ 1", "CH502"),
        ("plan x\n" + HEADER + "worker 0:\n F m0 s0", "CH504"),
        ("plan x\n" + HEADER + " F m0 s0 @ 1 on w1", "CH506"),
        ("plan x\n" + HEADER + " F m0 s0 @ " + "1" * 100 + " on w0", "CH506"),
        ("schedule x\n" + HEADER + "worker 1:\n", "CH506"),
        ("schedule x\n" + HEADER, "CH508"),
        ("program x\n" + HEADER + "worker 0:\n F m0 s0 @ 3 on w0", "CH513"),
        ("program x\n" + HEADER + "worker 0:\n send m0,m1 s0->s1 to w0", "CH506"),
        ("program x\n" + HEADER + "worker 0:\n recv m0 s0->s0 from w0 into 2", "CH506"),
        ("program x\n" + HEADER.replace("0..1", "0..0"), "CH506"),
        ("program x\n" + HEADER.replace("0..1", "0..2"), "CH506"),
        ("program x\n" + HEADER.replace("workers 1", "workers 0"), "CH506"),
        ("program x\n" + HEADER.replace("on 0", "on 1"), "CH506"),
        ("program x\n" + HEADER + "pipe p on 0 micros none\n", "CH514"),
        ("program x\nmemory weights <= 1\nmemory weights <= 2\n" + HEADER, "CH514"),
        ("program x\nmemory host <= 1 2\n" + HEADER, "CH529"),
        ("program x\nprogram y\n" + HEADER, "CH504"),
        ("plan x\n" + SOME.replace("updates 2", "updates 3"), "CH517"),
        ("plan x\n" + SOME.replace("updates 2", "updates 0"), "CH517"),
        ("plan x\n" + SOME.replace("period 2", "period 3"), "CH517"),
        ("plan x\n" + SOME.replace("period 2", "period 0"), "CH517"),
        ("plan x\n" + SOME + "F m0 s0 v3 @ 0 on w0", "CH506"),
        ("plan x\n" + SOME + "F m0 s0 @ 0 on w0", "CH518"),
        ("plan x\n" + SOME + "F m s0 v0 @ 0 on w0", "CH522"),
        ("plan x\n" + STREAM, "CH519"),
        ("program x\n" + SOME, "CH519"),
        ("schedule x\n" + SOME, "CH519"),
        ("program x\n" + STREAM.replace("updates 2", "updates 3"), "CH520"),
        ("program x\n" + STREAM.replace("updates 2", "updates 0"), "CH520"),
        ("program x\nupdates 1 per turn\n" + STREAM, "CH514"),
        ("program x\n" + STREAM.replace(" per turn", ""), "CH502"),
        ("program x\n" + STREAM.replace(" per turn", " per"), "CH502"),
        ("program x\n" + STREAM + "worker 0:\n F m-9999999 s0 v", "CH506"),
        ("program x\n" + STREAM + "worker 0:\n F m s0 v-9999999", "CH506"),
        ("program x\n" + STREAM + "worker 0:\n F m s0 v+" + "9" * 30, "CH506"),
        ("program x\n" + STREAM + "worker 0:\n F m+" + "9" * 5000 + " s0 v", "CH506"),
        ("program x\n" + STREAM + "worker 0:\n F m0 s0 v", "CH521"),
        ("program x\n" + STREAM + "worker 0:\n F m,m1 s0 v", "CH521"),
        ("program x\n" + STREAM + "worker 0:\n F m s0 v0", "CH521"),
        ("program x\n" + STREAM + "worker 0:\n F m s+1 v", "CH502"),
        ("program x\n" + STREAM + "worker 0:\n F m + 1 s0 v", "CH502"),
        ("program x\n" + STREAM + "worker 0:\n recv m s0->s0 from w0 into 0", "CH523"),
        ("program x\n" + STREAM + "worker 0:\n recv m s0->s0 from w0 into 0 of 0", "CH506"),
        ("program x\n" + STREAM + "worker 0:\n recv m s0->s0 from w0 into 2 of 2", "CH506"),
        ("program x\n" + STREAM + "worker 0:\n recv m s0->s0 from w0 into 0 of " + "9" * 19, "CH506"),
        ("program x\n" + HEADER + "worker 0:\n recv m0 s0->s0 from w0 into 0 of 2", "CH502"),
        ("program x\n" + HEADER + "worker 0:\n F m+1 s0", "CH522"),
        ("program x\n" + HEADER + "worker 0:\n send m s0->s0 to w0", "CH522"),
        ("program x\n" + STREAM + "worker 0:\n F m s0", "CH518"),
        ("program x\n" + STREAM + "worker 0:\n step s0", "CH518"),
        ("program x\n" + STREAM + "worker 0:\n stash s0", "CH502"),
        ("schedule x\n" + STREAM + "worker 0:\n drop s0 v", "CH513"),
        ("program x\n" + HEADER + "worker 0:\n F m0 s0 v0", "CH518"),
        ("program x\n" + HEADER + "worker 0:\n stash s0 v0", "CH518"),
    ],
)
def test_what_is_said_of_one_mistake(text: str, code: str):
    assert codes(text) == [code]
