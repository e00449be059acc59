"""Stages that share parameters compute what one process computes with one parameter; other ties are refused."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.ranks import Job, Outcome, compiled, run_all
from tests.repeatable import also
from tests.sizes import chains, on_workers

ENDS = ("first,last",)
CHECK = ("--check-only", "--micro-batch-size", "2")
REFUSED = {
    "other": (
        "none",
        ENDS,
        r"ties no stages, and dapple\(D=4, N=4\) was compiled for a model that ties stages 0 and 3",
    ),
    "apart": ("", (), r"ties stages 0 and 3, and dapple.* that ties no stages: compile it again with --tied 0,3$"),
    "name": ("name", ENDS, r"tied names 'heed.weight' in stage 3, which has no such .*did you mean head.weight"),
    "shape": ("shape", ENDS, r"is float64 of shape \(11, 6\), and head.weight of stage 3, which is .*\(12, 6\)"),
    "frozen": ("frozen", ENDS, r"which is float64 of shape \(11, 6\), frozen; let them be alike"),
    "keys": ("keys", (), r"head.weight of stage 3 is tied by _tied_weights_keys .*write `def tied"),
    "shared": ("shared", (), r"stages 0 and 3 share the parameter head.weight.*compile with --tied 0,3"),
}
"""What TIES is, what was compiled, and what the message says."""


def four_ranks(folder: Path) -> Iterator[Job]:
    for scheme in chains():
        if scheme != "pipedream":
            directory = compiled(folder, scheme, ENDS, **on_workers(scheme, 4, 4))
            yield Job(scheme, directory, CHECK, "tied.py", {"TIES": "dropout"})
    for scheme in also(("chimera", "pipedream_2bw"), ("dapple",)):
        copies = compiled(folder, scheme, ENDS, D=2, N=2)
        yield Job(f"{scheme}-W2", copies, (*CHECK, "--layout", "replica"), "tied.py")
    both = compiled(folder, "chimera", ("0,1,2,3", "first,last"), D=4, N=4)
    yield Job("all", both, ("--check", "--steps", "2", "--memory-limit", "1GiB"), "tied.py", {"TIES": "all"})
    yield Job("alone", compiled(folder, "interleaved", ENDS, P=1, v=2, N=2), CHECK, "tied.py")
    traced = ("--steps", "3", "--trace", str(folder / "trace"))
    yield Job("traced", compiled(folder, "pipedream_2bw", ENDS, D=4, N=4), traced, "tied.py")
    rehearsed = ("--steps", "2", "--rehearse", "F=0.001,B=0.002")
    yield Job("rehearsed", compiled(folder, "gems", ENDS, D=4, N=4), rehearsed, "tied.py")
    for name, (spoilt, ties, _) in REFUSED.items():
        yield Job(f"refused-{name}", compiled(folder, "dapple", ties, D=4, N=4), CHECK, "tied.py", {"TIES": spoilt})


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    folder = tmp_path_factory.mktemp("ties")
    return run_all(folder, 4, list(four_ranks(folder)))


def test_every_scheme_trains_tied_ends_as_one_process_does(four: dict[str, Outcome]) -> None:
    for name, outcome in four.items():
        if not name.startswith("refused-"):
            outcome.assert_passed()
        if name not in ("traced", "rehearsed") and not name.startswith("refused-"):
            assert "check: passed" in outcome.said[0], name
            assert "at most 1e-12 in float64" in outcome.said[0], name


@pytest.mark.parametrize("name", REFUSED)
def test_other_ties_are_refused_in_one_message(four: dict[str, Outcome], name: str) -> None:
    outcome = four[f"refused-{name}"]
    said = [line for text in outcome.said for line in text.splitlines() if line.startswith("train.py:")]
    assert "0" not in outcome.statuses
    assert len({*said}) == 1, outcome.said
    assert re.search(REFUSED[name][2], said[0]), said[0]
