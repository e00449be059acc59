"""Slices of micro-batches: makespans and peaks of Seq1F1B and TeraPipe, from a simulator that is not ours.

In slices of equal cost, a forward of a slice takes 1 and a backward 2, without communication.
"""

from fractions import Fraction

import pytest

from chimera_ir.compilation import Compilation
from chimera_ir.cost.durations import Costs
from chimera_ir.request import Request
from chimera_ir.source import Source
from chimera_ir.verify.findings import Rule

SCHEME = """scheme sliced(D = 4, N = 8, k = 4)
pipe down {{
  stages s in 0..D on s
  micros m in 0..N
  slices q in 0..k
  F(m, s, q) @ {forward}
  B(m, s, q) @ {backward}
}}
"""
SEQ1F1B = SCHEME.format(forward="2*(k*m + q) + s", backward="2*(k*m + 2*(k-1) - q) + 2*D-1 - s")
TERAPIPE = SCHEME.format(forward="k*m + q + s", backward="2*k*N + D + k*(N-1-m) + k-1 - q + D-1 - s")


@pytest.mark.parametrize(
    ("text", "sizes", "makespan", "peaks"),
    [
        (SEQ1F1B, (4, 8, 2), 57, [5, 4, 3, 2]),
        (SEQ1F1B, (4, 8, 4), 105, [7, 6, 5, 4]),
        (SEQ1F1B, (4, 2, 4), 33, [7, 6, 5, 4]),
        (TERAPIPE, (4, 2, 4), 33, [8, 8, 8, 8]),
    ],
)
def test_slices_take_the_published_time_and_memory(
    text: str, sizes: tuple[int, int, int], makespan: int, peaks: list[int]
) -> None:
    *_, k = sizes
    compilation = Compilation(
        Request(
            Source("sliced.chim", text),
            dict(zip(("D", "N", "k"), sizes, strict=True)),
            costs=Costs(F=Fraction(k), B=Fraction(2 * k)),
        )
    )
    assert compilation.report.makespan == makespan
    assert [k * kept for kept in compilation.report.activations] == peaks
    assert all(carried <= kept for carried, kept in zip(compilation.report.carries, peaks, strict=True))
    assert {Rule.ACYCLIC, Rule.CHANNELS, Rule.MEMORY} <= compilation.verified.rules


def test_the_last_slice_of_a_micro_batch_carries_nothing_on() -> None:
    """All forwards come first, so the carries of all other slices are there at once."""
    report = Compilation(Request(Source("sliced.chim", TERAPIPE), {"D": 4, "N": 2, "k": 4})).report
    assert report.carries == (2 * (4 - 1),) * 4
    assert report.as_json()["carries"] == [6, 6, 6, 6]
    assert "carries" not in report.as_json()["baseline"]
