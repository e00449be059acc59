"""Library schemes that a search found: what the pages say of them is found again, with the files of these pages."""

from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path

import pytest

import chimera_ir

pytestmark = pytest.mark.skipif(find_spec("ortools") is None, reason="OR-Tools is not installed: the extra search")

DOCS = Path(__file__).resolve().parents[2] / "docs"
SLOW = chimera_ir.Options(
    profile=DOCS / "examples" / "even.profile.toml",
    cluster=DOCS / "examples" / "slow.cluster.toml",
    micro_batch_size=1,
    search=600,
)


@pytest.mark.parametrize(("D", "N"), [(2, 5), (3, 8), (4, 8), (6, 11)])
def test_under_slow_messages_no_order_is_shorter_than_that_of_a_longer_warm_up(D: int, N: int) -> None:
    """Twelve layers of 1 ms and 2 ms; a message of 3 MB takes 0.5 ms and 1 ms, and delays only the ends."""
    found = chimera_ir.compile(DOCS / "examples" / "free_order.chim", options=SLOW, D=D, N=N)
    assert found.improvement.result.proven
    stage, message = Fraction(36, D), Fraction(3, 2)
    makespan = (N + D - 1) * stage + 2 * (D - 1) * message
    assert float(found.improvement.result.makespan) == pytest.approx(float(makespan / 1000), rel=1e-6)
    assert found.improvement.result.hints["dapple"] > found.improvement.result.makespan
    assert found.schedule.lanes == chimera_ir.compile("eager_1f1b", D=D, N=N).schedule.lanes


def test_the_scheme_that_was_fitted_has_the_orders_of_the_librarys() -> None:
    page = (DOCS / "howto" / "formulas.md").read_text(encoding="utf-8")
    fitted = next(
        block.split("```")[0] for block in page.split("```chim\n") if block.startswith("# Orders of a search")
    )
    for D, N in ((1, 1), (2, 3), (5, 4), (7, 20)):
        lanes = chimera_ir.compile(chimera_ir.Source("fitted.chim", fitted), D=D, N=N).schedule.lanes
        assert lanes == chimera_ir.compile("eager_1f1b", D=D, N=N).schedule.lanes
