"""A pipeline over one dimension of a mesh, its stages spread over the other: as one process trains."""

import re
from pathlib import Path

import pytest

from tests.e2e.ranks import Job, Outcome, compiled, run_all
from tests.repeatable import also

LOOPS = Path(__file__).resolve().parent / "loops"
LOOP, COUNTS = LOOPS / "mesh.py", LOOPS / "mesh_counts.py"
COUNTED = "sharded", "penalized", "partly sharded", "summed", "split", "plain", "sharded and replicated"
KINDS = {"shards": "DTensor", "tensors": "DTensor Parameter"}
SCHEMES = also(("chimera", "zb_h1"), ("dapple",))
"""With replicas of each stage and without; whole backwards and halves. A search has the fourth combination, too."""


@pytest.fixture(scope="module")
def meshes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    folder = tmp_path_factory.mktemp("meshes")
    directories = {scheme: compiled(folder, scheme, D=2, N=2) for scheme in SCHEMES}
    jobs = [Job(how, LOOP, (how, *map(str, directories.values())), model=None) for how in KINDS]
    one = compiled(folder, "interleaved", P=1, v=2, N=2)
    jobs.append(Job("counts", COUNTS, (str(directories["chimera"]), str(one)), model=None))
    return run_all(folder, 4, jobs)


@pytest.mark.parametrize("how", KINDS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_stages_in_parts_train_as_one_process_does(meshes: dict[str, Outcome], scheme: str, how: str) -> None:
    """Gradients, norms and weights, with replicas of each stage and without, clipping and two steps as one."""
    outcome = meshes[how]
    outcome.assert_passed()
    for rank, printed in enumerate(outcome.said):
        line = re.search(rf"^rank {rank}: {scheme}-D2-N2: {KINDS[how]}: off by (\S+)$", printed, re.M)
        assert line is not None, printed
        assert float(line[1]) < 1e-10


def test_sharded_stages_are_not_split_and_those_of_tensor_parallelism_are(meshes: dict[str, Outcome]) -> None:
    """The first stage, whose input needs no gradient, does all in the second half either way."""
    remark = "stage 1 has fully_shard in it: its I is a whole backward, and its W does nothing"
    for how, expected in (("shards", [remark]), ("tensors", [])):
        for rank, printed in enumerate(meshes[how].said):
            assert re.findall(rf"^rank {rank}: zb_h1-D2-N2: (stage .*)$", printed, re.M) == expected, printed


@pytest.mark.parametrize("kind", COUNTED)
def test_gradients_of_sums_and_counts_are_those_of_all_rows_that_share_parameters(
    meshes: dict[str, Outcome], kind: str
) -> None:
    """Rows count 4, 1 and 0 items, and accumulate; each of them exports into one file."""
    outcome = meshes["counts"]
    outcome.assert_passed()
    for rank, printed in enumerate(outcome.said):
        line = re.search(rf"^rank {rank}: {kind}: off by (\S+)$", printed, re.M)
        assert line is not None, printed
        assert float(line[1]) < 1e-12
