"""Stages that hand on memory which they write again, or hold what they are given: right, or an error that says so."""

from pathlib import Path

import pytest

from tests.e2e.ranks import HERE, Job, Outcome, compiled, run_all

LOOP = Path(__file__).resolve().parent / "loops" / "memory.py"
KINDS = ("buffer", "workspace", "graph", "parameter", "mask", "input", "gradient", "count", "auxiliary")
OF_LATE = ("identity", "mask", "input", "gradient", "graph")
"""In a schedule that has the W of the next stage late, so that its graph holds what lay in the receive buffer."""
LATER = ("later", "later_graph")
"""Kinds that begin after the micro-batch at start, and so are refused."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    folder = tmp_path_factory.mktemp("memory")
    flush = str(compiled(folder, "gpipe", D=2, N=4))
    late = str(compiled(folder, str(HERE / "schemes" / "late_w.sir")))
    jobs = [("flush", flush, KINDS), ("late", late, OF_LATE), *((kind, flush, (kind,)) for kind in LATER)]
    return run_all(folder, 2, [Job(name, LOOP, (directory, *kinds), model=None) for name, directory, kinds in jobs])


@pytest.mark.parametrize("name", ["flush", "late"])
def test_what_is_kept_or_written_again_changes_no_gradient(outcomes: dict[str, Outcome], name: str) -> None:
    outcomes[name].assert_passed()


@pytest.mark.parametrize("kind", LATER)
def test_memory_that_is_handed_on_twice_only_later_is_refused(outcomes: dict[str, Outcome], kind: str) -> None:
    assert "stage 0 returned the same memory for micro-batches 0 and 1" in outcomes[kind].said[0]
    assert "0" not in outcomes[kind].statuses
