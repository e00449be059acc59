"""Evaluations and predictions of compiled schedules are those of one process, and training goes on as if without."""

import json
from typing import Any

import pytest

from tests.e2e.ranks import HERE, ROOT, compiled, torchrun_script
from tests.repeatable import also

TOLERANCE = 1e-12
JOBS: dict[str, tuple[str, str, dict[str, int]]] = {
    "chimera": ("alike", "chimera", {"D": 4, "N": 4}),
    "interleaved": ("alike", "interleaved", {"P": 4, "v": 2, "N": 4}),
    "groups": ("alike", "chimera_doubling", {"D": 4, "N": 8}),
    "halves": ("alike", "chimera_halving", {"D": 4, "N": 4}),
    "two copies in two directions": ("alike", "chimera", {"D": 2, "N": 2}),
    "stream in a loop": ("followed", "pipedream_2bw", {"D": 4, "N": 4}),
    "an update a micro-batch": ("streamed", "pipedream", {"D": 4}),
}
JOBS |= also(
    (),
    {
        "gpipe": ("alike", "gpipe", {"D": 4, "N": 4}),
        "two copies": ("alike", "gpipe", {"D": 2, "N": 2}),
        "an update a micro-batch in a loop": ("followed", "pipedream", {"D": 4}),
        "stream": ("streamed", "pipedream_2bw", {"D": 4, "N": 4}),
    }.items(),
)
"""Stages with replicas and without, several of them on a rank, in copies and in both directions; streams."""

ALONE = ("gpipe", "interleaved")
"""Those whose stages have no replica, so that all buffers are those of one process after training as well."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("evaluations")
    jobs = [(name, kind, str(compiled(folder, scheme, **settings))) for name, (kind, scheme, settings) in JOBS.items()]
    (folder / "jobs.json").write_text(json.dumps({"log": str(folder / "found"), "jobs": jobs}))
    done = torchrun_script(HERE / "evaluations.py", 4, str(folder / "jobs.json"), folder=folder, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"found.{rank}").read_text()) for rank in range(4)]


@pytest.mark.parametrize("name", [name for name, (kind, *_) in JOBS.items() if kind == "alike"])
def test_it_is_the_evaluation_of_one_process(ranks: list[dict[str, Any]], name: str) -> None:
    for found in ranks:
        for when in ("after 0", "after 2") if name in ALONE else ("after 0",):
            assert found[name][when]["loss"] <= TOLERANCE
            assert found[name][when]["loss of a function"] <= TOLERANCE
            assert found[name][when]["outputs"] <= TOLERANCE
        assert all(found[name][when]["same everywhere"] for when in ("after 0", "after 2"))
        assert all(found[name][when]["in place"] for when in ("after 0", "after 2"))


@pytest.mark.parametrize("name", [name for name, (kind, *_) in JOBS.items() if kind == "followed"])
def test_an_evaluation_completes_what_is_under_way(ranks: list[dict[str, Any]], name: str) -> None:
    for found in ranks:
        for when in ("after 2", "after 4"):
            assert found[name][when]["loss"] <= TOLERANCE
            assert found[name][when]["loss of a function"] <= TOLERANCE
            assert found[name][when]["outputs"] <= TOLERANCE
            assert found[name][when]["same everywhere"]


@pytest.mark.parametrize("name", [name for name, (kind, *_) in JOBS.items() if kind in ("alike", "followed")])
def test_training_after_an_evaluation_is_bitwise_what_it_is_without(ranks: list[dict[str, Any]], name: str) -> None:
    assert all(found[name]["trains on as if nothing had been"] for found in ranks)


@pytest.mark.parametrize("name", [name for name, (kind, *_) in JOBS.items() if kind == "streamed"])
def test_without_a_flush_it_reads_the_newest_weights(ranks: list[dict[str, Any]], name: str) -> None:
    for found in ranks:
        for when in ("before", "after"):
            assert found[name][when]["loss"] <= TOLERANCE
            assert found[name][when]["outputs"] <= TOLERANCE
