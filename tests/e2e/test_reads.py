"""What the host reads of the device in an update, and how often it waits for it: a wait leaves the device idle.

On a board (tests/e2e/board.py), where each operation of torch whose result is the host's is a read.
"""

import json

import pytest

from tests.e2e.ranks import HERE, Job, Outcome, compiled, run_all

MICROS = 4
SIZES = {"D": 2, "N": MICROS}
LOOPS: dict[str, tuple[str, dict[str, int], tuple[str, ...]]] = {
    "flush": ("dapple", SIZES, ()),
    "halves": ("zb_h1", SIZES, ()),
    "two directions": ("chimera", SIZES, ()),
    "stream": ("pipedream_2bw", SIZES, ("stream",)),
    "stream of single micro-batches": ("pipedream", {"D": 2}, ("stream",)),
    "auxiliary": ("dapple", SIZES, ("auxiliary",)),
    "counted": ("dapple", SIZES, ("counted",)),
    "counted in two directions": ("chimera", SIZES, ("counted",)),
    "recomputing": ("dapple", SIZES, ("again",)),
}
"""A scheme, its sizes and the options of the loop."""

LOSSES = {
    "flush": (0, MICROS),
    "halves": (0, MICROS),
    "two directions": (MICROS // 2, MICROS // 2),
    "stream": (0, MICROS),
    "stream of single micro-batches": (0, 1),
    "auxiliary": (MICROS, MICROS + 1),
    "counted": (0, MICROS),
    "counted in two directions": (MICROS // 2, MICROS // 2),
    "recomputing": (0, MICROS),
}
"""The copies of an update, on each rank, that are not over when the one before them is.

Where there are auxiliary losses, the last of them comes behind the last loss.
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    folder = tmp_path_factory.mktemp("reads")
    loop = HERE / "loops" / "reads.py"
    jobs = []
    for name, (scheme, sizes, options) in LOOPS.items():
        asked = ("--recompute",) if "again" in options else ()
        jobs.append(Job(name, loop, (str(compiled(folder, scheme, asked=asked, **sizes)), *options), model=None))
    return run_all(folder, 2, jobs)


def of_updates(outcome: Outcome, rank: int) -> dict[str, list[int]]:
    """The reads and waits of a rank."""
    outcome.assert_passed()
    counts: dict[str, list[int]] = json.loads(outcome.said[rank].splitlines()[-1])
    return counts


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("rank", [0, 1])
def test_nothing_is_read_that_waits_for_all_before_but_the_count_of_a_stage_without_replicas(
    outcomes: dict[str, Outcome], name: str, rank: int
) -> None:
    """What a mini-batch counts has to be known before the step: with replicas it is read from the sum on the host."""
    reads = of_updates(outcomes[name], rank)["reads"]
    assert {*reads} == ({1} if name == "counted" else {0})


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("rank", [0, 1])
def test_the_copies_of_losses_are_all_that_the_host_waits_for(
    outcomes: dict[str, Outcome], name: str, rank: int
) -> None:
    """Of a stream those of the update that is complete: so the first updates have none.

    Where forwards are run again, the results of comparisons are read after the first three updates.
    """
    waits = of_updates(outcomes[name], rank)["waits"][3 if name == "recomputing" else 0 :]
    begun = [count for count in waits if count] if "stream" in name else waits
    assert {*begun} <= {LOSSES[name][rank]}
    assert len(begun) >= 3 or LOSSES[name][rank] == 0
