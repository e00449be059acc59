"""A name for the worker of a stage: what it stands for, written out, gives the same plan."""

import pytest

from chimera_ir.elaborate.elaborate import elaborate
from chimera_ir.ir.levels import Plan
from chimera_ir.source import Source
from chimera_ir.syntax.formatter import show
from chimera_ir.syntax.parser import parse

FLUSHED = """
scheme named(P = 3, N = 4)
workers P
pipe down[i in 0..2] {{
  stages s in 0..2*P on {name}(s + i) % P
  micros m in 0..N/2
  recompute when {w} > 0
  sync lazy when {w} == 1
  F(m, s) @ 60*m + 20*i + 2*s + {w} when {w} < P
  B(m, s) @ 60*m + 20*i + 300 - 3*s + {w}
}}
"""

STREAM = """
scheme named(P = 2)
workers P
update every 1
pipe down {{
  stages s in 0..2*P on {name}s % P
  micros m in 0..
  reads version max(0, m - 4 + {w})
  F(m, s) @ 16*m + 2*s
  B(m, s) @ 16*m + 4*(2*P - s) + 9 + {w}
}}
"""


def plan(text: str, name: str, w: str) -> Plan:
    return elaborate(parse(Source("", text.format(name=name, w=w))), {}, 10_000)[0]


@pytest.mark.parametrize(("text", "written"), [(FLUSHED, "((s + i) % P)"), (STREAM, "(s % P)")])
def test_a_name_for_the_worker_is_what_it_stands_for(text: str, written: str) -> None:
    assert plan(text, "w = ", "w") == plan(text, "", written)


def test_the_name_is_printed_and_reads_back() -> None:
    scheme = parse(Source("", FLUSHED.format(name="w = ", w="w")))
    assert "stages s in 0..2*P on w = (s + i) % P" in show(scheme)
    assert parse(Source("", show(scheme))) == scheme
