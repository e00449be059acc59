"""A value is found by itself, not by its direction: two values cross one edge, each in messages of its own."""

import pytest

from chimera_ir.ir.kinds import BACKWARD, FORWARD, KINDS, Counted, Kind, Readers, Value
from chimera_ir.ir.levels import Header, Pipe, Program, Schedule
from chimera_ir.ir.ops import Compute, Micro, Send, Stage, Worker
from chimera_ir.ir.text.printer import line, show
from chimera_ir.ir.text.reader import parse
from chimera_ir.lower.lower import lower
from chimera_ir.source import Source
from chimera_ir.verify.verify import verify_program, verify_schedule
from tests.unit.test_ir_text import codes

NORMS = Value("n", "norms", Readers.FEEDING, Counted.MESSAGE, "it needs those norms")
NORMED = Kind(
    *("N", "backward with norms", (*BACKWARD.reads, NORMS), (*BACKWARD.makes, NORMS)),
    frees=BACKWARD.frees,
    sums=True,
    cost=2,
)
HEADER = Header("normed", (), 2, 2, 2, (Pipe("down", (Worker(0), Worker(1)), (Micro(0), Micro(1))),))
TEXT = """program normed
workers 2
stages 2
micro_batches 2
pipe down on 0 1 micros 0..2

worker 0:
  recv m0 s1->s0 from w1 into 0
  recv n m0 s1->s0 from w1 into 0
  wait recv n m0 s1->s0

worker 1:
  send m0 s1->s0 to w0
  send n m0 s1->s0 to w0
  wait send n m0 s1->s0
"""


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, NORMED.letter, NORMED)


@pytest.fixture
def program() -> Program:
    """Two micro-batches on two workers, verified."""
    pairs = [(kind, micro) for micro in range(2) for kind in (FORWARD, NORMED)]
    lanes = (tuple(Compute(kind, (Micro(micro),), Stage(s)) for kind, micro in pairs) for s in range(2))
    checked = verify_schedule(Schedule(HEADER, tuple(lanes)), None)
    assert not checked.findings.errors
    return verify_program(lower(checked.level), checked).program


def test_each_value_is_sent_once_and_named_if_its_stages_imply_the_other(program: Program) -> None:
    sends = [line(instruction, HEADER) for instruction in program.lanes[1] if isinstance(instruction, Send)]
    assert sends == [f"send {value}m{micro} s1->s0 to w0" for micro in range(2) for value in ("", "n ")]


def test_a_text_says_which_value_a_message_has() -> None:
    assert show(parse(Source("a.sir", TEXT))) == TEXT
    assert parse(Source("a.sir", TEXT.replace("wait send n m0", "wait send dx m0"))) == parse(
        Source("a.sir", TEXT.replace("wait send n m0", "wait send m0"))
    )


@pytest.mark.parametrize("wrong", ["q", "y", "a"])
def test_a_value_that_does_not_go_from_one_stage_to_the_other_is_a_mistake(wrong: str) -> None:
    assert codes(TEXT.replace("send n m0 s1->s0 to", f"send {wrong} m0 s1->s0 to")) == ["CH502"]
